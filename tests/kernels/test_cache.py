"""A directory of kernels: whole entries or none, damage, disks that fail, what is removed."""

import contextlib
import hashlib
import json
import os
import pathlib
import resource
import shutil
import stat
import struct
import tempfile
import time
import warnings

import pytest

from shardops.kernels.cache import KernelDirectory, _parts

KEY, OTHER = "0" * 64, "f" * 64
CODE = b"\x7fELF" + bytes(range(256)) * 40
ABOUT = {
    "kernel": "norm_forward",
    "arch": "sm_90",
    "file": "norm_forward.cuh",
    "constants": {"COLS": 4096},
    "code_bytes": len(CODE),
    "resources": {
        "registers": 64,
        "stack_bytes": 0,
        "spill_store_bytes": 0,
        "spill_load_bytes": 0,
        "shared_bytes": 32,
    },
    "nvrtc": "13.1",
    "shardops": "0.1.0",
}
UNREPORTED = {**ABOUT, "resources": None}


@pytest.fixture
def directory(tmp_path):
    return KernelDirectory(tmp_path / "made" / "on demand", "Do this.")


@contextlib.contextmanager
def one_warning(match: str):
    """Expects a warning at the first trouble, and none after."""
    with pytest.warns(RuntimeWarning, match=match) as caught:
        yield
    assert len(caught) == 1


def files(directory: KernelDirectory) -> list[str]:
    return sorted(path.name for path in directory.path.iterdir())


def test_what_was_written_is_read(directory):
    assert directory.read(KEY) is None
    directory.write(KEY, CODE, ABOUT)
    directory.write(OTHER, b"", UNREPORTED)
    assert directory.read(KEY) == CODE
    assert directory.read(OTHER) == b""
    assert files(directory) == [f"{KEY}.kernel", f"{OTHER}.kernel"]
    first, second = directory.entries()
    assert (first.about, second.about) == (ABOUT, UNREPORTED)
    assert first.size == (directory.path / f"{KEY}.kernel").stat().st_size > len(CODE)


def test_second_write_replaces_first(directory):
    directory.write(KEY, CODE, ABOUT)
    directory.write(KEY, CODE[::-1], ABOUT)
    assert directory.read(KEY) == CODE[::-1]
    assert len(files(directory)) == 1


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_others_may_read_what_the_umask_allows(directory, umask, mode):
    """A pack that root put into an image serves a process that is not root."""
    before = os.umask(umask)
    try:
        directory.write(KEY, CODE, ABOUT)
    finally:
        os.umask(before)
    assert stat.S_IMODE((directory.path / f"{KEY}.kernel").stat().st_mode) == mode


def _damaged(whole: bytes) -> dict[str, bytes]:
    middle = len(whole) // 2
    return {
        "truncated": whole[:-100],
        "cut in the head": whole[:20],
        "cut after the head": whole[:50],
        "empty": b"",
        "longer": whole + b"\0",
        "foreign": b"\x7fELF of something else" * 100,
        "of another version": whole.replace(b"kernel 3\n", b"kernel 2\n"),
        "last bit flipped": whole[:-1] + bytes([whole[-1] ^ 1]),
        "account changed": whole.replace(b"4096", b"8192"),
        "middle zeroed": whole[: middle - 8] + bytes(16) + whole[middle + 8 :],
    }


@pytest.mark.parametrize("damage", list(_damaged(CODE)))
def test_damaged_entry_is_ignored_with_one_warning(directory, damage):
    directory.write(KEY, CODE, ABOUT)
    path = directory.path / f"{KEY}.kernel"
    whole = path.read_bytes()
    path.write_bytes(_damaged(whole)[damage])
    assert path.read_bytes() != whole
    assert [entry.about for entry in directory.entries()] == [None]
    with one_warning(rf"on demand holds a damaged or foreign file, {path.name}\. Do this\."):
        assert directory.read(KEY) is None
        assert directory.read(KEY) is None
    directory.write(KEY, CODE, ABOUT)
    assert path.read_bytes() == whole


def _sealed(account: bytes, length: int | None = None) -> bytes:
    """What an account's entry is where its digest is right."""
    return _with_digest(struct.pack("<I", len(account) if length is None else length) + account)


def _with_digest(rest: bytes) -> bytes:
    return b"shardops kernel 3\n" + hashlib.sha256(KEY.encode() + rest).digest() + rest


def _account(**changed: object) -> bytes:
    return json.dumps({**ABOUT, **changed}).encode()


SEALED = {
    "nothing": _with_digest(b""),
    "half a length": _with_digest(b"12"),
    "no account": _sealed(b""),
    "no JSON": _sealed(b"not json!"),
    "no text": _sealed(b"\xff\xfe\xfd"),
    "nested without end": _sealed(b"[" * 200_000),
    "a list": _sealed(b"[]"),
    "an empty account": _sealed(b"{}"),
    "an account that ends before its length": _sealed(_account(), 10_000),
    "no name": _sealed(_account(kernel=None)),
    "constants that are no numbers": _sealed(_account(constants={"COLS": "4096"})),
    "resources that are incomplete": _sealed(_account(resources={"registers": 64})),
}


@pytest.mark.parametrize("account", list(SEALED))
def test_entry_whose_digest_is_right_and_whose_account_is_not_is_damaged(directory, account):
    assert _parts(KEY, _sealed(_account())) == (ABOUT, b"")
    directory.write(OTHER, CODE, ABOUT)
    path = directory.path / f"{KEY}.kernel"
    path.write_bytes(SEALED[account])
    assert [entry.about for entry in directory.entries()] == [None, ABOUT]
    with one_warning(rf"holds a damaged or foreign file, {path.name}\. Do this\."):
        assert directory.read(KEY) is None
        assert directory.read(KEY) is None
    assert directory.read(OTHER) == CODE
    assert directory.clear()[0] == 2
    assert files(directory) == []


