"""Launch shapes that were the fastest when measured, by GPU: they go before the heuristic,
but for a few rows so long that all blocks of a launch share each.

A table is a JSON file named by architecture and multiprocessors, "sm_90-132.json": one beside this
file, and one in SHARDOPS_CACHE_DIR/tuned, as `make tune` writes it, which goes first. A table maps
`key`s to the fields of a `Geometry`, a `Ragged` or a `Staged`. Few rows have keys of their own, and
without one that of many.
"""

import functools
import pathlib
import warnings

from shardops import config
from shardops.kernels.element_types import TYPE_BYTES
from shardops.kernels.norm_problem import NormProblem, is_small
from shardops.kernels.norm_ragged import Ragged
from shardops.kernels.norm_registers import Geometry
from shardops.kernels.norm_staged import Staged
from shardops.kernels.target import Target
from shardops.kernels.tuned.reading import read

_SHIPPED = pathlib.Path(__file__).parent


def keys(problem: NormProblem, target: Target, direction: str) -> tuple[str, ...]:
    """What a shape was measured for, "rms.backward.add 2 2 4096": bytes of x and gamma, columns.

    Before it, backward and for few rows, `is_small`, the same and "few".
    """
    add = ".add" if problem.add else ""
    sizes = f"{TYPE_BYTES[problem.x]} {TYPE_BYTES[problem.gamma]}"
    of_many = f"{problem.kind}.{direction}{add} {sizes} {problem.cols}"
    few = direction == "backward" and is_small(problem, target.sm_count)
    return (f"{of_many} few", of_many) if few else (of_many,)


def lookup(
    problem: NormProblem, target: Target, direction: str
) -> Geometry | Ragged | Staged | None:
    """The shape in the table of this GPU; None where there is none."""
    table = _table(target.arch, target.sm_count)
    return next((table[k] for k in keys(problem, target, direction) if k in table), None)


def file_name(arch: str, sm_count: int) -> str:
    return f"{arch}-{sm_count}.json"


@functools.cache
def _table(arch: str, sm_count: int) -> dict[str, Geometry | Ragged | Staged]:
    found: dict[str, Geometry | Ragged | Staged] = {}
    for folder in (_SHIPPED, config.get().cache_dir / "tuned"):
        path = folder / file_name(arch, sm_count)
        try:
            entries = read(path)
        except (FileNotFoundError, NotADirectoryError):
            # No table. Where SHARDOPS_CACHE_DIR is a file, the cache of kernels says so.
            continue
        except (OSError, ValueError) as error:
            warnings.warn(
                f"shardops: the table of launch shapes {path} cannot be used ({error}); the "
                "heuristic decides. Write it anew with `make tune`, or remove it.",
                RuntimeWarning,
                stacklevel=2,
            )
            continue
        found |= entries
    return found
