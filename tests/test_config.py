"""The environment: read once, checked, and never in the way of a CPU."""

from pathlib import Path

import pytest

import shardops as so
from shardops import config


@pytest.fixture(autouse=True)
def read_anew():
    config.get.cache_clear()
    yield
    config.get.cache_clear()


def test_config_defaults(monkeypatch):
    for name in ("KERNELS", "CACHE_DIR", "KERNEL_PACK", "NVRTC", "AUTOTUNE", "SM_MARGIN"):
        monkeypatch.delenv(f"SHARDOPS_{name}", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert config.get() == config.Config(
        kernels=".*",
        cache_dir=Path("/somewhere/shardops"),
        kernel_pack=None,
        nvrtc=True,
        autotune=False,
        sm_margin=0,
    )


@pytest.mark.parametrize("name", ["CACHE_DIR", "KERNEL_PACK", "NVRTC", "AUTOTUNE", "SM_MARGIN"])
def test_config_set_but_empty_counts_as_not_set(monkeypatch, name):
    monkeypatch.delenv(f"SHARDOPS_{name}", raising=False)
    unset = config.get()
    config.get.cache_clear()
    monkeypatch.setenv(f"SHARDOPS_{name}", "")
    assert config.get() == unset


def test_config_works_without_a_home(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("SHARDOPS_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert config.get().cache_dir.name.startswith("shardops-")


@pytest.mark.parametrize(
    ("given", "base", "want"),
    [
        ("~/kept", "/base", "/home/someone/kept"),
        ("", "/base", "/base/shardops"),
        ("", "base", "/home/someone/.cache/shardops"),
    ],
)
def test_where_the_cache_lies(monkeypatch, given, base, want):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("SHARDOPS_CACHE_DIR", given)
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    assert config.get().cache_dir == Path(want)


@pytest.mark.parametrize(
    ("name", "value", "want"),
    [
        ("KERNELS", "(", "expected a regular expression"),
        ("NVRTC", "maybe", "expected 0 or 1"),
        ("AUTOTUNE", "2", "expected 0 or 1"),
        ("SM_MARGIN", "x", "expected an integer >= 0"),
        ("SM_MARGIN", "-1", "expected an integer >= 0"),
        ("SM_MARGIN", "9" * 50, "expected an integer >= 0.*9 digits at most"),
    ],
)
def test_config_names_the_variable_that_is_wrong(monkeypatch, name, value, want):
    monkeypatch.setenv(f"SHARDOPS_{name}", value)
    with pytest.raises(ValueError, match=want) as error:
        config.get()
    assert str(error.value).startswith(f"SHARDOPS_{name} is {value!r}")


def test_use_kernels_refuses_bytes():
    with pytest.raises(TypeError, match="as a string"), so.use_kernels(b".*"):  # type: ignore[arg-type]
        pass
