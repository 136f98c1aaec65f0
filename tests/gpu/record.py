"""The record of the last GPU test run: what passed, on what, for which sources.

    python tests/gpu/record.py                   after a full passing run: tests/gpu_record.json
    python tests/gpu/record.py --check           say whether the sources have changed since
    python tests/gpu/record.py --check --strict  the same, exit code 1 where they have

CI has no GPU: the record says which sources were last seen to work on one.
"""

import argparse
import collections
import datetime
import hashlib
import json
import pathlib
import sys
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
RECORD = ROOT / "tests" / "gpu_record.json"
OUTCOMES = ROOT / "out" / "gpu_outcomes.json"
RECORDED = ("csrc", "shardops/kernels", "shardops/primitives")
SUFFIXES = (".cc", ".h", ".cuh", ".py")


def digest() -> str:
    """The sha256 of the names and contents of all sources that decide what runs on a GPU."""
    total = hashlib.sha256()
    for folder in RECORDED:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                total.update(f"{path.relative_to(ROOT).as_posix()} {content}\n".encode())
    return total.hexdigest()


def keep_outcomes(outcomes: dict[str, str], *, whole: bool) -> None:
    """Called by pytest on the GPU machine at the end of a run.

    After a whole run, one of a part of the tests on the same sources and machine replaces their
    outcomes: a test that was wrong itself can be mended without running all the others again.
    """
    OUTCOMES.parent.mkdir(exist_ok=True)
    facts = {"sources": digest(), "whole": whole, "machine": machine(), "outcomes": outcomes}
    if not whole and OUTCOMES.exists():
        before = json.loads(OUTCOMES.read_text())
        alike = all(before[key] == facts[key] for key in ("sources", "machine"))
        if before["whole"] and alike:
            facts |= {"whole": True, "outcomes": before["outcomes"] | outcomes}
    OUTCOMES.write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")


def machine() -> dict[str, Any]:
    """The device and the versions of all that took part."""
    import jax
    import jaxlib

    from shardops.kernels import compile, library

    versions = library.core().versions()
    return {
        "device": jax.devices()[0].device_kind,
        "devices": len(jax.devices()),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "driver": _driver(),
        "cuda_driver_api": versions["driver"],
        "cublaslt": versions["cublaslt"],
        "nvrtc": compile.nvrtc_version(),
    }


def write() -> int:
    """Turns the outcomes of a full passing run into the record."""
    if not OUTCOMES.exists():
        print(f"no record written: {OUTCOMES.relative_to(ROOT)} is missing; run pytest tests/gpu")
        return 1
    facts = json.loads(OUTCOMES.read_text())
    counts = collections.Counter(facts["outcomes"].values())
    for complaint, holds in {
        f"{counts['failed']} tests failed": counts["failed"],
        "only a part of tests/gpu was run": not facts["whole"],
        "the sources have changed since the run": facts["sources"] != digest(),
    }.items():
        if holds:
            print(f"no record written: {complaint}; run pytest tests/gpu")
            return 1
    record = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "sources": facts["sources"],
        "machine": facts["machine"],
        "counts": dict(counts),
        "tests": facts["outcomes"],
    }
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    print(f"{RECORD.relative_to(ROOT)}: {dict(counts)} on {record['machine']['device']}")
    return 0


def check() -> tuple[str, bool]:
    """One line on the record, and whether it is about the present sources."""
    if not RECORD.exists():
        return "gpu record: none; run `make gpu` on a machine with a GPU", False
    record = json.loads(RECORD.read_text())
    of = f"{record['counts'].get('passed', 0)} tests on {record['machine']['device']}"
    if record["sources"] == digest():
        return f"gpu record: current ({of}, {record['date']})", True
    return f"gpu record: stale, {', '.join(RECORDED)} changed since {record['date']} ({of})", False


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether it is current")
    parser.add_argument("--strict", action="store_true", help="exit code 1 where it is not")
    options = parser.parse_args(arguments)
    if not options.check:
        return write()
    line, current = check()
    print(line)
    return int(options.strict and not current)


def _driver() -> str:
    version = pathlib.Path("/sys/module/nvidia/version")
    if version.exists():
        return version.read_text().strip()
    procfs = pathlib.Path("/proc/driver/nvidia/version")
    return procfs.read_text().split("  ")[1].split()[0] if procfs.exists() else "unknown"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
