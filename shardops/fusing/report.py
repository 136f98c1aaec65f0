"""What `fuse` found: fusions, and near misses with their reasons."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

# Private: the public module has no way from an equation to the line that it was written in.
from jax._src.source_info_util import user_frames

Kind = Literal["add", "return_input", "bias", "activation", "bias+activation", "quantizer"]
_PACKAGE = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class Fusion:
    """One fusion: the op, where it is called, and what it has taken in."""

    kind: Kind
    op: str  # "rms_norm", "gemm", ...
    where: str  # "model.py:31"; empty where no line of the caller is known
    what: str

    def __str__(self) -> str:
        return f"fused: {_at(self.where)}{self.op}: {self.what}"


@dataclass(frozen=True)
class Miss:
    """What looks like a fusion, and why it is none."""

    op: str
    where: str
    why: str

    def __str__(self) -> str:
        return f"left alone: {_at(self.where)}{self.op}: {self.why}"


@dataclass(frozen=True)
class Report:
    """What `shardops.fuse` did in one trace of a function.

    A body that runs often, as in a `scan`, is listed once; a function that is called twice, twice.
    """

    fused: tuple[Fusion, ...]
    missed: tuple[Miss, ...]

    def count(self, kind: Kind, op: str | None = None) -> int:
        """How many fusions of a kind there are, of one op or of all."""
        return sum(f.kind == kind and op in (None, f.op) for f in self.fused)

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.fused, *self.missed))) or "nothing to fuse"


def where(eqn: Any) -> str:
    """File and line of the caller of an op; empty where none is known."""
    return next(_lines(eqn), "")


def _at(where: str) -> str:
    return where and f"{where} "


def _lines(eqn: Any) -> Iterator[str]:
    for frame in user_frames(eqn.source_info.traceback):
        if not frame.file_name.startswith(_PACKAGE):
            yield f"{Path(frame.file_name).name}:{frame.start_line}"
