"""Where the scales of a quantised operand lie: by their own rule, never the tensor's factors."""

from collections.abc import Sequence

from shardops.rules.spec import Sizes, Spec, fit


def scale_shape(shape: Sequence[int], block: Sequence[int] | None) -> tuple[int, ...]:
    """The shape of an operand's scales: one a block, a partial block at the end of a dim included.

    Args:
      shape: of the operand.
      block: elements that one scale covers, a number a dim; None: one scale for all.
    Returns: blocks along each dim; () for one scale.
    """
    if block is None:
        return ()
    return tuple(-(-n // b) for n, b in zip(shape, block, strict=True))


def scale_spec(shape: Sequence[int], spec: Spec, block: Sequence[int] | None, sizes: Sizes) -> Spec:
    """The sharding of the scales of an operand that lies as `spec`.

    A tensor's one scale is replicated. Block scales follow a dim as far as whole blocks lie on one
    device, `dim % (shards * block) == 0`; further axes are gathered.

    Args:
      shape, block: as of `scale_shape`.
      spec: where the operand lies: of each dim the axes that cut it.
      sizes: mesh axis name -> number of devices along it.
    Returns: of each dim of the scales the axes that cut it.
    """
    if block is None:
        return ()
    return tuple(fit(d, n, sizes, b) for d, n, b in zip(spec, shape, block, strict=True))
