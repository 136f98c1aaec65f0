"""A report as one HTML page: no script, no font, no image from elsewhere."""

from collections.abc import Iterator
from html import escape

from shardops.explaining import text, wording
from shardops.explaining.drawing import drawing
from shardops.explaining.report import Entry, Held, Report

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; }
body { padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
table { border-collapse: collapse; margin: .8rem 0; }
th, td { text-align: left; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid #8884; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
figure { display: inline-block; margin: .3rem 1rem .3rem 0; vertical-align: top; }
figcaption { font-size: .85rem; max-width: 15rem; overflow-wrap: anywhere; }
svg .block { stroke: #555; stroke-width: .8; fill: #cde; }
svg .who { font: 11px system-ui, sans-serif; fill: #222; }
svg .dim { font: italic 11px system-ui, sans-serif; fill: currentColor; }
.suggestion { border-left: 4px solid #d90; padding-left: .7rem; }
.note, .plain { opacity: .75; }
"""


def as_page(report: Report) -> str:
    """The whole report as a page."""
    return "".join(_page(report))


def _page(report: Report) -> Iterator[str]:
    yield '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>shardops report</title><style>{_STYLE}</style></head><body>\n"
    yield f"<h1>shardops report</h1><p>{escape(text.title(report))}</p>\n"
    yield f"<p>In all {wording.size(report.bytes)} to each device"
    yield f" in {escape(wording.time(report.microseconds))}.</p>\n"
    yield from (f"<p>{escape(_sentence(line))}</p>\n" for line in text.compiled(report))
    if len(report.entries) > 1:
        yield from _overview(report)
    for number, entry in enumerate(report.entries, 1):
        yield from _section(number, entry)
    yield from (f'<p class="note">{escape(n)}</p>\n' for n in report.notes)
    yield "</body></html>\n"


def _overview(report: Report) -> Iterator[str]:
    yield "<table><thead><tr><th>op</th><th>bytes</th><th>µs</th><th>why</th></tr></thead><tbody>\n"
    for number, entry in enumerate(report.entries, 1):
        name = escape(f"{number}. {text.heading(entry)}")
        yield f'<tr><td><a href="#op{number}">{name}</a></td>'
        yield f'<td class="number">{wording.size(entry.bytes)}</td>'
        yield f'<td class="number">{entry.microseconds:.1f}</td>'
        yield f"<td>{escape(entry.reason)}</td></tr>\n"
    yield "</tbody></table>\n"


def _section(number: int, entry: Entry) -> Iterator[str]:
    yield f'<section id="op{number}"><h2>{number}. {escape(text.heading(entry))}</h2>\n'
    yield f"<p>{escape(entry.reason)}</p>\n"
    if entry.computed is not None:
        yield f"<p>computed {escape(entry.computed)}</p>\n"
    for operand in entry.operands:
        yield _figure(entry, operand)
    for result in entry.results:
        yield _figure(entry, result, "→ ")
    if entry.steps:
        yield "<table><thead><tr><th>step</th><th>bytes</th><th>µs</th></tr></thead><tbody>\n"
        for step in entry.steps:
            yield f"<tr><td>{escape(wording.step(step, entry.names))}</td>"
            yield f'<td class="number">{wording.size(step.bytes)}</td>'
            yield f'<td class="number">{entry.step_microseconds(step):.1f}</td></tr>\n'
        yield "</tbody></table>\n"
    yield f"<p>{escape(_sentence(text.total(entry)))}</p>\n"
    if (plain := text.xla(entry)) is not None:
        yield f'<p class="plain">Plain XLA: {escape(plain)}.</p>\n'
    if entry.suggestion is not None:
        yield f'<p class="suggestion">{escape(_sentence(entry.suggestion.text))}</p>\n'
    yield "</section>\n"


def _figure(entry: Entry, one: Held, mark: str = "") -> str:
    sizes = entry.record.sizes
    pictures = drawing(one.array, one.shape, one.spec, sizes)
    if one.used != one.spec:
        pictures += "<br>used as<br>" + drawing(one.array, one.shape, one.used, sizes)
    caption = f"{mark}{one.array.name} {text.held(one)}"
    return f"<figure>{pictures}<figcaption>{escape(caption)}</figcaption></figure>\n"


def _sentence(words: str) -> str:
    """With a capital letter and a full stop."""
    return f"{words[:1].upper()}{words[1:].removesuffix('.')}."
