"""The record of the last GPU test run: what passed, on what, for which sources.

    python tests/gpu/record.py                   after a full passing run: tests/gpu_record.json
    python tests/gpu/record.py --check           say whether the sources have changed since
    python tests/gpu/record.py --check --strict  the same, exit code 1 where they have

CI has no GPU: the record says which sources were last seen to work on one, and on several: the
tests of tests/multi_gpu, from whose last passing run it is, on sources of their own.
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
SEVERAL_OUTCOMES = ROOT / "out" / "multi_gpu_outcomes.json"
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


def keep_outcomes(outcomes: dict[str, str], *, whole: bool, several: bool = False) -> None:
    """Called by pytest on the GPU machine at the end of a run, on one GPU or on several.

    After a whole run, one of a part of the tests on the same sources and machine replaces their
    outcomes: a test that was wrong itself can be mended without running all the others again.
    """
    kept = SEVERAL_OUTCOMES if several else OUTCOMES
    kept.parent.mkdir(exist_ok=True)
    facts = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "sources": digest(),
        "whole": whole,
        "machine": machine(),
        "outcomes": outcomes,
    }
    if not whole and kept.exists():
        before = json.loads(kept.read_text())
        alike = all(before[key] == facts[key] for key in ("sources", "machine"))
        if before["whole"] and alike:
            facts |= {"whole": True, "outcomes": before["outcomes"] | outcomes}
    kept.write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")


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
    """Turns the outcomes of full passing runs into the record: of one GPU, of several, or of both.

    What no such run is there for stays as it was. A first record needs a run on one.
    """
    before = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    one = _accepted(OUTCOMES, "tests/gpu")
    if one is not None and one["sources"] != digest():
        print("not in the record: the sources have changed since the run; run pytest tests/gpu")
        one = None
    several = _accepted(SEVERAL_OUTCOMES, "tests/multi_gpu")
    record = one or {key: value for key, value in before.items() if key != "several"}
    if not record or (one is None and several is None):
        print("no record written")
        return 1
    if several is not None or "several" in before:
        record["several"] = several or before["several"]
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    for run in (one, several):
        if run is not None:
            print(f"{RECORD.relative_to(ROOT)}: {run['counts']} on {run['machine']['device']}")
    return 0


def _accepted(path: pathlib.Path, tests: str) -> dict[str, Any] | None:
    """What the record says of a full passing run; None, and a line why, where it was none."""
    if not path.exists():
        print(f"not in the record: {path.relative_to(ROOT)} is missing; run pytest {tests}")
        return None
    facts = json.loads(path.read_text())
    counts = collections.Counter(facts["outcomes"].values())
    for complaint, holds in {
        f"{counts['failed']} tests failed": counts["failed"],
        f"only a part of {tests} was run": not facts["whole"],
    }.items():
        if holds:
            print(f"not in the record: {complaint}; run pytest {tests}")
            return None
    return {
        "date": facts["date"],
        "sources": facts["sources"],
        "machine": facts["machine"],
        "counts": dict(counts),
        "tests": facts["outcomes"],
    }


def check() -> tuple[str, bool]:
    """One line on the record, and whether its run on one GPU is of the present sources."""
    if not RECORD.exists():
        return "gpu record: none; run `make gpu` on a machine with a GPU", False
    record = json.loads(RECORD.read_text())
    current = record["sources"] == digest()
    lines = [f"gpu record: {_said(record)}"]
    if "several" in record:
        lines.append(f"on {record['several']['machine']['devices']}: {_said(record['several'])}")
    return "; ".join(lines), current


def _said(run: dict[str, Any]) -> str:
    of = f"{run['counts'].get('passed', 0)} tests on {run['machine']['device']}"
    if run["sources"] == digest():
        return f"current ({of}, {run['date']})"
    return f"stale, {', '.join(RECORDED)} changed since {run['date']} ({of})"


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
