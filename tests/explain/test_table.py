"""The report as rich tables, and without rich."""

import builtins
import io

import pytest
from rich.console import Console

from shardops.explaining.report import Report
from tests.explain.one_product import planned


def report():
    return Report((planned("b s k, k n -> b s n", "dp,,tp", "tp,"),), notes=("[a note]",))


def test_table_has_the_layouts_the_moves_and_the_reason():
    console = Console(file=io.StringIO(), width=300)
    console.print(report())
    text = console.file.getvalue()
    for part in (
        "1. gemm, forward",
        "lhs bfloat16[b 8@dp, s 512, k 4096@tp]",
        "all-reduce of out over tp",
        "25.2 MB in 106.4 µs",
        "k is sharded over tp on both: partial sums;",
        "sharding rhs's n over tp instead of k saves the all-reduce",
        "note: [a note]",  # what looks like markup stays as it is
    ):
        assert part in text


def test_without_rich_the_text_is_there_and_the_table_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without_rich(name, *args, **kwargs):
        if name.partition(".")[0] == "rich":
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_rich)
    assert "all-reduce" in str(report())
    with pytest.raises(ImportError, match=r"Report\.to_rich: .*pip install rich"):
        report().to_rich()
