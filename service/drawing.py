"""What commands draw for people: tables and progress. Imported only by commands that draw."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from mambapool.pool.layout import Geometry

if TYPE_CHECKING:
    from mambapool.client.replay.summary import ReplaySummary


def draw_status(status: dict[str, Any]) -> None:
    """Pools with their counts, then who holds what."""
    console = Console()
    console.print(f"allocator pid {status['pid']}, epoch {status['epoch']}, up {status['uptime_s']:.1f} s")
    pools = Table("pool", *_right("slots", "free", "held", "windows", "offered", "quarantined"), "state", "shards")
    for pool in status["pools"]:
        counts = [str(pool[key]) for key in ("slots", "free", "held", "windows", "offered", "quarantined")]
        size = human_bytes(pool["bytes_per_slot"]) if pool["shards"] else "allocator-only"
        pools.add_row(pool["name"], *counts, size, str(pool["shards"]))
    console.print(pools)
    holders = Table(
        "pool", *_right("session"), "name", *_right("pid", "rank"), "state", *_right("held", "windows")
    )
    for pool in status["pools"]:
        for holder in pool["holders"]:
            keys = ("session", "name", "pid", "rank", "state", "held", "windows")
            holders.add_row(pool["name"], *(str(holder[key]) for key in keys))
    if holders.row_count:
        console.print(holders)


def draw_geometry(model_type: str, tp_size: int, geometry: Geometry, memory: int | None) -> None:
    """One rank's tensors per slot, and how many slots fit."""
    console = Console()
    table = Table("tensor", "dtype", *_right("layers"), "shape", *_right("bytes per slot"))
    for spec in geometry.tensors:
        shape = " × ".join(map(str, spec.shape))
        table.add_row(spec.name, spec.dtype, str(spec.layers), shape, f"{spec.bytes_per_slot:,}")
    console.print(table)
    ranks = f"one of {tp_size} ranks" if tp_size > 1 else "one rank"
    console.print(f"{model_type}, {ranks}: {geometry.bytes_per_slot:,} bytes per slot")
    if memory is not None:
        console.print(f"{geometry.slots_that_fit(memory):,} slots fit into {human_bytes(memory)}")


def draw_summary(summary: ReplaySummary) -> None:
    """The result of a replay, in words, and what went wrong."""
    console = Console()
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    for row in summary.rows():
        table.add_row(row.label, row.value, row.note)
    console.print(table)
    for finding in summary.findings:
        console.print(f"[red]✗[/red] {finding}", highlight=False)


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


def _right(*headers: str) -> list[Any]:
    from rich.table import Column

    return [Column(header, justify="right") for header in headers]
