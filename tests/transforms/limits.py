"""Cells of the matrix that say no, and what is raised there."""

from dataclasses import dataclass

from tests.transforms.routes import ROUTES, Route
from tests.transforms.subjects import Subject
from tests.transforms.transformations import Transformation


@dataclass(frozen=True)
class Limit:
    """`reason` is the footnote; `error` and `match` are what a call raises.

    An `error` of None: there is nothing to call.
    """

    transformation: str
    routes: tuple[str, ...]
    reason: str
    error: type[BaseException] | None
    match: str = ""
    but: tuple[str, ...] = ()  # ops for which it is yes


_ALL = tuple(route.name for route in ROUTES)

_NO_MESH = "A shard_map needs a mesh."

LIMITS = (
    Limit(
        "jvp",
        _ALL,
        'JAX: "can\'t apply forward-mode autodiff (jvp) to a custom_vjp function". So no '
        "`jacfwd` and no `hessian` either: take `jacrev(jacrev(f))`.",
        TypeError,
        "forward-mode (autodiff|differentiation)",
    ),
    Limit("nested shard_map", ("none",), _NO_MESH, None),
    Limit("grad of nested shard_map", ("none",), _NO_MESH, None),
    Limit(
        "grad of nested shard_map",
        ("shard_map", "partly manual, Auto", "partly manual, Explicit"),
        "JAX cannot differentiate a shard_map that is inside another one from outside, plain jnp "
        'neither, where it saves more than its result: "Cannot lower jaxpr with verifier errors". '
        "Take the gradient inside of it.",
        ValueError,
        "Cannot lower jaxpr with verifier errors",
        but=("softmax",),
    ),
    Limit(
        "export",
        ("Auto", "mixed", "partly manual, Auto"),
        "JAX cannot serialise `custom_partitioning`, which ops are partitioned by on Auto axes: "
        '"serialization of host_callbacks is not yet implemented".',
        NotImplementedError,
        "serialization of host_callbacks",
    ),
)


def limit(subject: Subject, route: Route, transformation: Transformation) -> Limit | None:
    """Why a cell says no; None where it says yes."""
    for one in LIMITS:
        named = one.transformation == transformation.name and route.name in one.routes
        if named and subject.name not in one.but:
            return one
    return None
