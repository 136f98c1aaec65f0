"""exporting write|call ROUTE DEVICES FILE: writes an exported step, or calls it and checks."""

import contextlib
import json
import sys
from pathlib import Path

import jax
import jax.export

from tests.processes import model

SIZES = {1: (1, 1), 2: (1, 2), 8: (2, 4)}  # devices: dp, tp


def main(what: str, route: str, devices: str, file: str) -> None:
    mesh = model.mesh(route, *SIZES[int(devices)])
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        operands = model.placed(mesh)
        if what == "write":
            blob = jax.export.export(model.step(route))(operands).serialize()
            Path(file).write_bytes(blob)
        else:
            exported = jax.export.deserialize(bytearray(Path(file).read_bytes()))
            assert exported.nr_devices == int(devices)
            model.check(jax.jit(exported.call)(operands))
    print(json.dumps("done"))


if __name__ == "__main__":
    main(*sys.argv[1:])
