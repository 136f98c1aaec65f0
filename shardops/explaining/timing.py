"""How long a plan takes on a named link: a start, bytes over a rate, a latency a hop of a ring."""

from math import prod

from shardops.errors import shown
from shardops.rules.hardware import LINKS, Link
from shardops.rules.parts import size_of
from shardops.rules.spec import Sizes
from shardops.rules.step import Step


def link_named(name: str) -> Link:
    """A link of the hardware table. Raises ValueError for another name."""
    if not isinstance(name, str) or name not in LINKS:
        raise ValueError(
            f"explain: link is {shown(name)}; expected one of {', '.join(LINKS)}. Choose the one "
            "that joins your devices."
        )
    return LINKS[name]


def hops(step: Step, sizes: Sizes) -> int:
    """How many times in turn a ring passes pieces on."""
    n = prod(size_of(a, sizes) for a in step.axes)
    if step.kind == "ppermute":
        return 1
    return {"slice": 0, "psum": 2}.get(step.kind, 1) * (n - 1)


def microseconds(step: Step, sizes: Sizes, link: Link) -> float:
    """Predicted time of one step, alone on the link."""
    start = 0.0 if step.kind == "slice" else link.start
    return 1e6 * (start + step.bytes / link.rate + link.latency * hops(step, sizes))
