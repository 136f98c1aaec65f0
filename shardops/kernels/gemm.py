"""GEMM on the GPU, on one device's operands, through cuBLASLt: called while JAX lowers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import backend

from shardops import config
from shardops.kernels import autotune, gemm_own, gemm_ranking, library
from shardops.kernels.gemm_layout import DimPair, Layout, layout
from shardops.kernels.gemm_padding import padded
from shardops.kernels.target import current_target

Epilogue = Literal["none", "bias", "gelu", "gelu_aux", "relu"]

_TARGET_NAME = "shardops_gemm"
# cudaDataType
CUDA_TYPES = {
    "float32": 0,
    "float16": 2,
    "bfloat16": 14,
    "float8_e4m3fn": 28,
    "float8_e5m2": 29,
}
_COMPUTE_F32, _COMPUTE_TF32 = 68, 77  # cublasComputeType
# What cuBLASLt may take. The algorithm it names says what it needs, often nothing.
_WORKSPACE_LIMIT = 32 << 20
_WORKSPACE_ALIGN = 256  # kWorkspaceAlign of csrc/gemm_plan.h
_AUX_MULTIPLE = 8  # cuBLASLt: rows of the auxiliary output


def gemm(
    lhs: jax.Array,
    rhs: jax.Array,
    bias: jax.Array | None,
    add: jax.Array | None,
    *,
    contracting: DimPair,
    batch: DimPair,
    epilogue: Epilogue,
    out_dtype: Any,
    precision: Any,
) -> tuple[jax.Array, ...]:
    """Multiplies, and does what follows the product in the same kernel where the library can.

        z = lhs · rhs + add + bias;  out = z, tanh-GELU(z) or ReLU(z);  aux = z

    Accumulates in float32. An operand whose dims cuBLASLt cannot address is transposed first, and
    rows that it would read slowly are padded first where that takes less time.

    Args:
      lhs, rhs: float32 | bfloat16 | float16; no empty dim. Of two dtypes, they are widened to
        float32, and multiplied in TF32 unless more is asked for: float16 fits in that.
      bias: None, or [*rhs free dims].
      add: None, or as the result.
      contracting, batch: dims of lhs and of rhs, as in jax.lax.dot_general.
      epilogue: what follows the product besides add; an activation comes after the bias.
      out_dtype: float32 | bfloat16 | float16.
      precision: as in jax.lax.dot_general, but None is full float32 for two float32 operands
        unless jax_default_matmul_precision says otherwise.
    Returns: out [*batch dims, *lhs free dims, *rhs free dims]; aux alike, only for "gelu_aux".
    """
    out_dtype = jnp.dtype(out_dtype)
    mixed = lhs.dtype != rhs.dtype
    if mixed:
        lhs, rhs = lhs.astype(jnp.float32), rhs.astype(jnp.float32)
    tf32 = _allows_tf32(precision, unless_asked=mixed)
    product = _Product(layout(lhs.shape, rhs.shape, contracting, batch), tf32)
    if _fuses(lhs, bias, add, epilogue, out_dtype, product.layout):
        fused = product.call(lhs, rhs, bias, add, epilogue, out_dtype)
        if fused is not None:
            return fused
    bare = product.call(lhs, rhs, None, None, "none", jnp.dtype(jnp.float32))
    if bare is None:
        bare = (product.reference(lhs, rhs, (contracting, batch)),)
    return finish(bare[0], bias, add, epilogue, out_dtype)


def _fuses(
    lhs: jax.Array,
    bias: jax.Array | None,
    add: jax.Array | None,
    epilogue: Epilogue,
    out_dtype: np.dtype,
    shape: Layout,
) -> bool:
    """Whether the library has the epilogue, and does it to the result's precision."""
    if out_dtype not in (lhs.dtype, jnp.float32):
        return False
    # The library takes both in the result's dtype.
    if bias is not None and out_dtype not in (bias.dtype, jnp.float32):
        return False
    if add is not None and add.dtype != out_dtype:
        return False
    # Its tanh is good to 11 bits.
    if epilogue in ("gelu", "gelu_aux") and out_dtype == jnp.float32:
        return False
    return epilogue != "gelu_aux" or shape.n % _AUX_MULTIPLE == 0


