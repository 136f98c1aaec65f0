"""What the environment asks for, read once; and which ops run as kernels."""

import contextlib
import functools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax


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
    env = os.environ.get
    pack = env("SHARDOPS_KERNEL_PACK")
    default_cache = Path(env("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardops"
    return Config(
        kernels=_regex("SHARDOPS_KERNELS", env("SHARDOPS_KERNELS", ".*")),
        cache_dir=Path(env("SHARDOPS_CACHE_DIR") or default_cache),
        kernel_pack=Path(pack) if pack else None,
        nvrtc=_flag("SHARDOPS_NVRTC", True),
        autotune=_flag("SHARDOPS_AUTOTUNE", False),
        sm_margin=_count("SHARDOPS_SM_MARGIN", 0),
    )


# Part of JAX's own cache keys: a function that was jitted before is traced anew inside the context.
_pattern = jax.make_user_context(None)


@contextlib.contextmanager
def use_kernels(pattern: str) -> Iterator[None]:
    """Choose which ops run as kernels, for the length of a `with` block.

    An op whose name (`gemm`, `layer_norm`, `rms_norm`; their gradients end in `.grad`) matches
    `pattern` from its start to its end runs as a CUDA kernel, any other as the jnp reference
    through XLA. Outside any block `SHARDOPS_KERNELS` decides (default `.*`). Jitted functions are
    traced again where the pattern differs. Leaving restores what was there before.

    Args:
      pattern: a regular expression.
    Raises: ValueError where `pattern` is no regular expression.
    """
    with _pattern(_regex("use_kernels: pattern", pattern)):
        yield


def runs_as_kernel(op: str) -> bool:
    """Whether `op` is to run as a kernel where the platform has one."""
    pattern = _pattern.value
    return re.fullmatch(get().kernels if pattern is None else pattern, op) is not None


def _regex(name: str, text: str) -> str:
    try:
        re.compile(text)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"{name} is {text!r}; expected a regular expression ({error}). Use '.*' for all ops, "
            "'' for none."
        ) from error
    return text


def _flag(name: str, default: bool) -> bool:
    text = os.environ.get(name, "1" if default else "0")
    if text not in ("0", "1"):
        raise ValueError(f"{name} is {text!r}; expected 0 or 1. Correct the environment.")
    return text == "1"


def _count(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ValueError(f"{name} is {text!r}; expected an integer >= 0. Correct the environment.")
    return int(text)
