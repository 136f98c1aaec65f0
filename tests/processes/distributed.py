"""distributed PORT PROCESS ROUTE...: one of two processes that hold four devices each."""

import json
import sys

import jax

from tests.processes import model


def main(port: str, process: str, *routes: str) -> None:
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(process))
    assert (jax.process_count(), jax.device_count(), jax.local_device_count()) == (2, 8, 4)
    for route in routes:
        for tp_major in (False, True):  # dp crosses the processes, then tp
            mesh = model.mesh(route, *((4, 2) if tp_major else (2, 4)), tp_major=tp_major)
            assert mesh is not None
            with jax.set_mesh(mesh):
                model.check(model.step(route)(model.placed(mesh)))
    print(json.dumps("done"))


if __name__ == "__main__":
    main(*sys.argv[1:])
