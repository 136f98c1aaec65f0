"""The GPU that kernels are compiled and launched for."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax

from shardops import config, errors
from shardops.kernels import occupancy


@dataclass(frozen=True)
class Target:
    """What a launch plan must know of a GPU.

    Args:
      arch: the real architecture, "sm_90".
      sm_count: streaming multiprocessors.
      shared_bytes: most dynamic shared memory that one block can opt in to.
      threads_per_sm: most threads resident on a multiprocessor.
      devices: as CUDA counts them, the GPUs that a launch must suit; none where it is planned for
        GPUs that are not here.
      largest_cluster: the most blocks of a cluster that the GPU has room for, where that is less
        than its architecture has.
    """

    arch: str
    sm_count: int
    shared_bytes: int
    threads_per_sm: int = 2048
    devices: tuple[int, ...] = ()
    largest_cluster: int = 16

    @property
    def cluster_blocks(self) -> int:
        """The most blocks of a cluster; 1 where there are no clusters.

        Data-centre GPUs have more than the portable most.
        """
        if self._capability < 90:
            return 1
        return min(16 if self.data_centre else PORTABLE_CLUSTER, self.largest_cluster)

    @property
    def data_centre(self) -> bool:
        """Whether it is of sm_90 or newer, and below compute capability 12.0."""
        return 90 <= self._capability < 120

    @property
    def early_launches(self) -> bool:
        """Whether a launch may start before what precedes it on the stream has ended."""
        return self._capability >= 90

    def resident_clusters(self, cluster: int, blocks_per_sm: int) -> int:
        """Clusters that run at once where so many blocks share a multiprocessor.

        Of more than two blocks not all that the multiprocessors have room for, and how many differs
        between GPUs of a kind; one more than fits takes a kernel of equal shares twice the time.
        """
        blocks = self.sm_count * blocks_per_sm
        if cluster <= 2:
            return max(1, blocks // cluster)
        shared_bytes = (self.shared_bytes + BLOCK_RESERVE) // blocks_per_sm - BLOCK_RESERVE
        asked = [occupancy.active_clusters(d, cluster, shared_bytes) for d in self.devices]
        found = [count for count in asked if count is not None]
        if len(found) == len(asked) > 0:
            return max(1, min(found))  # plans take no cluster of which not one fits
        return max(1, int(blocks * _SURELY_IN_CLUSTERS) // cluster)

    @property
    def _capability(self) -> int:
        number = self.arch.removeprefix("sm_")
        return int(number) if number.isdigit() else 0


# (shared_bytes, threads_per_sm) by compute capability: CUDA C++ Programming Guide, table
# "Technical Specifications per Compute Capability".
_LIMITS = {
    "sm_80": (166912, 2048),
    "sm_86": (101376, 1536),
    "sm_87": (166912, 1536),
    "sm_89": (101376, 1536),
    "sm_90": (232448, 2048),
    "sm_100": (232448, 2048),
    "sm_103": (232448, 2048),
    "sm_120": (101376, 1536),
    "sm_121": (101376, 1536),
}
# Holds on every architecture since sm_80, so an unknown one gets working, if not best, launches.
_LEAST_LIMITS = (101376, 1536)

_MOST_MULTIPROCESSORS = 1 << 12
BLOCK_RESERVE = 1024  # bytes of a block's shared memory that the system keeps
PORTABLE_CLUSTER = 8  # blocks, for which all have room but slices of fewer multiprocessors
# Of a whole GPU, at most; a cluster lies in one. So one part has an eighth of the multiprocessors.
_PARTS = 8
_SURELY_IN_CLUSTERS = 7 / 8  # of a GPU's blocks: docs/decisions/0024-clusters-that-fit.md

# Part of JAX's own cache keys: a function jitted before is lowered anew inside the context.
_override = jax.make_user_context(None)


def target_for(arch: str, sm_count: int) -> Target:
    """Describes a GPU of which only the architecture and the size are known.

    Args:
      arch: "sm_90".
      sm_count: multiprocessors.
    Raises: ValueError for what names no GPU.
    """
    if not isinstance(arch, str) or not re.fullmatch(r"sm_\w+", arch):
        fix = "Its compute capability without the point follows sm_."
        raise ValueError(errors.wrong("target_for", "arch", errors.shown(arch), "sm_90, say", fix))
    if not isinstance(sm_count, int) or not 1 <= sm_count <= _MOST_MULTIPROCESSORS:
        got, want = errors.shown(sm_count), f"an int of 1 to {_MOST_MULTIPROCESSORS}"
        fix = "An H200 has 132."
        raise ValueError(errors.wrong("target_for", "sm_count", got, want, fix))
    shared_bytes, threads_per_sm = _LIMITS.get(arch, _LEAST_LIMITS)
    return Target(arch, sm_count, shared_bytes, threads_per_sm)


@contextlib.contextmanager
def use_target(target: Target) -> Iterator[None]:
    """Lowers for `target` instead of this machine's GPU: for cross-compilation and tests.

    Raises: TypeError for what is no Target.
    """
    if not isinstance(target, Target):
        got, fix = errors.shown(target), 'Pass target_for("sm_90", 132), say.'
        raise TypeError(errors.wrong("use_target", "target", got, "a Target", fix))
    with _override(target):
        yield


def named_target() -> Target | None:
    """Returns `use_target`'s GPU."""
    return _override.value


def current_target() -> Target:
    """Returns the GPU to lower for: `use_target`'s, else the first CUDA device that JAX has."""
    if (named := named_target()) is not None:
        return named
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError as error:
        raise errors.KernelUnavailableError(
            "kernels: no CUDA device is visible to JAX; expected one to compile for. On a machine "
            "with an NVIDIA GPU, install shardops with its extra cuda13 or cuda12 (in a checkout: "
            "pip install '.[cuda13]'); elsewhere, lower for a named GPU with "
            "shardops.kernels.target.use_target."
        ) from error
    major, minor = device.compute_capability.split(".")
    if int(major) < 8:
        raise NotImplementedError(
            f"kernels: compute capability is {major}.{minor}; expected 8.0 or newer. "
            "Set SHARDOPS_KERNELS= (empty) to run the reference on this GPU."
        )
    # SMs held back are for kernels that run beside ours, collectives say.
    margin = config.get().sm_margin
    target = target_for(f"sm_{major}{minor}", max(1, device.core_count - margin))
    here = jax.local_devices(backend="cuda")
    ordinals = tuple(sorted(one.local_hardware_id for one in here))
    largest = _largest_cluster(target, device.core_count, ordinals)
    target = replace(target, largest_cluster=largest)
    # One program for all GPUs; processes do not see each other's, and plan alike.
    if margin or jax.process_count() > 1:
        return target
    return replace(target, devices=ordinals)


def has_room(cluster: int, sm_count: int) -> bool:
    """Whether a GPU surely runs a cluster of so many blocks; a slice of one may not."""
    return sm_count >= _PARTS * cluster


def _largest_cluster(target: Target, sm_count: int, devices: tuple[int, ...]) -> int:
    """The most blocks of a cluster, each alone on a multiprocessor, of which all GPUs run one."""
    largest = target.cluster_blocks
    while largest > 2 and not has_room(largest, sm_count):
        asked = [occupancy.active_clusters(d, largest, target.shared_bytes) for d in devices]
        if 0 not in asked:  # None: the driver does not tell
            break
        largest //= 2
    return largest
