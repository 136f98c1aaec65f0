"""Errors of the library, and how an argument error is worded."""


class KernelUnavailableError(RuntimeError):
    """A CUDA kernel was asked for, and what it needs is not on this machine."""


def wrong(op: str, argument: str, got: object, want: str, fix: str) -> str:
    """Word an argument error: `{op}: {argument} is {got}; expected {want}. {fix}`."""
    return f"{op}: {argument} is {got}; expected {want}. {fix}"
