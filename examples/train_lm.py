"""Train a small character model, tensor-, sequence- and data-parallel, and compare with plain jnp.

    python examples/train_lm.py                      8 virtual CPU devices, or the GPUs there are
    python examples/train_lm.py --mesh dp=4,tp=2 --steps 400 --resume
    python examples/train_lm.py --recipe delayed     products of 8-bit operands

The text is the source of Python's own standard library. Writes a checkpoint and loss.png to --out.
Exit code 2 for input that has to be changed, 1 where training leaves that of plain float32 jnp on
one device: in float32 the loss curve by more than 1e-3, with a recipe or in bfloat16 the loss on
held-out text by more than 2 %.
"""

import os
import signal
import sys
import threading
from typing import Any

from lm import text as corpus
from lm.checkpoint import Store, open_store
from lm.options import Options, UsageError, parse

EVALUATION_BATCHES = 16
ALLOWED_ALONG_CURVE = 1e-3  # relative, where both are float32
ALLOWED_HELD_OUT = 0.02  # relative, where ours is of fewer bits


def main(arguments: list[str]) -> int:
    store = None
    try:
        options = parse(arguments)
        text = corpus.read(options.corpus, options.seq)
        store = open_store(options, text.fingerprint)
        return run(options, text, store)
    except UsageError as error:
        print(f"train_lm.py: {error}", file=sys.__stderr__)
        return 2
    except OSError as error:
        print(f"train_lm.py: {error.filename}: {error.strerror}", file=sys.__stderr__)
        return 2
    except ImportError as error:
        print(f"train_lm.py: {error}: install the extra demo (make demo does)", file=sys.__stderr__)
        return 2
    except MemoryError as error:
        print(f"train_lm.py: not enough memory for these sizes: {error}", file=sys.__stderr__)
        return 2
    except KeyboardInterrupt:
        resume = "; --resume goes on from the last checkpoint" if store and store.exists() else ""
        print(f"train_lm.py: interrupted{resume}", file=sys.__stderr__)
        return 130


def run(options: Options, text: corpus.Text, store: Store) -> int:
    # Imported after the input was checked: JAX takes seconds to start.
    import jax
    import matplotlib  # noqa: F401  # used last: its absence must show first
    import orbax.checkpoint  # noqa: F401
    from rich.console import Console

    from lm import report, training

    console = Console()
    mesh = training.make_mesh(options)
    device = mesh.devices.flat[0]
    model = training.sharded_model(options, corpus.VOCABULARY)
    state: Any = training.initial_state(model, options.layers, options.seed)
    if options.resume:
        state = store.restore(state, training.state_shardings(model, state, mesh))
    report.header(console, options, mesh, state["params"], text)

    def batch(step: int) -> training.Batch:
        return text.batch(options.seed, step, options.batch, options.seq)

    def train(trainer: training.Trainer, title: str, saves: bool) -> list[float]:
        losses = list(store.losses)
        meter = report.Meter(console, title, options.batch * options.seq)
        interrupted = threading.Event()
        # Between steps only: an interrupt inside the array store may be swallowed there.
        before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
        for step in meter.steps(store.start, options.steps):
            if interrupted.is_set():
                raise KeyboardInterrupt
            losses.append(trainer.step(batch(step)))
            meter.took(losses[-1])
            done = step + 1
            periodic = options.save_every and done % options.save_every == 0
            if saves and (periodic or done == options.steps):
                store.save(done, trainer.state, losses)
        signal.signal(signal.SIGINT, before)
        return losses

    # Taken to the host first: training donates the arrays that it starts from.
    start = jax.device_get(state)
    trainer = training.sharded(model, start, mesh, batch(0))
    losses = train(trainer, "sharded", saves=True)

    def evaluate(trainer: training.Trainer, part: Any) -> float:
        batches = text.evaluation(part, options.batch, options.seq, EVALUATION_BATCHES)
        return trainer.evaluate(batches)

    held_out = evaluate(trainer, text.held_out)
    report.losses(console, evaluate(trainer, text.train), held_out)
    report.collectives(console, trainer.step_program)
    plain = left = None
    if options.check:
        reference = training.unsharded(start, device, batch(0))
        plain = train(reference, "jnp, one device", saves=False)[store.start :]
        difference, at = report.largest_difference(losses[store.start :], plain)
        if options.exact:
            left = "the loss curve" if difference > ALLOWED_ALONG_CURVE else None
            report.along_curve(console, difference, store.start + at + 1, ALLOWED_ALONG_CURVE)
        else:
            expected = evaluate(reference, text.held_out)
            difference, _ = report.largest_difference([held_out], [expected])
            left = "the loss on held-out text" if difference > ALLOWED_HELD_OUT else None
            report.beside_plain(console, held_out, expected, difference, ALLOWED_HELD_OUT)
    picture = options.out / "loss.png"
    report.picture(picture, losses, plain)
    console.print(f"wrote {picture} and {store.folder / str(options.steps)}", soft_wrap=True)
    if left:
        print(f"train_lm.py: {left} left that of plain jnp", file=sys.__stderr__)
        return 1
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    # All is written. Tearing down libraries with threads of their own can add words to the one line
    # that was promised, or end in a signal.
    os._exit(status)
