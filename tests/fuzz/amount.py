"""How many cases are drawn: a few hundred in every run, thousands by `make exhaustive`."""

import os

EXHAUSTIVE = os.environ.get("SHARDOPS_EXHAUSTIVE", "0") not in ("", "0")

TOGETHER = 8  # cases to a compile
# Compiles of each of the five routes: 5 * (5 + 3) * 8 = 320 cases; 5 * (32 + 19) * 8 = 2040.
PRODUCT_BATCHES = 32 if EXHAUSTIVE else 5
# Not eight: in partly manual regions those are 48 shard_maps, too many for JAX 0.10's XLA
# (docs/shard-map.md).
QUANTISED_TOGETHER, QUANTISED_BATCHES = 4, 40 if EXHAUSTIVE else 3  # of each route as well
ROW_BATCHES = 19 if EXHAUSTIVE else 3
BYTE_CASES = 300 if EXHAUSTIVE else 40  # of each of two routes, a compile each
