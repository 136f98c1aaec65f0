"""What rounding partial sums before they cross the mesh costs: evidence for decision 0002.

python benchmarks/partial_sums.py
"""

import ml_dtypes
import numpy as np

DEVICES, M, N, K = 8, 256, 256, 512


def main() -> None:
    rng = np.random.default_rng(0)
    bf16 = ml_dtypes.bfloat16
    lhs = rng.standard_normal((DEVICES, M, K)).astype(bf16).astype(np.float64)
    rhs = rng.standard_normal((DEVICES, K, N)).astype(bf16).astype(np.float64)
    partials = lhs @ rhs
    exact = partials.sum(0)

    def error(got: np.ndarray) -> float:
        return float(np.linalg.norm(got.astype(np.float64) - exact) / np.linalg.norm(exact))

    once = partials.astype(np.float32).sum(0).astype(bf16)
    tree = partials.astype(bf16)
    while len(tree) > 1:
        tree = (tree[::2].astype(np.float32) + tree[1::2].astype(np.float32)).astype(bf16)
    ring = partials[0].astype(bf16)
    for partial in partials[1:]:
        ring = (ring.astype(np.float32) + partial.astype(bf16).astype(np.float32)).astype(bf16)
    print(f"{DEVICES} partial sums, K = {K} a device, bfloat16 results")
    print(f"float32 over the mesh, rounded once: {error(once):.2e}")
    print(f"bfloat16 over the mesh, a tree:      {error(tree[0]):.2e}")
    print(f"bfloat16 over the mesh, a ring:      {error(ring):.2e}")


if __name__ == "__main__":
    main()
