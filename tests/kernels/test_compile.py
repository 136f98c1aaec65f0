"""Kernels from source to machine code, and where they come from: memory, pack, disk, NVRTC."""

import dataclasses
import threading
import time
import warnings

import pytest

from shardops import errors
from shardops.kernels import compile, library, nvrtc, tuned
from shardops.kernels.families import Request
from shardops.kernels.packing import kernels_of

try:
    compile.nvrtc_version()
except errors.KernelUnavailableError as error:
    pytest.skip(f"{error}", allow_module_level=True)

# The sum of a backward pass's partials: small, and compiled quickly.
KERNEL = kernels_of(Request("rms_norm", 64, "float32", ("backward",)), "sm_90")[-1]


def cubin(arch: str = "sm_90") -> bytes:
    return compile.cubin(KERNEL.file, KERNEL.name, KERNEL.constants, arch)


def entries(tmp_path) -> list:
    return sorted((tmp_path / "cache" / "kernels").iterdir())


def test_second_use_comes_from_memory_then_disk(caches, tmp_path):
    first = cubin()
    assert first[:4] == b"\x7fELF"
    assert cubin() == first
    assert compile.counts == compile.Counts(compiled=1, memory=1)
    compile.clear_memory()
    assert cubin() == first
    assert compile.counts == compile.Counts(compiled=1, memory=1, disk=1)
    assert len(entries(tmp_path)) == 1


def test_architecture_and_constants_are_in_the_key(caches, tmp_path):
    assert cubin("sm_90") != cubin("sm_80")
    wider = tuple((name, 128 if name == "COLS" else value) for name, value in KERNEL.constants)
    compile.cubin(KERNEL.file, KERNEL.name, wider, "sm_90")
    assert compile.counts == compile.Counts(compiled=3)
    assert len(entries(tmp_path)) == 3


def test_sources_are_in_the_key(caches, monkeypatch, tmp_path):
    """Of every file that is included: a kernel edited anywhere is compiled anew."""
    sources = tmp_path / "sources"
    sources.mkdir()
    for path in compile.source_directory().iterdir():
        (sources / path.name).write_text(path.read_text())
    monkeypatch.setattr(compile, "source_directory", lambda: sources)
    arguments = ("norm_forward.cuh", "norm_forward", (("COLS", 8),), "sm_90")
    keys = set()
    for name in ("norm_forward.cuh", "elements.cuh", "ptx.cuh"):
        keys.add(compile.key_of(*arguments))
        path = sources / name
        path.write_text(path.read_text() + "// changed\n")
        compile.clear_memory()
    assert len({*keys, compile.key_of(*arguments)}) == 4


def test_compiler_is_in_the_disk_key(caches, monkeypatch):
    cubin()
    compile.clear_memory()
    monkeypatch.setattr(compile, "compiler", lambda: "nvidia-cuda-nvrtc 99.0.1")
    cubin()
    assert compile.counts == compile.Counts(compiled=2)


def test_compiler_is_named_by_its_wheel_else_by_itself(monkeypatch):
    compile.compiler.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(compile, "_WHEELS", ("no-such-wheel",))
        assert compile.compiler() == f"nvrtc {compile.nvrtc_version()}"
        compile.compiler.cache_clear()
        patch.setattr(compile, "_WHEELS", ("no-such-wheel", "jax", "pytest"))
        assert compile.compiler() == f"jax {jax_version()}, pytest {pytest.__version__}"
    compile.compiler.cache_clear()


def jax_version() -> str:
    import jax

    return jax.__version__


def test_unusable_cache_warns_once_and_works_from_memory(caches, tmp_path):
    # A file where the directory should be: nobody can write there, not even root.
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    caches(cache_dir=blocked)
    with pytest.warns(RuntimeWarning, match=r"cannot be .*SHARDOPS_CACHE_DIR") as caught:
        first = cubin("sm_90")
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cubin("sm_80")
        assert cubin("sm_90") == first
    assert compile.counts == compile.Counts(compiled=2, memory=1)


