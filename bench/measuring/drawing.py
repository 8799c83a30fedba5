"""The table for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Column, Table

#: Of a table that goes to a file or a pipe.
FILE_WIDTH = 160


def draw(figures: Sequence[dict[str, Any]], *, judged: bool) -> None:
    """Every figure with its limit and, if ``judged``, whether it is met."""
    right = [Column(header, justify="right") for header in ("measured", "goal is")]
    table = Table(Column("goal", justify="right"), "figure", *right, box=None, pad_edge=False)
    if judged:
        table.add_column("")
    for figure in figures:
        sign = "≤" if figure["better"] == "lower" else "≥"
        row = [str(figure["goal"]), figure["name"], _short(figure["value"]), f"{sign} {_short(figure['limit'])}"]
        if judged:
            row.append("met" if figure["met"] else "[bold red]MISSED[/]")
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    console.print(table)


def markdown(figures: Sequence[dict[str, Any]]) -> str:
    """The same as the README has it."""
    lines = ["| goal | figure | measured | limit | |", "|---|---|---|---|---|"]
    for figure in figures:
        goal = figure["goal"] if type(figure["goal"]) is int else ""
        sign = "≤" if figure["better"] == "lower" else "≥"
        met = "met" if figure["met"] else "**missed**"
        cells = (goal, figure["name"], _short(figure["value"]), f"{sign} {_short(figure['limit'])}", met)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2f}"
