"""What an argument error must say: op, argument, what it is, what is wanted, what to do."""

import re

import jax
import pytest

WORDING = re.compile(
    r"^(?P<op>\w+): (?P<argument>\w+)\S*.* (is|are|has|have) .+; expected .+\. .+\.$", re.S
)


def refuses(error: type[Exception], f, *shapes, op: str, argument: str, says: tuple[str, ...] = ()):
    """`f` is refused while it is traced, in words that name `op`, `argument` and `says`."""
    with pytest.raises(error) as caught:
        jax.eval_shape(f, *shapes)
    message = str(caught.value).partition("\n")[0]  # JAX adds a note on its traceback
    found = WORDING.match(message)
    assert found, f"not worded as op: argument is got; expected want. Fix.: {message}"
    assert found["op"] == op, message
    assert found["argument"] == argument, message
    for part in says:
        assert part in message, f"{part!r} is not in: {message}"
