"""Everyday shardings of a transformer, as rules for the logical axes of `shardops.layers.axes`.

    rules = presets.tensor_sequence_parallel("tp", data="dp")
    layer = shardops.layers.nnx.TransformerLayer(..., rules=rules)
    presets.layout(rules)  # where its activations lie, for code without Flax

Each is a function of the names of mesh axes; an axis may be a tuple of names.
"""

from typing import Any

from jax.sharding import PartitionSpec

from shardops.layers.axes import HEADS, HIDDEN, STREAM, Layout, Rules, resolve

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


def layout(rules: Rules) -> Layout:
    """Where rules put the activations of a layer: for the functions of `shardops.layers`."""
    return Layout(*(resolve(names, rules) for names in (STREAM, HEADS, HIDDEN)))


def spec(rules: Rules, *names: str | None) -> PartitionSpec:
    """The spec of an array whose dims have these logical names.

    spec(rules, "embed", "heads", "head_dim") is that of a query kernel.
    """
    return resolve(names, rules)


def _rules(**axes: Any) -> Rules:
    every = ("batch", "sequence", "embed", "heads", "kv_heads", "head_dim", "mlp")
    return tuple((name, axes.get(name)) for name in every)
