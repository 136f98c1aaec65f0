"""What is asked of a ScaledArray that is an operand."""

from typing import Any

import jax.numpy as jnp

from shardops.errors import shown, wrong
from shardops.primitives.scaling import FLOATS, FORMATS, ScalingMode
from shardops.rules.scales import scale_shape

# Elements that a scale covers, and along how many dims at most.
_BLOCKS = {ScalingMode.BLOCK_128: (128, 2), ScalingMode.MXFP8: (32, 1)}


def scaled(op: str, name: str, value: Any) -> Any:
    """A ScaledArray that has data, and one scale or blocks along its dims."""
    if value.data is None and value.transposed_data is None:
        fix = "Pass one that so.quantize made."
        raise ValueError(wrong(op, name, "a ScaledArray without data", "data", fix))
    scale_dims = 0 if value.scale_inv is None else jnp.ndim(value.scale_inv)
    added = value.ndim - len(value.block) if value.block else scale_dims
    if added:
        got = f"a stack of ScaledArrays, {added} dims of them in front, of shape {value.shape}"
        fix = f"Map over these dims: jax.vmap(so.{op}), or jax.lax.scan."
        raise ValueError(wrong(op, name, got, "one ScaledArray", fix))
    _parts(op, name, value)
    return value


def _parts(op: str, name: str, value: Any) -> None:
    """Refuse data, scales and blocks that do not go together: a GPU would misread them."""

    def refuse(what: str, got: str, want: str) -> None:
        fix = "Pass one that so.quantize made, or correct it."
        raise ValueError(wrong(op, f"{name}.{what}", got, want, fix))

    if not isinstance(value.mode, ScalingMode):
        refuse("mode", shown(value.mode), "a ScalingMode")
    if value.dtype.name not in FLOATS:
        refuse("dtype", value.dtype.name, " | ".join(FLOATS))
    for prefix, part in (("", value), ("transposed_", value.transposed)):
        if part is None or part.data is None:
            continue
        if part.data.dtype.name not in FORMATS:
            refuse(f"{prefix}data", f"of dtype {part.data.dtype}", " | ".join(FORMATS))
        shape = value.shape if not prefix else (*value.shape[-1:], *value.shape[:-1])
        if part.data.shape != shape:
            refuse(f"{prefix}data", f"of shape {part.data.shape}", str(shape))
        length, most = _BLOCKS.get(value.mode, (0, 0))
        block = part.block or ()
        if bool(length) != bool(block) or (
            length and not ({*block} <= {1, length} and 1 <= block.count(length) <= most)
        ):
            want = f"{length} along {most} dims at most, 1 along the others" if length else "None"
            refuse("block", shown(part.block), want)
        scales = "float8_e8m0fnu" if value.mode is ScalingMode.MXFP8 else "float32"
        have, of = part.scale_inv, scale_shape(shape, part.block)
        if have is None or have.dtype.name != scales or have.shape != of:
            got = "None" if have is None else f"{have.dtype.name} of shape {have.shape}"
            want = f"{scales} of shape {of}"
            refuse(f"{prefix}scale_inv", got, want)
