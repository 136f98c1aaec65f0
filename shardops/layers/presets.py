"""Everyday shardings of a transformer, as rules for the logical axes of `shardops.layers.axes`.

    rules = presets.tensor_sequence_parallel("tp", data="dp")
    layer = shardops.layers.nnx.TransformerLayer(..., rules=rules)
    presets.layout(rules)  # where its activations lie, for code without Flax

Each is a function of the names of mesh axes; an axis may be a tuple of names.
"""

from typing import Any

from jax.sharding import PartitionSpec

from shardops.errors import shown, wrong
from shardops.layers.axes import ACTIVATIONS, NAMES, Layout, Rules, ordered, resolve

__all__ = [
    "data_parallel",
    "fsdp",
    "fsdp_tensor_parallel",
    "layout",
    "spec",
    "tensor_parallel",
    "tensor_sequence_parallel",
]

Axis = str | tuple[str, ...] | None


def data_parallel(data: Axis = "dp") -> Rules:
    """The batch over `data`; every device has all parameters.

    Moves: one all-reduce for the weight gradients.
    """
    return _rules(batch=data)


def fsdp(data: Axis = "fsdp") -> Rules:
    """The batch over `data`, and each kernel cut over it for storage.

    Moves: one all-gather a use of a weight, one reduce-scatter a weight gradient.
    """
    return _rules(batch=data, embed=data)


def tensor_parallel(model: Axis = "tp", *, data: Axis = None, replicate_kv: bool = False) -> Rules:
    """Heads and hidden features over `model`; the stream is the same along it.

    Moves: one all-reduce for attention and one for the MLP, forward and backward.

    Args:
      replicate_kv: key and value kernels are copies on each device: for fewer heads of them than
        devices along `model`.
    """
    return _rules(batch=data, heads=model, mlp=model, kv_heads=None if replicate_kv else model)


def tensor_sequence_parallel(
    model: Axis = "tp", *, data: Axis = None, replicate_kv: bool = False
) -> Rules:
    """As tensor parallel, the stream between products cut over `model` along the sequence.

    Moves: an all-gather and a reduce-scatter for attention and for the MLP, forward and backward;
    backward one more all-gather for each, or the gathered input kept.

    Args:
      replicate_kv: as in `tensor_parallel`.
    """
    kv = None if replicate_kv else model
    return _rules(batch=data, sequence=model, heads=model, mlp=model, kv_heads=kv)


def fsdp_tensor_parallel(
    data: Axis = "fsdp", model: Axis = "tp", *, replicate_kv: bool = False
) -> Rules:
    """Tensor and sequence parallel over `model`, and each kernel cut over `data` for storage.

    Moves: what `fsdp` and `tensor_sequence_parallel` move.

    Args:
      replicate_kv: as in `tensor_parallel`.
    """
    kv = None if replicate_kv else model
    return _rules(batch=data, sequence=model, embed=data, heads=model, mlp=model, kv_heads=kv)


def layout(rules: Rules, *, batch_first: bool = True) -> Layout:
    """Where rules put the activations of a layer: for the functions of `shardops.layers`.

    Args:
      batch_first: whether activations are [batch, sequence, ...], or [sequence, batch, ...].
    """
    specs = (resolve(ordered(names, batch_first), rules) for names in ACTIVATIONS)
    return Layout(*specs, batch_first=batch_first)


def spec(rules: Rules, *names: str | None) -> PartitionSpec:
    """The spec of an array whose dims have these logical names.

    spec(rules, "embed", "heads", "head_dim") is that of a query kernel. A name without a rule is
    of a dim that is whole.

    Raises: ValueError for a name that neither the rules nor the layers have.
    """
    known = {None, *NAMES, *(name for name, _ in rules)}
    for name in names:
        if name not in known:
            fix = "Misspelt? Give it a rule, or pass None."
            want = "one of " + ", ".join(sorted(known - {None}))
            raise ValueError(wrong("presets.spec", "names", shown(name), want, fix))
    return resolve(names, rules)


def _rules(**axes: Any) -> Rules:
    for name, axis in axes.items():
        if not all(isinstance(a, str) for a in _several(axis)):
            fix = "Name an axis, or several in a tuple."
            want = "the name of a mesh axis, a tuple of them or None"
            raise TypeError(wrong("presets", f"the axis of {shown(name)}", shown(axis), want, fix))
    both = {*_several(axes.get("batch"))} & {*_several(axes.get("heads"))}
    if both:
        got = f"{shown(axes['batch'])}, and that of 'heads' {shown(axes['heads'])}"
        fix = "An axis cuts the batch or the model: take another one for either."
        raise ValueError(wrong("presets", "the axis of 'batch'", got, "different axes", fix))
    return tuple((name, axes.get(name)) for name in NAMES)


def _several(axis: Any) -> tuple[Any, ...]:
    return () if axis is None else axis if isinstance(axis, tuple) else (axis,)
