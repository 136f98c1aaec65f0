"""The families of kernels that a pack can be filled with, in the words of the command line."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from shardops.kernels import gemm_small, scale_tiles, softmax_plan
from shardops.kernels.gemm_flat import FlatProblem
from shardops.kernels.gemm_own import PIECE, own_plan
from shardops.kernels.gemm_scaled_plan import has_mxfp8
from shardops.kernels.launch import Launch
from shardops.kernels.norm_plan import backward_plan, forward_plan
from shardops.kernels.norm_problem import NormProblem
from shardops.kernels.norm_quantized_plan import QuantizedNorm, quantized_forward_plan
from shardops.kernels.quantize_plan import (
    QuantizeProblem,
    Scales,
    arranged,
    magnitudes_plan,
    quantize_plan,
)
from shardops.kernels.softmax_plan import MaskKind
from shardops.kernels.target import Target

DTYPES = ("float32", "bfloat16", "float16")

PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Option:
    """A choice beside row length and dtype.

    Args:
      values: the default first.
      bare: what the flag means without a value; None where it needs one.
    """

    values: tuple[str, ...]
    help: str
    bare: str | None = None


OPTIONS = {
    "gamma_dtype": Option(("same", *DTYPES), "dtype of gamma; same: that of --dtype"),
    "beta_dtype": Option(
        ("same", "none", *DTYPES), "dtype of layer_norm's beta; same: that of gamma"
    ),
    "add": Option(
        ("no", "yes"),
        "forward: a residual is added first; backward: the cotangent of a residual, or of an input "
        "that was returned, is added last",
        bare="yes",
    ),
    "mask": Option(
        ("no", "keys", "rows"), "a mask that differs between keys, or between rows alone"
    ),
    "causal": Option(
        ("no", "yes", "sharded"),
        "later keys are hidden; sharded: and devices have queries from the middle",
        bare="yes",
    ),
    "scale": Option(("positive", "negative", "zero"), "the sign of softmax's scale"),
    "zero_centered_gamma": Option(("no", "yes"), "gamma counts from 1", bare="yes"),
    "scaling": Option(
        ("delayed", "current", "block", "square", "mxfp8"),
        "of quantised arrays: block: 1 x 128; square: 128 x 128",
    ),
    "lhs_turned": Option(("no", "yes"), "of gemm: lhs is [k, m]", bare="yes"),
    "rhs_turned": Option(("no", "yes"), "of gemm: rhs is [n, k]", bare="yes"),
    "format": Option(("float8_e4m3fn", "float8_e5m2"), "of quantised arrays"),
    "layout": Option(("rows", "columns", "both"), "of quantised arrays"),
}


@dataclass(frozen=True)
class Request:
    """What a pack is asked to serve, for any number of rows.

    Args:
      length: elements of a row, on one device.
      passes: some of PASSES.
      options: values other than the defaults, by name.
    """

    op: str
    length: int
    dtype: str
    passes: tuple[str, ...] = PASSES
    options: tuple[tuple[str, str], ...] = ()

    def option(self, name: str) -> str:
        return dict(self.options).get(name, OPTIONS[name].values[0])


@dataclass(frozen=True)
class Family:
    """An op.

    Args:
      options: names of those it heeds.
      launches: plans a request for so many rows on a GPU.
      own: the kernels that are looked for here alone, and the only ones that are; none: all others.
      otherwise: what serves a request without kernels, and which have some.
    """

    options: tuple[str, ...]
    launches: Callable[[Request, int, Target], list[Launch]]
    own: tuple[str, ...] = ()
    otherwise: str = ""


def _norm(request: Request, rows: int, target: Target) -> list[Launch]:
    launches = []
    for direction in request.passes:
        problem = _norm_problem(request, rows)
        if direction == "forward":
            launches += _norm_forward(problem, target)
            continue
        # The gradient of beta does not depend on beta, so not on its dtype.
        plan = backward_plan(replace(problem, beta=problem.beta and problem.gamma), target)
        launches.append(plan.main)
        launches += [] if plan.finish is None else [plan.finish]
        launches += [] if plan.sums is None else [plan.sums.launch]
    return launches


def _norm_problem(request: Request, rows: int) -> NormProblem:
    layer = request.op.startswith("layer_norm")
    gamma = _either(request.option("gamma_dtype"), request.dtype)
    beta = request.option("beta_dtype")
    return NormProblem(
        rows,
        request.length,
        kind="layer" if layer else "rms",
        x=request.dtype,
        gamma=gamma,
        beta=_either(beta, gamma) if layer and beta != "none" else None,
        add=request.option("add") == "yes",
        zero_centered=request.option("zero_centered_gamma") == "yes",
    )


def _norm_forward(problem: NormProblem, target: Target) -> list[Launch]:
    plan = forward_plan(problem, target)
    return [plan.main, *([] if plan.sums is None else [plan.sums.launch])]


def _quantized_norm(request: Request, rows: int, target: Target) -> list[Launch]:
    """The forward, for arrays [rows, length]; the gradient is the plain norm's."""
    norm = _norm_problem(request, rows)
    if request.option("scaling") != "current":  # which has to see all values first
        fused = quantized_forward_plan(QuantizedNorm(norm, _written(request, rows)), target)
        if fused is not None:
            return fused.launches
    wide = quantized_forward_plan(QuantizedNorm(norm, None), target)
    if wide is None:
        in_float32 = _norm_forward(replace(norm, x="float32", add=False), target)
    else:
        in_float32 = wide.launches
    return [*in_float32, *_quantize(replace(request, dtype="float32"), rows, target)]


