"""Kernel packs: what a request needs, filling, running from one alone, what is missing."""

import re
import shlex
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import shardops as so
from shardops import __main__ as command_line
from shardops import errors
from shardops.kernels import compile, library, packing
from shardops.kernels.families import DTYPES, FAMILIES, OPTIONS, PASSES, Request
from shardops.kernels.launch import Kernel
from shardops.kernels.target import target_for, use_target

ARCHES = ("sm_80", "sm_90", "sm_100")


@st.composite
def requests(draw) -> Request:
    op = draw(st.sampled_from(sorted(FAMILIES)))
    options = [(name, draw(st.sampled_from(OPTIONS[name].values))) for name in FAMILIES[op].options]
    chosen = tuple(pair for pair in options if pair[1] != OPTIONS[pair[0]].values[0])
    length = draw(st.one_of(st.integers(1, 4096), st.integers(1, 512).map(lambda n: 128 * n)))
    passes = draw(st.sampled_from([PASSES, ("forward",), ("backward",)]))
    return Request(op, length, draw(st.sampled_from(DTYPES)), passes, chosen)


rows = st.one_of(st.integers(1, 4096), st.integers(1, 2**31))


@settings(max_examples=30)
@given(requests(), st.sampled_from(ARCHES), st.lists(rows, min_size=8), st.data())
def test_pack_serves_any_number_of_rows_on_a_gpu_of_any_size(request, arch, many_rows, data):
    packed = set(packing.kernels_of(request, arch))
    for count in many_rows:
        sm_count = data.draw(st.integers(1, 192))
        whole = target_for(arch, sm_count)
        portable = replace(whole, largest_cluster=8)  # a slice may lack room for more
        planned = [
            {launch.kernel for launch in FAMILIES[request.op].launches(request, count, target)}
            for target in (whole, portable)
        ]
        assert set.union(*planned) <= packed, (count, sm_count)
        exact = packing.kernels_of(request, arch, count, sm_count)
        assert {*exact} == set.union(*planned) if sm_count < 128 else {*exact} == planned[0]


@settings(max_examples=25)
@given(requests(), st.sampled_from(ARCHES), st.data())
def test_every_kernel_names_a_command_that_builds_it(request, arch, data):
    kernels = packing.kernels_of(request, arch)
    assume(kernels)  # there are none for most products
    kernel = data.draw(st.sampled_from(kernels))
    text = packing.missing(None, kernel.file, kernel.name, kernel.constants, arch)
    command = text[text.index("kernels build") : text.index("; or unset")]
    arguments = command_line.parser().parse_args(shlex.split(command))
    (asked,) = arguments.requests(arguments)
    assert kernel in packing.kernels_of(asked, *arguments.arch)
    if "COLS" in dict(kernel.constants):  # others serve any length, so another may be named
        assert f"rows of {request.length}" in text


def test_unknown_kernel_is_named_by_its_constants():
    text = packing.missing(None, "f.cuh", "f", (("COLS", 64), ("KNOB", 3)), "sm_90")
    assert "f (COLS=64, KNOB=3) for sm_90 is missing: SHARDOPS_KERNEL_PACK is not set" in text
    assert packing.request_for(Kernel("f.cuh", "f", (("KNOB", 3),)), "sm_90") is None


def test_paths_in_commands_are_quoted_for_a_shell(tmp_path):
    (kernel,) = packing.kernels_of(Request("rms_norm", 64, "float32", ("forward",)), "sm_90", 1)
    for name in ("with spaces", "it's $HOME; rm"):
        pack = tmp_path / name
        pack.mkdir()
        text = packing.missing(pack, kernel.file, kernel.name, kernel.constants, "sm_90")
        command = text[text.index("kernels build") : text.rindex("; or unset")]
        arguments = command_line.parser().parse_args(shlex.split(command))
        assert arguments.out == pack


def test_pack_that_is_no_directory_is_named_as_the_cause(tmp_path):
    (tmp_path / "file").write_text("")
    (kernel,) = packing.kernels_of(Request("rms_norm", 64, "float32", ("forward",)), "sm_90", 1)
    for name, what in (("file", "is no directory"), ("absent", "does not exist")):
        pack = tmp_path / name
        text = packing.missing(pack, kernel.file, kernel.name, kernel.constants, "sm_90")
        assert f"is missing: SHARDOPS_KERNEL_PACK is {pack}, which {what}, and SHARD" in text
        assert "compiling it. Correct SHARDOPS_KERNEL_PACK, or build it: python" in text


# --- with a compiler ----------------------------------------------------------------------------

REQUEST = Request("rms_norm", 64, "bfloat16", options=(("gamma_dtype", "float32"),))


