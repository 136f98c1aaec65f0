"""Devices, mesh, Adam, and the compiled step and evaluation of one model."""

import contextlib
import math
import os
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardops import KernelUnavailableError, config

from . import model
from .options import Options, UsageError, check_mesh, mesh_for

State = dict[str, Any]  # params, first and second moments, step
Batch = tuple[np.ndarray, np.ndarray]

_DEFAULT_CPU_MESH = {"dp": 2, "tp": 4}
_LEARNING_RATE, _WARMUP = 3e-3, 20
_BETA1, _BETA2, _EPSILON = 0.9, 0.99, 1e-8


def make_mesh(options: Options) -> Mesh:
    """The mesh asked for, on virtual CPU devices or on the GPUs there are."""
    try:
        config.get()
    except ValueError as error:
        raise UsageError(str(error)) from error
    # Both curves in full float32: by default a GPU multiplies float32 matrices in TF32.
    jax.config.update("jax_default_matmul_precision", "float32")
    cpu_mesh = options.mesh or _DEFAULT_CPU_MESH
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", math.prod(cpu_mesh.values()))
    if options.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")  # leaves the GPUs to others
    try:
        devices = jax.devices(None if options.platform == "auto" else options.platform)
    except (RuntimeError, AssertionError) as error:  # an assertion where JAX_PLATFORMS names none
        reason = (str(error).strip() or "JAX finds none").splitlines()[0]
        raise UsageError(f"--platform {options.platform} has no device here: {reason}") from error
    if devices[0].platform == "cpu":
        sizes = cpu_mesh
    else:
        sizes = options.mesh or mesh_for(options, len(devices))
    check_mesh(options, sizes)
    count = math.prod(sizes.values())
    if count > len(devices):
        raise UsageError(
            f"--mesh dp={sizes['dp']},tp={sizes['tp']} needs {count} devices, "
            f"there are {len(devices)} ({devices[0].platform})"
        )
    shape, names = (sizes["dp"], sizes["tp"]), ("dp", "tp")
    return jax.make_mesh(shape, names, (AxisType.Explicit,) * 2, devices=devices[:count])


def initial_state(options: Options, vocabulary: int) -> State:
    """Parameters and optimizer state on the host: the same for every mesh."""
    params = model.parameters(
        dim=options.dim,
        layers=options.layers,
        heads=options.heads,
        seq=options.seq,
        vocabulary=vocabulary,
        seed=options.seed,
    )
    zeros = jax.tree.map(np.zeros_like, params)
    return {"params": params, "first": zeros, "second": zeros, "step": np.int32(0)}


def state_shardings(mesh: Mesh, layers: int) -> State:
    specs = model.specs(layers)
    tree = {"params": specs, "first": specs, "second": specs, "step": P()}
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), tree)


def _adam(state: State, grads: Any) -> State:
    """Adam with a warm-up, then 1/sqrt: by the step alone, so that a run can be made longer."""
    step = state["step"] + 1
    t = step.astype(jnp.float32)
    rate = _LEARNING_RATE * jnp.minimum(t / _WARMUP, jnp.sqrt(_WARMUP / t))
    rate = rate * jnp.sqrt(1 - _BETA2**t) / (1 - _BETA1**t)
    first = jax.tree.map(lambda m, g: _BETA1 * m + (1 - _BETA1) * g, state["first"], grads)
    second = jax.tree.map(lambda v, g: _BETA2 * v + (1 - _BETA2) * g * g, state["second"], grads)
    params = jax.tree.map(
        lambda w, m, v: w - rate * m / (jnp.sqrt(v) + _EPSILON), state["params"], first, second
    )
    return {"params": params, "first": first, "second": second, "step": step}


class Trainer:
    """One model compiled for one place: a mesh, or (mesh None) one device in plain jnp."""

    def __init__(self, mesh: Mesh | None, device: Any, state: State, example: Batch) -> None:
        ops = model.SHARDED if mesh else model.PLAIN
        self._mesh = mesh
        self._batch_sharding = NamedSharding(mesh, ops.tokens) if mesh and ops.tokens else device
        self.state = jax.device_put(
            state, state_shardings(mesh, len(state["params"]["layers"])) if mesh else device
        )

        def step(state: State, inputs: jax.Array, targets: jax.Array) -> tuple[State, jax.Array]:
            loss, grads = jax.value_and_grad(model.loss)(state["params"], inputs, targets, ops)
            return _adam(state, grads), loss

        def evaluate(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
            return model.loss(params, inputs, targets, ops)

        batch = self._put(example)
        try:
            with self._ambient():
                lowered = jax.jit(step, donate_argnums=0).lower(self.state, *batch)
        except KernelUnavailableError as error:
            raise UsageError(str(error).splitlines()[0]) from error
        self.step_program = lowered.compile()
        self._evaluate = jax.jit(evaluate)

    def step(self, batch: Batch) -> float:
        """Train on one batch; its loss before the update."""
        self.state, loss = self.step_program(self.state, *self._put(batch))
        # Waiting here also keeps one program in flight: virtual CPU devices share few threads,
        # and two programs could each hold some of the threads that a collective waits for.
        return float(loss)

    def evaluate(self, batches: Iterable[Batch]) -> float:
        params = self.state["params"]
        with self._ambient():
            losses = [float(self._evaluate(params, *self._put(batch))) for batch in batches]
        return float(np.mean(losses))

    def _put(self, batch: Batch) -> list[jax.Array]:
        return [jax.device_put(array, self._batch_sharding) for array in batch]

    def _ambient(self) -> Any:
        return jax.set_mesh(self._mesh) if self._mesh else contextlib.nullcontext()
