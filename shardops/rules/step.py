"""One step of a plan: what moves between devices, or is cut without moving."""

from dataclasses import dataclass
from typing import Literal

from shardops.rules.spec import Axes, Spec

StepKind = Literal["slice", "all_gather", "all_to_all", "ppermute", "psum", "psum_scatter"]


@dataclass(frozen=True)
class Step:
    """A step takes one array from one sharding to another.

    Axes are those of the mesh, or parts of one: `tp[0]` is the major part of `tp`.

    | kind         | axes                         | dim                 | to_dim           |
    |--------------|------------------------------|---------------------|------------------|
    | slice        | now cut `dim` further        | the dim that is cut |                  |
    | all_gather   | leave `dim`                  | the dim that grows  |                  |
    | all_to_all   | leave `dim` for `to_dim`     | the dim that grows  | the dim that is cut |
    | ppermute     | all that shard before, after |                     |                  |
    | psum         | summed over                  |                     |                  |
    | psum_scatter | summed over, now cut `dim`   | the dim that is cut |                  |
    """

    kind: StepKind
    axes: Axes
    before: Spec
    after: Spec
    bytes: float = 0.0  # that a device receives, under ring algorithms
    array: str = ""  # which one: "lhs", "rhs", "out", …
    dim: int = -1
    to_dim: int = -1

    @property
    def sums(self) -> bool:
        """Whether partial sums are summed."""
        return self.kind in ("psum", "psum_scatter")

    @property
    def collective(self) -> bool:
        """Whether devices talk to each other."""
        return self.kind != "slice"
