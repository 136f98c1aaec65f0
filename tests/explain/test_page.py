"""The report as a page, and the drawings in it."""

import html.parser
import re

import jax
import pytest
from jax.sharding import NamedSharding

from shardops.explaining.drawing import blocks, drawing, ranges
from shardops.explaining.names import Array
from shardops.explaining.report import Report
from shardops.rules.spec import to_partition_spec
from tests import meshes
from tests.explain.one_product import planned

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Reader(html.parser.HTMLParser):
    """Every tag is closed, in order."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(page):
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert not reader.open
    return reader


def pages():
    row = planned("b s k, k n -> b s n", "dp,,tp", "tp,")
    decode = planned("m k, k n -> m n", ",", "dp,tp")
    return Report((row,)), Report((row, decode), notes=("<b>a note</b>",))


@pytest.mark.parametrize("report", pages(), ids=["one", "two"])
def test_page_parses_and_needs_nothing_else(report):
    page = report.to_html()
    reader = read(page)
    assert page.startswith("<!DOCTYPE html>")
    assert not {t for t, _ in reader.tags} & {"script", "link", "img", "iframe", "object", "base"}
    for _, attributes in reader.tags:
        for name in ("src", "href", "xlink:href", "data"):
            assert attributes.get(name, "#").startswith("#")
    assert not re.search(r"url\(|@import|https?:", page)


def test_page_says_what_the_text_says():
    _, report = pages()
    said = "".join(read(report.to_html()).text)
    for entry in report.entries:
        assert entry.reason in said
        assert entry.suggestion.text[1:] in said
    assert "<b>a note</b>" in said


def test_page_has_a_drawing_of_each_array():
    _, report = pages()
    tags = read(report.to_html()).tags
    drawn = [a["data-array"] for t, a in tags if t == "svg"]
    # the decode product's lhs is drawn as it is offered and as it is used
    assert drawn == ["lhs", "rhs", "out", "lhs", "lhs", "rhs", "out"]


# --- drawings -----------------------------------------------------------------------------------

LAYOUTS = [
    ((8, 16, 32), (("dp",), (), ("tp",))),
    ((8, 16), (("tp", "dp"), ())),
    ((8, 16), ((), ("dp", "tp"))),
    ((8, 16), ((), ())),
    ((16,), (("tp",),)),
    ((), ()),
]


@pytest.mark.parametrize("shape, spec", LAYOUTS)
def test_blocks_are_those_of_jax(shape, spec):
    mesh = meshes.make("auto")
    numbers = {d: n for n, d in enumerate(mesh.devices.flat)}
    placed = NamedSharding(mesh, to_partition_spec(spec)).devices_indices_map(shape)
    want = {}
    for device, index in placed.items():
        bounds = tuple(i.indices(n)[:2] for i, n in zip(index, shape, strict=True))
        want.setdefault(bounds, []).append(numbers[device])
    got = {b.ranges: list(b.devices) for b in blocks(shape, spec, tuple(meshes.SIZES.items()))}
    assert got == {k: sorted(v) for k, v in want.items()}
    assert jax.device_count() >= 8


@pytest.mark.parametrize("shape, spec", LAYOUTS)
def test_drawing_tiles_the_array(shape, spec):
    sizes = tuple(meshes.SIZES.items())
    array = Array("x", tuple("abc"[: len(shape)]))
    reader = read(drawing(array, shape, spec, sizes))
    boxes = [a for t, a in reader.tags if t == "rect"]
    assert len(boxes) == len(blocks(shape, spec, sizes))
    area = sum(float(b["width"]) * float(b["height"]) for b in boxes)
    assert area == pytest.approx(216 * 118, rel=0.01)
    assert len({(b["x"], b["y"]) for b in boxes}) == len(boxes)


def test_a_last_block_may_be_short():
    got = blocks((5,), (("tp",),), (("tp", 4),))
    assert [b.ranges for b in got] == [((0, 2),), ((2, 4),), ((4, 5),), ((5, 5),)]


def test_a_drawing_of_very_many_blocks_counts_them():
    picture = drawing(
        Array("x", ("m", "n")), (4096, 4096), (("a",), ("b",)), (("a", 64), ("b", 64))
    )
    assert picture.count("<rect") == 1
    assert "64 × 64 blocks" in picture


def test_runs_of_devices():
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
