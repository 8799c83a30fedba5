"""``mambapool replay`` without its command line."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from mambapool.client.replay import trace
from mambapool.client.replay.options import ReplayOptions
from mambapool.client.replay.runner import run_schedulers
from mambapool.client.replay.summary import ReplaySummary, summarize
from mambapool.pool.errors import ConfigError


def run_replay(options: ReplayOptions, progress: Callable[[int, int], None]) -> ReplaySummary:
    """Replay a trace on a running daemon's pool, one process per scheduler, and sum up what they found.

    ``progress(finished, total)`` is called several times a second, from this thread, with counts of
    requests. Needs torch in the schedulers, not in this process; those that are started elsewhere join it.

    Raises :class:`~mambapool.pool.errors.TraceError` before anything is started,
    :class:`~mambapool.pool.errors.ConfigError` when there is no torch or the pool cannot serve the requests,
    :class:`~mambapool.client.replay.failure.ReplayFailed` when a scheduler dies or none can go on, and what
    ``connect`` raises.
    """
    if not options.elsewhere and importlib.util.find_spec("torch") is None:
        raise ConfigError("a replay's schedulers need torch: pip install 'mambapool[worker]'")
    total = len(trace.load(options.trace, options.limit))
    run = run_schedulers(options, lambda finished: progress(finished, total))
    return summarize(options, total, run)
