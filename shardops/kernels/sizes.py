"""Arithmetic of sizes that plans share."""


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not below `value`."""
    return -(-value // multiple) * multiple
