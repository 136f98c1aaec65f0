"""Writes docs/collectives.md: what everyday layouts move, by shardops, by XLA, and at the least.

    python -m benchmarks.collectives [--out FILE]

Compiles each layout of tests/layouts.py for eight virtual CPU devices and reads the collectives of
the compiled program; nothing runs.
"""

import argparse
import pathlib
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

import jax

from tests.layout_programs import WITHIN, Program, auto, bound, explicit, xla
from tests.layouts import FREE, WANTED, Layout, shown

ROOT = pathlib.Path(__file__).parent.parent

HEAD = """\
# What everyday layouts move

Command: `make collectives`. Date: {date}. JAX {jax}, float32, eight virtual CPU devices.

Each product of `tests/layouts.py` is compiled, and its collectives are read from the compiled
program. KB are those that one device receives under ring algorithms: of n devices an all-gather
moves (n-1)/n of its result, a reduce-scatter and an all-to-all (n-1)/n of the operand, an
all-reduce twice that, a permute its operand.

- *Least*: the fewest KB that any sequence of slices, all-gathers, all-to-alls, permutes and sums
  needs for the result of the program on Explicit axes with no more FLOPs a device than it has,
  found by trying all of them (`tests/rules/brute_force.py`), without the planner.
- *Ratio*: to the least for the program's own result and FLOPs.
- *Plan*: `plan.bytes` of the program on Explicit axes.
- *XLA*: `jax.lax.dot_general` on Auto axes with the same shardings in and out. An all-reduce of
  which a device uses a slice alone counts as the reduce-scatter that it could be.
- `dp,-,tp`: an entry a dim, `+` joins axes, `-` for none.

## Summary

{summary}
"""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs" / "collectives.md")
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    wanted = [Row.of(layout, explicit(layout)) for layout in WANTED]
    free = [Row.of(layout, explicit(layout)) for layout in FREE]
    cheapest = [Row.of(layout, explicit(layout, "cheapest"), True) for layout in FREE]
    met = summary(wanted, free, cheapest)
    text = HEAD.format(date=time.strftime("%Y-%m-%d"), jax=jax.__version__, summary=met)
    text += "## A wanted result\n\n" + wanted_table(wanted)
    text += "\n## A free result\n\n" + FREE_NOTE + free_table(free)
    text += '\n## A free result, `out_sharding="cheapest"`\n\n' + CHEAPEST_NOTE
    text += cheapest_table(cheapest)
    options.out.write_text(text)
    print(met)
    return 0


FREE_NOTE = """\
Each program is compared at the result that it chose: on Explicit axes the type says it, on Auto
axes the sharding that was propagated. XLA is given that of the Explicit program.

"""
CHEAPEST_NOTE = """\
The planner chooses the result on Explicit axes; the least is that of any result. XLA is given the
same result, and in the last columns chooses its own.

"""


@dataclass(frozen=True)
class Row:
    """The programs of one layout."""

    layout: Layout
    explicit: Program
    auto: Program
    xla: Program  # its result where the Explicit program has it
    any_result: bool = False  # compared with the least for any result, not for its own

    @classmethod
    def of(cls, layout: Layout, explicit: Program, any_result: bool = False) -> "Row":
        return cls(layout, explicit, auto(layout), xla(layout, explicit.out), any_result)

    def least(self, program: Program) -> float:
        return bound(self.layout, None if self.any_result else program.out, program.flops)

    def meets(self, program: Program) -> bool:
        return program.meets(self.least(program))

    def ratio(self, program: Program) -> float:
        least = self.least(program)
        return program.received / least if least else 1 if program.received == 0 else inf


