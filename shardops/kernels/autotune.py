"""The fastest algorithm of each GEMM on this machine's GPU, timed once and remembered."""

import hashlib
import json
import math
import pathlib
import threading
import warnings
from collections.abc import Mapping
from typing import Any

import jax

from shardops import config
from shardops.kernels.agreement import agreed
from shardops.kernels.cache import write_whole
from shardops.kernels.gemm_ranking import MOST

# What an entry begins with: files of another version of this format are foreign.
_FORMAT = "shardops gemm algorithm 2"
# The heuristic's first is kept where another one is not clearly faster.
_LEAST_GAIN = 0.01

Algorithm = dict[str, Any]  # algo: bytes, algo_version, workspace_bytes

_lock = threading.RLock()  # held while timing: two at a time would slow each other down
_memory: dict[str, Algorithm | None] = {}  # None: the heuristic's first, as processes agreed
_warned: set[str] = set()


def tuned(
    extension: Any, device: int, attributes: Mapping[str, int], workspace_limit: int
) -> Algorithm | None:
    """The algorithm to use for a GEMM; None: the heuristic's first.

    In a run of several processes nothing is timed, and the first one that lowers the GEMM decides
    for all, by what it finds on disk: their programs must not differ.

    Args:
      extension: `shardops._core`.
      device: the CUDA ordinal to time on.
      attributes: of the GEMM, as csrc/gemm_problem.h names them.
      workspace_limit: bytes that an algorithm may use.
    """
    problem = {
        "attributes": dict(sorted(attributes.items())),
        "cublaslt": extension.versions()["cublaslt"],
        "device": extension.device_name(device),
        "workspace_limit": workspace_limit,
    }
    key = hashlib.sha256(json.dumps([_FORMAT, problem]).encode()).hexdigest()
    with _lock:
        if key not in _memory:
            found = _read(key, problem)
            if jax.process_count() > 1:
                _memory[key] = _agreed(key, problem, found)
                return _memory[key]
            if found is None:
                found = _timed(extension, device, problem)
                if found is None:
                    return None
                _write(key, problem, found)
            _memory[key] = found
        return _memory[key]


def clear_memory() -> None:
    """Forgets what this process knows: for the tests."""
    with _lock:
        _memory.clear()
        _warned.clear()


def _agreed(key: str, problem: Mapping[str, Any], own: Algorithm | None) -> Algorithm | None:
    """What all processes take, of which one found `own` on disk."""
    text = agreed(f"shardops/gemm/{key}", "null" if own is None else _entry(problem, own))
    return None if text is None else _algorithm(json.loads(text), problem)


def _timed(extension: Any, device: int, problem: Mapping[str, Any]) -> Algorithm | None:
    """The fastest candidate; None where there is none, or no memory to time it in."""
    limit = problem["workspace_limit"]
    try:
        candidates = extension.gemm_query(
            device=device,
            limit=MOST,
            timed=True,
            **problem["attributes"],
            workspace_bytes=limit,
        )
    except MemoryError as error:
        _warn("memory", f"{error} Lower XLA_PYTHON_CLIENT_MEM_FRACTION.")
        return None
    except RuntimeError as error:
        _warn("timing", f"{error} The heuristic decides instead.")
        return None
    if not candidates or not math.isfinite(min(c["microseconds"] for c in candidates)):
        return None
    first, best = candidates[0], min(candidates, key=lambda c: c["microseconds"])
    if best["microseconds"] > first["microseconds"] * (1 - _LEAST_GAIN):
        best = first
    return {name: best[name] for name in ("algo", "algo_version", "workspace_bytes")}


# ---- The directory -------------------------------------------------------------------------------


def _path(key: str) -> pathlib.Path:
    return config.get().cache_dir / "gemm" / f"{key}.json"


def _read(key: str, problem: Mapping[str, Any]) -> Algorithm | None:
    path = _path(key)
    try:
        entry = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn("read", f"{path} cannot be read ({error}).")
        return None
    except (ValueError, RecursionError):
        entry = None
    found = _algorithm(entry, problem)
    if found is None:
        _warn("damaged", f"{path} is damaged or foreign, and is not used.")
    return found


def _algorithm(entry: Any, problem: Mapping[str, Any]) -> Algorithm | None:
    """What an entry says; None where it is not one of this problem."""
    if not isinstance(entry, dict) or entry.get("format") != _FORMAT:
        return None
    if entry.get("problem") != problem or entry.get("digest") != _digest(entry):
        return None
    return {
        "algo": bytes.fromhex(entry["algo"]),
        "algo_version": problem["cublaslt"],
        "workspace_bytes": entry["workspace_bytes"],
    }


def _entry(problem: Mapping[str, Any], algorithm: Algorithm) -> str:
    """As `_algorithm` reads it."""
    entry = {
        "format": _FORMAT,
        "problem": problem,
        "algo": algorithm["algo"].hex(),
        "workspace_bytes": algorithm["workspace_bytes"],
    }
    return json.dumps({**entry, "digest": _digest(entry)}, indent=1)


def _write(key: str, problem: Mapping[str, Any], algorithm: Algorithm) -> None:
    """One entry; where that fails, a warning."""
    path = _path(key)
    try:
        write_whole(path, _entry(problem, algorithm).encode())
    except OSError as error:
        _warn("write", f"{path} cannot be written ({error}); later processes time again.")


def _digest(entry: Mapping[str, Any]) -> str:
    """Of what an algorithm is, so that no damaged one reaches the library."""
    text = json.dumps([entry.get(name) for name in ("problem", "algo", "workspace_bytes")])
    return hashlib.sha256(text.encode()).hexdigest()


def _warn(what: str, text: str) -> None:
    """Once for each kind of trouble."""
    if what not in _warned:
        _warned.add(what)
        warnings.warn(f"shardops: SHARDOPS_AUTOTUNE: {text}", RuntimeWarning, stacklevel=2)
