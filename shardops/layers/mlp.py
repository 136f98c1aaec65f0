"""A norm and two dense layers, with an activation or a gate between them."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardops import array_type
from shardops.errors import shown, wrong
from shardops.layers.activations import Activation, Gated, check_gated, gated
from shardops.layers.dense import Dims, linear
from shardops.layers.norm_dense import Norm
from shardops.layers.operands import Input, normed
from shardops.layers.product import as_asked
from shardops.layers.quantized import check_quantizers
from shardops.primitives import check
from shardops.primitives.gemm import OutSharding
from shardops.quantizer import DenseQuantizers


def layer_norm_mlp(
    x: jax.Array,
    gamma: jax.Array,
    kernels: tuple[jax.Array, jax.Array],
    *,
    beta: jax.Array | None = None,
    biases: tuple[jax.Array | None, jax.Array | None] = (None, None),
    norm: Norm = "layer_norm",
    epsilon: float = 1e-6,
    zero_centered_gamma: bool = False,
    activation: Activation | Gated | None = "gelu",
    batch_dims: Dims = ((), ()),
    quantizers: tuple[DenseQuantizers, DenseQuantizers] | None = None,
    add: jax.Array | None = None,
    return_input: bool = False,
    out_dtype: Any = None,
    hidden_sharding: OutSharding = None,
    out_sharding: OutSharding = None,
    input_sharding: PartitionSpec | None = None,
    precise_accumulation: bool = False,
) -> Any:
    """Normalise, widen, activate and narrow: the feed-forward half of a transformer's layer.

        s = x + add,  z = norm(s) · kernels[0] + biases[0]
        hidden[*r, f] = activation(z[*r, f]),  or gated a0(z[*r, 0, f]) * a1(z[*r, 1, f])
        y = hidden · kernels[1] + biases[1]

    Both products as of `dense`; a gate is computed in float32 from the pre-activation, in one pass
    forward and one backward, and the pre-activation is what is kept for it.

    Args:
      x: [*r, d] float32 | bfloat16 | float16.
      gamma, beta: [d]; beta with norm="layer_norm" alone, or None.
      kernels: [d, f] and [f, n]; gated [d, 2, f] and [f, n]: gate and linear part on a dim of their
        own, so that f can be sharded.
      biases: [f] or [2, f], and [n]; None each.
      norm: "layer_norm" | "rms_norm".
      epsilon, zero_centered_gamma: as of `shardops.layer_norm`.
      activation: as of `dense`; or a pair of "gelu" | "silu" | "relu" | "linear", a gate.
      batch_dims: dims of x that are batch-like, and of no kernel, as of `shardops.gemm`.
      quantizers: a pair, `recipe.dense_quantizers()` for each product.
      add, return_input: as of `layer_norm_dense`.
      out_dtype, precise_accumulation: as of `dense`.
      hidden_sharding: of hidden, [*r, f].
      out_sharding: of y.
      input_sharding: of norm(x) while it is multiplied, as of `dense`.
    Returns: y [*r, n]; with return_input (y, s).
    Raises: as `dense` and the norms do.
    Sharding: tensor and sequence parallel, x and y sharded over the sequence by an axis and hidden
      by the same one: forward one all-gather and one reduce-scatter; backward one of each, and one
      more all-gather of norm(x) for its kernel's gradient unless `input_sharding` keeps it. FSDP:
      one all-gather a use of a kernel, one reduce-scatter a gradient. Scales of blocks move along.
    Source: Shazeer 2020, https://arxiv.org/abs/2002.05202 (gates); Korthikanti et al. 2022,
      https://arxiv.org/abs/2205.05198 (sequence parallelism)
    """
    name = "layer_norm_mlp"
    single, pair = check_gated(name, activation)
    x, gamma, beta, add = check.arrays(name, x=x, gamma=gamma, beta=beta, add=add)
    norm_options: dict[str, Any] = {
        "epsilon": epsilon,
        "zero_centered_gamma": zero_centered_gamma,
    }
    given = normed(name, x, gamma, beta, norm, norm_options, add, return_input)
    _check_kernels(name, x, kernels, biases, pair is not None)
    up, up_bias = check.arrays(name, kernel=kernels[0], bias=biases[0])
    _check_batch_dims(name, x, up, batch_dims)
    within, mesh = (*x.shape[:-1], up.shape[-1]), array_type.mesh_of(x, up)
    check.out_sharding(name, hidden_sharding, within, mesh, "hidden_sharding")
    if pair is not None:
        up = _with_whole_pair(up)
        up_bias = None if up_bias is None else _with_whole_pair(up_bias)
    first, second = _pair_of_quantizers(name, quantizers)
    options: dict[str, Any] = {
        "batch_dims": batch_dims,
        "precise_accumulation": precise_accumulation,
    }
    hidden, residual = linear(
        name,
        given,
        up,
        up_bias,
        activation=single,
        quantizers=first,
        out_sharding=_with_pair(hidden_sharding, x.ndim) if pair else hidden_sharding,
        input_sharding=input_sharding,
        grouped=pair is not None,
        **options,
    )
    if pair is not None:
        hidden = as_asked(name, gated(pair, hidden), hidden_sharding)
    out, _ = linear(
        name,
        Input(hidden),
        kernels[1],
        biases[1],
        quantizers=second,
        out_dtype=out_dtype,
        out_sharding=out_sharding,
        **options,
    )
    return (out, residual) if return_input else out


def _with_whole_pair(array: jax.Array) -> jax.Array:
    """A gate's kernel or bias [.., 2, f]: of each element both parts on one device."""
    spec = array_type.explicit_spec(array)
    if spec is None or len(spec) < 2:  # a bias of another shape is refused by its product
        return array
    return array_type.laid_out(array, (*spec[:-2], (), spec[-1]))


