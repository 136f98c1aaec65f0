"""Files of a directory of kernels that are no entries of it, or another one."""

import os
import pathlib
import shutil

import pytest

from shardops.kernels.cache import KernelDirectory
from tests.kernels.test_cache import ABOUT, CODE, KEY, OTHER, one_warning


@pytest.fixture
def directory(tmp_path):
    return KernelDirectory(tmp_path / "kernels", "Do this.")


def test_entry_under_the_name_of_another_is_foreign(directory):
    directory.write(OTHER, CODE, ABOUT)
    shutil.copy(directory.path / f"{OTHER}.kernel", directory.path / f"{KEY}.kernel")
    assert [entry.about for entry in directory.entries()] == [None, ABOUT]
    with one_warning(rf"holds a damaged or foreign file, {KEY}.kernel"):
        assert directory.read(KEY) is None
    assert directory.read(OTHER) == CODE


def _pipe(path: pathlib.Path) -> None:
    os.mkfifo(path)


def _endless(path: pathlib.Path) -> None:
    path.symlink_to("/dev/zero")


def test_reading_what_is_no_file_leaves_none_open(directory):
    (directory.path / f"{KEY}.kernel").mkdir(parents=True)
    before = len(os.listdir("/proc/self/fd"))
    with one_warning("cannot be read"):
        for _ in range(5):
            assert directory.read(KEY) is None
            directory.entries()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("make", [_pipe, _endless])
def test_what_is_no_regular_file_is_not_read(directory, make):
    directory.write(OTHER, CODE, ABOUT)
    make(directory.path / f"{KEY}.kernel")
    with one_warning(f"cannot be read \\({KEY}.kernel is not a regular file"):
        assert directory.read(KEY) is None
    assert [entry.about for entry in directory.entries()] == [None, ABOUT]
