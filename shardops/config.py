"""What the environment asks for, read once; and which ops run as kernels."""

import contextlib
import functools
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax

from shardops.errors import shown


@dataclass(frozen=True)
class Config:
    """The `SHARDOPS_*` environment."""

    kernels: str  # regex over op names: these run as kernels where the platform has them
    cache_dir: Path
    kernel_pack: Path | None
    nvrtc: bool
    autotune: bool
    sm_margin: int


@functools.cache
def get() -> Config:
    """The configuration of this process."""
    pack = _text("SHARDOPS_KERNEL_PACK", "")
    return Config(
        kernels=_regex("SHARDOPS_KERNELS", os.environ.get("SHARDOPS_KERNELS", ".*")),
        cache_dir=_cache_dir(),
        kernel_pack=Path(os.path.expanduser(pack)) if pack else None,
        nvrtc=_flag("SHARDOPS_NVRTC", True),
        autotune=_flag("SHARDOPS_AUTOTUNE", False),
        sm_margin=_count("SHARDOPS_SM_MARGIN", 0),
    )


def _cache_dir() -> Path:
    if given := _text("SHARDOPS_CACHE_DIR", ""):
        return Path(os.path.expanduser(given))  # "~" comes here as it is where no shell read it
    base = Path(_text("XDG_CACHE_HOME", ""))
    if base.is_absolute():  # others are to be ignored, its specification says
        return base / "shardops"
    try:
        return Path.home() / ".cache" / "shardops"
    except RuntimeError:  # a user without a home, as in many containers
        return Path(tempfile.gettempdir()) / f"shardops-{os.getuid()}"


# Part of JAX's own cache keys: a function that was jitted before is traced anew inside the context.
_pattern = jax.make_user_context(None)


@contextlib.contextmanager
def use_kernels(pattern: str) -> Iterator[None]:
    """Choose which ops run as kernels, for the length of a `with` block.

    An op whose name (`gemm`, `dot_general`, `layer_norm`, `rms_norm`, `softmax`, `quantize`;
    gradients end in `.grad`) matches `pattern` from its start to its end runs as a CUDA kernel, any
    other as the jnp reference through XLA. Outside any block `SHARDOPS_KERNELS` decides (default
    `.*`). Jitted functions are traced again where the pattern differs. Leaving restores what was
    there before.

    Args:
      pattern: a regular expression.
    Raises: ValueError where `pattern` is no regular expression, TypeError where it is no string.
    """
    with _pattern(_regex("use_kernels: pattern", pattern)):
        yield


def runs_as_kernel(op: str) -> bool:
    """Whether `op` is to run as a kernel where the platform has one."""
    pattern = _pattern.value
    return re.fullmatch(get().kernels if pattern is None else pattern, op) is not None


def _regex(name: str, text: str) -> str:
    fix = "Use '.*' for all ops, '' for none."
    if not isinstance(text, str):
        raise TypeError(
            f"{name} is {shown(text)}; expected a regular expression as a string. {fix}"
        )
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(
            f"{name} is {shown(text)}; expected a regular expression ({error}). {fix}"
        ) from error
    return text


def _text(name: str, default: str) -> str:
    """A variable of the environment; set but empty it counts as not set."""
    return os.environ.get(name) or default


def _flag(name: str, default: bool) -> bool:
    text = _text(name, "1" if default else "0")
    if text not in ("0", "1"):
        raise ValueError(f"{name} is {shown(text)}; expected 0 or 1. Correct the environment.")
    return text == "1"


def _count(name: str, default: int) -> int:
    text = _text(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        fix = "Correct the environment: 9 digits at most."
        raise ValueError(f"{name} is {shown(text)}; expected an integer >= 0. {fix}")
    return int(text)
