"""`python -m shardops doctor`: what this installation has, what would run where, and why not."""

import argparse
import json
import os
import re
import secrets
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import jax

from shardops import config
from shardops.errors import KernelUnavailableError
from shardops.kernels import arguments as read
from shardops.kernels import cache, compile, versions
from shardops.kernels.gemm_scaled_plan import Side, scaled_plan
from shardops.version import OLDEST_JAX

# By the library that runs them on a GPU.
_OPS = {
    "cublasLt": ("gemm", "dot_general"),
    "nvrtc": ("layer_norm", "rms_norm", "softmax", "quantize"),
}
_SCALES = {  # the blocks of lhs and rhs in the products that recipes make
    "one scale": ("tensor", None, None),
    "blocks of 128": ("block_128", (1, 128), (128, 128)),
    "MXFP8": ("mxfp8", (1, 32), (1, 32)),
}
_WIDE = "dequantised"
_PREFIX = "SHARDOPS_"
Section = dict[str, str]


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `doctor` to the commands of `python -m shardops`."""
    parser = commands.add_parser(
        "doctor",
        help="versions, libraries, devices, what would run where and why not",
        description="Versions, libraries, devices and settings, and what would run where. Needs no "
        "GPU. Returns 1 where something is in the way.",
    )
    parser.add_argument(
        "--arch", type=read.arch, metavar="SM", help="as on a machine with such a GPU"
    )
    parser.add_argument("--json", action="store_true", help="print plain data instead of text")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    # Beside a program that has the GPU, nothing of its memory is to be taken.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    found = examined(arguments.arch)
    print(json.dumps(found.data(), indent=1) if arguments.json else found.text())
    return 1 if found.problems else 0


@dataclass
class Findings:
    """Sections of names and what there is to say of each, and what is in the way."""

    sections: dict[str, Section] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def data(self) -> dict[str, Any]:
        return {**self.sections, "problems": self.problems}

    def text(self) -> str:
        lines = []
        for title, section in self.sections.items():
            width = max(map(len, section), default=0)
            lines += [title, *(f"  {name:{width}}  {text}" for name, text in section.items()), ""]
        numbered = [f"  {n}. {text}" for n, text in enumerate(self.problems, 1)]
        return "\n".join([*lines, "problems", *(numbered or ["  none"])])


def examined(arch: str | None = None) -> Findings:
    """Looks at this process's installation, environment and devices.

    Args:
      arch: of a GPU that there is to be, "sm_90"; None: those that JAX has.
    """
    found = Findings()
    parts = versions.parts()
    found.sections["versions"] = {name: str(part) for name, part in parts.items()}
    if _numbers(jax.__version__) < _numbers(OLDEST_JAX):
        found.problems.append(
            f"jax is {jax.__version__}; expected {OLDEST_JAX} or newer. pip install -U jax"
        )
    settings = _environment(found)
    arches = _devices(found, parts, settings)
    if arch is not None:
        arches = {arch: 1}
    if arches and _uses_kernels(settings):
        missing = {n: p for n, p in parts.items() if isinstance(p, KernelUnavailableError)}
        if arch is not None and not _has_gpu(found):
            missing.pop("driver", None)  # the machine with that GPU has its own
        if settings is not None and not settings.nvrtc:
            missing.pop("nvrtc", None)
        found.problems += map(str, missing.values())
    if settings is not None:
        _directories(found, settings, bool(arches))
        for each in arches or {"cpu": 0}:
            found.sections[f"what runs on {each}"] = _what_runs(found, settings, each, parts)
    return found


def _uses_kernels(settings: config.Config | None) -> bool:
    return settings is None or settings.kernels != ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


# ---- Devices -------------------------------------------------------------------------------------


def _has_gpu(found: Findings) -> bool:
    return any("NVIDIA" in name for name in found.sections["devices"])


def _devices(
    found: Findings, parts: dict[str, Any], settings: config.Config | None
) -> dict[str, int]:
    """Lists them. Returns how many GPUs there are of each architecture that has kernels."""
    section = found.sections["devices"] = {}
    arches: dict[str, int] = {}
    try:
        devices = jax.devices()
    except Exception as error:  # whatever a plugin raises
        devices = []
        found.problems.append(f"JAX finds no devices: {error}")
    for device in devices:
        if "cuda" not in device.client.platform_version:
            kind = device.device_kind
            section[kind] = f"{sum(d.device_kind == kind for d in devices)}; ops run as jnp"
            continue
        capability = device.compute_capability
        arch = f"sm_{capability.replace('.', '')}"
        name = f"NVIDIA {device.device_kind.removeprefix('NVIDIA ')}"
        arches[arch] = arches.get(arch, 0) + 1
        section[name] = f"{arches[arch]}; {arch}, {device.core_count} multiprocessors"
        old = int(capability.split(".")[0]) < 8
        if old and arches[arch] == 1 and _uses_kernels(settings):
            found.problems.append(
                f"compute capability of {name} is {capability}; expected 8.0 or newer. Set "
                "SHARDOPS_KERNELS= (empty): ops run as jnp there"
            )
    if not arches and isinstance(parts["driver"], str) and os.path.exists("/dev/nvidiactl"):
        chosen = os.environ.get("JAX_PLATFORMS")
        why = f"JAX_PLATFORMS is {chosen!r}" if chosen else "pip install 'jax[cuda13]'"
        found.problems.append(f"there is an NVIDIA GPU, and JAX does not use it: {why}")
    return arches


# ---- Environment ---------------------------------------------------------------------------------


def _environment(found: Findings) -> config.Config | None:
    """Lists the settings; None where one cannot be read."""
    section = found.sections["settings"] = {}
    fields = config.Config.__dataclass_fields__
    names = {f"{_PREFIX}{name.upper()}": name for name in fields}
    for name in sorted(os.environ.keys() - names):
        if not name.startswith(_PREFIX):
            continue
        section[name] = "no setting, not heeded"
        if meant := get_close_matches(name.removeprefix(_PREFIX), [n.upper() for n in fields]):
            found.problems.append(f"{name} is no setting; perhaps {_PREFIX}{meant[0]} is meant")
    try:
        settings = config.get()
    except ValueError as error:
        found.problems.append(str(error))
        settings = None
    for variable, name in names.items():
        given = os.environ.get(variable)
        if given is not None:
            section[variable] = repr(given)
        elif settings is not None:
            value = getattr(settings, name)
            section[variable] = f"not set: {int(value) if isinstance(value, bool) else value}"
    return settings


def _directories(found: Findings, settings: config.Config, needed: bool) -> None:
    section = found.sections["directories"] = {}
    probe = settings.cache_dir / f"doctor-{secrets.token_hex(8)}"
    kernels = compile.cache_directory(settings)
    try:
        cache.write_whole(probe, b"")
        probe.unlink()
        tuned = len(list((settings.cache_dir / "gemm").glob("*.json")))
    except (OSError, ValueError) as error:
        section["cache"] = f"{settings.cache_dir}: cannot be written ({error})"
        if needed:
            found.problems.append(
                f"the cache {section['cache']}: each process compiles its kernels anew. Point "
                "SHARDOPS_CACHE_DIR at a directory of your own"
            )
    else:
        held = f"{_held(found, kernels)}, {tuned} tuned algorithms"
        section["cache"] = f"{settings.cache_dir}: writable, {held}"
    if settings.kernel_pack is None:
        section["pack"] = "none"
        return
    pack = compile.pack_directory(settings.kernel_pack)
    if not os.path.isdir(settings.kernel_pack):
        section["pack"] = f"{pack.path}: is not there"
        found.problems.append(f"SHARDOPS_KERNEL_PACK is {pack.path}; expected a directory")
        return
    section["pack"] = f"{pack.path}: {_held(found, pack, needed=True)}"


def _held(found: Findings, directory: cache.KernelDirectory, *, needed: bool = False) -> str:
    """What a directory has. A cache heals by itself, and may hold what other versions wrote."""
    try:
        entries = directory.entries()
    except OSError as error:
        found.problems.append(f"{directory.path} cannot be read ({error}). Correct its permissions")
        return f"cannot be read ({error})"
    damaged = sum(entry.about is None for entry in entries)
    if damaged and needed:
        found.problems.append(
            f"{directory.path} has {damaged} damaged or foreign files, which are not used. "
            f"`python -m shardops kernels clear {directory.path}` removes kernels"
        )
    others = f", {damaged} damaged or foreign files" if damaged else ""
    return f"{len(entries) - damaged} kernels{others}"


# ---- What runs -----------------------------------------------------------------------------------


def _what_runs(
    found: Findings, settings: config.Config, arch: str, parts: dict[str, Any]
) -> Section:
    if arch == "cpu":
        ops = [op for group in _OPS.values() for op in group]
        modes = [f"gemm of 8-bit operands, {name}" for name in _SCALES]
        return dict.fromkeys(ops, "jnp") | dict.fromkeys(modes, "jnp, dequantised")
    section = {}
    kernels = {"cublasLt": _by_cublaslt(parts), "nvrtc": _by_nvrtc(settings, arch, parts)}
    wanted = set()  # of these
    for library, ops in _OPS.items():
        if any(config.runs_as_kernel(n) for op in ops for n in (op, f"{op}.grad")):
            wanted.add(library)
        for op in ops:
            section[op] = _chosen(settings, op, kernels[library])
    for name, (kind, lhs, rhs) in _SCALES.items():
        label = f"gemm of 8-bit operands, {name}"
        section[label] = section["gemm"]
        if config.runs_as_kernel("gemm") and section["gemm"].startswith("cuBLASLt"):
            a, b = (Side((256, 256), "float8_e4m3fn", kind, block) for block in (lhs, rhs))
            plan = scaled_plan(a, b, ((1,), (1,)), ((), ()), arch)
            native = plan.native is not None
            section[label] = f"{'native' if native else _WIDE}: {plan.why}"
            if native and kind != "tensor" and _numbers(str(parts["cublasLt"])) < (12, 9):
                section[label] = f"{_WIDE}: cuBLASLt is older than 12.9"
            elif native and kind == "mxfp8":
                wanted.add("nvrtc")  # orders the scales
                if kernels["nvrtc"].startswith("fails"):
                    section[label] = kernels["nvrtc"]
    told = {name for name, part in parts.items() if isinstance(part, KernelUnavailableError)}
    for library, kernel in kernels.items():
        if kernel.startswith("fails") and library in wanted and not {library, "extension"} & told:
            found.problems.append(f"kernels for {arch}: {kernel}")
    return section


def _chosen(settings: config.Config, op: str, kernel: str) -> str:
    ways = [kernel if config.runs_as_kernel(name) else "jnp" for name in (op, f"{op}.grad")]
    if ways == [kernel, kernel]:
        return kernel
    chosen = f"SHARDOPS_KERNELS is {settings.kernels!r}"
    if ways[0] == ways[1]:
        return f"jnp: {chosen}"
    return f"{ways[0]}; its gradient: {ways[1]}; {chosen}"


def _by_cublaslt(parts: dict[str, Any]) -> str:
    lacking = [n for n in ("extension", "cublasLt") if isinstance(parts[n], KernelUnavailableError)]
    return f"fails: {' and '.join(lacking)} missing" if lacking else "cuBLASLt"


def _by_nvrtc(settings: config.Config, arch: str, parts: dict[str, Any]) -> str:
    if isinstance(parts["extension"], KernelUnavailableError):
        return "fails: extension missing"
    pack = "" if settings.kernel_pack is None else "the pack"
    if not settings.nvrtc:
        return f"kernels of {pack}" if pack else "fails: SHARDOPS_NVRTC is 0, and there is no pack"
    try:
        compile.check_arch(arch)
    except KernelUnavailableError as error:
        return f"kernels of {pack}" if pack else f"fails: {error}"
    return f"kernels of {pack}, else by NVRTC" if pack else "kernels by NVRTC"
