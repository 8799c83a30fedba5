"""Request traces: what a replay is fed with, and how a trace file becomes requests."""

from __future__ import annotations

import gzip
import itertools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from mambapool.client.replay import mooncake
from mambapool.client.replay.request import Request
from mambapool.pool.errors import TraceError

#: The first bytes of every gzip member: RFC 1952, 2.3.1.
_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class _Format:
    """How the lines of one kind of trace file are read.

    ``parse(line, index)`` returns the request of one line, or raises ``ValueError`` with what was
    expected of the line.
    """

    name: str
    parse: Callable[[str, int], Request]


_FORMATS = {".jsonl": _Format("Mooncake", mooncake.parse_line)}


def load(path: Path, limit: int | None = None) -> list[Request]:
    """Read the first ``limit`` requests of a trace (all by default), plain or gzip-compressed.

    The requests come in order of arrival, those of the same moment in the order of the file; a request's
    ``index`` is its place in that order. The file's name says its format (a ``.gz`` at the end is passed
    over), its first bytes say whether it is compressed.

    Raises :class:`TraceError`, which names the file, the line where there is one, and what was expected.
    """
    trace_format = _format_of(path)
    try:
        with path.open("rb") as raw, _decompressed(raw) as lines:
            requests = list(itertools.islice(_parse(path, lines, trace_format), limit))
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read: {_reason(error)}") from error
    if not requests:
        raise TraceError(f"{path}: holds no requests: expected one {trace_format.name} request per line")
    requests.sort(key=lambda request: request.arrival_ms)
    return [replace(request, index=index) for index, request in enumerate(requests)]


def _format_of(path: Path) -> _Format:
    suffixes = path.suffixes
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
    found = _FORMATS.get(suffixes[-1]) if suffixes else None
    if found is None:
        accepted = ", ".join(f"{suffix} ({known.name})" for suffix, known in _FORMATS.items())
        raise TraceError(
            f"{path}: unknown kind of trace: expected a name that ends in {accepted}, or in .gz after it"
        )
    return found


def _decompressed(raw: BinaryIO) -> BinaryIO | gzip.GzipFile:
    compressed = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    raw.seek(0)
    return gzip.GzipFile(fileobj=raw) if compressed else raw


def _parse(path: Path, lines: BinaryIO | gzip.GzipFile, trace_format: _Format) -> Iterator[Request]:
    count = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
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
