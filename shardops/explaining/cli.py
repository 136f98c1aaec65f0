"""`python -m shardops explain`: one product, without any device."""

import argparse
import json
import sys
from pathlib import Path

from shardops.explaining import equation
from shardops.explaining.report import Report, entries_of
from shardops.explaining.timing import link_named
from shardops.rules.hardware import DEFAULT, LINKS

_EXAMPLE = """\
example:
  python -m shardops explain "b s k, k n -> b s n" --mesh dp=2,tp=4 \\
      --lhs dp,,tp --rhs tp, --out dp,tp, --shape b=8,s=512,k=4096,n=4096
"""

_NO_XLA = "plain XLA is not compared: that needs devices to compile for; use shardops.explain(fn)"


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `explain` to the commands of `python -m shardops`."""
    parser = commands.add_parser(
        "explain",
        help="what one sharded product moves between devices, and why",
        description="What one sharded product moves between devices, and why. Needs no device.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("einsum", help='dims of lhs, rhs and result: "b s k, k n -> b s n"')
    parser.add_argument("--mesh", required=True, metavar="A=N,…", help="mesh axes: dp=2,tp=4")
    parser.add_argument("--shape", required=True, metavar="D=N,…", help="sizes: b=8,s=512,…")
    spec = "an entry a dim, empty for none; axes of one dim joined by +: dp+fsdp,,tp"
    parser.add_argument("--lhs", default="", metavar="SPEC", help=f"spec of lhs: {spec}")
    parser.add_argument("--rhs", default="", metavar="SPEC", help="spec of rhs")
    wanted = "spec wanted of the result, or cheapest; left out: as the operands give it"
    parser.add_argument("--out", default=None, metavar="SPEC", help=wanted)
    like = "batch-like dims, as batch_dims of gemm: b,s"
    parser.add_argument("--batch-dims", default="", metavar="D,…", help=like)
    dtypes = ", ".join(equation.DTYPES)
    parser.add_argument("--dtype", default="bfloat16", help=f"{dtypes} (default: bfloat16)")
    links = f"{', '.join(LINKS)} (default: {DEFAULT.name})"
    parser.add_argument("--link", default=DEFAULT.name, help=links)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with drawings")
    parser.add_argument("--json", action="store_true", help="print plain data instead of text")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report. Returns the exit status: 2 for bad input, which stderr explains."""
    try:
        report = report_of(arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(report.to_dict(), indent=2) if arguments.json else report)
    if arguments.html is not None:
        try:
            arguments.html.write_text(report.to_html(), encoding="utf-8")
        except OSError as error:
            print(f"explain: --html: {error}", file=sys.stderr)
            return 2
    return 0


def report_of(arguments: argparse.Namespace) -> Report:
    """The report that the arguments ask for. Raises ValueError."""
    link = link_named(arguments.link)
    parsed = equation.parse(arguments.einsum)
    record = equation.record_of(
        parsed,
        equation.sizes_of("--shape", arguments.shape),
        equation.sizes_of("--mesh", arguments.mesh),
        (arguments.lhs, arguments.rhs, arguments.out),
        dtype=arguments.dtype,
        batch_like=arguments.batch_dims.replace(",", " ").split(),
    )
    notes = (_NO_XLA,)
    if parsed.out != parsed.computed:
        order = " ".join(parsed.computed)
        notes = (f"the product gives {order}; its dims are then transposed on each device", *notes)
    entries = entries_of(record, link, letters=(parsed.lhs, parsed.rhs))
    return Report(entries, link, None, notes)
