"""What callers pass besides slots and counts, checked before anything is sent or changed."""

from __future__ import annotations

import math
import operator
from typing import Any

from mambapool.pool import protocol
from mambapool.pool.errors import ConfigError


def check_timeout(timeout: float) -> None:
    """``TypeError`` or ``ValueError`` unless it is a number of seconds.

    An infinite one waits without end, one below 0 not at all. NaN is neither: a wait would end at once, or never.
    """
    try:
        is_none = math.isnan(timeout)
    except TypeError:
        raise TypeError(f"timeout must be a number of seconds, not {type(timeout).__name__}") from None
    except OverflowError:  # an int that no float can hold
        is_none = True
    if is_none:
        raise ValueError(f"timeout must be a number of seconds, not {timeout!r}"[:100])


def check_number(name: str, value: Any, least: int, most: int) -> int:
    """The whole number, of whatever integer type; :class:`ConfigError` unless it is within these."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or not least <= number <= most:
        raise ConfigError(f"{name} must be a whole number from {least} to {most}, not {_shown(value)}")
    return number


def check_optional_number(name: str, value: Any, least: int, most: int) -> int | None:
    """The same, or None."""
    return None if value is None else check_number(name, value, least, most)


def check_session(value: Any) -> int:
    """The number of another session; whether there is one, the allocator knows."""
    return check_number("to", value, 0, protocol.MAX_NUMBER - 1)


def check_name(name: str, value: Any) -> str:
    """1 to 128 bytes of printable text: terminals show it."""
    # In this order: what cannot be encoded is not printable.
    if (
        not isinstance(value, str)
        or not value.isprintable()
        or not 0 < len(value.encode()) <= protocol.MAX_NAME_BYTES
    ):
        raise ConfigError(
            f"{name} must be 1 to {protocol.MAX_NAME_BYTES} bytes of printable text, not {_shown(value)}"
        )
    return value


def _shown(value: Any) -> str:
    try:
        text = ascii(value)
    except ValueError:  # CPython refuses to print integers of more than 4300 digits
        return "a number with thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."
