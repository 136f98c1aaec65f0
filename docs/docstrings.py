"""What autodoc needs to read this project's docstrings, and a check that it has read them all.

Docstrings are written to be read in an editor: equations stand indented without a mark, `Returns:`
and its like go on in the same line, fields of a dataclass have their comment beside them. Napoleon
wants the marks of reStructuredText instead. This runs before it.
"""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

from sphinx.application import Sphinx
from sphinx.util import logging

FIELD = re.compile(r"(Returns|Raises|Sharding|Source): (.*)")
SECTION = re.compile(r"(Args|Attributes):$")
LITERAL = re.compile(r"(``?)(.+?)\1")
ATTRIBUTE = re.compile(r" {4}(\w+): [^#]*?(?:# (.*))?$")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", _process, priority=400)  # napoleon: 500
    app.connect("env-check-consistency", _check_public_names)
    return {"parallel_read_safe": True}


def _process(app: Sphinx, what: str, name: str, of: Any, options: Any, lines: list[str]) -> None:
    if what == "class" and dataclasses.is_dataclass(of) and "Attributes:" not in lines:
        lines += _attributes(of)
    lines[:] = list(_marked(lines))


def _attributes(of: Any) -> Iterator[str]:
    """A section of a dataclass's fields, each with the comment beside it in the source.

    A field without a comment shares that of the one before.
    """
    names = {field.name for field in dataclasses.fields(of)}
    entries: list[tuple[str, str]] = []
    for match in filter(None, map(ATTRIBUTE.match, inspect.getsource(of).splitlines())):
        name, comment = match.groups()
        if name in names and comment:
            entries.append((name, comment))
        elif name in names and entries:
            entries[-1] = (f"{entries[-1][0]}, {name}", entries[-1][1])
    if entries:
        yield from ("", "Attributes:", *(f"  {n}: {comment}" for n, comment in entries), "")


def _marked(lines: list[str]) -> Iterator[str]:
    inside = ""  # a "section", or a "block": an equation or a table
    for line in lines:
        indented, row = line.startswith(" "), line.startswith("|")
        if inside != "section" and (indented or row):
            if inside != "block":
                yield from ("::", "")
            inside = "block"
            yield f"  {line}" if row else line
        elif not line or indented:
            yield _escaped(line)
        else:
            field = FIELD.match(line)
            inside = "section" if field or SECTION.match(line) else ""
            yield f":{field[1]}: {_escaped(field[2])}" if field else _escaped(line)


def _escaped(line: str) -> str:
    """`*` and `|` outside of literals as they stand, and literals with the marks that keep all."""
    parts, end = [], 0
    for literal in LITERAL.finditer(line):
        parts += [re.sub(r"([*|\\])", r"\\\1", line[end : literal.start()]), f"``{literal[2]}``"]
        end = literal.end()
    return "".join([*parts, re.sub(r"([*|\\])", r"\\\1", line[end:])])


def _check_public_names(app: Sphinx, env: Any) -> None:
    """Warn, which fails the build, of a public name that no page documents."""
    import shardops.hlo
    from shardops.layers import linen, nnx

    documented = env.domaindata["py"]["objects"]
    modules = (
        shardops,
        shardops.rules,
        shardops.hlo,
        shardops.recipes,
        shardops.checkpoint_policies,
    )
    for module in (*modules, nnx, linen):
        alike = nnx.__all__ if module is linen else ()  # modules of one name have one page
        for name in sorted({*module.__all__} - {*alike}):
            full = f"{module.__name__}.{name}"
            if full not in documented and not name.startswith("__"):
                logging.getLogger(__name__).warning("%s is public and not in docs/api.md", full)
