"""caching ROUTE...: runs the step of each, and prints how often JAX's persistent cache was hit."""

import contextlib
import json
import sys

import jax

from tests.processes import model


def main(*routes: str) -> None:
    events: list[str] = []
    jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
    found = {}
    for route in routes:
        mesh = model.mesh(route, 2, 4)
        with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
            operands = model.placed(mesh)
            step = model.step(route)
            events.clear()
            model.check(jax.block_until_ready(step(operands)))
        counts = {k: sum(e.endswith(f"cache_{k}") for e in events) for k in ("hits", "misses")}
        found[route] = counts
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
