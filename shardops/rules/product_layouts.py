"""Every way to lay a product out over a few mesh axes, as arrays that the search adds up.

Each axis shards one loop of the product (a batch pair, a free dim of either operand, a contracting
pair) or none. What the operands and the partial result look like then follows.
"""

from functools import lru_cache
from itertools import combinations_with_replacement, permutations
from math import prod
from typing import NamedTuple

import numpy as np

from shardops.rules.layouts import Layouts, Numbers, layouts_of

Loops = tuple[Numbers, ...]  # for each loop the axes that shard it


class LoopNest(NamedTuple):
    """The loops of a product, in the order batch, lhs free, rhs free, contracting."""

    units: Numbers  # into how many parts each loop may be cut
    sizes: Numbers  # of the mesh axes
    parts: tuple[Numbers, ...]  # of each axis, in which arrays may move on the way
    part_sizes: Numbers
    lhs: Numbers  # the loop of each dim of the operand
    rhs: Numbers
    lhs_units: Numbers  # for each dim of the operand, as it may be cut on the way
    rhs_units: Numbers
    out_units: Numbers  # of the result's dims, which are the first loops
    contracting: int  # how many loops at the end

    def parted(self, axes: Numbers) -> Numbers:
        """Parts of axes."""
        return tuple(p for a in axes for p in self.parts[a])


class ProductLayouts(NamedTuple):
    """All layouts of a product: row i of each array belongs to `loops[i]`."""

    nest: LoopNest
    loops: list[Loops]
    lhs: np.ndarray  # number of the operand's layout
    rhs: np.ndarray
    out: np.ndarray  # number of the partial result's layout, its sums pending
    work: np.ndarray  # part of the operations that one device carries out
    ends: dict[int, Loops]  # the summed layouts of the result over whole axes, by their numbers

    @property
    def lhs_layouts(self) -> Layouts:
        return layouts_of(self.nest.lhs_units, self.nest.part_sizes)

    @property
    def rhs_layouts(self) -> Layouts:
        return layouts_of(self.nest.rhs_units, self.nest.part_sizes)

    @property
    def out_layouts(self) -> Layouts:
        return layouts_of(self.nest.out_units, self.nest.part_sizes, True)


@lru_cache(maxsize=256)
def product_layouts(nest: LoopNest) -> ProductLayouts:
    """The layouts of a product; remembered: they do not depend on the lengths of its loops."""
    loops = _assignments(nest)
    left = layouts_of(nest.lhs_units, nest.part_sizes)
    right = layouts_of(nest.rhs_units, nest.part_sizes)
    out = layouts_of(nest.out_units, nest.part_sizes, True)
    kept = len(nest.units) - nest.contracting
    lhs_of, rhs_of, out_of, work = [], [], [], []
    for assigned in loops:
        fine = [nest.parted(axes) for axes in assigned]
        lhs_of.append(left.index[*(fine[n] for n in nest.lhs), ()])
        rhs_of.append(right.index[*(fine[n] for n in nest.rhs), ()])
        pending = tuple(sorted(p for loop in fine[kept:] for p in loop))
        out_of.append(out.index[*fine[:kept], pending])
        work.append(1 / prod(nest.sizes[a] for loop in assigned for a in loop))
    ends = {
        out.index[*(nest.parted(axes) for axes in node[:-1]), ()]: node[:-1]
        for node in layouts_of(nest.out_units, nest.sizes).nodes
    }
    return ProductLayouts(
        nest, loops, np.array(lhs_of), np.array(rhs_of), np.array(out_of), np.array(work), ends
    )


def _assignments(nest: LoopNest) -> list[Loops]:
    """Each axis on one loop, in any order there, or on none; loops are cut into equal parts."""
    found: list[Loops] = []
    axes = range(len(nest.sizes))
    for count in range(len(nest.sizes) + 1):
        for order in permutations(axes, count):
            # Non-decreasing places give each distribution over the loops once for each order.
            for places in combinations_with_replacement(range(len(nest.units)), count):
                loops: list[Numbers] = [()] * len(nest.units)
                for axis, at in zip(order, places, strict=True):
                    loops[at] += (axis,)
                if all(
                    unit % prod(nest.sizes[a] for a in loop) == 0
                    for unit, loop in zip(nest.units, loops, strict=True)
                ):
                    found.append(tuple(loops))
    return found
