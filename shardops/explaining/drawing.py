"""An array's blocks over the mesh, as inline SVG.

The last dim runs to the right, all others downwards, nested in their order. In a block stand the
numbers of the devices that hold it, counted along the mesh with the last axis fastest.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import product
from math import prod

from shardops.explaining import wording
from shardops.explaining.names import Array
from shardops.op import AxisSizes
from shardops.rules.spec import Spec

WIDTH, HEIGHT, LEFT, BELOW = 216, 120, 14, 18
_MOST = 32  # blocks a side; beyond, they are counted and not drawn


@dataclass(frozen=True)
class Block:
    """A part of an array that some devices hold.

    Attributes:
      at: the number of the part along each dim.
      ranges: the elements of each dim, (first, last + 1).
      devices: who holds it.
    """

    at: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    devices: tuple[int, ...]


def blocks(shape: Sequence[int], spec: Spec, sizes: AxisSizes) -> list[Block]:
    """All different blocks of an array, in order of their place in it."""
    lengths = dict(sizes)
    holders: dict[tuple[int, ...], list[int]] = {}
    for device, coordinates in enumerate(product(*(range(n) for _, n in sizes))):
        where = dict(zip(lengths, coordinates, strict=True))
        at = []
        for axes in spec:
            number = 0
            for axis in axes:  # major to minor
                number = number * lengths[axis] + where[axis]
            at.append(number)
        holders.setdefault(tuple(at), []).append(device)
    parts = [prod(lengths[a] for a in axes) for axes in spec]
    out = []
    for at, devices in sorted(holders.items()):
        units = [-(-n // p) for n, p in zip(shape, parts, strict=True)]  # the last one may be short
        ranges = tuple(
            (min(n, i * u), min(n, (i + 1) * u)) for i, u, n in zip(at, units, shape, strict=True)
        )
        out.append(Block(at, ranges, tuple(devices)))
    return out


def drawing(array: Array, shape: Sequence[int], spec: Spec, sizes: AxisSizes) -> str:
    """One <svg> of the array's blocks."""
    label = f"{array.name}: {wording.layout(array.dims, spec)}"
    body = "".join(_body(array, shape, spec, sizes))
    box = f"0 0 {LEFT + WIDTH + 2} {HEIGHT + BELOW}"
    return (
        f'<svg role="img" aria-label="{escape(label)}" data-array="{escape(array.name)}" '
        f'viewBox="{box}" width="{LEFT + WIDTH + 2}" height="{HEIGHT + BELOW}">'
        f"<title>{escape(label)}</title>{body}</svg>"
    )


def _body(array: Array, shape: Sequence[int], spec: Spec, sizes: AxisSizes) -> Iterator[str]:
    lengths = dict(sizes)
    parts = [prod(lengths[a] for a in axes) for axes in spec]
    across, down = (parts[-1] if parts else 1), prod(parts[:-1])
    yield _text(
        LEFT + WIDTH / 2, HEIGHT + 13, array.dims[-1] if array.dims else "one number", "dim"
    )
    middle = f'transform="rotate(-90 9 {HEIGHT / 2:.0f})"'
    yield _text(9, HEIGHT / 2, " · ".join(array.dims[:-1]), "dim", middle)
    if max(across, down) > _MOST:
        yield f'<rect x="{LEFT}" y="1" width="{WIDTH}" height="{HEIGHT - 2}" class="block"/>'
        yield _text(LEFT + WIDTH / 2, HEIGHT / 2, f"{down} × {across} blocks", "who")
        return
    wide, high = WIDTH / across, (HEIGHT - 2) / down
    found = blocks(shape, spec, sizes)
    for number, block in enumerate(found):
        row = 0
        for i, n in zip(block.at[:-1], parts[:-1], strict=True):
            row = row * n + i
        x, y = LEFT + (block.at[-1] if block.at else 0) * wide, 1 + row * high
        hue = 210 if len(found) == 1 else round(360 * number / len(found))
        yield (
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" class="block" '
            f'style="fill:hsl({hue} 60% 80%)"><title>{escape(_told(array, block))}</title></rect>'
        )
        who = ranges(block.devices)
        if high >= 11 and wide >= 6 * len(who):
            yield _text(x + wide / 2, y + high / 2 + 4, who, "who")


def ranges(numbers: Sequence[int]) -> str:
    """0-3,6: runs of numbers."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _told(array: Array, block: Block) -> str:
    where = [f"{d} {a}:{b}" for d, (a, b) in zip(array.dims, block.ranges, strict=True)]
    devices = "device" if len(block.devices) == 1 else "devices"
    return f"{', '.join(where)} on {devices} {ranges(block.devices)}"


def _text(x: float, y: float, text: str, kind: str, more: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="middle" {more}>'
        f"{escape(text)}</text>"
    )
