"""What commands draw for people: tables and progress. Imported only by commands that draw."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

from mambapool.pool.layout import Geometry
from mambapool.service.findings import Finding


class Summary(Protocol):
    """What is drawn of a replay: rows of (label, value, note), and lines about what went wrong."""

    @property
    def findings(self) -> tuple[str, ...]: ...

    def rows(self) -> Sequence[tuple[str, str, str]]: ...


#: Of a table that goes to a file or a pipe, where nothing needs to be cut to a screen.
FILE_WIDTH = 1000

_COUNTS = ("slots", "free", "held", "windows", "offered", "quarantined")
_HOLDER = ("session", "name", "pid", "group", "rank", "state", "held", "windows")


def draw_status(status: dict[str, Any]) -> None:
    """Pools with their counts, then who holds what."""
    console = make_console()
    console.print(f"allocator pid {status['pid']}, epoch {status['epoch']}, up {status['uptime_s']:.1f} s")
    pools = plain_table("pool", *_right(*_COUNTS), "state")
    holders = plain_table(
        "pool",
        *_right("session"),
        "name",
        *_right("pid"),
        "group",
        *_right("rank"),
        "state",
        *_right("held", "windows"),
    )
    for pool in status["pools"]:
        pools.add_row(pool["name"], *(str(pool[key]) for key in _COUNTS), _state(pool))
        for holder in pool["holders"]:
            holders.add_row(pool["name"], *("" if holder[key] is None else str(holder[key]) for key in _HOLDER))
    for table in (pools, holders):
        if table.row_count:
            console.print()
            console.print(table)


def _state(pool: dict[str, Any]) -> str:
    """What a slot of the pool holds, on each of its shards."""
    if not pool["shards"]:
        return "allocator-only"
    size = human_bytes(pool["bytes_per_slot"])
    return size if pool["shards"] == 1 else f"{pool['shards']} × {size}"


def draw_settings(settings: Sequence[tuple[str | None, str, Any, str]]) -> None:
    """(pool or None, setting, value, where it comes from)."""
    table = plain_table("pool", "setting", "value", "from")
    for pool, name, value, source in settings:
        shown = " ".join(map(str, value)) if isinstance(value, list) else value
        table.add_row(pool or "", name, "-" if shown in (None, "") else str(shown), source)
    make_console().print(table)


def draw_geometry(model_type: str, tp_size: int, geometry: Geometry, memory: int | None) -> None:
    """One rank's tensors per slot, and how many slots fit."""
    console = make_console()
    table = plain_table("tensor", "dtype", *_right("layers"), "shape", *_right("bytes per slot"))
    for spec in geometry.tensors:
        shape = " × ".join(map(str, spec.shape))
        table.add_row(spec.name, spec.dtype, str(spec.layers), shape, f"{spec.bytes_per_slot:,}")
    console.print(table)
    ranks = f"one of {tp_size} ranks" if tp_size > 1 else "one rank"
    console.print(f"{model_type}, {ranks}: {geometry.bytes_per_slot:,} bytes per slot")
    if memory is not None:
        console.print(f"{geometry.slots_that_fit(memory):,} slots fit into {human_bytes(memory)}")


def draw_summary(summary: Summary) -> None:
    """The result of a replay, in words, and what went wrong."""
    console = make_console()
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    for row in summary.rows():
        table.add_row(*row)
    console.print(table)
    for finding in summary.findings:
        console.print(Text.assemble(("✗", "red"), " ", finding))


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr while that is a terminal; yields ``update(done, total)``."""
    console = Console(stderr=True)
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def human_bytes(size: int) -> str:
    """``77266944`` → ``73.7 MiB``."""
    value = float(size)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def make_console() -> Console:
    """Text is text: a client may call itself anything, "[/b]" too, which would be markup."""
    console = Console(markup=False)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    return console


def plain_table(*columns: Column | str) -> Table:
    """Columns without lines around them, for eyes and for awk."""
    return Table(*columns, box=None, padding=(0, 2, 0, 0), pad_edge=False)


def _right(*headers: str) -> list[Column]:
    return [Column(header, justify="right") for header in headers]


_MARKS = {"good": ("ok", "green"), "note": ("note", "yellow"), "bad": ("FAILS", "red")}


def draw_findings(findings: Sequence[Finding]) -> None:
    """What ``mambapool doctor`` found, one below the other."""
    console = Console(highlight=False, soft_wrap=True)
    for finding in findings:
        mark, style = _MARKS[finding.state]
        console.print(Text(f"{mark:>5}  ", style), Text(f"{finding.what}: {finding.found}"), sep="")
        console.print(Text(f"       {finding.means}", "dim"))
        if finding.todo:
            console.print(Text(f"       → {finding.todo}", style))