def summary(wanted: list[Row], free: list[Row], cheapest: list[Row]) -> str:
    """The goals and how many layouts meet them."""
    seventy = wanted + free
    above = [r.layout.name for r in seventy + cheapest if r.explicit.received > r.xla.received]
    for r in seventy:
        if r.auto.received > xla(r.layout, r.auto.out).received:
            above.append(r.layout.name)
    missed = sorted(r.ratio(r.xla) for r in seventy if not r.meets(r.xla))

    def line(what: str, met: Iterable[bool]) -> str:
        each = list(met)
        return _line(what, f"{sum(each)} of {len(each)}")

    out = _header(f"within {round(100 * (WITHIN - 1))} % of the least", "layouts")
    out += line("a wanted result, Explicit", (r.meets(r.explicit) for r in wanted))
    out += line("a wanted result, Auto", (r.meets(r.auto) for r in wanted))
    out += line("a free result, Explicit: of its type", (r.meets(r.explicit) for r in free))
    out += line("a free result, Auto: of its own", (r.meets(r.auto) for r in free))
    of_any = (r.meets(r.explicit) for r in cheapest)
    out += line('a free result, `"cheapest"`: of any result', of_any)
    out += line("XLA", (r.meets(r.xla) for r in seventy))
    out += f"\nPrograms of shardops that receive more than XLA's: {len(above)}"
    out += f" ({', '.join(above)}).\n" if above else ".\n"
    if missed:
        out += f"Where XLA misses it, it receives a median of {statistics.median(missed):.1f} × the"
        out += f" least, at most {missed[-1]:.0f} ×.\n"
    return out


def wanted_table(rows: list[Row]) -> str:
    out = _header(
        "layout",
        "specs",
        "least KB",
        "Explicit",
        "ratio",
        "plan KB",
        "Auto",
        "ratio",
        "XLA",
        "ratio",
    )
    for r in rows:
        out += _line(
            r.layout.name,
            _specs(r.layout),
            *_planned(r),
            *_moved(r, r.auto),
            *_moved(r, r.xla),
        )
    return out


def free_table(rows: list[Row]) -> str:
    out = _header(
        "layout", "operands", "Explicit: result", "least KB", "moved", "ratio", "plan KB",
        "Auto: result", "moved", "ratio", "XLA", "ratio",
    )  # fmt: skip
    for r in rows:
        out += _line(
            r.layout.name,
            _specs(r.layout),
            f"`{shown(r.explicit.out)}`",
            *_planned(r),
            f"`{shown(r.auto.out)}`",
            *_moved(r, r.auto),
            *_moved(r, r.xla),
        )
    return out


def cheapest_table(rows: list[Row]) -> str:
    out = _header(
        "layout", "operands", "result", "least KB", "Explicit", "ratio", "plan KB", "XLA", "ratio",
        "XLA's result", "XLA", "ratio",
    )  # fmt: skip
    for r in rows:
        own = xla(r.layout, None)
        out += _line(
            r.layout.name,
            _specs(r.layout),
            f"`{shown(r.explicit.out)}`",
            *_planned(r),
            *_moved(r, r.xla),
            f"`{shown(own.out)}`",
            *_moved(r, own),
        )
    return out


def _header(*names: str) -> str:
    return _line(*names) + _line(*("---" for _ in names)).replace(" ", "")


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def _specs(layout: Layout) -> str:
    """The equation over its mesh, and where the arrays lie."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in layout.sizes.items())
    result = "" if layout.out is None else f" → `{layout.out}`"
    return f"`{layout.equation}` on {mesh}: `{layout.lhs}` · `{layout.rhs}`{result}"


def _planned(row: Row) -> tuple[str, ...]:
    """Four cells of the Explicit program: least, moved, ratio, plan."""
    planned = "" if row.explicit.planned is None else _kb(row.explicit.planned)
    return _kb(row.least(row.explicit)), *_moved(row, row.explicit), planned


def _moved(row: Row, program: Program) -> tuple[str, str]:
    """Two cells of a program: KB and collectives, ratio to the least."""
    kinds = Counter(c.kind for c in program.collectives)
    named = ", ".join(f"{n} {kind}" if n > 1 else kind for kind, n in kinds.items())
    cell = _kb(program.received) + (f" ({named})" if named else "")
    return cell, f"{row.ratio(program):.2f}"


def _kb(size: float) -> str:
    return f"{size / 1024:.2f}".removesuffix(".00")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
