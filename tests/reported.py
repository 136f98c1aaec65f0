"""What the classes of reported cases have in common: whether kernels run, and that they do."""

import contextlib
from collections.abc import Iterator


class Reported:
    """A class of its own for each platform inherits from this."""

    on_gpu = False

    @contextlib.contextmanager
    def launches(self, *, none: bool = False) -> Iterator[None]:
        """On a GPU the block launches kernels of this library (`none`: does not)."""
        if not self.on_gpu:
            yield
            return
        from shardops.kernels import library

        before = library.core().counters()["kernels_launched"]
        yield
        launched = library.core().counters()["kernels_launched"] - before
        assert (launched == 0) is none, f"{launched} kernels were launched"
