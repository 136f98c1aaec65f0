"""Which products kernels of this library make, and their launches: no GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardops as so
from shardops import errors
from shardops.kernels import compile, gemm_small
from shardops.kernels.gemm_flat import FlatProblem, flat_plan, gains
from shardops.kernels.gemm_small import small_plan
from shardops.kernels.resources import Resources
from shardops.kernels.target import target_for
from tests.kernels.flat_products import DTYPES, TURNS
from tests.kernels.lowering import GPU, launches, lowered

SIZES = {"m": 4096, "n": 4096, "k": 32}


def names(program, *shapes, target=GPU) -> list[str]:
    """The kernels of a program; "gemm": cuBLASLt's call."""
    text = lowered(program, *shapes, target=target)
    return [name for name, _, _ in launches(text)] + ["gemm"] * text.count("@shardops_gemm")


def made(text="mk,kn", dtype="bfloat16", target=GPU, add=None, **options) -> list[str]:
    """The kernels of a product of such letters; `options`: lengths, and those of gemm."""
    length = {c: options.pop(c, size) for c, size in SIZES.items()}
    terms = text.split(",")
    options["contracting_dims"] = tuple((term.index("k"),) for term in terms)
    shapes = [(tuple(length[c] for c in term), dtype) for term in (*terms, "mn")]

    def program(x, w, *added):
        return so.gemm(x, w, add=added[0] if added else None, **options)

    return names(program, *shapes[: 2 + bool(add)], target=target)


@pytest.mark.usefixtures("extension_is_not_needed")
class TestChoice:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("text", ["mk,kn", "km,kn", "mk,nk", "km,nk"])
    def test_short_contraction(self, text, dtype):
        assert made(text, dtype) == ["gemm_flat"]

    @pytest.mark.parametrize(
        "change",
        [
            {"dtype": "float32"},
            {"out_dtype": jnp.float32},
            {"add": True},
            {"activation": "relu"},
            {"k": 28},  # lines that begin anywhere
            {"n": 4100},
            {"k": 72, "m": 1 << 16},
            {"k": 64},  # of which the result is too small
            {"m": 4088},
            {"target": target_for("sm_80", 108)},
            {"target": target_for("sm_100", 148)},
        ],
    )
    def test_everything_else_is_cublaslt(self, change):
        assert made(**change) == ["gemm"]

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("text", ["mk,kn", "km,kn", "mk,nk", "km,nk"])
    def test_small(self, text, dtype):
        assert made(text, dtype, m=128, n=264, k=72) == ["gemm_small"]
        assert made(text, dtype, m=8, n=8, k=8) == ["gemm_small"]

    @pytest.mark.parametrize(
        "change",
        [
            {"dtype": "float32"},
            {"out_dtype": jnp.float32},
            {"add": True},
            {"activation": "gelu"},
            {"k": 130},
            {"k": gemm_small.LONGEST + 8},
            {"m": 264},
            {"target": target_for("sm_100", 148)},
        ],
    )
    def test_not_small(self, change):
        assert made(**{"m": 256, "n": 256, "k": 128, **change}) == ["gemm"]

    def test_batches_are_cublaslt(self):
        shapes = [((3, 4096, 32), "bfloat16"), ((3, 32, 4096), "bfloat16")]
        assert names(jax.vmap(so.gemm), *shapes) == ["gemm"]

    def test_without_a_compiler_only_what_a_pack_has(self, caches, tmp_path):
        caches(nvrtc=False)
        assert made() == ["gemm"]
        plan = flat_plan(FlatProblem(4096, 4096, 32, "bfloat16", False, False, 32, 4096), GPU)
        kernel = plan.kernel
        code, about = compile.compile_kernel(kernel.file, kernel.name, kernel.constants, "sm_90")
        key = compile.key_of(kernel.file, kernel.name, kernel.constants, "sm_90")
        compile.pack_directory(tmp_path / "pack").store(key, code, about)
        caches(nvrtc=False, kernel_pack=tmp_path / "pack")
        assert made() == ["gemm_flat"]
        assert made("km,kn") == ["gemm"]  # another kernel

    def test_missing_compiler(self, monkeypatch, caches):
        def missing():
            raise errors.KernelUnavailableError("no NVRTC")

        monkeypatch.setattr(compile.nvrtc, "version", missing)
        assert made() == ["gemm"]