@pytest.fixture(scope="module")
def filled(nvrtc, tmp_path_factory):
    """A pack for REQUEST, its kernels, and their code."""
    directory = compile.pack_directory(tmp_path_factory.mktemp("pack"))
    kernels = packing.kernels_of(REQUEST, "sm_90")
    built = list(packing.build(kernels, "sm_90", directory))
    assert all(one.seconds is not None and one.seconds > 0 for one in built)
    return directory.path, kernels


def code(kernel: Kernel, arch: str = "sm_90") -> bytes:
    return compile.cubin(kernel.file, kernel.name, kernel.constants, arch)


@pytest.mark.usefixtures("nvrtc")
class TestFilled:
    def test_pack_alone_serves_its_kernels(self, caches, monkeypatch, tmp_path, filled):
        path, kernels = filled
        monkeypatch.setattr(
            "shardops.kernels.nvrtc._library", lambda: pytest.fail("loads the compiler")
        )
        caches(kernel_pack=path, nvrtc=False)
        for kernel in kernels:
            assert code(kernel)[:4] == b"\x7fELF"
        assert compile.counts == compile.Counts(pack=len(kernels))
        assert not (tmp_path / "cache").exists()

    def test_pack_comes_before_the_cache_and_the_rest_is_compiled(self, caches, filled):
        path, kernels = filled
        caches(kernel_pack=path)
        code(kernels[-1])
        code(kernels[-1], "sm_80")
        assert compile.counts == compile.Counts(pack=1, compiled=1)

    def test_kernel_in_no_pack_raises_with_the_command_that_builds_it(self, caches, filled):
        path, kernels = filled
        caches(kernel_pack=path, nvrtc=False)
        with pytest.raises(errors.KernelUnavailableError) as raised:
            code(kernels[0], "sm_80")
        assert str(raised.value) == (
            f"kernels: {kernels[0].name} (forward of rms_norm, rows of 64, bfloat16, gamma_dtype "
            f"float32) for sm_80 is missing: it is not in the pack {path}, and SHARDOPS_NVRTC=0 "
            "forbids compiling it. Build it: python -m shardops kernels build --arch sm_80 "
            "--op rms_norm --rows-length 64 --dtype bfloat16 --gamma-dtype float32 --forward "
            f"--out {path}; or unset SHARDOPS_NVRTC."
        )

    def test_damaged_kernel_is_told_from_one_that_is_not_there(self, caches, filled, tmp_path):
        path, kernels = filled
        pack = shutil.copytree(path, tmp_path / "copy")
        kernel = kernels[0]
        key = compile.key_of(kernel.file, kernel.name, kernel.constants, "sm_90")
        (pack / f"{key}.kernel").write_bytes(b"not a kernel")
        caches(kernel_pack=pack, nvrtc=False)
        with (
            pytest.warns(RuntimeWarning, match="damaged"),
            pytest.raises(
                errors.KernelUnavailableError,
                match=rf"{key}\.kernel, is damaged or cannot be read, and",
            ),
        ):
            code(kernel)
        list(packing.build(kernels, "sm_90", compile.pack_directory(pack)))  # writes it anew
        compile.clear_memory()
        assert code(kernel) == compile.pack_directory(path).read(key)

    def test_pack_of_other_sources_is_told(self, caches, filled, monkeypatch):
        path, kernels = filled
        caches(kernel_pack=path, nvrtc=False)
        original = compile.source_text
        monkeypatch.setattr(compile, "source_text", lambda *a: original(*a) + "// newer\n")
        told = "has one of other sources, or is a cache: shardops "
        with pytest.raises(errors.KernelUnavailableError, match=told):
            code(kernels[0])

    def test_pack_that_does_not_exist_is_told_once(self, caches, filled, tmp_path):
        _, kernels = filled
        caches(kernel_pack=tmp_path / "absent")
        with pytest.warns(RuntimeWarning, match=r"absent does not exist.*SHARDOPS_KERNEL_PACK"):
            code(kernels[-1])
        code(kernels[-1], "sm_80")  # a second warning would be an error
        assert compile.counts == compile.Counts(compiled=2)

    def test_damaged_entry_of_a_pack_is_compiled_and_left(self, caches, filled, tmp_path):
        source, kernels = filled
        path = tmp_path / "pack"
        shutil.copytree(source, path)
        kernel = kernels[-1]
        key = compile.key_of(kernel.file, kernel.name, kernel.constants, "sm_90")
        (path / f"{key}.kernel").write_bytes(b"damaged")
        caches(kernel_pack=path)
        with pytest.warns(RuntimeWarning, match=r"damaged or foreign.*kernels build"):
            code(kernel)
        assert compile.counts == compile.Counts(compiled=1)
        assert (path / f"{key}.kernel").read_bytes() == b"damaged"
        # Building again mends it, and compiles nothing else.
        built = list(packing.build(kernels, "sm_90", compile.pack_directory(path)))
        assert [one.seconds is not None for one in built] == [k == kernel for k in kernels]

    def test_directory_named_as_a_kernel_is_told_before_any_is_compiled(self, filled, tmp_path):
        _, kernels = filled
        kernel = kernels[-1]
        key = compile.key_of(kernel.file, kernel.name, kernel.constants, "sm_90")
        blocked = tmp_path / f"{key}.kernel"
        blocked.mkdir()
        (tmp_path / f"{'a' * 64}.kernel").mkdir()  # of no kernel that is wanted: no matter
        with pytest.raises(ValueError, match=rf"{blocked} is a directory; expected a kernel, or"):
            list(packing.build(kernels, "sm_90", compile.pack_directory(tmp_path)))
        assert len(list(tmp_path.iterdir())) == 2
        blocked.rmdir()
        assert len(list(packing.build([kernel], "sm_90", compile.pack_directory(tmp_path)))) == 1

    def test_full_pack_fails_loudly(self, filled, tmp_path):
        _, kernels = filled
        (tmp_path / "file").write_text("")
        directory = compile.pack_directory(tmp_path / "file" / "pack")
        with pytest.raises(OSError, match="Not a directory"):
            list(packing.build(kernels[-1:], "sm_90", directory))


