"""``mambapool replay`` without its command line."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from mambapool.client.replay.options import ReplayOptions
from mambapool.client.replay.runner import run_schedulers
from mambapool.client.replay.shares import count_requests
from mambapool.client.replay.summary import ReplaySummary, summarize
from mambapool.pool.errors import ConfigError


def run_replay(
    options: ReplayOptions, progress: Callable[[int, int], None], plot: Path | None = None
) -> ReplaySummary:
    """Replay a trace on a running daemon's pool, one process per scheduler, and sum up what they found.

    ``progress(finished, total)`` is called several times a second, from this thread, with counts of
    requests. Needs torch in the schedulers, not in this process; those that are started elsewhere join it. ``plot``:
    draw who held how many slots when, into that file (:mod:`~mambapool.client.replay.plot`).

    Raises :class:`~mambapool.pool.errors.TraceError` before anything is started,
    :class:`~mambapool.pool.errors.ConfigError` when there is no torch or the pool cannot serve the requests,
    :class:`~mambapool.client.replay.failure.ReplayFailed` when a scheduler dies or none can go on, and what
    ``connect`` raises.
    """
    if not options.elsewhere and importlib.util.find_spec("torch") is None:
        raise ConfigError("a replay's schedulers need torch: pip install 'mambapool[worker]'")
    if plot is not None:
        from mambapool.client.replay.plot import check_plot

        check_plot(plot)
    total = count_requests(options)
    run = run_schedulers(options, lambda finished: progress(finished, total))
    summary = summarize(options, total, run)
    if plot is not None:
        from mambapool.client.replay.plot import draw_plot

        draw_plot(plot, summary, run.results, [path.name for path in options.more_traces and options.traces])
    return summary
