"""Errors of the library, and how an argument error is worded."""

_LONGEST = 240  # characters of a value in an error
_MOST_BITS = 256  # of an integer that is written out; Python refuses to write very long ones


class KernelUnavailableError(RuntimeError):
    """A CUDA kernel was asked for, and what it needs is not on this machine."""


def wrong(op: str, argument: str, got: object, want: str, fix: str) -> str:
    """Word an argument error: `{op}: {argument} is {got}; expected {want}. {fix}`."""
    got = shortened(got) if isinstance(got, str) else shown(got)
    return f"{op}: {argument} is {got}; expected {want}. {fix}"


def shown(value: object) -> str:
    """Any value as an error has it: its repr, in one line; of a long one the two ends."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception:  # whatever a stranger's class raises
        return f"a {type(value).__name__} that has no repr"
    return shortened(text)


def shortened(text: str) -> str:
    """Text for an error, in one line; of a long one the two ends."""
    if "\n" in text:
        text = " ".join(text.split())
    if len(text) <= _LONGEST:
        return text
    left_out = f"… ({len(text)} characters) …"
    half = (_LONGEST - len(left_out)) // 2  # so that what is shortened is not shortened again
    return f"{text[:half]}{left_out}{text[-half:]}"
