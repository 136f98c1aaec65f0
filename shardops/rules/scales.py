"""Where the scales of a quantised operand lie: by their own rule, never the tensor's factors."""

from collections.abc import Sequence

from shardops.rules.spec import Sizes, Spec, fit


def scale_shape(shape: Sequence[int], block: Sequence[int] | None) -> tuple[int, ...]:
    """One scale a block of `block` elements; () for one scale a tensor. Partial blocks count."""
    if block is None:
        return ()
    return tuple(-(-n // b) for n, b in zip(shape, block, strict=True))


def scale_spec(shape: Sequence[int], spec: Spec, block: Sequence[int] | None, sizes: Sizes) -> Spec:
    """The sharding of the scales of an operand that lies as `spec`.

    A tensor's one scale is replicated. Block scales follow a dim as far as whole blocks lie on one
    device, `dim % (shards * block) == 0`; further axes are gathered.
    """
    if block is None:
        return ()
    return tuple(fit(d, n, sizes, b) for d, n, b in zip(spec, shape, block, strict=True))
