"""Seventy everyday layouts of products: 57 with a wanted result, 13 that leave it free.

A product is written as by einsum, one letter a dim; a layout as in "dp,-,tp", one entry a dim:
axes joined by +, major to minor, or - for none. Sizes keep the ratios of real models; arrays of a
few megabytes, for programs that are compiled and not run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from jax.sharding import PartitionSpec as P

from shardops.rules.spec import Spec

Dims = tuple[int, ...]

# b batch, s sequence, q k queries and keys, d model, f feed-forward, v vocabulary, n h heads,
# r queries a key-value head, e head dim, t tokens, x experts, c tokens of an expert
DIMS = {
    "b": 8, "s": 256, "q": 256, "k": 256, "d": 512, "f": 2048, "v": 8192, "h": 8, "r": 4, "e": 64,
    "t": 2048, "x": 8, "c": 256,
}  # fmt: skip

DP_TP = {"dp": 2, "tp": 4}
DP_CP = {"dp": 2, "cp": 4}
DP_EP = {"dp": 2, "ep": 4}
EP_TP = {"ep": 2, "tp": 4}
FSDP_TP = {"fsdp": 4, "tp": 2}
HSDP = {"dp": 2, "fsdp": 2, "tp": 2}


@dataclass(frozen=True)
class Layout:
    """One product: einsum `equation`, the operands' layouts, the result's or None."""

    name: str
    equation: str
    lhs: str
    rhs: str
    out: str | None
    sizes: Mapping[str, int] = field(default_factory=lambda: DP_TP, hash=False)
    dims: Mapping[str, int] = field(default_factory=dict, hash=False)
    batch_like: str = ""  # letters of the dims that `gemm` is told are batch-like

    @cached_property
    def letters(self) -> tuple[str, str, str]:
        operands, _, out = self.equation.partition("->")
        lhs, rhs = operands.split(",")
        return lhs, rhs, out

    @cached_property
    def shapes(self) -> tuple[Dims, Dims, Dims]:
        """Of lhs, rhs and the result."""
        lhs, rhs, out = (
            tuple({**DIMS, **self.dims}[letter] for letter in part) for part in self.letters
        )
        return lhs, rhs, out

    @cached_property
    def dimension_numbers(self) -> tuple[tuple[Dims, Dims], tuple[Dims, Dims]]:
        """As of `jax.lax.dot_general`: contracting pairs, batch pairs."""
        lhs, rhs, out = self.letters
        contracting = [c for c in lhs if c in rhs and c not in out]
        batch = [c for c in lhs if c in rhs and c in out]
        return self._pairs(contracting), self._pairs(batch)

    @cached_property
    def batch_like_dims(self) -> tuple[Dims, Dims]:
        lhs, rhs, _ = self.letters
        lhs_dims = tuple(lhs.index(c) for c in self.batch_like if c in lhs)
        return lhs_dims, tuple(rhs.index(c) for c in self.batch_like if c in rhs)

    def _pairs(self, chosen: list[str]) -> tuple[Dims, Dims]:
        lhs, rhs, _ = self.letters
        return tuple(map(lhs.index, chosen)), tuple(map(rhs.index, chosen))

    @property
    def specs(self) -> tuple[Spec, Spec]:
        return spec(self.lhs), spec(self.rhs)

    @property
    def wanted(self) -> Spec | None:
        return None if self.out is None else spec(self.out)


def spec(text: str) -> Spec:
    """A layout from its text."""
    return tuple(() if entry == "-" else tuple(entry.split("+")) for entry in text.split(","))


def shown(layout: Spec | P) -> str:
    """The text of a layout."""
    entries = [() if e is None else (e,) if isinstance(e, str) else e for e in layout]
    return ",".join("+".join(e) or "-" for e in entries)


TOKENS_8 = {"t": 8}  # decode

WANTED = (
    # Megatron: columns of the first weight, rows of the second one
    Layout("column parallel", "bsd,df->bsf", "dp,-,-", "-,tp", "dp,-,tp"),
    Layout("column parallel, gathered", "bsd,df->bsf", "dp,-,-", "-,tp", "dp,-,-"),
    Layout("column parallel dgrad", "bsf,df->bsd", "dp,-,tp", "-,tp", "dp,-,-"),
    Layout("column parallel wgrad", "bsd,bsf->df", "dp,-,-", "dp,-,tp", "-,tp"),
    Layout("column parallel wgrad, ZeRO", "bsd,bsf->df", "dp,-,-", "dp,-,tp", "dp,tp"),
    Layout("row parallel", "bsf,fd->bsd", "dp,-,tp", "tp,-", "dp,-,-"),
    Layout("row parallel dgrad", "bsd,fd->bsf", "dp,-,-", "tp,-", "dp,-,tp"),
    # the same with the sequence sharded outside
    Layout("column TP+SP", "bsd,df->bsf", "dp,tp,-", "-,tp", "dp,-,tp"),
    Layout("column TP+SP dgrad", "bsf,df->bsd", "dp,-,tp", "-,tp", "dp,tp,-"),
    Layout("column TP+SP wgrad", "bsd,bsf->df", "dp,tp,-", "dp,-,tp", "-,tp"),
    Layout("row TP+SP", "bsf,fd->bsd", "dp,-,tp", "tp,-", "dp,tp,-"),
    Layout("row TP+SP dgrad", "bsd,fd->bsf", "dp,tp,-", "tp,-", "dp,-,tp"),
    # FSDP: weights sharded over the batch's axis, copied over tp or sharded over both
    Layout("FSDP on K", "bsd,df->bsf", "dp,-,-", "dp,-", "dp,-,-"),
    Layout("FSDP on N", "bsd,df->bsf", "dp,-,-", "-,dp", "dp,-,-"),
    Layout("FSDP on K dgrad", "bsf,df->bsd", "dp,-,-", "dp,-", "dp,-,-"),
    Layout("FSDP on N dgrad", "bsf,df->bsd", "dp,-,-", "-,dp", "dp,-,-"),
    Layout("FSDP on K wgrad", "bsd,bsf->df", "dp,-,-", "dp,-,-", "dp,-"),
    Layout("FSDP on N wgrad", "bsd,bsf->df", "dp,-,-", "dp,-,-", "-,dp"),
    Layout("FSDP over two axes", "bsd,df->bsf", "dp+tp,-,-", "dp+tp,-", "dp+tp,-,-"),
    Layout("FSDP over two axes, rows over one", "bsd,df->bsf", "dp,-,-", "dp+tp,-", "dp,-,-"),
    Layout("FSDP over two axes wgrad", "bsd,bsf->df", "dp+tp,-,-", "dp+tp,-,-", "dp+tp,-"),
    # 2-D weights: FSDP × TP
    Layout("column FSDP×TP", "bsd,df->bsf", "dp,-,-", "dp,tp", "dp,-,tp"),
    Layout("column FSDP×TP+SP", "bsd,df->bsf", "dp,tp,-", "dp,tp", "dp,-,tp"),
    Layout("column FSDP×TP dgrad", "bsf,df->bsd", "dp,-,tp", "dp,tp", "dp,-,-"),
    Layout("column FSDP×TP+SP wgrad", "bsd,bsf->df", "dp,tp,-", "dp,-,tp", "dp,tp"),
    Layout("row FSDP×TP", "bsf,fd->bsd", "fsdp,-,tp", "tp,fsdp", "fsdp,-,-", FSDP_TP),
    Layout("row FSDP×TP+SP", "bsf,fd->bsd", "fsdp,-,tp", "tp,fsdp", "fsdp,tp,-", FSDP_TP),
    # weight gradients wanted over two axes
    Layout("wgrad of copies, over two axes", "bsd,bsf->df", "dp,-,-", "dp,-,-", "dp,tp"),
    Layout("wgrad of sequences, two dims", "bsd,bsf->df", "dp,tp,-", "dp,tp,-", "dp,tp"),
    Layout("wgrad of sequences, one dim", "bsd,bsf->df", "dp,tp,-", "dp,tp,-", "-,dp+tp"),
    # HSDP: copies over dp, shards over fsdp
    Layout("HSDP column", "bsd,df->bsf", "dp+fsdp,-,-", "fsdp,tp", "dp+fsdp,-,tp", HSDP),
    Layout("HSDP+SP wgrad", "bsd,bsf->df", "dp+fsdp,tp,-", "dp+fsdp,-,tp", "fsdp,tp", HSDP),
    # decode: eight tokens
    Layout("decode column", "td,df->tf", "dp,-", "dp,tp", "dp,tp", dims=TOKENS_8),
    Layout("decode row", "tf,fd->td", "dp,tp", "tp,dp", "dp,-", dims=TOKENS_8),
    Layout("decode column, tokens copied", "td,df->tf", "-,-", "dp,tp", "-,tp", dims=TOKENS_8),
    Layout("decode query projection", "td,dhe->the", "dp,-", "dp,tp,-", "dp,tp,-", dims=TOKENS_8),
    Layout("decode LM head", "td,dv->tv", "dp,-", "dp,tp", "dp,tp", dims=TOKENS_8),
    # embedding and LM head
    Layout("LM head", "bsd,dv->bsv", "dp,tp,-", "-,tp", "dp,-,tp"),
    Layout("LM head wgrad", "bsd,bsv->dv", "dp,-,-", "dp,-,tp", "dp,tp"),
    Layout("embedding of one-hot tokens", "bsv,vd->bsd", "dp,-,tp", "tp,-", "dp,-,-"),
    # attention
    Layout("query projection", "bsd,dhe->bshe", "dp,tp,-", "dp,tp,-", "dp,-,tp,-"),
    Layout("output projection", "bshe,hed->bsd", "dp,-,tp,-", "tp,-,dp", "dp,tp,-"),
    Layout("query projection wgrad", "bsd,bshe->dhe", "dp,tp,-", "dp,-,tp,-", "dp,tp,-"),
    Layout("scores", "bqhe,bkhe->bhqk", "dp,-,tp,-", "dp,-,tp,-", "dp,tp,-,-"),
    Layout("grouped scores", "bqhre,bkhe->bhqrk", "dp,-,tp,-,-", "dp,-,tp,-", "dp,tp,-,-,-"),
    Layout("scores, K gathered", "bqhe,bkhe->bhqk", "dp,cp,-,-", "dp,cp,-,-", "dp,-,cp,-", DP_CP),
    Layout("scores, Ulysses", "bqhe,bkhe->bhqk", "dp,cp,-,-", "dp,cp,-,-", "dp,cp,-,-", DP_CP),
    # context parallel
    Layout("context parallel wgrad, FSDP", "bsd,bsf->df", "dp,cp,-", "dp,cp,-", "dp,-", DP_CP),
    # experts
    Layout("experts FSDP", "xcd,xdf->xcf", "ep,dp,-", "ep,dp,-", "ep,dp,-", DP_EP),
    Layout("experts wgrad FSDP", "xcd,xcf->xdf", "ep,dp,-", "ep,dp,-", "ep,dp,-", DP_EP),
    Layout("experts row parallel", "xcf,xfd->xcd", "ep,-,tp", "ep,tp,-", "ep,tp,-", EP_TP),
    Layout("experts, tokens arrive", "xcd,xdf->xcf", "-,dp+ep,-", "ep,-,-", "ep,dp,-", DP_EP),
    Layout("experts, tokens return", "xcf,xfd->xcd", "ep,dp,-", "ep,-,-", "-,dp+ep,-", DP_EP),
    # contracting dims that do not match
    Layout("K over tp and over dp", "bsd,df->bsf", "-,dp,tp", "dp,-", "-,dp,-"),
    Layout("K on one side", "bsd,df->bsf", "dp,-,tp", "-,-", "dp,-,-"),
    Layout("K in another order", "td,df->tf", "-,dp+tp", "tp+dp,-", "-,-"),
    # one axis on the rows and on the columns
    Layout("columns keep dp", "td,df->tf", "dp,-", "-,dp", "-,dp"),
)  # fmt: skip

FREE = (
    Layout("free: column parallel", "bsd,df->bsf", "dp,-,-", "-,tp", None),
    Layout("free: column TP+SP", "bsd,df->bsf", "dp,tp,-", "-,tp", None),
    Layout("free: row parallel", "bsf,fd->bsd", "dp,-,tp", "tp,-", None),
    Layout("free: output projection", "bshe,hed->bsd", "dp,-,tp,-", "tp,-,-", None),
    Layout("free: FSDP on K", "bsd,df->bsf", "dp,-,-", "dp,-", None, batch_like="b"),
    Layout("free: FSDP on N", "bsd,df->bsf", "dp,-,-", "-,dp", None, batch_like="b"),
    Layout("free: column FSDP×TP", "bsd,df->bsf", "dp,-,-", "dp,tp", None, batch_like="b"),
    Layout("free: decode row FSDP×TP", "tf,fd->td", "dp,tp", "tp,dp", None, dims=TOKENS_8),
    Layout("free: wgrad", "bsd,bsf->df", "dp,-,-", "dp,-,tp", None, batch_like="bs"),
    Layout("free: wgrad of sequences", "bsd,bsf->df", "dp,tp,-", "dp,tp,-", None),
    Layout("free: K on one side", "bsd,df->bsf", "dp,-,tp", "-,-", None),
    Layout("free: K over tp and over dp", "td,df->tf", "-,tp", "dp,-", None),
    Layout("free: experts column parallel", "xcd,xdf->xcf", "ep,-,-", "ep,-,tp", None, EP_TP),
)  # fmt: skip

LAYOUTS = WANTED + FREE
