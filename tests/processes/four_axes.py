"""A program for 16 devices: products whose plans permute over axes out of the mesh's order."""

import sys

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardops as so

CASES = [
    (P(None, "a"), P(("c", "b", "d")), P("b")),
    (P(("c", "b"), "d"), P(("c", "a"), "d"), P("a", ("c", "d"))),
    (P(("a", "c"), "d"), P("b", ("d", "c")), P(("d", "b"), ("a", "c"))),
]


def main(kind: str) -> None:
    """Print the largest error of each case: operands are small integers, so it is 0."""
    rng = np.random.default_rng(0)
    mesh = jax.make_mesh((2, 2, 2, 2), tuple("abcd"), axis_types=(AxisType[kind],) * 4)
    with jax.set_mesh(mesh):
        for x, w, out in CASES:
            lhs, rhs = (rng.integers(-4, 5, s).astype(np.float32) for s in ((32, 16), (16, 32)))
            placed = [
                jax.device_put(a, jax.NamedSharding(mesh, s)) for a, s in ((lhs, x), (rhs, w))
            ]
            options = {} if kind == "Explicit" else {"out_shardings": jax.NamedSharding(mesh, out)}
            wanted = out if kind == "Explicit" else None
            f = jax.jit(lambda x, w, s=wanted: so.gemm(x, w, out_sharding=s), **options)
            got = f(*placed)
            shards = [
                np.abs(np.asarray(s.data) - (lhs @ rhs)[s.index]).max()
                for s in got.addressable_shards
            ]
            print(float(max(shards)))


if __name__ == "__main__":
    main(sys.argv[1])
