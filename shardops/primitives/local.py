"""A device-local op as a JAX primitive: the jnp reference on any platform, a kernel on CUDA."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial, wraps
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

from shardops.errors import wrong

Results = tuple[jax.Array, ...]
Shapes = tuple[jax.ShapeDtypeStruct, ...]


def local_primitive(
    name: str,
    reference: Callable[..., Results],
    kernel: Callable[..., Results],
    on_cpu: Callable[..., Results] | None = None,
    results_of: Callable[..., Shapes] | None = None,
) -> Callable[..., Results]:
    """Make `bind(*arrays, kernel=bool, **statics)` out of two functions with the same signature.

    `reference` is what the op means, and what runs where no kernel does. `kernel` is called while
    JAX lowers for CUDA, with the shapes of one device; it issues custom calls. A call with
    `kernel=False`, or with an operand or result of no elements, lowers to the reference. `on_cpu`
    stands in for the reference where XLA:CPU cannot run that as it is. `results_of` tells shapes
    and dtypes of the results by those of the operands, which else takes a trace of the reference.
    """
    reference, run_kernel = _of_any_ranks(reference), _of_any_ranks(kernel)
    on_cpu = on_cpu and _of_any_ranks(on_cpu)
    primitive = Primitive(name)
    primitive.multiple_results = True

    def without_flag(function: Callable[..., Results]) -> Callable[..., Results]:
        return lambda *arrays, kernel, **statics: function(*arrays, **statics)

    def traced(*operands: jax.ShapeDtypeStruct, **statics: Any) -> Shapes:
        return tuple(jax.eval_shape(partial(reference, **statics), *operands))

    shapes_of = _of_any_ranks(results_of or traced)

    def abstract(*avals: Any, kernel: bool, **statics: Any) -> list[Any]:
        results = _results(shapes_of, avals, statics)
        # Derived from an operand's type, a result keeps the manual axes that it varies over.
        return [_typed_like(avals[0], r) for r in results]

    def cuda(*arrays: jax.Array, kernel: bool, **statics: Any) -> Results:
        results = _results(shapes_of, arrays, statics)
        if not kernel or any(a.size == 0 for a in (*arrays, *results)):
            return tuple(_kept(r) for r in reference(*arrays, **statics))
        _of_known_sizes(name, arrays)
        return run_kernel(*arrays, **statics)

    def run_eagerly(*arrays: jax.Array, kernel: bool, **statics: Any) -> Results:
        settings: Any = jax.config  # its options are attributes that no type names
        if settings.jax_disable_jit:  # a jit would come straight back here
            return (on_cpu or reference)(*arrays, **statics)
        return _compiled(primitive, kernel=kernel, **statics)(*arrays)

    primitive.def_abstract_eval(abstract)
    primitive.def_impl(run_eagerly)
    mlir.register_lowering(
        primitive, mlir.lower_fun(without_flag(reference), multiple_results=True)
    )
    if on_cpu is not None:
        lowering = mlir.lower_fun(without_flag(on_cpu), multiple_results=True)
        mlir.register_lowering(primitive, lowering, platform="cpu")
    mlir.register_lowering(primitive, mlir.lower_fun(cuda, multiple_results=True), platform="cuda")
    return lambda *arrays, **statics: tuple(primitive.bind(*arrays, **statics))


def _of_any_ranks(function: Callable[..., Any]) -> Callable[..., Any]:
    """A caller's `jax_numpy_rank_promotion` is for its own arrays: a bias has fewer dims here."""

    @wraps(function)
    def allowed(*arrays: Any, **statics: Any) -> Any:
        with jax.numpy_rank_promotion("allow"):
            return function(*arrays, **statics)

    return allowed


def _of_known_sizes(name: str, arrays: Sequence[jax.Array]) -> None:
    for array in arrays:
        if not all(isinstance(size, int) for size in array.shape):
            fix = "Export for each size, or within so.use_kernels('')."
            got = f"of shape {array.shape}"
            op = name.removeprefix("shardops_")
            raise ValueError(wrong(op, "x", got, "sizes that are numbers", fix))


def _kept(result: jax.Array) -> jax.Array:
    """8-bit data as they are: XLA drops a cast to 8 bits and back as if rounding were of no use."""
    return jax.lax.optimization_barrier(result) if result.dtype.itemsize == 1 else result


def _typed_like(aval: Any, result: Any) -> Any:
    spec = PartitionSpec(*(None,) * len(result.shape))
    return aval.update(
        shape=result.shape,
        dtype=result.dtype,
        weak_type=False,
        sharding=aval.sharding.update(spec=spec),
    )


def _results(
    shapes_of: Callable[..., Shapes], operands: Sequence[Any], statics: dict[str, Any]
) -> Shapes:
    """Shapes and dtypes of the results. A call of the op asks several times while it is traced."""
    shapes = tuple((a.shape, a.dtype) for a in operands)
    fixed = all(isinstance(size, int) for shape, _ in shapes for size in shape)
    find = _results_of_shapes if fixed else _results_of_shapes.__wrapped__  # exports: unknown sizes
    return find(shapes_of, shapes, tuple(statics.items()))


@lru_cache(maxsize=1024)
def _results_of_shapes(
    shapes_of: Callable[..., Shapes],
    shapes: tuple[tuple[tuple[int, ...], Any], ...],
    statics: tuple[tuple[str, Any], ...],
) -> Shapes:
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    return shapes_of(*operands, **dict(statics))


@lru_cache(maxsize=1024)
def _compiled(primitive: Primitive, **statics: Any) -> Callable[..., Any]:
    return jax.jit(partial(primitive.bind, **statics))
