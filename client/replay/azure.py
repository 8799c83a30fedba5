"""Azure's LLM inference traces: CSV with a header line.

Source of the format: Azure/AzurePublicDataset, ``AzureLLMInferenceDataset2023.md``. ``TIMESTAMP`` is when the
request came (date and time of day, seven decimals in 2023, an offset from UTC in 2024), the others count tokens.
There are no block ids.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from mambapool.client.replay.request import Request

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"

_EXPECTED = f"expected {HEADER}, for example 2023-11-16 18:15:46.6805900,374,44"

_MOST_TOKENS = 2**31 - 1
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def parse_line(line: str, index: int) -> Request:
    """The request that a line after the header holds; its arrival is in milliseconds since 1970.

    Raises ``ValueError`` with what was expected of the line.
    """
    fields = line.strip().split(",")
    if len(fields) != 3:
        raise ValueError(f"{_shown(line.strip())} has {len(fields)} fields: {_EXPECTED}")
    return Request(
        index=index,
        arrival_ms=_milliseconds(fields[0]),
        input_length=_tokens(fields[1], "ContextTokens"),
        output_length=_tokens(fields[2], "GeneratedTokens"),
    )


def check_header(line: str) -> None:
    """Raises ``ValueError`` unless it is the header."""
    if line.strip() != HEADER:
        raise ValueError(f"{_shown(line.strip())} is not the header: expected {HEADER}")


def _milliseconds(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise ValueError(f"TIMESTAMP is {_shown(text)}: {_EXPECTED}") from error
    return (moment.replace(tzinfo=moment.tzinfo or UTC) - _EPOCH) / timedelta(milliseconds=1)


def _tokens(text: str, what: str) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 10 and int(digits) <= _MOST_TOKENS):
        raise ValueError(f"{what} is {_shown(text)}: expected a whole number from 0 to {_MOST_TOKENS}")
    return int(digits)


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 60 else f"{text[:57]!r}..."
