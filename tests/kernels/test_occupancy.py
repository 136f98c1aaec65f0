"""How many clusters a plan takes to fit: what the GPUs say, or where none is here, fewer."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from shardops import config
from shardops.kernels import occupancy, target
from shardops.kernels.families import DTYPES, FAMILIES, Request
from shardops.kernels.norm_plan import backward_plan
from shardops.kernels.norm_problem import NormProblem
from shardops.kernels.norm_staged import Staged
from shardops.kernels.target import current_target, target_for

LENGTHS = (4096, 8192, 16384, 20001, 32768, 40001, 65536, 131072, 262144)
NOWHERE = target_for("sm_90", 132)


@pytest.fixture
def answers(monkeypatch):
    """What each GPU of this machine says to (blocks of a cluster, bytes of one): here to be set."""
    of_device: dict[int, dict[tuple[int, int], int]] = {}
    monkeypatch.setattr(
        occupancy, "active_clusters", lambda device, *asked: of_device[device].get(asked)
    )
    return of_device


def test_clusters_are_as_many_as_fit_on_the_worst_gpu(answers):
    answers |= {0: {(8, 232448): 16, (4, 115712): 64}, 3: {(8, 232448): 15, (4, 115712): 62}}
    here = replace(NOWHERE, devices=(0, 3))
    assert here.resident_clusters(8, 1) == 15
    assert here.resident_clusters(4, 2) == 62
    assert here.resident_clusters(2, 1) == 66  # always
    assert here.resident_clusters(1, 2) == 264


def test_clusters_are_surely_few_where_a_gpu_does_not_tell(answers):
    answers |= {0: {(8, 232448): 16}, 1: {}}
    silent = replace(NOWHERE, devices=(0, 1))
    for unknown in (NOWHERE, silent):
        assert [unknown.resident_clusters(n, 1) for n in (2, 4, 8, 16)] == [66, 28, 14, 7]
    assert target_for("sm_90", 1).resident_clusters(16, 1) == 1


@pytest.fixture
def gpus(monkeypatch):
    """GPUs that JAX has: here to be filled."""
    found: list[SimpleNamespace] = []
    monkeypatch.setattr(jax, "devices", lambda backend: found)
    monkeypatch.setattr(jax, "local_devices", lambda backend: found)
    return found


def of(sm_count, number=0, capability="9.0"):
    return SimpleNamespace(
        compute_capability=capability, core_count=sm_count, local_hardware_id=number
    )


@pytest.mark.parametrize(
    "found, largest",
    [
        ({0: {16: 1}, 1: {16: 1}}, 16),
        ({0: {16: 1}, 1: {16: 0, 8: 1}}, 8),
        ({0: {16: 0, 8: 0, 4: 0}, 1: {16: 1, 8: 2, 4: 3}}, 2),
        ({0: {}, 1: {}}, 16),  # neither tells
    ],
    ids=str,
)
def test_slices_of_gpus_are_asked_for_the_largest_clusters_that_they_run(
    answers, gpus, found, largest
):
    answers |= {
        gpu: {(cluster, NOWHERE.shared_bytes): count for cluster, count in of_one.items()}
        for gpu, of_one in found.items()
    }
    gpus += [of(16, 0), of(16, 1)]
    assert current_target().cluster_blocks == largest


def test_whole_gpus_are_not_asked_whether_they_run_a_cluster(answers, gpus):
    gpus.append(of(132))  # of which `answers` has none
    assert current_target().cluster_blocks == 16
    gpus[:] = [of(108, capability="8.0")]
    assert current_target().cluster_blocks == 1


def cluster_of(launches) -> int:
    return max(launch.cluster[0] for launch in launches)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "softmax", "layer_norm_quantized"])
def test_plans_take_no_larger_clusters_than_a_gpu_runs(op):
    whole = target_for("sm_90", 16)
    seen = set()
    for length, dtype, add in itertools.product(LENGTHS, DTYPES, ["no", "yes"]):
        options = (("add", add),) if "add" in FAMILIES[op].options else ()
        if op == "layer_norm_quantized":
            options += (("layout", "both"),)
        request = Request(op, length, dtype, options=options)
        plans = [
            FAMILIES[op].launches(request, 1024, replace(whole, largest_cluster=most))
            for most in (16, 8, 4, 2)
        ]
        clusters = [cluster_of(plan) for plan in plans]
        assert all(n <= most for n, most in zip(clusters, (16, 8, 4, 2), strict=True))
        seen |= {*clusters}
    assert seen >= {1, 2, 4, 8} | ({16} - {16 * (op == "layer_norm_quantized")})


def test_an_answer_of_no_cluster_is_one(answers):
    """Of a geometry that is given: what the driver then says of the launch is an error."""
    answers[0] = {(16, 232448): 0}
    assert replace(NOWHERE, devices=(0,)).resident_clusters(16, 1) == 1


def test_a_plan_launches_what_fits_of_the_same_kernel(answers):
    """So a pack that was filled elsewhere serves every GPU of the architecture."""
    answers[0] = {(8, 232448): 13}
    problem = NormProblem(1024, 65536, "rms", "bfloat16", "bfloat16")
    shape = Staged(512, 512, 4, cluster=8)
    here = backward_plan(problem, replace(NOWHERE, devices=(0,)), shape)
    elsewhere = backward_plan(problem, NOWHERE, shape)
    assert (here.main.grid[0], here.workspace[1]) == (13 * 8, 13)
    assert (elsewhere.main.grid[0], elsewhere.workspace[1]) == (14 * 8, 14)
    assert here.main.kernel == elsewhere.main.kernel
    assert here.finish.kernel == elsewhere.finish.kernel


@pytest.mark.parametrize(
    "margin, processes, devices", [(0, 1, (0, 1)), (4, 1, ()), (0, 2, ())], ids=str
)
def test_gpus_are_asked_where_one_process_sees_all_and_uses_all(
    margin, processes, devices, gpus, monkeypatch
):
    gpus += [of(132, 1), of(132, 0)]
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    settings = replace(config.get(), sm_margin=margin)
    monkeypatch.setattr(target.config, "get", lambda: settings)
    found = current_target()
    assert (found.sm_count, found.devices) == (132 - margin, devices)


def test_a_machine_without_a_driver_tells_nothing(monkeypatch):
    def missing(name):
        raise occupancy.KernelUnavailableError(name)

    monkeypatch.setattr(occupancy.library, "find_library", missing)
    occupancy.active_clusters.cache_clear()
    assert occupancy.active_clusters(0, 8, 232448) is None
    occupancy.active_clusters.cache_clear()


@pytest.mark.parametrize("status, clusters", [(0, 0), (912, 0), (1, None)])
def test_a_driver_may_refuse_the_size_of_a_cluster_or_not_answer(status, clusters, monkeypatch):
    class Driver:
        def __getattr__(self, name: str):
            return lambda *_: status if name == "cuOccupancyMaxActiveClusters" else 0

    monkeypatch.setattr(occupancy.library, "find_library", lambda name: name)
    monkeypatch.setattr(occupancy.ctypes, "CDLL", lambda path: Driver())
    occupancy.active_clusters.cache_clear()
    assert occupancy.active_clusters(0, 16, 232448) == clusters
    occupancy.active_clusters.cache_clear()