def test_directory_in_the_place_of_an_entry_is_ignored(directory):
    (directory.path / f"{KEY}.kernel" / "inside").mkdir(parents=True)
    with one_warning("cannot be read"):
        assert directory.read(KEY) is None
        directory.write(KEY, CODE, ABOUT)
    assert files(directory) == [f"{KEY}.kernel"]  # and no temporary file
    directory.write(OTHER, CODE, ABOUT)
    os.mkfifo(directory.path / f"{'a' * 64}.kernel")  # nobody writes to it: a reader would wait
    found = [(entry.about, entry.size > 0) for entry in directory.entries()]
    assert found == [(None, False), (None, False), (ABOUT, True)]
    assert directory.clear()[0] == 2
    assert (directory.path / f"{KEY}.kernel" / "inside").is_dir()


def test_file_in_the_place_of_the_directory_is_ignored(tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "kernels"):
        directory = KernelDirectory(path, "Do this.")
        with one_warning("cannot be (read|written)"):
            assert directory.read(KEY) is None
            directory.write(KEY, CODE, ABOUT)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("name", ["with\0nul", "a" * 300, "loop/kernels"])
def test_path_that_cannot_be_is_ignored(tmp_path, name):
    (tmp_path / "loop").symlink_to("loop")
    directory = KernelDirectory(tmp_path / name, "Do this.")
    with one_warning("cannot be (read|written)"):
        assert directory.read(KEY) is None
        directory.write(KEY, CODE, ABOUT)


def test_absent_directory_is_worth_a_warning_only_where_it_was_named(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert KernelDirectory(tmp_path / "absent", "Do this.").read(KEY) is None
    named = KernelDirectory(tmp_path / "absent", "Do this.", required=True)
    with one_warning(r"absent does not exist\. Do this\."):
        assert named.read(KEY) is None
        assert named.read(OTHER) is None


@contextlib.contextmanager
def unprivileged():
    """Not root, whom no mode keeps out; and a directory that is theirs."""
    root = os.geteuid() == 0
    directory = pathlib.Path(tempfile.mkdtemp())
    if root:
        os.chown(directory, 65534, 65534)
        os.seteuid(65534)
    try:
        yield directory
    finally:
        if root:
            os.seteuid(0)
        for path in (directory, *directory.rglob("*")):
            path.chmod(0o700)
        shutil.rmtree(directory)


def test_read_only_directory_serves_what_it_has():
    with unprivileged() as place:
        directory = KernelDirectory(place, "Do this.")
        directory.write(KEY, CODE, ABOUT)
        place.chmod(0o555)
        with one_warning(r"cannot be written \(.*Permission denied"):
            assert directory.read(KEY) == CODE
            assert directory.read(OTHER) is None
            directory.write(OTHER, CODE, ABOUT)
            directory.write(OTHER, CODE, ABOUT)
        assert files(directory) == [f"{KEY}.kernel"]


def test_unreadable_directory_and_entry_are_ignored():
    with unprivileged() as place:
        KernelDirectory(place, "Do this.").write(KEY, CODE, ABOUT)
        for path in (place / f"{KEY}.kernel", place):
            path.chmod(0o000)
            directory = KernelDirectory(place, "Do this.")
            with one_warning(r"cannot be read \(.*Permission denied"):
                assert directory.read(KEY) is None
            if path != place:  # the others are shown all the same
                assert [entry.about for entry in directory.entries()] == [None]
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                directory.write(OTHER, CODE, ABOUT)  # no second warning
        place.chmod(0o700)


def test_disk_that_fills_up_leaves_nothing_behind(directory):
    """The write fails in its middle: a file may grow to 4096 bytes here."""
    directory.write(OTHER, b"", UNREPORTED)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with one_warning("cannot be written"):
            directory.write(KEY, CODE, ABOUT)
            directory.write(KEY, CODE, ABOUT)
        with pytest.raises(OSError, match="File too large"):
            directory.store(KEY, CODE, ABOUT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files(directory) == [f"{OTHER}.kernel"]
    assert directory.read(KEY) is None


def test_interrupt_leaves_nothing_behind(directory, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        directory.write(KEY, CODE, ABOUT)
    assert files(directory) == []


def test_clear_removes_entries_and_stale_temporaries_only(directory):
    directory.write(KEY, CODE, ABOUT)
    directory.write(OTHER, CODE, ABOUT)
    sizes = sum(path.stat().st_size for path in directory.path.iterdir())
    stale, fresh = f".{KEY[:16]}-77-0123abcd", f".{KEY[:16]}-78-0123abcd"
    mine = ["notes.kernel", "notes.txt", f"{KEY}.kernel.bak"]
    for name in (stale, fresh, *mine):
        (directory.path / name).write_bytes(b"x")
    hours_ago = time.time() - 7200
    os.utime(directory.path / stale, (hours_ago, hours_ago))
    assert directory.clear() == (2, sizes)
    assert files(directory) == sorted([fresh, *mine])
    assert directory.clear() == (0, 0)


def test_absent_directory_has_no_entries(tmp_path):
    directory = KernelDirectory(tmp_path / "absent", "Do this.")
    assert directory.entries() == []
    assert directory.clear() == (0, 0)
    assert not directory.path.exists()
