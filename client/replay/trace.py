"""Request traces: what a replay is fed with, and how a trace file becomes requests."""

from __future__ import annotations

import gzip
import itertools
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from mambapool.client.replay import azure, mooncake
from mambapool.client.replay.request import Request
from mambapool.pool.errors import TraceError
from mambapool.pool.regular_files import open_regular

#: The first bytes of every gzip member: RFC 1952, 2.3.1.
_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class _Format:
    """How the lines of one kind of trace file are read.

    ``parse(line, index)`` returns the request of one line, or raises ``ValueError`` with what was
    expected of the line; so does ``check_header``, of the first one, if the format has a header.
    """

    name: str
    begins_with: bytes
    parse: Callable[[str, int], Request]
    check_header: Callable[[str], None] | None = None
    #: Arrivals are times of day; the trace starts with the first.
    by_the_calendar: bool = False


_FORMATS = {
    ".jsonl": _Format("Mooncake", b"{", mooncake.parse_line),
    ".csv": _Format("Azure", azure.HEADER.encode(), azure.parse_line, azure.check_header, by_the_calendar=True),
}

#: A request of a million tokens has 2,000 block ids of up to 20 bytes.
MAX_LINE_BYTES = 2**20

#: The longest beginning of a file by which a format is told.
_LONGEST_BEGINNING = 64


def load(path: Path, limit: int | None = None) -> list[Request]:
    """Read the first ``limit`` requests of a trace (all by default), plain or gzip-compressed.

    The requests come in order of arrival, those of the same moment in the order of the file; a request's
    ``index`` is its place in that order. The file's name says its format (a ``.gz`` at the end is passed
    over), or its first bytes if the name does not; these also say whether it is compressed.

    Raises :class:`TraceError`, which names the file, the line where there is one, and what was expected.
    """
    try:
        # Nothing but a file: every scheduler reads it, and from its beginning.
        with os.fdopen(open_regular(path, os.O_RDONLY, follow=True), "rb") as raw, _decompressed(raw) as lines:
            trace_format = _format_of(path, lines)
            requests = list(itertools.islice(_parse(path, lines, trace_format), limit))
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read: {_reason(error)}") from error
    except TraceError:
        raise
    except ValueError as error:  # a name that no file can have
        raise TraceError(f"{str(path)!r}: cannot be read: {error}") from error
    if not requests:
        raise TraceError(f"{path}: holds no requests: expected one {trace_format.name} request per line")
    requests.sort(key=lambda request: request.arrival_ms)
    start_ms = requests[0].arrival_ms if trace_format.by_the_calendar else 0.0
    return [
        replace(request, index=index, arrival_ms=round(request.arrival_ms - start_ms, 3))
        for index, request in enumerate(requests)
    ]


def _format_of(path: Path, lines: BinaryIO | gzip.GzipFile) -> _Format:
    """By the name, else by how the file begins."""
    suffixes = path.suffixes
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
    found = _FORMATS.get(suffixes[-1]) if suffixes else None
    if found is not None:
        return found
    beginning = lines.read(_LONGEST_BEGINNING).lstrip()
    lines.seek(0)
    for known in _FORMATS.values():
        if beginning.startswith(known.begins_with):
            return known
    accepted = ", ".join(f"{suffix} ({known.name})" for suffix, known in _FORMATS.items())
    raise TraceError(
        f"{path}: unknown kind of trace: expected a name that ends in {accepted}, or in .gz after it, "
        "or a file that begins as they do"
    )


def _decompressed(raw: BinaryIO) -> BinaryIO | gzip.GzipFile:
    compressed = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    raw.seek(0)
    return gzip.GzipFile(fileobj=raw) if compressed else raw


def _parse(path: Path, lines: BinaryIO | gzip.GzipFile, trace_format: _Format) -> Iterator[Request]:
    count = 0
    header = trace_format.check_header
    for number in itertools.count(1):
        line = lines.readline(MAX_LINE_BYTES + 1)
        if not line:
            return
        if len(line) > MAX_LINE_BYTES:
            raise TraceError(f"{path}, line {number}: it has more than {MAX_LINE_BYTES} bytes: that is no request")
        if not line.strip():
            continue
        try:
            if header is not None:
                header(_text(line))
                header = None
                continue
            request = trace_format.parse(_text(line), count)
        except ValueError as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
        count += 1
        yield request


def _text(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is {line[error.start]:#04x}: expected UTF-8") from error


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)
