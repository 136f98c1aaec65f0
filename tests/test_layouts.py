"""Seventy everyday layouts: bytes that a device receives, in compiled HLO, against the fewest
possible at the same FLOPs, and against XLA's partitioner."""

import pytest

from tests.layout_programs import WITHIN, auto, bound, explicit, xla
from tests.layouts import FREE, LAYOUTS, WANTED, shown

AUTO_MISSES = 1  # layouts with a wanted result that may miss the bound on Auto axes


def layouts(chosen):
    return pytest.mark.parametrize("layout", chosen, ids=[layout.name for layout in chosen])


def test_there_are_seventy_layouts():
    assert (len(WANTED), len(FREE)) == (57, 13)
    assert len({layout.name for layout in LAYOUTS}) == 70
    assert all(layout.wanted is not None for layout in WANTED)
    assert all(layout.wanted is None for layout in FREE)


# --- a wanted result ----------------------------------------------------------------------------


@layouts(WANTED)
def test_explicit_meets_the_bound_and_its_plan(layout):
    program = explicit(layout)
    least = bound(layout, layout.wanted, program.flops)
    assert least <= program.received <= WITHIN * least
    assert program.received == program.planned
    assert program.out == layout.wanted
    assert program.received <= xla(layout, layout.wanted).received


def test_auto_meets_the_bound():
    programs = {layout: auto(layout) for layout in WANTED}
    missed = {
        layout.name: program.received / bound(layout, layout.wanted, program.flops)
        for layout, program in programs.items()
        if not program.meets(bound(layout, layout.wanted, program.flops))
    }
    assert len(missed) <= AUTO_MISSES, missed


@layouts(WANTED)
def test_auto_is_not_above_xla(layout):
    assert auto(layout).received <= xla(layout, layout.wanted).received


# --- a free result ------------------------------------------------------------------------------


@layouts(FREE)
def test_auto_meets_the_bound_of_the_propagated_result(layout):
    program = auto(layout)
    least = bound(layout, program.out, program.flops)
    assert least <= program.received <= WITHIN * least, shown(program.out)
    assert program.received <= xla(layout, program.out).received


@layouts(FREE)
def test_explicit_meets_the_bound_of_its_type(layout):
    program = explicit(layout)
    least = bound(layout, program.out, program.flops)
    assert least <= program.received <= WITHIN * least, shown(program.out)
    assert program.received == program.planned
    assert program.received <= xla(layout, program.out).received


@layouts(FREE)
def test_cheapest_meets_the_bound_of_any_result(layout):
    program = explicit(layout, "cheapest")
    least = bound(layout, None, program.flops)
    assert least <= program.received <= WITHIN * least, shown(program.out)
    assert program.received == program.planned
    assert program.received <= xla(layout, program.out).received


# --- the yardsticks -----------------------------------------------------------------------------


@layouts(LAYOUTS)
def test_no_program_of_xla_is_below_the_bound(layout):
    program = xla(layout, layout.wanted)
    assert bound(layout, program.out, program.flops) <= program.received


def test_the_bound_is_no_matter_of_course():
    """XLA receives a multiple of it on many layouts: a planner that did as XLA would fail here."""
    above = [
        layout.name
        for layout in WANTED
        if not xla(layout, layout.wanted).meets(
            bound(layout, layout.wanted, xla(layout, layout.wanted).flops)
        )
    ]
    assert len(above) > 15, above