# --- the ops themselves -------------------------------------------------------------------------


def lowered(rows: int, sm_count: int, gamma: str) -> int:
    """Lowers a norm with a residual, and its gradient, for a GPU; returns how many launches."""

    def loss(x, gamma):
        y, h = so.layer_norm(x, gamma, jnp.zeros(96, jnp.float16), return_input=True)
        return (y * h).astype(jnp.float32).sum()

    shapes = [jax.ShapeDtypeStruct((rows, 96), jnp.bfloat16), jax.ShapeDtypeStruct((96,), gamma)]
    with use_target(target_for("sm_90", sm_count)):
        traced = jax.jit(jax.value_and_grad(loss, (0, 1))).trace(*shapes)
        return traced.lower(lowering_platforms=("cuda",)).as_text().count("shardops_launch")


@pytest.mark.usefixtures("nvrtc")
def test_commands_of_the_errors_make_a_pack_that_trains(caches, monkeypatch, tmp_path, capsys):
    """Without a compiler: what is missing is built by what the error says, and nothing is then."""
    monkeypatch.setattr(library, "core", lambda: None)  # only running needs the extension
    pack = tmp_path / "pack"
    caches(kernel_pack=pack, nvrtc=False)
    pack.mkdir()
    commands = []
    for _ in range(2):
        with pytest.raises(errors.KernelUnavailableError) as raised:
            lowered(300, 132, "float32")
        commands += re.findall(
            r"python -m shardops (kernels build .*); or unset", str(raised.value)
        )
        assert command_line.main(shlex.split(commands[-1])) == 0
        jax.clear_caches()
    assert lowered(300, 132, "float32") >= 3
    kernels = "kernels build --arch sm_90 --op layer_norm --rows-length 96 --dtype bfloat16"
    assert commands == [
        f"{kernels} --gamma-dtype float32 --beta-dtype float16 --forward --out {pack}",
        f"{kernels} --gamma-dtype float32 --add --backward --out {pack}",
    ]
    capsys.readouterr()
    # The same pack serves other numbers of rows and smaller GPUs.
    assert lowered(1, 132, "float32") == lowered(70_000, 78, "float32") >= 3
    assert compile.counts.compiled == 0
    with pytest.raises(errors.KernelUnavailableError, match="--beta-dtype float16 --forward"):
        lowered(300, 132, "bfloat16")
    # One command for all.
    caches(kernel_pack=tmp_path / "other", nvrtc=False)
    options = ["--gamma-dtype=float32", "--beta-dtype=float16", "--add=no,yes"]
    words = kernels.split()
    assert command_line.main([*words, *options, f"--out={tmp_path / 'other'}"]) == 0
    assert lowered(301, 132, "float32") >= 3


def test_a_pack_has_every_number_of_blocks_that_share_rows():
    """Also for a GPU of which some multiprocessors are left to collectives."""
    request = Request("layer_norm", 2**20, "bfloat16")
    packed = set(packing.kernels_of(request, "sm_90", 64))
    for sm_count in (132, 127, 124, 100):
        assert set(packing.kernels_of(request, "sm_90", 64, sm_count)) <= packed
