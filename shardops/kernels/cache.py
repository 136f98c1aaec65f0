"""A directory of compiled kernels that many processes may read and write at once."""

import hashlib
import os
import pathlib
import tempfile
import warnings

# Kernels are executed: an entry is used only where it is whole, as its digest says.
_MAGIC = b"shardops kernel 1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size


class KernelDirectory:
    """Entries are files named by key. What cannot be read or written is ignored, with one warning.

    An entry is written to a temporary file and renamed, so readers see all of it or nothing.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        self._warned = False

    def read(self, key: str) -> bytes | None:
        """Returns the entry, or None where there is none that is whole."""
        path = self._entry(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(f"cannot be read ({error})")
            return None
        head, code = data[: len(_MAGIC) + _DIGEST_BYTES], data[len(_MAGIC) + _DIGEST_BYTES :]
        if head != _MAGIC + hashlib.sha256(code).digest():
            self._warn(f"holds a damaged or foreign file, {path.name}; it will be replaced")
            return None
        return code

    def write(self, key: str, code: bytes) -> None:
        """Stores an entry; where that fails, later processes compile again."""
        path = self._entry(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{key[:16]}-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(_MAGIC + hashlib.sha256(code).digest() + code)
                os.replace(temporary, path)
            except OSError:
                os.unlink(temporary)
                raise
        except OSError as error:
            self._warn(f"cannot be written ({error})")

    def _entry(self, key: str) -> pathlib.Path:
        return self.path / f"{key}.kernel"

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"shardops: the kernel cache {self.path} {what}. Kernels are compiled anew in this "
                "process. Point SHARDOPS_CACHE_DIR at a writable directory of your own.",
                RuntimeWarning,
                stacklevel=3,
            )
