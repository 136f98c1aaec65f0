"""A report as text."""

from collections.abc import Iterator

from shardops import hlo
from shardops.explaining import wording
from shardops.explaining.compare import Plain
from shardops.explaining.report import Entry, Held, Report, mesh_sizes


def as_text(report: Report) -> str:
    """The whole report; no markup, no colours."""
    return "\n".join(_lines(report))


def title(report: Report) -> str:
    """mesh dp=2, tp=4; nvlink4: 261 GB/s, 4.0 µs and 1.0 µs a hop."""
    sizes = mesh_sizes(report.entries)
    mesh = ", ".join(f"{a}={n}" for a, n in sizes.items()) or "none"
    link = report.link
    start = f"{wording.time(1e6 * link.start)} and " if link.start else ""
    return (
        f"mesh {mesh}; {link.name}: {wording.size(link.rate)}/s, "
        f"{start}{wording.time(1e6 * link.latency)} a hop"
    )


def heading(entry: Entry) -> str:
    """gemm, backward (explicit axes)."""
    routes = {"explicit": " (Explicit axes)", "auto": " (Auto axes)", "alone": " (one device)"}
    route = routes.get(entry.record.route, "")
    return f"{entry.name}, {'backward' if entry.backward else 'forward'}{route}"


def held(one: Held) -> str:
    """lhs  bfloat16[b 8@dp, k 4096], used as b@dp, k@tp."""
    text = wording.typed(one.array, one.dtype, one.shape, one.spec)
    if one.used != one.spec:
        text += f", used as {wording.layout(one.array.dims, one.used)}"
    return text


def total(entry: Entry) -> str:
    """12.6 MB in 55.2 µs; the product 34.4 GFLOP in 43.0 µs."""
    text = f"{wording.size(entry.bytes)} in {wording.time(entry.microseconds)}"
    if not entry.bytes:
        text = "nothing between devices"
    if entry.flops:
        work = wording.operations(entry.flops)
        text += f"; the product {work} in {wording.time(entry.product_microseconds)}"
    return text


def xla(entry: Entry) -> str | None:
    """all-reduce, 25.2 MB (2.0 ×)."""
    plain: Plain | None = entry.plain
    if plain is None:
        return None
    if plain.kinds is None:
        return f"not compared: {plain.note}"
    if not plain.kinds:
        return "moves nothing"
    kinds = wording.listed([k if n == 1 else f"{n} × {k}" for k, n in plain.kinds.items()])
    text = f"{kinds}, {wording.size(plain.bytes)}"
    return f"{text} ({plain.bytes / entry.bytes:.2g} ×)" if entry.bytes else text


def compiled(report: Report) -> Iterator[str]:
    """What the compiled program has, beside what the ops planned."""
    if report.collectives is None or report.compiled_bytes is None:
        return
    other = report.other_collectives
    ours = len(report.collectives) - len(other)
    yield (
        f"compiled program: {wording.size(report.compiled_bytes)} in "
        f"{_counted(ours, 'collective')} of these ops{_difference(report)}"
    )
    if other:
        kinds = wording.listed(list(dict.fromkeys(c.kind for c in other)))
        moved = wording.size(sum(hlo.received_bytes(c) for c in other))
        yield f"besides: {moved} in {_counted(len(other), 'other')} ({kinds})"


def _difference(report: Report) -> str:
    """Two ops that gather one array alike share the gather: backward and forward, for example."""
    more = (report.compiled_bytes or 0.0) - report.bytes
    if abs(more) <= 1e-6 * report.bytes:
        return ""
    if more < 0:
        less = wording.size(-more)
        return f", {less} less than planned: equal collectives are merged, unused ones dropped"
    return f", {wording.size(more)} more than planned: the partitioner's, or in a wider type"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _lines(report: Report) -> Iterator[str]:
    yield f"shardops report: {title(report)}"
    for number, entry in enumerate(report.entries, 1):
        yield ""
        yield f"{number}. {heading(entry)}"
        yield from _rows(entry)
    yield ""
    yield f"total: {wording.size(report.bytes)} in {wording.time(report.microseconds)}"
    yield from compiled(report)
    for note in report.notes:
        yield f"note: {note}"


def _rows(entry: Entry) -> Iterator[str]:
    arrays = [*entry.operands, *entry.results]
    width = max(len("suggestion"), *(len(a.array.name) for a in arrays))
    for one in entry.operands:
        yield f"   {one.array.name:{width}}  {held(one)}"
    for one in entry.results:
        yield f"   {one.array.name:{width}}  {held(one)}"
    for step in entry.steps:
        moved = "no bytes"
        if step.collective:
            moved = f"{wording.size(step.bytes)}, {wording.time(entry.step_microseconds(step))}"
        yield f"   {'step':{width}}  {wording.step(step, entry.names)}: {moved}"
    yield f"   {'moves':{width}}  {total(entry)}"
    yield f"   {'why':{width}}  {entry.reason}"
    if entry.computed is not None:
        yield f"   {'computed':{width}}  {entry.computed}"
    if (plain := xla(entry)) is not None:
        yield f"   {'plain XLA':{width}}  {plain}"
    if entry.suggestion is not None:
        yield f"   {'suggestion':{width}}  {entry.suggestion.text}"