@given(
    m=st.integers(1, 2**20),
    n=st.integers(1, 2**17).map(lambda n: 8 * n),
    k=st.integers(1, 8).map(lambda k: 8 * k),
    turns=st.sampled_from(TURNS),
    sms=st.integers(1, 160),
)
def test_launches_keep_within_limits(m, n, k, turns, sms):
    target = target_for("sm_90", sms)
    problem = FlatProblem(m, n, k, "bfloat16", *turns, m if turns[0] else k, n)
    launch = flat_plan(problem, target)
    constants = dict(launch.kernel.constants)
    assert launch.shared_bytes <= target.shared_bytes
    assert launch.block[0] == 128 * (constants["GROUPS"] + 1) <= 1024
    tiles = -(-m // (64 * constants["GROUPS"])) * -(-n // 128)
    assert launch.grid == (min(tiles, sms), 1, 1)
    assert k <= constants["DEPTH"] <= 64
    # Pure, and one kernel for all sizes.
    assert flat_plan(dataclasses.replace(problem), target) == launch
    other = flat_plan(dataclasses.replace(problem, m=m + 8, n=n + 8), target)
    assert other.kernel == launch.kernel


def test_longer_contractions_need_larger_results():
    def gained(m: int, n: int, k: int) -> bool:
        return gains(FlatProblem(m, n, k, "bfloat16", False, False, k, n), GPU)

    for m, n in ((4096, 4096), (2048, 8192), (8192, 4096), (8192, 8192), (1 << 20, 4096)):
        assert gained(m, n, 8)
        assert gained(m, n, 32)
        assert gained(m, n, 64) == (m * n >= 1 << 25)
        assert not gained(m, n, 72)
    assert not gained(4096, 4088, 8)
    assert not gained(1 << 20, 2040, 8)
    assert not gained(1 << 20, 4088, 64)


@given(
    m=st.integers(1, 2**10),
    n=st.integers(1, 2**7).map(lambda n: 8 * n),
    k=st.integers(1, gemm_small.LONGEST // 8).map(lambda k: 8 * k),
    turns=st.sampled_from(TURNS),
)
def test_small_launches_keep_within_limits(m, n, k, turns):
    target = target_for("sm_90", 132)
    problem = FlatProblem(m, n, k, "bfloat16", *turns, m if turns[0] else k, n)
    launch = small_plan(problem)
    assert launch.shared_bytes <= target.shared_bytes
    assert -(-k // 64) <= dict(launch.kernel.constants)["MOST_CHUNKS"]
    across, down, _ = launch.grid
    assert 32 * (across - 1) < n <= 32 * across
    assert 32 * (down - 1) < m <= 32 * down
    assert small_plan(dataclasses.replace(problem, m=m + 8, k=8)).kernel == launch.kernel


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("turns", TURNS)
def test_kernels_do_not_spill(turns):
    plans = [
        flat_plan(FlatProblem(8192, 8192, k, dtype, *turns, 8192, 8192), GPU)
        for k, dtype in ((16, "float16"), (32, "bfloat16"), (64, "float16"), (64, "bfloat16"))
    ]
    small = (FlatProblem(64, 64, 64, dtype, *turns, 64, 64) for dtype in DTYPES)
    for kernel in (plan.kernel for plan in (*plans, *map(small_plan, small))):
        _, about = compile.compile_kernel(kernel.file, kernel.name, kernel.constants, "sm_90")
        used = Resources(**about["resources"])
        assert used.stack_bytes == 0, (kernel, used)
