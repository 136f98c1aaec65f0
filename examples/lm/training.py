"""Devices, mesh, Adam, and the compiled step and evaluation of one model."""

import contextlib
import math
import os
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardops as so
from shardops import KernelUnavailableError, config
from shardops.layers import presets

from . import plain
from .model import TENSOR_SEQUENCE_PARALLEL, Functional, Sizes, functional
from .options import Options, UsageError, check_mesh, mesh_for

# params, first and second moments, quantizers (the state of delayed scaling), step
State = dict[str, Any]
Batch = tuple[np.ndarray, np.ndarray]
Loss = Callable[[Any, Any, jax.Array, jax.Array], jax.Array]  # of params, quantizers, batch

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


def sharded_model(options: Options, vocabulary: int) -> Functional:
    """The model of the options."""
    sizes = Sizes(options.dim, options.layers, options.heads, options.seq, vocabulary)
    return functional(
        sizes, rules=TENSOR_SEQUENCE_PARALLEL, recipe=options.recipe, dtype=options.dtype
    )


def initial_state(model: Functional, layers: int, seed: int) -> State:
    """Parameters and optimizer state on the host: the same for every mesh."""
    params = _drawn(model.shapes, layers, seed)
    zeros = jax.tree.map(np.zeros_like, params)
    quantizers = jax.tree.map(np.asarray, model.fresh_quantizers())
    return {
        "params": params,
        "first": zeros,
        "second": zeros,
        "quantizers": quantizers,
        "step": np.int32(0),
    }


def _drawn(shapes: Any, layers: int, seed: int) -> Any:
    """Normal, scaled by fan-in; the kernels that write into the stream also by depth."""
    rng = np.random.default_rng(seed)
    into_stream = {"out": (2 * layers) ** -0.5, "down": (2 * layers) ** -0.5, "head": 0.5}

    def draw(path: Any, of: Any) -> np.ndarray:
        *_, module, name = ("", *(entry.key for entry in path))
        if name == "bias":
            return np.zeros(of.shape, np.float32)
        if name == "scale":
            return np.ones(of.shape, np.float32)
        gain = 0.1
        if name == "kernel":
            fan_in = math.prod(of.shape[:2] if module == "out" else of.shape[:1])
            gain = into_stream.get(module, 1.0) / math.sqrt(fan_in)
        return rng.standard_normal(of.shape, np.float32) * np.float32(gain)

    return jax.tree.map_with_path(draw, shapes)


def state_shardings(model: Functional, state: State, mesh: Mesh) -> State:
    """Parameters where the preset's rules put them, moments likewise, the rest everywhere."""
    specs = model.specs()
    whole = jax.tree.map(lambda _: P(), state["quantizers"])
    tree = {"params": specs, "first": specs, "second": specs, "quantizers": whole, "step": P()}
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), tree)


def _adam(state: State, grads: Any, learning_rate: float, warmup: int) -> State:
    """Adam with a warm-up, then 1/sqrt: by the step alone, so that a run can be made longer."""
    step = state["step"] + 1
    t = step.astype(jnp.float32)
    rate = learning_rate * jnp.minimum(t / warmup, jnp.sqrt(warmup / t))
    rate = rate * jnp.sqrt(1 - _BETA2**t) / (1 - _BETA1**t)
    first = jax.tree.map(lambda m, g: _BETA1 * m + (1 - _BETA1) * g, state["first"], grads)
    second = jax.tree.map(lambda v, g: _BETA2 * v + (1 - _BETA2) * g * g, state["second"], grads)
    params = jax.tree.map(
        lambda w, m, v: w - rate * m / (jnp.sqrt(v) + _EPSILON), state["params"], first, second
    )
    return {**state, "params": params, "first": first, "second": second, "step": step}


def step_of(
    loss: Loss, learning_rate: float = _LEARNING_RATE, warmup: int = _WARMUP
) -> Callable[[State, jax.Array, jax.Array], tuple[State, jax.Array]]:
    """One training step: (the next state, the loss before it)."""

    def watched(params: Any, quantizers: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        return loss(params, so.recipes.watch(quantizers), inputs, targets)

    def step(state: State, inputs: jax.Array, targets: jax.Array) -> tuple[State, jax.Array]:
        quantizers = state["quantizers"]
        value, (grads, seen) = jax.value_and_grad(watched, argnums=(0, 1))(
            state["params"], quantizers, inputs, targets
        )
        # Once a step: what the layers saw, forward and backward, decides the next one's scales.
        after = _adam(state, grads, learning_rate, warmup)
        return {**after, "quantizers": so.recipes.update(quantizers, seen)}, value

    return step


def plain_loss(params: Any, quantizers: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    """That of plain jnp, which has no quantizers."""
    del quantizers
    return plain.loss(params, inputs, targets)


class Trainer:
    """One loss compiled for one place.

    places, tokens: where the state is put, and the batches: shardings on the mesh, or a device.
    """

    def __init__(
        self,
        loss: Loss,
        state: State,
        batch: Batch,
        *,
        places: Any,
        tokens: Any,
        mesh: Mesh | None = None,
    ) -> None:
        self._tokens, self._mesh = tokens, mesh
        self.state = jax.device_put(state, places)
        try:
            with self._ambient():
                step = jax.jit(step_of(loss), donate_argnums=0)
                lowered = step.lower(self.state, *self._put(batch))
        except KernelUnavailableError as error:
            raise UsageError(str(error).splitlines()[0]) from error
        self.step_program = lowered.compile()
        self._evaluate = jax.jit(loss)

    def step(self, batch: Batch) -> float:
        """Train on one batch; its loss before the update."""
        self.state, loss = self.step_program(self.state, *self._put(batch))
        # Waiting here also keeps one program in flight: virtual CPU devices share few threads,
        # and two programs could each hold some of the threads that a collective waits for.
        return float(loss)

    def evaluate(self, batches: Iterable[Batch]) -> float:
        params, quantizers = self.state["params"], self.state["quantizers"]
        with self._ambient():
            losses = [
                float(self._evaluate(params, quantizers, *self._put(batch))) for batch in batches
            ]
        return float(np.mean(losses))

    def _put(self, batch: Batch) -> list[jax.Array]:
        return [jax.device_put(array, self._tokens) for array in batch]

    def _ambient(self) -> Any:
        return jax.set_mesh(self._mesh) if self._mesh else contextlib.nullcontext()


def sharded(model: Functional, state: State, mesh: Mesh, batch: Batch) -> Trainer:
    """Of the library's modules, over the mesh."""
    tokens = NamedSharding(mesh, presets.spec(TENSOR_SEQUENCE_PARALLEL, "batch", "sequence"))
    places = state_shardings(model, state, mesh)
    return Trainer(model.loss, state, batch, places=places, tokens=tokens, mesh=mesh)


def unsharded(state: State, device: Any, batch: Batch) -> Trainer:
    """Of plain jnp in float32, on one device."""
    state = {**state, "quantizers": {}}
    return Trainer(plain_loss, state, batch, places=device, tokens=device)