def test_file_in_the_place_of_the_cache_has_no_table_of_shapes(caches, tmp_path):
    """The one warning that a user sees of it is the one about kernels."""
    (tmp_path / "file").write_text("")
    caches(cache_dir=tmp_path / "file")
    tuned._table.cache_clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert tuned._table("sm_80", 1) == {}
            assert tuned._table("sm_90", 132) != {}  # the shipped one
    finally:
        tuned._table.cache_clear()


def test_damaged_entry_is_compiled_anew_and_replaced(caches, tmp_path):
    first = cubin()
    (entry,) = entries(tmp_path)
    whole = entry.read_bytes()
    entry.write_bytes(whole[:-100])
    compile.clear_memory()
    with pytest.warns(RuntimeWarning, match=f"damaged or foreign file, {entry.name}"):
        assert cubin() == first
    assert compile.counts == compile.Counts(compiled=2)
    assert entry.read_bytes() == whole


def test_threads_compile_a_kernel_once(caches, monkeypatch):
    """And a failure of one is not the end for those that wait."""
    compiled = []
    original = compile.compile_kernel

    def failing_at_first(*arguments):
        compiled.append(arguments)
        if len(compiled) == 1:
            raise errors.KernelUnavailableError("at first")
        return original(*arguments)

    monkeypatch.setattr(compile, "compile_kernel", failing_at_first)
    results: list[object] = []

    def ask() -> None:
        try:
            results.append(cubin())
        except errors.KernelUnavailableError as error:
            results.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results.count("at first") == 1
    assert len(set(results)) == 2
    assert len(compiled) == 2
    assert compile.counts == compile.Counts(compiled=1, memory=4)


def begin() -> None:
    before = threading.active_count()
    compile.begin(KERNEL.file, KERNEL.name, KERNEL.constants, "sm_90")
    while threading.active_count() > before:
        time.sleep(0.01)


def test_kernel_that_was_begun_is_compiled_once(caches):
    begin()
    assert compile.counts == compile.Counts()
    assert cubin()[:4] == b"\x7fELF"
    assert compile.counts == compile.Counts(compiled=1)
    begin()
    cubin()
    assert compile.counts == compile.Counts(compiled=1, memory=1)


def test_kernel_that_was_begun_in_vain_fails_where_it_is_asked_for(caches, capfd):
    caches(nvrtc=False)
    begin()
    assert capfd.readouterr().err == ""
    with pytest.raises(errors.KernelUnavailableError, match="SHARDOPS_NVRTC=0 forbids"):
        cubin()


def test_missing_nvrtc_is_named_with_its_fix(caches, monkeypatch):
    monkeypatch.setattr(nvrtc, "_library", nvrtc._library.__wrapped__)
    nothing = dataclasses.replace(library.LIBRARIES["nvrtc"], sonames=("libnvrtc.so.none",))
    monkeypatch.setitem(library.LIBRARIES, "nvrtc", nothing)
    with pytest.raises(errors.KernelUnavailableError, match=r"nvrtc is missing.*pip install"):
        cubin()


def test_compile_error_names_kernel_and_architecture():
    with pytest.raises(errors.KernelUnavailableError, match=r"broken for sm_90"):
        compile.compile_text("this is no C++", "broken", "sm_90")
    compile.check_arch("sm_90")
    with pytest.raises(errors.KernelUnavailableError, match=r"is sm_999, .*Correct it, or upgrade"):
        compile.check_arch("sm_999")


def test_older_nvrtc_is_not_given_an_option_that_it_lacks(monkeypatch):
    given = []
    monkeypatch.setattr(
        nvrtc, "compile_program", lambda text, name, options: given.append("--minimal" in options)
    )
    for version in ((12, 3), (12, 4), (13, 0)):
        monkeypatch.setattr(nvrtc, "version", lambda version=version: version)
        compile.compile_text('extern "C" __global__ void f() {}', "f", "sm_90")
    assert given == [False, True, True]
