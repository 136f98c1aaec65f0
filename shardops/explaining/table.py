"""A report as rich tables."""

from typing import Any

from shardops.explaining import text, wording
from shardops.explaining.report import Entry, Report


def as_table(report: Report) -> Any:
    """One table of all ops, the totals below it."""
    try:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text
    except ImportError as error:
        raise ImportError(
            "Report.to_rich: rich is not installed; expected it for tables. Install it with "
            "`pip install rich`, or print str(report)."
        ) from error
    table = Table(title=f"shardops report: {text.title(report)}", show_lines=True)
    for column in ("op", "operands and results", "moves", "why"):
        table.add_column(column, overflow="fold")
    for number, entry in enumerate(report.entries, 1):
        why = Text(entry.reason)
        if entry.computed is not None:
            why.append(f"\ncomputed {entry.computed}", style="dim")
        if (plain := text.xla(entry)) is not None:
            why.append(f"\nplain XLA: {plain}", style="dim")
        if entry.suggestion is not None:
            why.append(f"\n{entry.suggestion.text}", style="yellow")
        table.add_row(
            Text(f"{number}. {text.heading(entry)}"), Text(_arrays(entry)), Text(_moves(entry)), why
        )
    lines = [f"total: {wording.size(report.bytes)} in {wording.time(report.microseconds)}"]
    lines += [*text.compiled(report), *(f"note: {n}" for n in report.notes)]
    return Group(table, *map(Text, lines))


def _arrays(entry: Entry) -> str:
    operands = [f"{a.array.name} {text.held(a)}" for a in entry.operands]
    return "\n".join([*operands, *(f"→ {a.array.name} {text.held(a)}" for a in entry.results)])


def _moves(entry: Entry) -> str:
    return "\n".join([*(wording.step(s, entry.names) for s in entry.steps), text.total(entry)])
