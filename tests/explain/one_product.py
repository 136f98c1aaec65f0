"""A report's entry of one product, planned on a mesh that does not exist."""

from shardops.explaining import equation
from shardops.explaining.report import Entry, entries_of
from shardops.rules.hardware import DEFAULT

MESH = {"dp": 2, "tp": 4}
SIZES = {"b": 8, "s": 512, "k": 4096, "n": 4096, "m": 64, "h": 8, "q": 512, "e": 64}


def planned(
    text: str, lhs: str, rhs: str, out: str | None = None, *, mesh=MESH, **options
) -> Entry:
    """The entry. Options: `sizes` of some dims, and those of `record_of`."""
    parsed = equation.parse(text)
    sizes = {**SIZES, **options.pop("sizes", {})}
    shape = {d: sizes[d] for d in (*parsed.lhs, *parsed.rhs)}
    record = equation.record_of(parsed, shape, mesh, (lhs, rhs, out), **options)
    (entry,) = entries_of(record, DEFAULT, letters=(parsed.lhs, parsed.rhs))
    return entry