def _softmax(request: Request, rows: int, target: Target) -> list[Launch]:
    """For masks broadcast over any dims."""
    kinds: dict[str, MaskKind] = {"no": 0, "keys": 1, "rows": 2}
    signs = {"positive": 1, "negative": -1, "zero": 0}
    mask = kinds[request.option("mask")]
    causal = request.option("causal")
    launches: list[Launch] = []
    for direction in request.passes:
        plan = softmax_plan.forward_plan if direction == "forward" else softmax_plan.backward_plan
        for digits in range(softmax_plan.MAX_MASK_DIGITS + 1) if mask else (0,):
            problem = softmax_plan.SoftmaxProblem(
                rows,
                request.length,
                x=request.dtype,
                mask=mask,
                digits=digits,
                causal=causal != "no",
                first=causal == "sharded",
                sign=signs[request.option("scale")],
            )
            planned = plan(problem, target).launches
            launches += [launch for launch in planned if launch not in launches]
    return launches


def _quantize(request: Request, rows: int, target: Target) -> list[Launch]:
    """For arrays [rows, length]. There are no two passes: either asks for the same."""
    problem = _written(request, rows)
    launches = [quantize_plan(arranged(problem, target), target)]
    if request.option("scaling") == "mxfp8" and has_mxfp8(target.arch):
        # Of what is quantised, products order the scales, wherever their dims lie.
        scales = scale_tiles.in_order(rows, -(-request.length // 32))
        apart = replace(scales, rows=(*scales.rows, (1, 1)))
        launches += [scale_tiles.tiles_launch(scales, other) for other in (scales, apart)]
    if request.option("scaling") == "current":
        search, _ = magnitudes_plan(1, rows * request.length, request.dtype, target)
        launches.append(search)
    return launches


def _written(request: Request, rows: int) -> QuantizeProblem:
    scaling = request.option("scaling")
    scales: dict[str, Scales] = {"block": "row128", "square": "square", "mxfp8": "row32"}
    layout = request.option("layout")
    return QuantizeProblem(
        1,
        1,
        rows,
        request.length,
        request.dtype,
        request.option("format"),
        scales.get(scaling, "tensor"),
        as_rows=layout != "columns",
        as_columns=layout != "rows",
        amax=scaling == "delayed",
        again=scaling == "current",
    )


def _gemm(request: Request, rows: int, target: Target) -> list[Launch]:
    """For products of a contraction of the request's length, large ones and small ones; none where
    cuBLASLt makes them."""
    if request.dtype == "float32" or request.length % PIECE:
        return []
    lhs_turned, rhs_turned = (request.option(f"{side}_turned") == "yes" for side in ("lhs", "rhs"))
    problems = (
        FlatProblem(n, n, request.length, request.dtype, lhs_turned, rhs_turned, n, n)
        for n in (_LARGE, _SMALL)
    )
    plans = [own_plan(problem, target) for problem in problems]
    return [plan for plan in plans if plan is not None]


def _either(value: str, same: str) -> str:
    return same if value == "same" else value


_NORM_OPTIONS = ("gamma_dtype", "add", "zero_centered_gamma")
_QUANTIZED = ("scaling", "format", "layout")
_LARGE, _SMALL = 1 << 13, 1 << 6  # rows and columns of a product
_OWN = ("norm_quantized", "norm_quantized_rows", "norm_quantized_tiles")

# By the name that `use_kernels` knows the op by.
FAMILIES = {
    "rms_norm": Family(_NORM_OPTIONS, _norm),
    "layer_norm": Family((*_NORM_OPTIONS, "beta_dtype"), _norm),
    "softmax": Family(("mask", "causal", "scale"), _softmax),
    "quantize": Family(_QUANTIZED, _quantize),
    "gemm": Family(
        ("lhs_turned", "rhs_turned"),
        _gemm,
        own=("gemm_flat", "gemm_small"),
        otherwise="cuBLASLt makes these products. Kernels are there for contractions of at most "
        f"{gemm_small.LONGEST} elements that are a multiple of {PIECE}, in bfloat16 or float16, on "
        "sm_90",
    ),
    # Those with `quantizer=`.
    "rms_norm_quantized": Family((*_NORM_OPTIONS, *_QUANTIZED), _quantized_norm, own=_OWN),
    "layer_norm_quantized": Family(
        (*_NORM_OPTIONS, "beta_dtype", *_QUANTIZED), _quantized_norm, own=_OWN
    ),
}
