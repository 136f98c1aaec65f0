"""Lets `jax.export` serialise programs whose arguments or results are the library's pytrees."""

import json
from collections.abc import Callable
from typing import Any

import jax.export
import jax.numpy as jnp

from shardops.primitives.scaled import ScaledArray
from shardops.primitives.scaling import ScalingMode
from shardops.quantizer import DenseQuantizers, Quantizer

# By field: what JSON has no type for.
_WRITTEN: dict[str, Callable[[Any], Any]] = {"mode": lambda mode: mode.name, "dtype": str}
_READ: dict[str, Callable[[Any], Any]] = {
    "mode": lambda name: ScalingMode[name],
    "dtype": jnp.dtype,
    "block": lambda block: None if block is None else tuple(block),
}


def _register(kind: type, fields: tuple[str, ...]) -> None:
    """`fields`: the statics in the order of the pytree's registration."""

    def write(statics: Any) -> bytes:
        named = zip(fields, statics, strict=True)
        return json.dumps([_WRITTEN.get(n, lambda v: v)(v) for n, v in named]).encode()

    def read(text: bytes | bytearray) -> tuple[Any, ...]:
        named = zip(fields, json.loads(bytes(text)), strict=True)
        return tuple(_READ.get(n, lambda v: v)(v) for n, v in named)

    jax.export.register_pytree_node_serialization(
        kind,
        serialized_name=f"shardops.{kind.__name__}",
        serialize_auxdata=write,
        deserialize_auxdata=read,
    )


_register(ScaledArray, ("mode", "dtype", "block"))
_register(Quantizer, ("mode", "format", "layout", "block", "margin", "amax_compute"))
_register(DenseQuantizers, ())
