"""The brute-force bound itself: its moves against devices that hold sets of elements, its paths
against what has to arrive, and cases whose least is known."""

import itertools
from math import inf

import pytest

from tests.rules import brute_force
from tests.rules.brute_force import Array, Product, State, bound, cheapest, layouts, moves, path
from tests.rules.index_sets import Devices

TWO = (("dp", 2), ("tp", 4))
THREE = (("a", 2), ("b", 2), ("c", 2))
BYTES = 4


def subsets(mesh):
    names = [name for name, _ in mesh]
    return [frozenset(c) for n in range(len(names) + 1) for c in itertools.combinations(names, n)]


def states(shape, mesh, pending):
    """Every state on the way from a product with `pending` sums."""
    return [
        State(spec, left)
        for left in subsets(mesh)
        if left <= pending
        for spec in layouts(shape, mesh)
        if not left & {a for axes in spec for a in axes}
    ]


SMALL = [
    ((8, 8), TWO),
    ((4, 2, 8), TWO),
    ((6, 8), TWO),
    ((6, 8), THREE),
    ((8, 8), (("dp", 2), ("one", 1), ("tp", 2))),
]
small = pytest.mark.parametrize(("shape", "mesh"), SMALL)


# --- moves --------------------------------------------------------------------------------------


@small
def test_moves_do_what_they_say_and_receive_what_they_cost(shape, mesh):
    kinds = set()
    for pending in subsets(mesh):
        devices = Devices(mesh, shape, pending)
        for state in states(shape, mesh, pending):
            held = devices.holding(state)
            for move in moves(Array(shape, BYTES), mesh, state):
                after, received = devices.run(held, move)
                assert after == devices.holding(move.after), move
                assert received * BYTES == pytest.approx(move.received) or _stays(move, held, after)
                kinds.add(move.kind)
    assert kinds == {"slice", "all_gather", "all_to_all", "ppermute", "psum", "psum_scatter"}


def _stays(move, held, after):
    """An axis of size 1 is renamed: the formula counts a permute that moves nothing."""
    return move.kind == "ppermute" and held == after


def test_layouts_are_every_placement_of_the_axes_once():
    found = layouts((64, 64), TWO)
    dp, tp = ("dp",), ("tp",)
    both = ("dp", "tp")
    flat = {((), ()), (dp, ()), ((), dp), (tp, ()), ((), tp), (dp, tp), (tp, dp)}
    stacked = {(both, ()), ((), both), (both[::-1], ()), ((), both[::-1])}
    assert set(found) == flat | stacked
    assert len(found) == len(flat | stacked)
    assert len(layouts((64, 64, 64), THREE)) == len(set(layouts((64, 64, 64), THREE))) == 106
    assert set(layouts((3, 2), TWO)) == {((), ()), ((), dp)}


# --- paths --------------------------------------------------------------------------------------


@small
def test_no_move_shortens_a_cheapest_path(shape, mesh):
    """Dijkstra's own certificate: no edge improves, and each distance is that of its path."""
    array = Array(shape, BYTES)
    for start in states(shape, mesh, frozenset({mesh[-1][0]})):
        best = cheapest(array, mesh, start)
        for state, (cost, _) in best.items():
            assert sum(m.received for m in path(array, mesh, start, state)) == pytest.approx(cost)
            for move in moves(array, mesh, state):
                assert best[move.after][0] <= cost + move.received


@small
def test_paths_arrive_and_receive_at_least_what_was_missing(shape, mesh):
    array = Array(shape, BYTES)
    for pending in (frozenset(), frozenset({mesh[-1][0]})):
        devices = Devices(mesh, shape, pending)
        for start in (State(spec, pending) for spec in layouts(shape, mesh)):
            if pending & {a for axes in start.spec for a in axes}:
                continue
            for end, (cost, _) in cheapest(array, mesh, start).items():
                held = before = devices.holding(start)
                for move in path(array, mesh, start, end):
                    held, _ = devices.run(held, move)
                assert held == devices.holding(end)
                missing = max(len(held[d].keys() - before[d].keys()) for d in devices.all)
                assert cost >= missing * BYTES