def finish(
    z: jax.Array,
    bias: jax.Array | None,
    add: jax.Array | None,
    epilogue: Epilogue,
    out_dtype: np.dtype,
) -> tuple[jax.Array, ...]:
    """The epilogue of a float32 product, apart from it."""
    if add is not None:
        z = z + add.astype(jnp.float32)
    if bias is not None:
        z = z + bias.astype(jnp.float32)
    out = z
    if epilogue in ("gelu", "gelu_aux"):
        out = jax.nn.gelu(z, approximate=True)
    elif epilogue == "relu":
        out = jax.nn.relu(z)
    results = (out, z) if epilogue == "gelu_aux" else (out,)
    return tuple(r.astype(out_dtype) for r in results)


@dataclass(frozen=True)
class _Product:
    layout: Layout
    tf32: bool

    def call(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        bias: jax.Array | None,
        add: jax.Array | None,
        epilogue: Epilogue,
        out_dtype: np.dtype,
    ) -> tuple[jax.Array, ...] | None:
        """The custom call's results; None where cuBLASLt has no algorithm for it."""
        shape = self.layout
        plain = bias is None and add is None and epilogue == "none"
        if plain and (own := gemm_own.product(lhs, rhs, shape, out_dtype)) is not None:
            return (own,)
        if bias is not None:
            bias = bias.astype(out_dtype)
        outs = 1 + (add is not None) + (epilogue == "gelu_aux")
        larger = padded(shape, lhs.dtype.itemsize, out_dtype.itemsize, outs)
        if larger is None:
            operands = [shape.lhs.stored(lhs), shape.rhs.stored(rhs)]
            matrices = self._matrices(shape, lhs.dtype, out_dtype)
            result = jax.ShapeDtypeStruct(shape.result, out_dtype)
            return custom_call(matrices, operands, bias, add, epilogue, result)
        *operands, dense = larger.operands(shape, lhs, rhs)
        found = custom_call(
            self._matrices(dense, lhs.dtype, out_dtype),
            operands,
            None if bias is None else larger.bias(bias),
            None if add is None else larger.added(shape, add),
            epilogue,
            jax.ShapeDtypeStruct(dense.result, out_dtype),
        )
        return None if found is None else tuple(larger.cut(shape, r) for r in found)

    def _matrices(self, shape: Layout, dtype: Any, out_dtype: np.dtype) -> dict[str, int]:
        return {
            "m": shape.m,
            "n": shape.n,
            "k": shape.k,
            "batch": shape.batch,
            "transa": int(shape.lhs.transposed),
            "transb": int(shape.rhs.transposed),
            "lda": shape.lhs.ld,
            "ldb": shape.rhs.ld,
            "stride_a": shape.lhs.stride,
            "stride_b": shape.rhs.stride,
            "type": CUDA_TYPES[jnp.dtype(dtype).name],
            "out_type": CUDA_TYPES[out_dtype.name],
            "compute": _COMPUTE_TF32 if self.tf32 and dtype == jnp.float32 else _COMPUTE_F32,
        }

    def reference(
        self, lhs: jax.Array, rhs: jax.Array, dimension_numbers: tuple[DimPair, DimPair]
    ) -> jax.Array:
        """XLA's product in float32, for what cuBLASLt has no algorithm for."""
        exact = jax.lax.Precision.DEFAULT if self.tf32 else jax.lax.Precision.HIGHEST
        return jax.lax.dot_general(
            lhs, rhs, dimension_numbers, precision=exact, preferred_element_type=jnp.float32
        )


