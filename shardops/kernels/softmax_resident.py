"""Launches of the softmax kernels whose rows all blocks of a launch share (resident.py)."""

from shardops.kernels.resident import MANY_WORDS, Parts, Resident, Way
from shardops.kernels.softmax_problem import SoftmaxProblem
from shardops.kernels.softmax_shape import has_clusters
from shardops.kernels.target import Target

_LONG = 1 << 18  # keys


def parts_of(problem: SoftmaxProblem, target: Target) -> Parts:
    return Parts(problem.keys, problem.vector, problem.even, target.sm_count)


def resident_choice(problem: SoftmaxProblem, target: Target, operands: int) -> Resident | None:
    """For rows that see all their keys, in the place of kernels that read them twice."""
    plain = not problem.causal and problem.mask == 0
    if not plain or problem.keys < _LONG or not has_clusters(target):
        return None
    parts = parts_of(problem, target)
    many = (Way(4, 2), Way(4)) if operands == 1 else (Way(4),)
    ways = (Way(2, 4), Way(2, 2)) if parts.words <= MANY_WORDS else many
    return next(parts.choices(operands, target.shared_bytes, ways), None)
