"""Checkpoints in `OUT/checkpoint/STEP`, by orbax: written whole or not at all.

Beside the arrays each holds a JSON record: what the run was (sizes, seed, text), its losses, and a
checksum of the arrays. It is read without orbax, so that a checkpoint of another run is refused
before anything starts.
"""

import fcntl
import gc
import io
import json
import os
import shutil
import sys
import tempfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .options import Options, UsageError


@dataclass
class Store:
    folder: Path
    identity: dict[str, int | str]
    start: int = 0  # the step to continue from
    losses: list[float] = field(default_factory=list)
    checksum: int = 0  # of the arrays at `start`
    lock: int | None = None  # a file descriptor
    _replace: bool = False

    def restore(self, host_state: Any, shardings: Any) -> Any:
        """The arrays of the checkpoint, placed by `shardings`."""
        import jax
        import orbax.checkpoint as ocp

        def abstract(array: Any, sharding: Any) -> Any:
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

        target = jax.tree.map(abstract, host_state, shardings)
        where = self.folder / str(self.start)
        state = problem = None
        stderr, sys.stderr = sys.stderr, io.StringIO()
        try:
            with self._manager() as manager:
                wanted = ocp.args.Composite(state=ocp.args.StandardRestore(target))
                state = manager.restore(self.start, args=wanted)["state"]
        except Exception as error:  # what the array store raises for damage is a bare Exception
            problem = (str(error).strip() or type(error).__name__).splitlines()[0]
        gc.collect()
        if problem:
            # sys.stderr stays a buffer: the threads of a store that failed go on talking to the end
            # of the process, into the middle of the one line that main writes to sys.__stderr__.
            raise UsageError(f"--resume: cannot read {where}: {problem[:200]}")
        stderr.write(sys.stderr.getvalue())
        sys.stderr = stderr
        if _checksum(state) != self.checksum:
            raise UsageError(f"--resume: the arrays of {where} are damaged")
        return state

    def save(self, step: int, state: Any, losses: list[float]) -> None:
        import orbax.checkpoint as ocp

        old = self.folder.with_name("checkpoint.old")
        if self._replace:
            shutil.rmtree(old, ignore_errors=True)
            self.folder.rename(old)
        record = {"run": self.identity, "losses": losses, "checksum": _checksum(state)}
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record)
        )
        with self._manager() as manager:
            manager.save(step, args=items)
        if self._replace:  # only now: a save that fails leaves the old checkpoint
            shutil.rmtree(old)
            self._replace = False

    def exists(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        return bool(_steps(self.folder))

    def _manager(self) -> Any:
        import orbax.checkpoint as ocp

        options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
        return ocp.CheckpointManager(self.folder.resolve(), options=options)


def _checksum(state: Any) -> int:
    import jax

    total = 0
    for leaf in jax.tree.leaves(jax.device_get(state)):
        total = zlib.crc32(leaf.tobytes(), total)
    return total


def open_store(options: Options, fingerprint: int) -> Store:
    """Decide what this run does with --out; refuses what would lose or mix up a checkpoint."""
    folder = options.out / "checkpoint"
    store = Store(folder, {**options.identity(), "text": fingerprint})
    latest = max(_steps(folder), default=None)
    if options.resume:
        if latest is None:
            raise UsageError(f"--resume: there is no checkpoint in {folder}")
        record = _read(folder / str(latest), store.identity, latest)
        store.start, store.losses, store.checksum = latest, record["losses"], record["checksum"]
        if latest >= options.steps:
            raise UsageError(
                f"--resume: {folder} is at step {latest}, --steps {options.steps} adds none"
            )
    elif latest is not None and not options.overwrite:
        raise UsageError(
            f"--out {options.out} holds a checkpoint of step {latest}: "
            "continue it with --resume or replace it with --overwrite"
        )
    store._replace = latest is not None and options.overwrite
    _require_writable(options.out)
    if folder.exists():
        if not folder.is_dir():
            raise UsageError(f"--out: {folder} is in the way: it is no folder")
        _require_writable(folder)
    picture = options.out / "loss.png"
    if picture.is_dir():
        raise UsageError(f"--out: {picture} is in the way: it is a folder")
    if picture.exists():
        if latest is None and not options.overwrite:
            raise UsageError(f"--out: {picture} is of no run kept here: --overwrite replaces it")
        picture.open("ab").close()  # raises where it may not be written
    store.lock = _locked(options.out)
    return store


def _locked(out: Path) -> int:
    """Keeps other runs out of a folder until this process ends."""
    lock = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(f"--out {out} is in use by another run") from error
    return lock


def _steps(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    return [int(path.name) for path in folder.iterdir() if path.name.isdigit()]


def _read(folder: Path, identity: dict[str, int | str], step: int) -> dict[str, Any]:
    try:
        record = json.loads((folder / "record" / "metadata").read_text())
        run, losses = dict(record["run"]), record["losses"]
        sound = len(losses) == step and all(isinstance(loss, float) for loss in losses)
        sound = sound and isinstance(record["checksum"], int)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--resume: {folder} is no checkpoint of this program") from error
    if not sound:
        raise UsageError(f"--resume: {folder} is no checkpoint of this program")
    for name, value in identity.items():
        if run.get(name) != value:
            if name == "text":
                raise UsageError(f"--resume: {folder} was trained on other text than --corpus")
            raise UsageError(
                f"--resume: {folder} was trained with --{name} {run.get(name)}, not {value}"
            )
    return record


def _require_writable(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise UsageError(f"--out {out} cannot be written: {error.strerror}") from error
