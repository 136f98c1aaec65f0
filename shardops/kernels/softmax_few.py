"""Launches of softmax for few rows, which one block each would leave multiprocessors idle."""

from shardops.kernels.element_types import TYPE_BYTES
from shardops.kernels.sizes import SMALL
from shardops.kernels.softmax_problem import SoftmaxProblem
from shardops.kernels.softmax_shape import Geometry, clusters, has_clusters
from shardops.kernels.target import Target

_WORDS = 4  # a thread
_LEAST = 512  # words of a block
_MOST = 1024
_RESIDENT = (768, 640, 512)  # threads a multiprocessor: of odd rows, with a mask, of both fewer


def few_rows(problem: SoftmaxProblem, target: Target) -> Geometry | None:
    """Small blocks, as many a row as leave four words a thread: loads begin everywhere at once.

    Not of causal rows, of which some see a part: what they would gain was not measured.
    """
    small = problem.rows * problem.keys * TYPE_BYTES[problem.x] <= target.sm_count * SMALL
    if problem.causal or not small or not has_clusters(target):
        return None
    words = problem.whole_words
    parts = max((n for n in clusters(target) if words >= n * _LEAST), default=1)
    part = -(-words // parts)
    if parts == 1 or part > _MOST:
        return None
    threads = -(-part // (32 * _WORDS)) * 32
    crowded = (not problem.even) + (problem.mask > 0)
    return Geometry("registers", threads, parts=parts, min_blocks=_RESIDENT[crowded] // threads)


def spread(problem: SoftmaxProblem, target: Target, least: int) -> int:
    """The most blocks a row that few rows can have, of so many words each at least."""
    parts = 1
    for more in clusters(target)[1:]:
        if more * problem.rows <= target.sm_count and problem.words >= more * least:
            parts = more
    return parts
