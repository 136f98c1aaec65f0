"""Softmax of scaled logits, with a mask, a causal one, or both."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from shardops import array_type, config, routing
from shardops.errors import shown, wrong
from shardops.op import Wanted, compiled, with_derivative
from shardops.primitives import check
from shardops.primitives.softmax_op import SoftmaxBackward, SoftmaxForward

Causal = Literal["upper_left", "bottom_right"]


def softmax(
    x: jax.Array,
    *,
    scale: float = 1.0,
    mask: jax.Array | None = None,
    causal: Causal | None = None,
) -> jax.Array:
    """Turn the scaled logits of each row into weights that sum to 1.

        y[q, k] = exp(scale * x[q, k]) / sum_k(exp(scale * x[q, k]))

    Over the keys that a query sees; y is 0 at the others. In float32, less each row's largest
    logit; rounded once. The gradient is taken from the rounded y. A row that sees no key is 0, and
    so is its gradient. A NaN or an infinity in x that is seen acts as in `jax.nn.softmax`, a masked
    one not at all. A NaN in a cotangent makes its row NaN, but not where `causal` hides it.
    Derivatives of any order in reverse mode; no forward mode (`jax.jvp`, `jacfwd`): of `hessian`
    take `jacrev(jacrev(f))`.

    Args:
      x: [*batch, q, k] float32 | bfloat16 | float16; [k] where `causal` is None. With `causal` q
        and k are below 2^31.
      scale: a Python number: static; 0, or a float32 that is not subnormal.
      mask: bool, True where a key is masked out; its shape broadcasts to that of x.
      causal: "upper_left": query i sees keys 0 ... i. "bottom_right": query i sees keys
        0 ... i + k - q, so that the last one sees all. The same where q = k. Along manual axes of a
        `shard_map` the queries are those of the shard, counted from 0.
    Returns: [*batch, q, k], dtype of x.
    Raises: TypeError for dtypes and for a scale that is not static, ValueError for shapes and for
      other values of `causal` and `scale`.
    Sharding: batch, q: any axes, no communication; a causal mask keeps each query's place in the
      whole. k: whole while it runs. A sharded one is gathered, one all-gather of x; where it is
      wanted sharded in the result too, an all-to-all takes its axes to other dims and one takes
      them back. Likewise dy, y and dx of the gradient. mask: follows x along the dims that it has.
    Source: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762
    """
    (x,) = check.arrays("softmax", x=x)
    want = "[*batch, q, k]" if causal is not None else "[*batch, q, k] or [k]"
    if x.ndim < (1 if causal is None else 2):
        fix = "Give x a dim of keys." if x.ndim == 0 else "Give x a dim of queries."
        raise ValueError(wrong("softmax", "x", f"of shape {x.shape}", want, fix))
    op = SoftmaxForward(
        scale=_scale(scale),
        mask=mask is not None,
        diagonal=_diagonal(causal, x.shape),
        kernel=config.runs_as_kernel("softmax"),
    )
    masks = () if mask is None else (_mask(mask, x.shape),)
    return _compiled_softmax(op, (None,), *routing.match_varying(x, *masks))


def _scale(value: Any) -> float:
    fix = "It is static: multiply x by a scale that is an array."
    value = check.number("softmax", "scale", value, fix)
    numbers = np.finfo(np.float32)  # subnormal ones devices may take as 0
    if value != 0 and not float(numbers.tiny) <= abs(value) <= float(numbers.max):
        want = f"0 or a float32 of magnitude {numbers.tiny:.4g} to {numbers.max:.4g}"
        fix = "Use 1 / sqrt(d) or the like."
        raise ValueError(wrong("softmax", "scale", shown(value), want, fix))
    return float(value)


def _diagonal(causal: Any, shape: tuple[int, ...]) -> int | None:
    """The last key that query 0 sees: query i sees keys up to i + diagonal."""
    check.one_of("softmax", "causal", causal, (None, "upper_left", "bottom_right"))
    if causal is None:
        return None
    # A size that an export leaves open is no int, and its program is for fewer.
    if any(isinstance(size, int) and size >= 2**31 for size in shape[-2:]):
        want, fix = "fewer than 2^31 queries and keys with `causal`", "Their places are int32."
        raise ValueError(wrong("softmax", "x", f"of shape {shape}", want, fix))
    return 0 if causal == "upper_left" else shape[-1] - shape[-2]


def _mask(value: Any, shape: tuple[int, ...]) -> jax.Array:
    """The mask with the rank of x."""
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        fix = "Convert it with jnp.asarray."
        got = f"a {type(value).__name__}"
        raise TypeError(wrong("softmax", "mask", got, "a bool array", fix))
    if value.dtype != np.bool_:
        fix = "True masks out: pass `weights == 0`, or add other biases to x."
        raise TypeError(wrong("softmax", "mask", f"of dtype {value.dtype}", "bool", fix))
    mask = check.of_numpy("softmax", "mask", value, "a bool array")
    new = len(shape) - mask.ndim
    if new < 0 or any(m not in (1, n) for m, n in zip(mask.shape, shape[new:], strict=True)):
        want = f"a shape that broadcasts to {shape}, that of x"
        fix = "Each of its dims is 1 or that of x, from the last one on."
        raise ValueError(wrong("softmax", "mask", f"of shape {mask.shape}", want, fix))
    return jnp.expand_dims(mask, tuple(range(new)))


@with_derivative
def _softmax(op: SoftmaxForward, wanted: Wanted, x: jax.Array, *masks: jax.Array) -> jax.Array:
    return routing.run(op, (x, *masks), wanted)[0]


def _save(op: SoftmaxForward, wanted: Wanted, x: jax.Array, *masks: jax.Array) -> Any:
    # Through `_softmax` again: its derivative serves gradients of gradients.
    y = _softmax(op, wanted, x, *masks)
    return y, (y, array_type.Type.of(x))


def _pull(op: SoftmaxForward, wanted: Wanted, saved: Any, dy: jax.Array) -> Any:
    del wanted
    y, x_type = saved
    backward = SoftmaxBackward(op.scale, config.runs_as_kernel("softmax.grad"), op.diagonal)
    with jax.named_scope(backward.scope):
        dx = _gradient(backward, (x_type.spec,), *routing.match_varying(dy, y))
        return (x_type.apply(dx), *(None,) * op.mask)


_softmax.defvjp(_save, _pull)
_compiled_softmax = compiled(_softmax)


@with_derivative
def _gradient(op: SoftmaxBackward, wanted: Wanted, dy: jax.Array, y: jax.Array) -> jax.Array:
    """The routed gradient. Its own derivative is that of the reference."""
    return routing.run(op, (dy, y), wanted)[0]


def _gradient_save(op: SoftmaxBackward, wanted: Wanted, dy: jax.Array, y: jax.Array) -> Any:
    return _gradient(op, wanted, dy, y), (dy, y)


def _gradient_pull(op: SoftmaxBackward, wanted: Wanted, saved: Any, ddx: jax.Array) -> Any:
    del wanted
    return routing.pull(op.reference, saved, (ddx,))


_gradient.defvjp(_gradient_save, _gradient_pull)
