"""The command line: options, their defaults, and what is refused before anything starts.

JAX is not imported here, so that a mistyped option is answered at once.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

RECIPES = ("none", "delayed", "current", "block128", "mxfp8")
DTYPES = ("float32", "bfloat16")


class UsageError(Exception):
    """Input that the user has to change: printed as one line, exit code 2."""


@dataclass(frozen=True)
class Options:
    mesh: dict[str, int] | None  # None: chosen from the devices there are
    platform: str
    recipe: str
    dtype: str
    steps: int
    dim: int
    layers: int
    heads: int
    seq: int
    batch: int
    seed: int
    corpus: Path | None  # None: the standard library of the running Python
    out: Path
    resume: bool
    overwrite: bool
    check: bool
    save_every: int

    @property
    def exact(self) -> bool:
        """Whether what is computed differs from plain float32 by rounding alone."""
        return self.recipe == "none" and self.dtype == "float32"

    def identity(self) -> dict[str, int | str]:
        """What decides parameters and data order: a run can only be resumed with the same."""
        names = ("dim", "layers", "heads", "seq", "batch", "seed", "recipe", "dtype")
        return {name: getattr(self, name) for name in names}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _positive(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 up")
    return value


def _natural(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 to 2^32 - 1")
    return int(text)


def _mesh(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name not in ("dp", "tp") or name in sizes or not (size.isdigit() and int(size) >= 1):
            raise argparse.ArgumentTypeError(f"{text!r} is not of the form dp=2,tp=4")
        sizes[name] = int(size)
    return {"dp": sizes.get("dp", 1), "tp": sizes.get("tp", 1)}


def parse(arguments: list[str]) -> Options:
    parser = _Parser(
        prog="train_lm.py",
        description="Train a character model on the source of Python's library, over a mesh.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--mesh", type=_mesh, metavar="dp=2,tp=4", help="mesh; by default dp=2,tp=4 on CPU, "
        "on GPUs as many as divide the sizes")  # fmt: skip
    add("--platform", choices=("auto", "cpu", "cuda"), default="auto", help="where to train")
    add("--recipe", choices=RECIPES, default="none", help="8-bit products of the layers, by what "
        "scales; none: products of the operands as they are")  # fmt: skip
    add("--dtype", choices=DTYPES, default="float32", help="of activations and products; "
        "parameters are float32")  # fmt: skip
    add("--steps", type=_positive, default=400, help="training steps, those before --resume too")
    add("--dim", type=_positive, default=128, help="model width")
    add("--layers", type=_positive, default=2, help="transformer layers")
    add("--heads", type=_positive, default=4, help="attention heads")
    add("--seq", type=_positive, default=128, help="characters in a sequence")
    add("--batch", type=_positive, default=16, help="sequences in a step")
    add("--seed", type=_natural, default=0, help="of the parameters and the data order")
    add("--corpus", type=Path, metavar="DIR", help="train on the .py, .txt and .md files in DIR; "
        "by default Python's standard library")  # fmt: skip
    add("--out", type=Path, default=Path("out/train_lm"), metavar="DIR", help="for checkpoint "
        "and loss.png")  # fmt: skip
    add("--resume", action="store_true", help="continue from the checkpoint in --out")
    add("--overwrite", action="store_true", help="replace the checkpoint in --out")
    add("--no-check", dest="check", action="store_false", help="skip the comparison with plain "
        "jnp on one device")  # fmt: skip
    add("--save-every", type=_natural, default=100, help="steps between checkpoints; 0: at the end")
    options = Options(**vars(parser.parse_args(arguments)))
    _check(options)
    return options


def _check(options: Options) -> None:
    if options.resume and options.overwrite:
        raise UsageError("--resume and --overwrite exclude each other")
    if options.dim % options.heads:
        raise UsageError(f"--dim {options.dim} is not divisible by --heads {options.heads}")
    if options.mesh:
        check_mesh(options, options.mesh)


def check_mesh(options: Options, mesh: dict[str, int]) -> None:
    """Refuse a mesh whose axes do not divide what they shard."""
    for name, axis in (("batch", "dp"), ("heads", "tp"), ("seq", "tp")):
        size = getattr(options, name)
        if size % mesh[axis]:
            raise UsageError(f"--{name} {size} is not divisible by {axis}={mesh[axis]} of --mesh")


def mesh_for(options: Options, devices: int) -> dict[str, int]:
    """The mesh of most devices that divides the sizes; of equals, the largest tp up to 4."""
    best = {"dp": 1, "tp": 1}
    for tp in range(1, min(devices, 4) + 1):
        for dp in range(1, devices // tp + 1):
            mesh = {"dp": dp, "tp": tp}
            try:
                check_mesh(options, mesh)
            except UsageError:
                continue
            if dp * tp >= best["dp"] * best["tp"]:
                best = mesh
    return best
