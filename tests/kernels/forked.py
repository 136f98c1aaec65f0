"""Forks while threads compile, for test_forking.py: prints what the child saw."""

import os
import signal
import threading
import time

from shardops.kernels import compile, forking, nvrtc

_inner = threading.Lock()  # as NVRTC has some
_begun = threading.Event()


def compile_program(text: str, name: str, options: list[str]) -> tuple[bytes, str]:
    with _inner:
        _begun.set()
        time.sleep(0.5)
        return f"{name} by {os.getpid()}".encode(), ""


nvrtc.compile_program, nvrtc.version = compile_program, lambda: (13, 0)
PARENT = os.getpid()
KERNEL = ("elements.cuh", "one", (), "sm_90")

compile.begin(*KERNEL)
_begun.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)  # ends it where it hangs
    assert compile.cubin(*KERNEL) == f"one by {PARENT}".encode(), "it was there before the fork"
    assert compile.cubin("elements.cuh", "two", (), "sm_90") == f"two by {os.getpid()}".encode()
    print("both in the child", flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert compile.cubin("elements.cuh", "three", (), "sm_90") == f"three by {PARENT}".encode()
print("one more in the parent")

_enough = threading.Event()


def work() -> None:
    while not _enough.is_set():
        with forking.undivided():
            time.sleep(0.02)


workers = [threading.Thread(target=work) for _ in range(4)]  # never all between two pieces
for worker in workers:
    worker.start()
begun = time.monotonic()
if (child := os.fork()) == 0:
    os._exit(0)
took = time.monotonic() - begun
_enough.set()
assert os.waitpid(child, 0)[1] == 0
assert took < 5, f"the fork waited {took:.1f} s"
print("and one beside threads that never rest")
