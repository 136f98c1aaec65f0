"""`python -m shardops kernels`: build, list and clear compiled kernels, without any GPU."""

import argparse
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from shardops import config, errors
from shardops.kernels import arguments as read
from shardops.kernels import table

_EXAMPLE = """\
example:
  python -m shardops kernels build --arch sm_90 --op rms_norm --rows-length 4096,7168 \\
      --dtype bfloat16 --gamma-dtype float32 --add no,yes --out pack
  SHARDOPS_KERNEL_PACK=pack SHARDOPS_NVRTC=0 python train.py
"""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `kernels` to the commands of `python -m shardops`."""
    kernels = commands.add_parser("kernels", help="build, list and clear compiled kernels")
    actions = kernels.add_subparsers(dest="action", required=True, metavar="action")
    _add_build(actions)
    listing = actions.add_parser(
        "list",
        help="what the kernel pack and the cache hold",
        description="What directories of kernels hold. Sizes are in bytes: of the machine code, of "
        "what a thread spills from registers to memory and back, of a block's shared memory.",
    )
    default = "default: SHARDOPS_KERNEL_PACK, where set, and the cache"
    listing.add_argument("directory", nargs="?", type=read.path, metavar="DIR", help=default)
    listing.add_argument("--json", action="store_true", help="print plain data instead of a table")
    listing.set_defaults(run=_guarded(_list))
    clearing = actions.add_parser("clear", help="remove compiled kernels, and no other file")
    default = "default: the cache; a pack only when named"
    clearing.add_argument("directory", nargs="?", type=read.path, metavar="DIR", help=default)
    clearing.set_defaults(run=_guarded(_clear))


def _add_build(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from shardops.kernels.families import DTYPES, FAMILIES, OPTIONS
    from shardops.kernels.packing import flag

    parser = actions.add_parser(
        "build",
        help="fill a kernel pack",
        description="Compiles kernels into a pack. Needs NVRTC, no GPU. What is there stays.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--arch", required=True, metavar="SM,…", type=read.arches, help="sm_90")
    ops = ("all", *FAMILIES)
    parser.add_argument(
        "--op", required=True, metavar="OP,…", type=read.some(ops), help=", ".join(ops)
    )
    length = "elements of a row on one device: 4096,7168"
    parser.add_argument(
        "--rows-length", required=True, metavar="N,…", type=read.counts, help=length
    )
    dtypes = f"{', '.join(DTYPES)} (default: all)"
    parser.add_argument(
        "--dtype", default=DTYPES, metavar="TYPE,…", type=read.some(DTYPES), help=dtypes
    )
    for name, option in OPTIONS.items():
        heeding = ", ".join(op for op, family in FAMILIES.items() if name in family.options)
        parser.add_argument(
            flag(name),
            nargs=None if option.bare is None else "?",
            const=None if option.bare is None else (option.bare,),
            type=read.some(option.values),
            metavar="CHOICE,…",
            help=f"{option.help}: {', '.join(option.values)} (default: {option.values[0]}; "
            f"for {heeding})",
        )
    parser.add_argument("--forward", action="store_true", help="only the kernels of the forward")
    parser.add_argument("--backward", action="store_true", help="only those of the gradient")
    rows = "only what so many rows on one device need (default: any number)"
    parser.add_argument("--rows", type=read.count, metavar="N", help=rows)
    multiprocessors = "only what a GPU with so many multiprocessors needs (default: any number)"
    parser.add_argument("--sm-count", type=read.count, metavar="N", help=multiprocessors)
    parser.add_argument("--out", required=True, type=read.path, metavar="DIR", help="the pack")
    parser.set_defaults(run=_guarded(_build), requests=_requests)


def _guarded(command: Any) -> Any:
    """Turns what a user can mend into a message and an exit status."""

    def run(arguments: argparse.Namespace) -> int:
        try:
            return command(arguments)
        except BrokenPipeError:  # `| head`: whoever read has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except (OSError, ValueError, errors.KernelUnavailableError) as error:
            print(f"kernels {arguments.action}: {error}", file=sys.stderr)
            return 2

    return run


def _build(arguments: argparse.Namespace) -> int:
    from shardops.kernels import compile, packing

    _check_out(arguments.out)
    directory = compile.pack_directory(arguments.out)
    requests = _requests(arguments)
    built = kept = size = spilling = 0
    seconds = 0.0
    for arch in arguments.arch:  # loads the compiler too, which no kernel's time is to include
        compile.check_arch(arch)
    needed = {
        arch: [
            packing.kernels_of(request, arch, arguments.rows, arguments.sm_count)
            for request in requests
        ]
        for arch in arguments.arch
    }
    without = _without_kernels(requests, needed)
    if not any(itertools.chain.from_iterable(needed.values())):
        raise ValueError("\n".join(["there is nothing to build.", *without]))
    _make(arguments.out)
    print(table.HEAD + "    ms")
    for arch, found in needed.items():
        kernels = list(dict.fromkeys(itertools.chain.from_iterable(found)))
        for one in packing.build(kernels, arch, directory):
            took = "  kept" if one.seconds is None else f"{one.seconds * 1e3:6.0f}"
            print(table.row(one.about) + took, flush=True)
            print(f"    {table.constants(one.about['constants'])}")
            built, kept = built + (one.seconds is not None), kept + (one.seconds is None)
            seconds += one.seconds or 0.0
            size += one.about["code_bytes"]
            spilling += table.spilled(one.about) not in (0, None)
    for line in without:
        print(line)
    spills = f", {spilling} of them spill registers" if spilling else ""
    print(
        f"{arguments.out}: {_kernels(built + kept)}, {size:,} bytes{spills}; {built} compiled in "
        f"{seconds:.1f} s, {kept} were there"
    )
    return 0


def _without_kernels(requests: list[Any], needed: dict[str, list[Any]]) -> list[str]:
    """A line for each op and architecture: what needs no kernel, and why."""
    from shardops.kernels.families import FAMILIES

    asked: dict[tuple[str, str], dict[str, list[str]]] = {}  # lengths by dtype
    for arch, found in needed.items():
        for request, kernels in zip(requests, found, strict=True):
            if not kernels:
                lengths = asked.setdefault((request.op, arch), {}).setdefault(request.dtype, [])
                lengths.append(str(request.length))
    lines = []
    for (op, arch), by_dtype in asked.items():
        words = [f"{', '.join(dict.fromkeys(of))} in {dtype}" for dtype, of in by_dtype.items()]
        lines.append(f"{op}, {arch}: no kernel for {'; '.join(words)}: {FAMILIES[op].otherwise}.")
    return lines


def _requests(arguments: argparse.Namespace) -> list[Any]:
    """One for each combination of what the command line lists."""
    from shardops.kernels.families import FAMILIES, OPTIONS, PASSES, Request
    from shardops.kernels.packing import flag

    ops = tuple(FAMILIES) if "all" in arguments.op else arguments.op
    given = {name: getattr(arguments, name) for name in OPTIONS if getattr(arguments, name)}
    for name in given:
        if not any(name in FAMILIES[op].options for op in ops):
            heeding = ", ".join(op for op, family in FAMILIES.items() if name in family.options)
            got = f"{flag(name)} is given for {', '.join(ops)}"
            raise ValueError(f"{got}; expected one of {heeding}. Leave it out.")
    passes = [each for each in PASSES if getattr(arguments, each)] or list(PASSES)
    lengths: tuple[int, ...] = arguments.rows_length
    dtypes: tuple[str, ...] = arguments.dtype
    found = []
    for op, length, dtype in itertools.product(ops, lengths, dtypes):
        heeded = [name for name in given if name in FAMILIES[op].options]
        for values in itertools.product(*(given[name] for name in heeded)):
            options = tuple(zip(heeded, values, strict=True))
            found.append(Request(op, length, dtype, tuple(passes), options))
    return found


def _list(arguments: argparse.Namespace) -> int:
    pack = config.get().kernel_pack
    if arguments.directory is None and pack is not None and not pack.is_dir():
        from shardops.kernels import packing

        raise ValueError(
            f"{packing.no_directory(pack)}; expected a directory of kernels. Correct it, or fill "
            "it by `python -m shardops kernels build`."
        )
    listed = []
    for title, directory in _directories(arguments.directory):
        entries = directory.entries()
        listed += [
            {
                "directory": str(directory.path),
                "file": e.path.name,
                "bytes": e.size,
                "about": e.about,
            }
            for e in entries
        ]
        if arguments.json:
            continue
        size = sum(entry.size for entry in entries)
        print(f"{title} {directory.path}: {_kernels(len(entries))}, {size:,} bytes")
        if entries:
            print(table.HEAD + " nvrtc")
        whole = [entry.about for entry in entries if entry.about is not None]
        for about in sorted(whole, key=table.order):
            print(f"{table.row(about)}{about['nvrtc']:>6}")
            print(f"    {table.constants(about['constants'])}")
        for entry in entries:
            if entry.about is None:
                what = "a directory" if entry.path.is_dir() else f"{entry.size:,} bytes"
                print(f"{entry.path.name}: damaged or foreign, ignored ({what})")
    if arguments.json:
        print(json.dumps(listed, indent=2))
    return 0


def _clear(arguments: argparse.Namespace) -> int:
    title, directory = _directories(arguments.directory)[-1]
    count, size = directory.clear()
    print(f"{title} {directory.path}: removed {_kernels(count)}, {size:,} bytes")
    for entry in directory.entries():
        if entry.path.is_dir():
            print(f"{entry.path.name}: a directory, left")
    return 0


def _kernels(count: int) -> str:
    return f"{count} kernel{'s' * (count != 1)}"


def _directories(given: Path | None) -> list[tuple[str, Any]]:
    """What to look at, and what to call it; the cache last."""
    from shardops.kernels import compile

    if given is not None:
        if not given.is_dir():
            raise ValueError(f"{given} is no directory; expected one of kernels. Correct DIR.")
        return [("directory", compile.pack_directory(given))]
    settings = config.get()
    cache = compile.cache_directory(settings)
    there = next(p for p in (cache.path, *cache.path.parents) if os.path.lexists(p))
    if not os.path.isdir(there):
        raise ValueError(
            f"SHARDOPS_CACHE_DIR is {settings.cache_dir}, and {there} is no directory; expected a "
            "directory, or a path where one can be made. Correct it, or remove that file."
        )
    found = [("cache", cache)]
    if settings.kernel_pack is not None:
        found.insert(0, ("pack", compile.pack_directory(settings.kernel_pack)))
    return found


def _check_out(out: Path) -> None:
    """Refuses a pack that cannot be made, before kernels are compiled for it."""
    there = next((path for path in (out, *out.parents) if os.path.lexists(path)), None)
    if there is not None and not there.is_dir():
        of = "" if there == out else f" in {there}"
        raise ValueError(
            f"--out is {out}{of}, which is no directory; expected a directory, or a path where one "
            "can be made. Choose another."
        )


def _make(out: Path) -> None:
    """Makes the directory of a pack, and sees that it can be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ValueError(
            f"--out is {out}, which cannot be written ({error.strerror}); expected a directory, or "
            "a path where one can be made. Choose another."
        ) from error
