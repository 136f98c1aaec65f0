"""Products written as "bsk,kn", and their values in float64."""

import math
from dataclasses import dataclass

import numpy as np

from shardops.kernels.gemm_layout import Dims


@dataclass(frozen=True)
class Contraction:
    """A letter on both sides is contracted, or a batch dim where `batch` has it."""

    text: str
    batch: str = ""

    @property
    def terms(self) -> tuple[str, str]:
        lhs, rhs = self.text.split(",")
        return lhs, rhs

    @property
    def contracting(self) -> tuple[Dims, Dims]:
        lhs, rhs = self.terms
        both = [c for c in lhs if c in rhs and c not in self.batch]
        return tuple(lhs.index(c) for c in both), tuple(rhs.index(c) for c in both)

    @property
    def batch_dims(self) -> tuple[Dims, Dims]:
        lhs, rhs = self.terms
        return tuple(lhs.index(c) for c in self.batch), tuple(rhs.index(c) for c in self.batch)

    @property
    def rhs_free(self) -> str:
        lhs, rhs = self.terms
        return "".join(c for c in rhs if c not in lhs)

    @property
    def result(self) -> str:
        lhs, rhs = self.terms
        return self.batch + "".join(c for c in lhs if c not in rhs) + self.rhs_free

    def shapes(self, sizes: dict[str, int]) -> tuple[Dims, Dims]:
        lhs, rhs = (tuple(sizes[c] for c in term) for term in self.terms)
        return lhs, rhs

    def product(self, lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
        """In float64, by a matrix product: einsum's own loops take minutes for large ones."""
        (lhs_k, rhs_k), (lhs_b, rhs_b) = self.contracting, self.batch_dims
        lhs_m, rhs_n = (
            tuple(d for d in range(array.ndim) if d not in taken)
            for array, taken in ((lhs, lhs_k + lhs_b), (rhs, rhs_k + rhs_b))
        )
        batch, k = (tuple(lhs.shape[d] for d in dims) for dims in (lhs_b, lhs_k))
        free = tuple(lhs.shape[d] for d in lhs_m) + tuple(rhs.shape[d] for d in rhs_n)
        a = lhs.astype(np.float64).transpose(lhs_b + lhs_m + lhs_k)
        b = rhs.astype(np.float64).transpose(rhs_b + rhs_k + rhs_n)
        z = a.reshape(math.prod(batch), -1, math.prod(k)) @ b.reshape(
            math.prod(batch), math.prod(k), -1
        )
        return z.reshape(batch + free)


# (contraction, elements transposed first: "lhs", "rhs", both or neither). Sizes that differ.
CASES = [
    (Contraction("mk,kn"), ()),
    (Contraction("km,kn"), ()),
    (Contraction("mk,nk"), ()),
    (Contraction("km,nk"), ()),
    (Contraction("bsk,kn"), ()),  # dense layer
    (Contraction("bsk,kxy"), ()),  # several free dims each
    (Contraction("bsk,bsn"), ()),  # its weight gradient
    (Contraction("bsn,kn"), ()),  # its input gradient
    (Contraction("bsxy,xyk"), ()),  # two contracting dims
    (Contraction("bsxy,yxk"), ("rhs",)),  # in another order
    (Contraction("xsy,xyk"), ("lhs",)),
    (Contraction("xsy,xky"), ("lhs", "rhs")),
    (Contraction("bmk,bkn", "b"), ()),  # batches
    (Contraction("mbk,bkn", "b"), ()),  # interleaved ones: [sequence, batch, features]
    (Contraction("mbk,nbk", "b"), ()),
    (Contraction("kbm,nbk", "b"), ()),
    (Contraction("mkb,bkn", "b"), ("lhs",)),  # fastest
    (Contraction("bhqd,bhkd", "bh"), ()),  # attention
    (Contraction("bhqd,bhkd", "hb"), ("lhs", "rhs")),
    (Contraction("bqhd,bhkd", "bh"), ("lhs",)),
    (Contraction("k,kn"), ()),  # vectors
    (Contraction("mk,k"), ()),
    (Contraction("k,k"), ()),
    (Contraction("m,n"), ()),
    (Contraction("bk,bk", "b"), ()),
    (Contraction("bm,bn", "b"), ()),
]
