"""A picture of a replay: who held how many slots when, and who waited for them.

matplotlib is an extra (``mambapool[plot]``), and imported only here.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mambapool.client.replay.result import SchedulerResult
from mambapool.client.replay.summary import ReplaySummary
from mambapool.client.replay.usage import HeldTimeline
from mambapool.pool.errors import ConfigError
from mambapool.pool.regular_files import open_regular

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    Series = NDArray[np.float64]

KINDS = (".png", ".svg", ".pdf")

#: Intervals over the time of the trace: about one for two dots of the picture's width.
INTERVALS = 600

#: Schedulers beyond these repeat them: Okabe and Ito's colours, which people with any kind of sight tell apart.
COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#0072B2", "#D55E00", "#999999")
_INK = "#333333"
_DPI = 150


def check_plot(path: Path) -> None:
    """Before a replay of minutes: raise :class:`ConfigError` if there could be no picture at its end."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'mambapool[plot]'")
    if path.suffix not in KINDS:
        raise ConfigError(f"--plot {path}: expected a name that ends in {', '.join(KINDS)}")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no directory {path.parent}")
    if path.is_dir():
        raise ConfigError(f"--plot {path} is a directory")
    try:
        # A FIFO would be waited for, here and at the end.
        os.close(open_regular(path, os.O_WRONLY | os.O_CREAT, follow=True, mode=0o666))
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror}") from error


def draw_plot(
    path: Path, summary: ReplaySummary, results: Sequence[SchedulerResult], traces: Sequence[str] = ()
) -> None:
    """Write the picture; ``traces`` names the schedulers' traces, if each has its own.

    Raises :class:`OSError` when the file cannot be written.
    """
    # Without pyplot: no window, no state of the process that a caller may use for pictures of its own.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    edges = np.linspace(0.0, max([result.held.end_ms for result in results] + [1.0]), INTERVALS + 1)
    figure = Figure(figsize=(10, 6), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    occupancy, waits = figure.subplots(
        2, 1, sharex=True, gridspec_kw={"height_ratios": (3, 1) if summary.waits else (9, 1)}
    )
    _draw_occupancy(occupancy, edges, summary, results, traces)
    _draw_waits(waits, edges, summary, results)
    for axes in (occupancy, waits):
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0)
    waits.set_xlabel("minutes of the trace")
    figure.savefig(path)


def _draw_occupancy(
    axes: Axes,
    edges: Series,
    summary: ReplaySummary,
    results: Sequence[SchedulerResult],
    traces: Sequence[str],
) -> None:
    minutes = edges[:-1] / 60_000
    means = [_means(result.held, edges) for result in results]
    names = [f"scheduler {number}" for number in range(len(results))]
    for number, trace in enumerate(traces):
        names[number] += f": {trace if len(trace) <= 30 else trace[:27] + '…'}"
    colours = [COLOURS[number % len(COLOURS)] for number in range(len(results))]
    axes.stackplot(minutes, *means, step="post", labels=names, colors=colours, linewidth=0)
    most: float = max(summary.peak_held, float(np.sum(means, axis=0).max()))
    # Each label at a place of its own along the axis: levels may be close to one another.
    if summary.in_step:
        _mark(axes, summary.peak_held, 1.0, f"peak of all together: {summary.peak_held}")
        if summary.partitioned_need > summary.peak_held:
            most = summary.partitioned_need
            _mark(axes, most, 0.76, f"equal parts, one per scheduler: {summary.partitioned_need}")
    if summary.slots <= 1.5 * most:
        _mark(axes, summary.slots, 0.4, f"slots of the pool: {summary.slots}")
        most = max(most, summary.slots)
    axes.set_ylim(0, max(1.0, 1.18 * most))
    axes.set_ylabel("slots held")
    axes.set_title(
        f"{summary.finished:,} requests on one pool of {summary.slots:,} slots "
        f"(means over {(edges[1] - edges[0]) / 1000:.1f} s)",
        loc="left",
        fontsize=11,
        color=_INK,
    )
    axes.legend(
        loc="upper left", ncols=2 if traces else min(len(results), 6), frameon=False, fontsize=9, borderaxespad=0.1
    )


def _draw_waits(axes: Axes, edges: Series, summary: ReplaySummary, results: Sequence[SchedulerResult]) -> None:
    if not summary.waits:
        axes.set_ylim(0, 1)
        axes.set_yticks([])
        axes.text(
            0.5, 0.5, "none waited for a slot", transform=axes.transAxes, ha="center", va="center", color=_INK
        )
        return
    axes.set_ylabel("requests waiting")
    means = [_means(result.waiting, edges) for result in results]
    colours = [COLOURS[number % len(COLOURS)] for number in range(len(results))]
    axes.stackplot(edges[:-1] / 60_000, *means, step="post", colors=colours, linewidth=0)
    axes.set_ylim(0, None)
    axes.set_title(
        f"{summary.waits:,} requests waited at least one step. Each scheduler has a clock of its own: "
        "they are not in step then",
        loc="left",
        fontsize=9,
        color=_INK,
    )


def _mark(axes: Axes, slots: int, x: float, text: str) -> None:
    """A level, with its meaning above it, which ends at ``x`` of the width."""
    line: dict[str, Any] = {"color": _INK, "linewidth": 0.9, "linestyle": (0, (5, 3))}
    axes.axhline(slots, **line)
    axes.annotate(
        text,
        (x, slots),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        fontsize=9,
        color=_INK,
    )


def _means(timeline: HeldTimeline, edges: Series) -> Series:
    """The mean over each interval; before the timeline's first change and after its end it is 0."""
    moments = np.array([0.0, *(moment for moment, _ in timeline.changes), timeline.end_ms, np.inf])
    values = np.array([0.0, *(float(held) for _, held in timeline.changes), 0.0])
    moments = np.minimum(moments, edges[-1])
    area = np.concatenate(([0.0], np.cumsum(values * np.diff(moments))))
    means: Series = np.diff(np.interp(edges, moments, area)) / np.diff(edges)
    return means
