"""Numbers on a command line, refused by argparse where no answer could be made of them."""

from __future__ import annotations

import math


def whole(text: str) -> int:
    """A whole number, 1 or more."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def positive(text: str) -> float:
    """A finite number above 0."""
    number = not_negative(text)
    if number == 0:
        raise ValueError
    return number


def not_negative(text: str) -> float:
    """A finite number, 0 or more."""
    number = float(text)
    if not 0 <= number < math.inf:
        raise ValueError
    return number


# argparse names the function where it raises: "invalid <name> value: '0'".
whole.__name__ = "number (1, 2, ...)"
positive.__name__ = "number (above 0)"
not_negative.__name__ = "number (0 or more)"
