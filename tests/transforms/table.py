"""Prints docs/transformations.md: python -m tests.transforms.table > docs/transformations.md"""

from tests.transforms.limits import LIMITS, Limit, limit
from tests.transforms.routes import ROUTES
from tests.transforms.subjects import SUBJECTS
from tests.transforms.transformations import TRANSFORMATIONS

HEAD = """\
# Transformations

Each op under each of JAX's transformations, on each route that an op can take. Every "yes" is a
test beside plain jnp under the same transformation, values on every device; every "no"
is a test that what its footnote says is raised (`tests/transforms`). Made by
`python -m tests.transforms.table > docs/transformations.md`.

The routes: *none*, no mesh; *Auto*, *Explicit*, *mixed*, axes of the mesh of these types (mixed:
one of each); *shard_map*, inside of one over all axes; *partly manual*, inside of one over some
axes, the others of the type named. `pmap` has no column: `shard_map` takes its place in JAX.
"""

TAIL = """\
What the columns are: *eager*, value and gradients without `jit`; *vmap*, over each operand by
itself and over all together, and its gradients in one order and the other; *scan*, over layers
with operands of their own, and the gradient through it; *checkpoint policies*,
`everything_saveable`, `dots_saveable` and `save_only_these_names`; *donate*, the first operand's
buffer is given to another result; *nested shard_map*, one more than the route has; *export*,
serialised by `jax.export`, and called again. Loops and `cond` are in the middle of a program that
is jitted.

Between processes (`tests/processes`): exported programs are called in another process on 1, 2 and
8 devices; a second process finds compiled programs in JAX's persistent cache on every route, on
Auto axes with `jax_remove_custom_partitioning_ptr_from_cache_key`; two processes of four devices
each run one program.
"""


def text() -> str:
    """The page."""
    notes = _notes()
    names = [t.name for t in TRANSFORMATIONS]
    lines = [HEAD, _row(["op", "route", *names]), _row(["---"] * (2 + len(names)))]
    for subject in SUBJECTS:
        for route in ROUTES:
            found = [limit(subject, route, t) for t in TRANSFORMATIONS]
            cells = ["yes" if one is None else f"no ({notes[one.reason]})" for one in found]
            lines.append(_row([f"`{subject.name}`", route.name, *cells]))
    lines.append("")
    lines += [f"{number}. {reason}" for reason, number in notes.items()]
    return "\n".join([*lines, "", TAIL])


def _notes() -> dict[str, int]:
    """The number of each footnote, in the order of the table's columns."""
    order = [t.name for t in TRANSFORMATIONS]

    def column(one: Limit) -> int:
        return order.index(one.transformation)

    reasons = dict.fromkeys(one.reason for one in sorted(LIMITS, key=column))
    return {reason: number for number, reason in enumerate(reasons, 1)}


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(text(), end="")
