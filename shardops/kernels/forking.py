"""Work that a fork of the process waits for.

The child of a fork has copies of locks and of a library's state, but none of the threads that hold
the ones or change the other: it would wait for them for ever. So a fork waits until other threads
are between two pieces of work, and they do not begin another one before it is done.
"""

import contextlib
import os
import threading
from collections.abc import Iterator

_MOST_SECONDS = 60.0  # a parent that hangs is no better than a child that may

_changes = threading.Condition()
_working: dict[int, int] = {}  # by thread: pieces of work, within each other
_forks = 0  # that wait, or are under way


@contextlib.contextmanager
def undivided() -> Iterator[None]:
    """A piece of work that is all before a fork, or all after it."""
    thread = threading.get_ident()
    with _changes:
        if thread not in _working:  # what a fork waits for may need this thread's work to end
            _changes.wait_for(lambda: not _forks, _MOST_SECONDS)
        _working[thread] = _working.get(thread, 0) + 1
    try:
        yield
    finally:
        with _changes:
            _working[thread] -= 1
            if not _working[thread]:
                del _working[thread]
                _changes.notify_all()


def _nobody_works() -> bool:
    # A fork in the midst of this thread's own work does not wait: others may wait for that.
    return not _working or threading.get_ident() in _working


def _before() -> None:
    global _forks
    _changes.acquire()
    _forks += 1
    _changes.wait_for(_nobody_works, _MOST_SECONDS)


def _in_parent() -> None:
    global _forks
    _forks -= 1
    _changes.notify_all()
    _changes.release()


def _in_child() -> None:
    global _forks
    _forks = 0  # whoever waits with one is no thread of the child's
    thread = threading.get_ident()
    for other in _working.keys() - {thread}:
        del _working[other]
    _changes.release()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