def test_every_layout_is_reached_from_every_other():
    for spec in layouts((8, 8), THREE):
        assert {s.spec for s in cheapest(Array((8, 8)), THREE, State(spec))} == {
            *layouts((8, 8), THREE)
        }


# --- known cases --------------------------------------------------------------------------------

M, N, K = 16, 32, 64
GEMM = Product(Array((M, K)), Array((K, N)), ((1,), (0,)), TWO)
DP, TP, ALL, NONE = ("dp",), ("tp",), ("dp", "tp"), ()


def known(lhs, rhs, wanted, at_flops=inf):
    return bound(GEMM, lhs, rhs, wanted, at_flops)


@pytest.mark.parametrize(
    ("lhs", "rhs", "wanted", "least"),
    [
        pytest.param((DP, NONE), (NONE, TP), (DP, TP), 0, id="column parallel"),
        pytest.param((DP, TP), (TP, NONE), (DP, TP), 3 / 4 * M // 2 * N, id="row, scattered"),
        pytest.param((DP, TP), (TP, NONE), (DP, NONE), 2 * 3 / 4 * M // 2 * N, id="row, summed"),
        pytest.param((DP, TP), (TP, NONE), None, 3 / 4 * M // 2 * N, id="row, free"),
        pytest.param((ALL, NONE), (NONE, TP), (DP, TP), 3 / 4 * M // 2 * K, id="rows gathered"),
        pytest.param((NONE, DP), (DP, TP), (NONE, TP), M * N // 4, id="2-D weight, few rows"),
        pytest.param((NONE, ALL), (ALL, NONE), (ALL, NONE), 7 / 8 * M * N, id="K over both"),
        pytest.param((NONE, NONE), (NONE, NONE), (DP, TP), 0, id="copies are sliced"),
        pytest.param((NONE, TP), (TP, DP), (TP, DP), 3 / 4 * M * N // 2, id="scatter over rows"),
    ],
)
def test_bound_of_known_cases(lhs, rhs, wanted, least):
    assert known(lhs, rhs, wanted) == BYTES * least


def test_bound_falls_with_the_flops_that_are_allowed():
    """Plain FSDP weights, many rows: tp multiplies copies, or the result is gathered over it."""
    rows = 16 * M
    product = Product(Array((rows, K)), Array((K, N)), ((1,), (0,)), TWO)
    work = 2 * rows * N * K

    def least(at_flops):
        return bound(product, (DP, NONE), (DP, NONE), (DP, NONE), at_flops)

    gathered = BYTES * K * N // 2
    assert least(work / 2) == least(inf) == gathered
    # tp shares the columns, of which a device then gathers a quarter of the weight only
    assert least(work / 8) == gathered / 4 + BYTES * 3 / 4 * rows // 2 * N
    assert least(work / 16) == inf


def test_bound_of_a_batched_product():
    """Experts over ep: tokens come to their expert by one all-to-all."""
    tokens, weights = Array((4, 8, 16)), Array((4, 16, 32))
    mesh = (("dp", 2), ("ep", 4))
    experts = Product(tokens, weights, ((2,), (1,)), mesh, batch=((0,), (0,)))
    ep, none = ("ep",), ()
    local = bound(experts, (ep, DP, none), (ep, none, none), (ep, DP, none))
    assert local == 0
    arriving = bound(experts, (none, ep, none), (ep, none, none), (ep, none, none))
    assert arriving == BYTES * 3 / 4 * (4 * 8 * 16 / 4)
    # expert weights lie apart and the tokens everywhere: the result is gathered, less than weights
    everywhere = bound(experts, (none, none, none), (ep, none, none), (none, none, none))
    assert everywhere == BYTES * 3 / 4 * (4 * 8 * 32)


def test_products_have_no_axis_on_two_dims():
    for local in brute_force.products(GEMM):
        used = [a for axes in local.out.spec for a in axes] + [*local.out.pending]
        assert len(used) == len(set(used))
        assert local.flops == 2 * M * N * K / (2 ** ("dp" in used) * 4 ** ("tp" in used))
