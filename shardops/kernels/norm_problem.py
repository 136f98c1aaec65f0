"""What a norm's launch depends on."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from shardops.kernels.element_types import TYPE_BYTES, TYPE_CODES
from shardops.kernels.sizes import SMALL

# Registers of a row that a thread has at most; of more it takes minutes to compile a kernel, which
# would keep them in local memory.
MOST_HELD = 128


@dataclass(frozen=True)
class NormProblem:
    """What a norm's launch depends on; all of it is static.

    Args:
      x, gamma, beta: dtype names; beta is None where there is none.
      add: forward: a residual is added first; backward: its cotangent is added last.
    """

    rows: int
    cols: int
    kind: Literal["layer", "rms"]
    x: str
    gamma: str
    beta: str | None = None
    add: bool = False
    zero_centered: bool = False

    @property
    def vector(self) -> int:
        """Elements in the widest word that cuts every row evenly."""
        length = self.word
        while self.cols % length:
            length //= 2
        return length

    @property
    def word(self) -> int:
        """Elements of 16 bytes."""
        return 16 // TYPE_BYTES[self.x]

    @property
    def vectors(self) -> int:
        return self.cols // self.vector

    @property
    def covered(self) -> "NormProblem":
        """The same with rows as long as the words of 16 bytes that cover one of this."""
        words = (self.cols + 2 * self.word - 2) // self.word
        return replace(self, cols=words * self.word) if self.vector < self.word else self

    @property
    def sums(self) -> int:
        """Parameter gradients: dgamma, and dbeta where there is a beta."""
        return 1 + (self.beta is not None)

    def registers(self, dtype: str) -> int:
        """32-bit registers that one vector of `dtype` takes."""
        return max(1, self.vector * TYPE_BYTES[dtype] // 4)

    @property
    def parameter_registers(self) -> int:
        """Those that one vector of the wider of gamma and beta takes."""
        return max(self.registers(dtype) for dtype in (self.gamma, self.beta or self.gamma))


def constants_of(problem: NormProblem, vector: int) -> tuple[tuple[str, int], ...]:
    """The macros that every norm kernel is specialised by."""
    return (
        ("COLS", problem.cols),
        ("VECTOR", vector),
        ("X_TYPE", TYPE_CODES[problem.x]),
        ("GAMMA_TYPE", TYPE_CODES[problem.gamma]),
        ("BETA_TYPE", TYPE_CODES[problem.beta or "float32"]),
        ("LAYER", int(problem.kind == "layer")),
        ("HAS_BETA", problem.sums - 1),
        ("HAS_ADD", int(problem.add)),
        ("ZERO_CENTERED", int(problem.zero_centered)),
    )


def rows_to_next_place(problem: NormProblem) -> int:
    """After so many rows, one starts again at the same place of a word of 16 bytes."""
    return 16 // math.gcd(16, problem.cols * TYPE_BYTES[problem.x])


def is_small(problem: NormProblem, sm_count: int) -> bool:
    """Whether x is 64 KiB a multiprocessor at most.

    Of partial sums a launch for many rows would write as many bytes as x has.
    """
    return problem.rows * problem.cols * TYPE_BYTES[problem.x] <= sm_count * SMALL


def register_limit(resident_threads: int) -> int:
    """Registers a thread may have: warps are dealt to 4 schedulers, 512 registers a lane each."""
    warps_per_scheduler = -(-resident_threads // 128)
    return min(255, 512 // warps_per_scheduler // 8 * 8)
