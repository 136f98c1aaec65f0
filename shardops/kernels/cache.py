"""A directory of compiled kernels that many processes may read and write at once."""

import dataclasses
import hashlib
import json
import os
import pathlib
import re
import secrets
import stat
import struct
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from shardops.kernels.resources import Resources

# An entry: this line, the SHA-256 of its key and the rest, the length of an account in JSON, the
# account, and the machine code. Kernels are executed: an entry is used only where it is whole and
# under its own name, as its digest says.
FORMAT = b"shardops kernel 3\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
_LENGTH = struct.Struct("<I")
# What every account says; `compile.compile_kernel` writes it.
_ACCOUNT = {
    "kernel": str,
    "arch": str,
    "file": str,
    "constants": dict,
    "code_bytes": int,
    "resources": dict | None,
    "nvrtc": str,
    "shardops": str,
}
_RESOURCES = [field.name for field in dataclasses.fields(Resources)]

_ENTRY = re.compile(r"[0-9a-f]{64}\.kernel")
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}-\d+-[0-9a-f]{8}")
# A temporary file so old was left by a process that was killed while it wrote.
_STALE_SECONDS = 3600.0


@dataclass(frozen=True)
class Entry:
    """A file of a directory of kernels.

    Args:
      size: of the file, in bytes; 0 for a directory.
      about: what `KernelDirectory.store` was given; None where the file is damaged, or none at all.
    """

    path: pathlib.Path
    size: int
    about: dict[str, Any] | None


def write_whole(path: pathlib.Path, content: bytes) -> None:
    """Writes a file, and its folder, so that readers see all of it or nothing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not `tempfile`: its files are readable by their owner alone, and a pack that root put into
    # an image, or the cache of a group, is read by others.
    temporary = path.with_name(f".{path.stem[:16]}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:  # also an interrupt from the keyboard leaves nothing behind
        with suppress(OSError):
            os.unlink(temporary)
        raise


class KernelDirectory:
    """Entries are files named by key. What cannot be read or written is ignored, with one warning.

    An entry is written to a temporary file and renamed, so readers see all of it or nothing, and
    the last of several writers wins. Nothing waits for a lock, which would hang or fail on some
    network file systems: processes that start together compile the same kernel each.

    Args:
      advice: what the warning says is to be done.
      required: a directory that does not exist is worth the warning too.
    """

    def __init__(self, path: pathlib.Path, advice: str, *, required: bool = False):
        self.path = path
        self._advice = advice
        self._required = required
        self._warned = False

    def read(self, key: str) -> bytes | None:
        """Returns the machine code, or None where there is no entry that is whole."""
        path = self._entry(key)
        try:
            data = content(path)
        except FileNotFoundError:
            if self._required and not self.path.exists():
                self._warn("does not exist")
            return None
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            self._warn(f"cannot be read ({error})")
            return None
        parts = _parts(key, data)
        if parts is None:
            self._warn(f"holds a damaged or foreign file, {path.name}")
            return None
        return parts[1]

    def write(self, key: str, code: bytes, about: Mapping[str, Any]) -> None:
        """Stores an entry; where that fails, later processes compile again."""
        try:
            self.store(key, code, about)
        except (OSError, ValueError) as error:
            self._warn(f"cannot be written ({error})")

    def store(self, key: str, code: bytes, about: Mapping[str, Any]) -> None:
        """Stores an entry. Raises OSError where that fails.

        Args:
          about: as `compile.compile_kernel` gives it; with another the entry counts as damaged.
        """
        account = json.dumps(about).encode()
        rest = _LENGTH.pack(len(account)) + account + code
        write_whole(self._entry(key), FORMAT + _digest(key, rest) + rest)

    def entries(self) -> list[Entry]:
        """Returns all entries, ordered by name, whole or not. Raises OSError."""
        found = []
        for path in self._files(_ENTRY):
            with suppress(FileNotFoundError):  # another process has removed it
                size = path.stat().st_size if path.is_file() else 0
                found.append(Entry(path, size, _about(path)))
        return found

    def clear(self) -> tuple[int, int]:
        """Removes entries and stale temporary files, no other file, no directory. Raises OSError.

        Returns: number and total size of the entries removed.
        """
        count = size = 0
        for path in self._files(_ENTRY):
            with suppress(FileNotFoundError):
                if path.is_dir() and not path.is_symlink():
                    continue
                length = path.lstat().st_size
                path.unlink()
                count, size = count + 1, size + length
        for path in self._files(_TEMPORARY):
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    path.unlink()
        return count, size

    def _files(self, name: re.Pattern[str]) -> list[pathlib.Path]:
        try:
            found = [*self.path.iterdir()]
        except FileNotFoundError:
            return []
        return sorted(path for path in found if name.fullmatch(path.name))

    def _entry(self, key: str) -> pathlib.Path:
        return self.path / f"{key}.kernel"

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"shardops: the directory of kernels {self.path} {what}. {self._advice}",
                RuntimeWarning,
                stacklevel=3,
            )


def content(path: pathlib.Path) -> bytes:
    """Reads a file. Raises OSError, also of what is no file: a pipe or a device may never end."""
    # Without O_NONBLOCK the opening of a pipe waits for a writer.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path.name} is not a regular file")
        return file.read()


def _digest(key: str, rest: bytes) -> bytes:
    return hashlib.sha256(key.encode() + rest).digest()


def _parts(key: str, data: bytes) -> tuple[dict[str, Any], bytes] | None:
    """The account and the machine code of an entry; None where it is not that of the key, whole."""
    head, rest = data[: len(FORMAT) + _DIGEST_BYTES], data[len(FORMAT) + _DIGEST_BYTES :]
    if head != FORMAT + _digest(key, rest):
        return None
    # The digest says that the file is as it was written, not that this library wrote it.
    if len(rest) < _LENGTH.size:
        return None
    end = _LENGTH.size + _LENGTH.unpack_from(rest)[0]
    try:
        about = json.loads(rest[_LENGTH.size : end])
    except (ValueError, RecursionError):
        return None
    return (about, rest[end:]) if end <= len(rest) and _is_account(about) else None


def _about(path: pathlib.Path) -> dict[str, Any] | None:
    """The account of an entry; None where it cannot be used."""
    try:
        parts = _parts(path.stem, content(path))
    except FileNotFoundError:
        raise
    except OSError:
        return None
    return None if parts is None else parts[0]


def _is_account(about: Any) -> bool:
    """Whether it says what is read from it: a file that is whole may still be a stranger's."""
    if not isinstance(about, dict):
        return False
    if not all(name in about and isinstance(about[name], of) for name, of in _ACCOUNT.items()):
        return False
    taken = about["resources"]
    numbers = list(about["constants"].values())
    if taken is not None:
        numbers += [taken.get(name) for name in _RESOURCES]
    return all(isinstance(number, int) for number in numbers)
