"""Checkpoints in `OUT/checkpoint/STEP`, by orbax: written whole or not at all.

Beside the arrays each holds a JSON record: what the run was (sizes, seed, text) and its losses. It
is read without orbax, so that a checkpoint of another run is refused before anything starts.
"""

import json
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .options import Options, UsageError


@dataclass
class Store:
    folder: Path
    identity: dict[str, int]
    start: int = 0  # the step to continue from
    losses: list[float] = field(default_factory=list)
    _replace: bool = False

    def restore(self, host_state: Any, shardings: Any) -> Any:
        """The arrays of the checkpoint, placed by `shardings`."""
        import jax
        import orbax.checkpoint as ocp

        def abstract(array: Any, sharding: Any) -> Any:
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

        target = jax.tree.map(abstract, host_state, shardings)
        try:
            with self._manager() as manager:
                wanted = ocp.args.Composite(state=ocp.args.StandardRestore(target))
                return manager.restore(self.start, args=wanted)["state"]
        except (OSError, ValueError, KeyError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            where = self.folder / str(self.start)
            raise UsageError(f"--resume: cannot read {where}: {reason}") from error

    def save(self, step: int, state: Any, losses: list[float]) -> None:
        import orbax.checkpoint as ocp

        if self._replace:
            shutil.rmtree(self.folder)
            self._replace = False
        record = {"run": self.identity, "losses": losses}
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record)
        )
        with self._manager() as manager:
            manager.save(step, args=items)

    def _manager(self) -> Any:
        import orbax.checkpoint as ocp

        options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
        return ocp.CheckpointManager(self.folder.resolve(), options=options)


def open_store(options: Options, fingerprint: int) -> Store:
    """Decide what this run does with --out; refuses what would lose or mix up a checkpoint."""
    folder = options.out / "checkpoint"
    store = Store(folder, {**options.identity(), "text": fingerprint})
    latest = max(_steps(folder), default=None)
    if options.resume:
        if latest is None:
            raise UsageError(f"--resume: there is no checkpoint in {folder}")
        store.start, store.losses = latest, _read(folder / str(latest), store.identity)
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
    return store


def _steps(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    return [int(path.name) for path in folder.iterdir() if path.name.isdigit()]


def _read(folder: Path, identity: dict[str, int]) -> list[float]:
    path = folder / "record" / "metadata"
    try:
        record = json.loads(path.read_text())
        run, losses = record["run"], record["losses"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--resume: {folder} is no checkpoint of this program") from error
    for name, value in identity.items():
        if run.get(name) != value:
            if name == "text":
                raise UsageError(f"--resume: {folder} was trained on other text than --corpus")
            raise UsageError(
                f"--resume: {folder} was trained with --{name} {run.get(name)}, not {value}"
            )
    return losses


def _require_writable(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise UsageError(f"--out {out} cannot be written: {error.strerror}") from error