def _pair_of_quantizers(op: str, value: Any) -> tuple[Any, Any]:
    if value is None:
        return None, None
    if not isinstance(value, tuple | list) or len(value) != 2:
        want = "a pair of DenseQuantizers: of the first and the second product"
        fix = "Pass two: recipe.dense_quantizers(), recipe.dense_quantizers()."
        raise TypeError(wrong(op, "quantizers", f"a {type(value).__name__}", want, fix))
    for i in range(2):
        check_quantizers(op, f"quantizers[{i}]", value[i])
    return value[0], value[1]


def _with_pair(spec: OutSharding, rank: int) -> OutSharding:
    """The sharding of [*rows, f] as one of [*rows, 2, f]."""
    if isinstance(spec, NamedSharding):
        spec = spec.spec
    if not isinstance(spec, PartitionSpec) or len(spec) < rank:
        return spec
    entries = (*spec[: rank - 1], None, *spec[rank - 1 :])
    return PartitionSpec(*entries, unreduced=spec.unreduced)


def _check_kernels(op: str, x: Any, kernels: Any, biases: Any, pair: bool) -> None:
    """Refuse kernels and biases whose shapes do not go together."""
    for argument, value in (("kernels", kernels), ("biases", biases)):
        if not isinstance(value, tuple | list) or len(value) != 2:
            got = f"a {type(value).__name__}"
            if isinstance(value, tuple | list):
                got += f" of {len(value)}"
            raise ValueError(
                wrong(op, argument, got, "a pair: of the first and the second product", "Pass two.")
            )
    if x.ndim < 1:
        fix = "A norm and a product are over its last dim."
        raise ValueError(wrong(op, "x", "of shape ()", "[*r, d]", fix))
    first, second = (jax.numpy.shape(k) for k in kernels)
    want = "[d, 2, f], as activation is a pair" if pair else "[d, f], as activation is no pair"
    middle = first[1:-1]
    if len(first) != 2 + pair or first[0] != x.shape[-1] or middle != (2,) * pair:
        fix = f"d is {x.shape[-1]}, the length of x's rows."
        raise ValueError(wrong(op, "kernels[0]", f"of shape {first}", want, fix))
    if len(second) != 2 or second[0] != first[-1]:
        want = f"[f, n] with f = {first[-1]}"
        fix = "f is the last dim of kernels[0]."
        raise ValueError(wrong(op, "kernels[1]", f"of shape {second}", want, fix))


def _check_batch_dims(op: str, x: jax.Array, kernel: Any, dims: Any) -> None:
    """Refuse batch-like dims of what both products contract, and of kernels."""
    of_x, of_kernel = check.dim_pair(op, "batch_dims", dims, x, kernel)
    if of_kernel or x.ndim - 1 in of_x:
        want = f"dims of x before its last one, {x.ndim - 1}, and none of the kernels"
        fix = "Pass ((0,), ()) where the first dim of x is the batch."
        raise ValueError(wrong(op, "batch_dims", shown((of_x, of_kernel)), want, fix))
