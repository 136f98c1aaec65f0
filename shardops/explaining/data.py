"""A report as plain data."""

import dataclasses
from typing import Any

from shardops import hlo
from shardops.explaining import wording
from shardops.explaining.report import Entry, Held, Report, mesh_sizes
from shardops.rules.step import Step


def as_dict(report: Report) -> dict[str, Any]:
    """Lists, dicts, strings and numbers; specs as lists of lists of axes."""
    return {
        "mesh": mesh_sizes(report.entries),
        "link": dataclasses.asdict(report.link),
        "ops": [_entry(e) for e in report.entries],
        "bytes": report.bytes,
        "microseconds": report.microseconds,
        "compiled_bytes": report.compiled_bytes,
        "collectives": None
        if report.collectives is None
        else [_collective(c) for c in report.collectives],
        "notes": list(report.notes),
    }


def _entry(entry: Entry) -> dict[str, Any]:
    suggested, plain = entry.suggestion, entry.plain
    return {
        "op": entry.name,
        "pass": "backward" if entry.backward else "forward",
        "route": entry.record.route,
        "operands": [_held(a) for a in entry.operands],
        "results": [_held(a) for a in entry.results],
        "steps": [_step(entry, s) for s in entry.steps],
        "bytes": entry.bytes,
        "flops": entry.flops,
        "microseconds": entry.microseconds,
        "product_microseconds": entry.product_microseconds,
        "reason": entry.reason,
        "computed": entry.computed,
        "plain_xla": None
        if plain is None
        else {
            "kinds": None if plain.kinds is None else dict(plain.kinds),
            "bytes": plain.bytes,
            "note": plain.note,
        },
        "suggestion": None
        if suggested is None
        else {
            "array": suggested.array,
            "spec": [list(d) for d in suggested.after],
            "bytes": suggested.bytes,
            "text": suggested.text,
        },
    }


def _held(one: Held) -> dict[str, Any]:
    return {
        "name": one.array.name,
        "dims": list(one.array.dims),
        "dtype": one.dtype,
        "shape": list(one.shape),
        "spec": [list(d) for d in one.spec],
        "used": [list(d) for d in one.used],
    }


def _step(entry: Entry, step: Step) -> dict[str, Any]:
    array = entry.names.called(step.array)
    return {
        "kind": wording.COLLECTIVES[step.kind],
        "array": array.name,
        "axes": list(step.axes),
        "dim": None if step.dim < 0 else wording.dim_name(array, step.dim),
        "to_dim": None if step.to_dim < 0 else wording.dim_name(array, step.to_dim),
        "bytes": step.bytes,
        "microseconds": entry.step_microseconds(step),
    }


def _collective(one: hlo.Collective) -> dict[str, Any]:
    return {
        "kind": one.kind,
        "groups": one.groups,
        "result_bytes": one.bytes,
        "received_bytes": hlo.received_bytes(one),
        "asked_by": hlo.asked_by(one),
    }
