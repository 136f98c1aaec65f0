"""Two processes of four devices each, through jax.distributed, as one mesh of eight."""

import socket

import pytest

from tests.processes.start import finish, start


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]


@pytest.mark.parametrize("routes", [("auto", "mixed"), ("explicit", "shard_map", "partly manual")])
def test_two_processes_agree_with_float64(routes):
    """Loss and gradients of a norm and two products, with sums that cross the processes."""
    port = free_port()
    settings = {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    finish(*(start("distributed", port, n, *routes, devices=4, **settings) for n in range(2)))
