"""Clock jumps: nothing waits by a clock that can be set."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mambapool.client import transport
from mambapool.pool import protocol
from mambapool.service import server

FOLDERS = [Path(str(module.__file__)).parent for module in (protocol, server, transport)]
SOURCES = sorted(path for folder in FOLDERS for path in folder.rglob("*.py"))

#: Of the wall's clock; ``strftime`` and the like only write it down.
SETTABLE = {"time", "time_ns", "localtime", "gmtime", "now", "utcnow", "today", "CLOCK_REALTIME"}


def readings(source: str) -> list[str]:
    """Where a clock that can be set is read: ``time.time``, ``datetime.now`` …"""
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and node.attr in SETTABLE
        and isinstance(node.value, ast.Name)
        and node.value.id in ("time", "datetime", "date")
    ] + [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        and node.module in ("time", "datetime")
        and SETTABLE & {alias.name for alias in node.names}
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_interval_is_measured_by_a_clock_that_can_be_set(path: Path) -> None:
    assert readings(path.read_text()) == []


def test_a_reading_is_found() -> None:
    assert readings("import time\nstart = time.time()") == ["line 2: time.time"]
    assert readings("from time import time")
    assert not readings("import time\nstart = time.monotonic()")
