"""The traces of Mooncake's FAST'25 release: one JSON object per line.

Source of the format: kvcache-ai/Mooncake, ``FAST25-release/traces``. ``timestamp`` is in milliseconds
from the start, lengths are in tokens, ``hash_ids`` holds one id per block of 512 prompt tokens.
"""

from __future__ import annotations

import json
from typing import Any

from mambapool.client.replay.request import Request

_EXPECTED = "expected a JSON object with timestamp, input_length, output_length and hash_ids"

_MOST_MS = 2**53  # exact in a double
_MOST_TOKENS = 2**31 - 1
_MOST_ID = 2**63 - 1


def parse_line(line: str, index: int) -> Request:
    """The request that a line holds. Raises ``ValueError`` with what was expected of the line."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}): {_EXPECTED}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{_shown(fields)} is not an object: {_EXPECTED}")
    return Request(
        index=index,
        arrival_ms=_milliseconds(fields, "timestamp"),
        input_length=_whole(_field(fields, "input_length"), "input_length", _MOST_TOKENS),
        output_length=_whole(_field(fields, "output_length"), "output_length", _MOST_TOKENS),
        hash_ids=_ids(fields, "hash_ids"),
    )


def _field(fields: dict[str, Any], key: str) -> Any:
    if key not in fields:
        raise ValueError(f"{key} is missing: {_EXPECTED}")
    return fields[key]


def _milliseconds(fields: dict[str, Any], key: str) -> float:
    value = _field(fields, key)
    if type(value) not in (int, float) or not 0 <= value <= _MOST_MS:  # NaN is not, either
        raise ValueError(f"{key} is {_shown(value)}: expected milliseconds from 0 to {_MOST_MS}")
    return float(value)


def _whole(value: Any, what: str, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{what} is {_shown(value)}: expected a whole number from 0 to {most}")
    return value


def _ids(fields: dict[str, Any], key: str) -> tuple[int, ...]:
    value = _field(fields, key)
    if not isinstance(value, list):
        raise ValueError(f"{key} is {_shown(value)}: expected a list of whole numbers")
    return tuple(_whole(item, f"an item of {key}", _MOST_ID) for item in value)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
