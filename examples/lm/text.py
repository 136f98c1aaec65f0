"""Real text as character ids: training and held-out files, and the batches of each step."""

import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from .options import UsageError

VOCABULARY = 128  # ASCII; other bytes are left out of the text
_SUFFIXES = (".py", ".txt", ".md")
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_HELD_OUT_ONE_IN = 10


@dataclass(frozen=True)
class Text:
    train: np.ndarray  # uint8 character ids
    held_out: np.ndarray
    files: int
    fingerprint: int  # of both parts: a resumed run has to read the same text

    def batch(self, seed: int, step: int, batch: int, seq: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets [batch, seq] of one step: a function of seed and step alone."""
        last = len(self.train) - seq - 1
        starts = np.random.default_rng((seed, step)).integers(0, last, batch, endpoint=True)
        return _windows(self.train, starts, seq)

    def evaluation(
        self, part: np.ndarray, batch: int, seq: int, batches: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Windows spread evenly over one part of the text."""
        starts = np.linspace(0, len(part) - seq - 1, batch * batches).astype(np.int64)
        for chunk in starts.reshape(batches, batch):
            yield _windows(part, chunk, seq)


def _windows(part: np.ndarray, starts: np.ndarray, seq: int) -> tuple[np.ndarray, np.ndarray]:
    window = part[starts[:, None] + np.arange(seq + 1)].astype(np.int32)
    return window[:, :-1], window[:, 1:]


def read(corpus: Path | None, seq: int) -> Text:
    """Read a folder (default: the standard library); every tenth file, by name, is held out."""
    root = corpus or Path(sysconfig.get_paths()["stdlib"])
    paths = _paths(root)
    if len(paths) < 2:
        raise UsageError(f"--corpus {root} has {len(paths)} text files, at least 2 are needed")
    # By a hash of the name, so that the split is spread over packages and the same everywhere.
    order = sorted(paths, key=lambda path: zlib.crc32(path.relative_to(root).as_posix().encode()))
    count = max(1, len(order) // _HELD_OUT_ONE_IN)
    held_out, train = _join(order[:count]), _join(order[count:])
    for name, part in (("training", train), ("held-out", held_out)):
        if len(part) <= seq:
            raise UsageError(
                f"--corpus {root} gives {len(part)} {name} characters, --seq {seq} needs more"
            )
    fingerprint = zlib.crc32(held_out.tobytes(), zlib.crc32(train.tobytes()))
    return Text(train, held_out, len(order), fingerprint)


def _paths(root: Path) -> list[Path]:
    if not root.is_dir():
        raise UsageError(f"--corpus {root} is no folder")
    found: list[Path] = []
    for folder, folders, files in os.walk(root, onerror=_unreadable):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        found += (Path(folder, name) for name in files if Path(name).suffix in _SUFFIXES)
    return [path for path in found if path.is_file()]


def _unreadable(error: OSError) -> NoReturn:
    raise UsageError(f"--corpus: cannot read {error.filename}: {error.strerror}") from error


def _join(paths: list[Path]) -> np.ndarray:
    try:
        data = b"\n".join(path.read_bytes() for path in paths)
    except OSError as error:
        raise UsageError(f"--corpus: cannot read {error.filename}: {error.strerror}") from error
    ids = np.frombuffer(data, np.uint8)
    return ids[ids < VOCABULARY]
