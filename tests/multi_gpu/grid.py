"""Meshes over all GPUs of the host, and how tests lie on them."""

import jax

from tests import meshes

KINDS = ("auto", "explicit")


def sizes() -> dict[str, int]:
    """All devices along tp, but for a dp of 2 where there are four or more."""
    count = len(jax.devices())
    dp = 2 if count >= 4 and count % 2 == 0 else 1
    return {"dp": dp, "tp": count // dp}


def entered(kind: str, over: dict[str, int] | None = None):
    """A mesh of these axes, by default of `sizes`, as the ambient one."""
    return meshes.entered(kind, sizes() if over is None else over)