def custom_call(
    matrices: dict[str, int],
    operands: Sequence[jax.Array],
    bias: jax.Array | None,
    add: jax.Array | None,
    epilogue: Epilogue,
    result: jax.ShapeDtypeStruct,
    layouts: Sequence[Sequence[int] | None] | None = None,
) -> tuple[jax.Array, ...] | None:
    """One call of the handler; None where cuBLASLt has no algorithm for it.

    Args:
      matrices: the attributes that say what is multiplied, as csrc/gemm_problem.h names them.
      operands: lhs, rhs and their scales, as the handler wants them.
      bias: in the dtype that the library takes.
      add: in the dtype of the result.
      layouts: of `operands`, where they are not row-major.
    Returns: out, and aux for "gelu_aux".
    """
    aux, gelu = epilogue == "gelu_aux", epilogue in ("gelu", "gelu_aux")
    attributes = {
        **matrices,
        "add": int(add is not None),
        "bias": int(bias is not None),
        "gelu": int(gelu),
        "aux": int(aux),
        "relu": int(epilogue == "relu"),
    }
    if config.get().sm_margin:
        attributes["sm_count"] = current_target().sm_count  # the margin is taken off already
    algorithm = _algorithm(attributes)
    if algorithm is None:
        return None
    extra = [a for a in (bias, add) if a is not None]
    results = [result] * (2 if aux else 1)
    workspace = int(algorithm["workspace_bytes"])
    scratch = jax.ShapeDtypeStruct((workspace + _WORKSPACE_ALIGN,), jnp.uint8)
    count = len(operands) + len(extra)
    outputs = jax.ffi.ffi_call(
        _TARGET_NAME,
        [*results, scratch] if workspace else results,
        # A sum that is accumulated over calls stays in its place.
        input_output_aliases={} if add is None else {count - 1: 0},
        input_layouts=None if layouts is None else [*layouts, *(None for _ in extra)],
    )(
        *operands,
        *extra,
        **{name: np.int64(value) for name, value in attributes.items()},
        **algorithm,
    )
    return tuple(outputs[: len(results)])


def _algorithm(attributes: dict[str, int]) -> dict[str, Any] | None:
    """The attributes that say how: of cuBLASLt's candidates here the one expected to be fastest, or
    with SHARDOPS_AUTOTUNE=1 the one that is; None where it has none.

    A process without CUDA devices leaves the choice to the one that runs the program.
    """
    device = _query_device()
    extension = library.core()
    if device is None:
        return {"workspace_bytes": np.int64(_WORKSPACE_LIMIT)}
    found = None
    if config.get().autotune:
        found = autotune.tuned(extension, device, attributes, _WORKSPACE_LIMIT)
    if found is None:
        candidates = extension.gemm_query(
            device=device,
            limit=gemm_ranking.MOST,
            **attributes,
            workspace_bytes=_WORKSPACE_LIMIT,
        )
        if not candidates:
            return None
        found = gemm_ranking.preferred(candidates, attributes)
    return {
        "algo": np.frombuffer(found["algo"], np.uint8),
        "algo_version": np.int64(found["algo_version"]),
        "workspace_bytes": np.int64(found["workspace_bytes"]),
    }


def _query_device() -> int | None:
    """The CUDA ordinal of a device that this process runs on: another's would get a context."""
    client = backend.backends().get("cuda")
    return client.local_devices()[0].local_hardware_id if client is not None else None


def _allows_tf32(precision: Any, unless_asked: bool) -> bool:
    """Whether TensorFloat-32 was asked for, for float32 operands: for both, where they differ.

    `unless_asked`: where nothing was asked for.
    """
    if precision is None:
        settings: Any = jax.config  # its options are attributes that no type names
        precision = settings.jax_default_matmul_precision
        if precision is None:
            return unless_asked
    parts: Sequence[Any] = precision if isinstance(precision, tuple) else (precision,)
    return all(_names_tf32(part) for part in parts)


def _names_tf32(precision: Any) -> bool:
    if precision is None:  # of one side
        return False
    name = precision if isinstance(precision, str) else getattr(precision, "name", str(precision))
    return name.upper() in ("DEFAULT", "FASTEST", "HIGH", "TENSORFLOAT32", "TF32_TF32_F32")
