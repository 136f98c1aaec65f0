"""Algorithms of GEMMs in a run of two processes whose caches differ."""

from tests.processes.start import finish, start
from tests.processes.test_distributed import free_port


def test_two_processes_take_the_same_algorithms(tmp_path):
    """Both take one process's, or the heuristic's where that one had none; nothing is timed."""

    def both(*port):
        folders = [{"SHARDOPS_CACHE_DIR": str(tmp_path / str(n))} for n in range(2)]
        return finish(*(start("tuning", n, *port, devices=1, **folders[n]) for n in range(2)))

    assert both() == [[1, 1, 1], [2, 2]]
    first, second = both(free_port())
    assert first == second
    assert first[0] in (1, None)  # the other process had nothing
    assert all(chosen in (1, 2) for chosen in first[1:3])
    assert first[3] is None
