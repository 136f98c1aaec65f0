"""Small arrays for every kind of kernel: what checked_launches.py launches.

A function that runs a case takes something with `array` that makes the operands.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from shardops.kernels import launch, norm, norm_quantized, quantize, scale_tiles, softmax
from shardops.kernels.gemm_flat import FlatProblem, flat_plan
from shardops.kernels.gemm_scaled_plan import Matrix, ScaleMode
from shardops.kernels.gemm_small import small_plan
from shardops.kernels.target import current_target, target_for, use_target
from shardops.primitives.quantize_local import Form, problem_of, quantized
from shardops.primitives.scaling import ScalingMode
from shardops.rules.quantize import Blocks

# Rows in registers, in tiles, streamed, over clusters and read in pieces; odd ones among them.
LENGTHS = (33, 1000, 1001, 1536, 4096, 20001, 20480, 65536, 262144, 1048576)
FLOAT32_LENGTHS = (33, 1536, 20480)
ELEMENTS = 1 << 19  # of an array, at most
SHARING = 78  # multiprocessors that share a row: fewer have no room for it, a GPU may have more
QUANTIZED_SHAPES = ((77, 1001), (130, 384), (33, 4096), (3, 20480))
FORMS = (
    (ScalingMode.TENSOR_DELAYED, None),
    (ScalingMode.TENSOR_CURRENT, None),
    (ScalingMode.BLOCK_128, (1, 128)),
    (ScalingMode.BLOCK_128, (128, 128)),
    (ScalingMode.MXFP8, (1, 32)),
)


def norm_cases() -> Iterator[tuple]:
    """(rows, columns, dtype, kind, add): options take turns over lengths."""
    options = itertools.cycle(((True, "rms"), (False, "layer"), (False, "rms"), (True, "layer")))
    for cols, turns in zip(LENGTHS, itertools.cycle((2, 2, 3)), strict=False):
        rows = min(77, max(3, ELEMENTS // cols))
        for add, kind in itertools.islice(options, turns):
            yield rows, cols, "bfloat16", kind, add
        if cols in FLOAT32_LENGTHS:
            yield rows, cols, "float32", kind, add


def run_norm(launches: Any, rng, rows, cols, dtype, kind, add) -> None:
    draw = _drawn(launches, rng, dtype)
    x, gamma = draw(rows, cols), draw(cols)
    beta = draw(cols) if kind == "layer" else None
    results = norm.norm_forward(
        x,
        gamma,
        beta,
        draw(rows, cols) if add else None,
        kind=kind,
        epsilon=1e-6,
        zero_centered_gamma=False,
    )
    norm.norm_backward(
        draw(rows, cols),
        x,
        gamma,
        results[-2] if kind == "layer" else None,
        results[-1],
        draw(rows, cols) if add else None,
        kind=kind,
        zero_centered_gamma=False,
        beta=kind == "layer",
    )


def softmax_cases() -> Iterator[tuple]:
    """((batch, queries, keys), dtype, what hides keys), turns taken likewise."""
    hidings = itertools.cycle(("none", "causal", "keys", "rows", "first"))
    for keys in LENGTHS:
        batch = 1 if keys > ELEMENTS else 2
        shape = (batch, min(33, max(2, ELEMENTS // (2 * keys))), keys)
        for hiding in itertools.islice(hidings, 2):
            yield shape, "bfloat16", hiding
        if keys in FLOAT32_LENGTHS:
            yield shape, "float32", hiding


def run_softmax(launches: Any, rng, shape, dtype, hiding) -> None:
    draw = _drawn(launches, rng, dtype)
    batch, queries, keys = shape
    mask = first = None
    if hiding in ("keys", "rows"):
        of = (batch, 1, keys) if hiding == "keys" else (1, queries, 1)
        mask = launches.array(rng.random(of) < 0.3)
    if hiding == "first":
        first = launches.array(np.int32([5])[0].reshape(()))
    diagonal = max(0, keys - queries) if hiding in ("causal", "first") else None
    y = softmax.softmax_forward(draw(*shape), mask, first, scale=0.125, diagonal=diagonal)
    softmax.softmax_backward(draw(*shape), y, first, scale=0.125, diagonal=diagonal)


def shared_cases() -> Iterator[tuple]:
    """(what, *its case) of rows that all blocks of a launch share: more rows than a block holds, on
    and off words, and few."""
    yield run_norm, 18, 131072, "bfloat16", "layer", True
    yield run_norm, 18, 131074, "bfloat16", "rms", False
    yield run_norm, 18, 131075, "bfloat16", "layer", False
    yield run_softmax, (1, 3, 1048576), "bfloat16", "none"
    yield run_softmax, (1, 3, 1048577), "bfloat16", "none"


def run_shared(launches: Any, rng: np.random.Generator, run: Callable, *case: Any) -> None:
    with use_target(target_for(current_target().arch, SHARING)):
        run(launches, rng, *case)


def quantize_cases() -> Iterator[tuple]:
    """(rows, columns, dtype, format, mode and block, layout, norm, add): turns taken likewise."""
    formats = itertools.cycle(("float8_e4m3fn", "float8_e5m2"))
    norms = ("rms", False), ("layer", True), ("rms", True), ("layer", False)
    kinds = itertools.cycle(itertools.chain.from_iterable(((None, False), n) for n in norms))
    for shape, of, layout in itertools.product(
        QUANTIZED_SHAPES, FORMS, ("rows", "columns", "both")
    ):
        kind, add = (None, False) if of[0] is ScalingMode.TENSOR_CURRENT else next(kinds)
        yield *shape, "bfloat16", next(formats), of, layout, kind, add
    yield 33, 1536, "float32", "float8_e4m3fn", FORMS[0], "both", None, False
    for cols, kind in ((32768, "rms"), (49152, "layer")):  # rows over clusters
        yield 3, cols, "bfloat16", "float8_e4m3fn", FORMS[0], "rows", kind, False


def run_quantize(launches: Any, rng, rows, cols, dtype, format, of, layout, kind, add) -> None:
    draw = _drawn(launches, rng, dtype)
    form = Form(format, of[0], Blocks(layout, of[1], added=1))
    wide = "float32" if kind else dtype
    problem = problem_of(form, (1, rows, cols), wide)
    given = [jax.ShapeDtypeStruct((1,), np.float32)] if form.given else []
    like = jax.ShapeDtypeStruct((1, rows, cols), wide)
    results = jax.eval_shape(partial(quantized, form=form), like, *given)
    scale = launches.array(np.full(1, 0.5, np.float32)) if form.given else None
    x = draw(rows, cols)
    if kind is None:
        quantize.quantize(x, scale, problem, results)
        if of[0] is ScalingMode.TENSOR_CURRENT:
            quantize.magnitudes(x, 0)
        return
    statistics = jax.ShapeDtypeStruct((rows,), np.float32)
    h = jax.ShapeDtypeStruct((rows, cols), x.dtype)
    done = norm_quantized.norm_quantized(
        x,
        draw(cols),
        draw(cols) if kind == "layer" else None,
        draw(rows, cols) if add else None,
        scale,
        problem,
        [*results, *(h,) * add, *(statistics,) * (2 if kind == "layer" else 1)],
        kind=kind,
        epsilon=1e-6,
        zero_centered_gamma=False,
    )
    if done is None:  # a norm in float32, then its quantisation
        quantize.quantize(_drawn(launches, rng, "float32")(rows, cols), scale, problem, results)


def scale_cases() -> Iterator[tuple]:
    """Shapes of the scales of both operands of a product, and the order of their dims."""
    yield ((256, 64), (0, 1)), ((77, 33), (0, 1))
    yield ((33, 77), (1, 0)), ((7, 9, 10), (1, 0, 2))


def run_scales(launches: Any, rng: np.random.Generator, *sides: tuple) -> None:
    operands = []
    for shape, order in sides:
        matrix = Matrix(order, 1, 1, 1, 1, ScaleMode.VEC_32)
        codes = rng.integers(0, 255, shape, np.uint8).view(ml_dtypes.float8_e8m0fnu)
        operands.append((matrix, launches.array(codes)))
    scale_tiles.tiled(*operands)


def product_cases() -> Iterator[tuple[str, FlatProblem]]:
    """Which kernel, and what it multiplies: dims turned likewise, tiles that end early. Flat ones
    have so many that a block's places for rhs are used again."""
    flat = (1032, 1160, 8), (520, 2056, 16), (1544, 520, 32), (776, 776, 40), (520, 904, 64)
    small = (72, 40, 200), (136, 8, 256)
    turned = itertools.cycle(itertools.product((False, True), repeat=2))
    dtypes = itertools.cycle(("bfloat16", "bfloat16", "float16"))
    for kernel, sizes, turns in (("flat", flat, 3), ("small", small, 4)):
        for m, n, k in sizes:
            for lhs_turned, rhs_turned in itertools.islice(turned, turns):
                pitches = (m if lhs_turned else k) + 8, k if rhs_turned else n
                yield kernel, FlatProblem(m, n, k, next(dtypes), lhs_turned, rhs_turned, *pitches)


def run_product(launches: Any, rng: np.random.Generator, kernel: str, problem: FlatProblem) -> None:
    p, draw = problem, _drawn(launches, rng, problem.x)
    lhs = draw(p.k if p.lhs_turned else p.m, p.lhs_pitch)
    rhs = draw(p.n if p.rhs_turned else p.k, p.rhs_pitch)
    result = jax.ShapeDtypeStruct((p.m, p.n), lhs.dtype)
    plan = flat_plan(p, current_target()) if kernel == "flat" else small_plan(p)
    launch.call(plan, [lhs, rhs], [result], [p.shape])


def _drawn(launches: Any, rng: np.random.Generator, dtype: str):
    of = jnp.dtype(dtype)
    return lambda *shape: launches.array(rng.standard_normal(shape, np.float32).astype(of))


CASES: dict[str, tuple[Callable[[], Iterator[tuple]], Callable[..., None]]] = {
    "norm": (norm_cases, run_norm),
    "softmax": (softmax_cases, run_softmax),
    "shared": (shared_cases, run_shared),
    "quantize": (quantize_cases, run_quantize),
    "scales": (scale_cases, run_scales),
    "products": (product_cases, run_product),
}
