"""What each scheduler of a replay serves: its share of one trace, or a trace of its own."""

from __future__ import annotations

from dataclasses import replace

from mambapool.client.replay import trace
from mambapool.client.replay.options import ReplayOptions
from mambapool.client.replay.request import Request
from mambapool.client.replay.routing import share


def requests_of(options: ReplayOptions, scheduler: int) -> list[Request]:
    """The requests that one scheduler serves, in order of arrival; no two schedulers have an index in common.

    Of several traces each scheduler has one, and all of them start at the same moment.
    """
    if not options.more_traces:
        requests = trace.load(options.trace, options.limit)
        return share(requests, scheduler, options.schedulers, options.route)
    traces = options.traces
    requests = trace.load(traces[scheduler], options.limit)
    return [replace(request, index=request.index * len(traces) + scheduler) for request in requests]


def count_requests(options: ReplayOptions) -> int:
    """How many there are, all traces together. Raises :class:`~mambapool.pool.errors.TraceError`."""
    return sum(len(trace.load(path, options.limit)) for path in options.traces)
