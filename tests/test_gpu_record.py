"""What the record of GPU tests takes from runs of a part of them."""

import json

import pytest

from tests.gpu import record

WHOLE = {"tests/gpu/a.py::one": "passed", "tests/gpu/a.py::two": "failed"}


@pytest.fixture
def written(monkeypatch, tmp_path):
    """Runs in turn (outcomes, whole, sources, machine), and what is kept."""

    def run(*runs):
        outcomes = tmp_path / "out" / "outcomes.json"
        monkeypatch.setattr(record, "OUTCOMES", outcomes)
        for results, whole, sources, machine in runs:
            monkeypatch.setattr(record, "digest", lambda s=sources: s)
            monkeypatch.setattr(record, "machine", lambda m=machine: {"device": m})
            record.keep_outcomes(results, whole=whole)
        return json.loads(outcomes.read_text())

    return run


def test_a_part_after_a_whole_run_replaces_its_outcomes(written) -> None:
    again = {"tests/gpu/a.py::two": "passed"}
    kept = written((WHOLE, True, "s", "gpu"), (again, False, "s", "gpu"))
    assert kept["whole"]
    assert kept["outcomes"] == dict.fromkeys(WHOLE, "passed")


@pytest.mark.parametrize(("sources", "machine"), [("other", "gpu"), ("s", "other")])
def test_a_part_on_other_sources_or_another_machine_is_a_part(written, sources, machine) -> None:
    again = {"tests/gpu/a.py::two": "passed"}
    kept = written((WHOLE, True, "s", "gpu"), (again, False, sources, machine))
    assert not kept["whole"]
    assert kept["outcomes"] == again


def test_a_part_alone_is_a_part(written) -> None:
    assert not written((WHOLE, False, "s", "gpu"))["whole"]


def test_the_record_keeps_what_several_gpus_gave(monkeypatch, tmp_path) -> None:
    """Its own sources and machine, and until they run again; which of the two is stale is said."""
    monkeypatch.setattr(record, "ROOT", tmp_path)
    for name in ("RECORD", "OUTCOMES", "SEVERAL_OUTCOMES"):
        monkeypatch.setattr(record, name, tmp_path / "out" / name)

    def run(outcomes, sources, count, *, several=False):
        monkeypatch.setattr(record, "digest", lambda: sources)
        monkeypatch.setattr(record, "machine", lambda: {"device": "gpu", "devices": count})
        record.keep_outcomes(outcomes, whole=True, several=several)

    passed = dict.fromkeys(WHOLE, "passed")
    run(passed, "before", 4, several=True)
    run(passed, "now", 1)
    assert record.write() == 0
    record.SEVERAL_OUTCOMES.unlink()
    run(WHOLE, "now", 2, several=True)
    assert record.write() == 0  # what failed since does not replace what passed
    kept = json.loads(record.RECORD.read_text())
    assert kept["sources"] == "now"
    assert (kept["several"]["sources"], kept["several"]["machine"]["devices"]) == ("before", 4)
    line, current = record.check()
    assert current
    assert "current (2 tests on gpu" in line.split("; ")[0]
    assert line.split("; ")[1].startswith("on 4: stale")


def test_a_run_on_several_gpus_alone_leaves_what_one_gave(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(record, "ROOT", tmp_path)
    for name in ("RECORD", "OUTCOMES", "SEVERAL_OUTCOMES"):
        monkeypatch.setattr(record, name, tmp_path / "out" / name)
    monkeypatch.setattr(record, "machine", lambda: {"device": "gpu", "devices": 2})
    monkeypatch.setattr(record, "digest", lambda: "before")
    assert record.write() == 1  # nothing has run
    record.keep_outcomes(dict.fromkeys(WHOLE, "passed"), whole=True)
    assert record.write() == 0
    monkeypatch.setattr(record, "digest", lambda: "now")
    record.keep_outcomes(WHOLE, whole=True)  # one fails
    assert record.write() == 1
    record.keep_outcomes({"tests/multi_gpu/b.py::one": "passed"}, whole=True, several=True)
    assert record.write() == 0
    kept = json.loads(record.RECORD.read_text())
    assert (kept["sources"], kept["several"]["sources"]) == ("before", "now")
    line, current = record.check()
    assert not current
    assert "stale" in line.split("; ")[0]
    assert "current" in line.split("; ")[1]
