"""Element types as csrc/kernels/elements.cuh knows them, by dtype name."""

TYPE_CODES = {"float32": 0, "bfloat16": 1, "float16": 2}
TYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
