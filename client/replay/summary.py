"""What a replay found out, for machines and for people."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mambapool.client.replay.options import ReplayOptions
from mambapool.client.replay.runner import Run
from mambapool.client.replay.usage import merge

# Each scheduler has a clock of its own, which goes on while it waits, or while others run faster than it.
_NOT_IN_STEP = "the schedulers' clocks were not in step"
_NO_MEAN = f"says nothing here: {_NOT_IN_STEP}"
_EQUAL_PARTS = "slots that equal parts would need: schedulers times the largest peak of one"
_OWN_PARTS = "slots that parts cut to each scheduler's own peak would need"
_CUT_OFF = "says nothing here: requests waited, so the pool's size cut the peaks off"


class Row(NamedTuple):
    """One line of a summary: what, how much, and what that means."""

    label: str
    value: str
    note: str


@dataclass(frozen=True, slots=True)
class ReplaySummary:
    """The keys of ``replay --json``.

    Held slots are those of requests and of open windows, over the whole pool and by the clock of the trace. Each
    scheduler has a clock of its own: where requests waited, or more were held at once by these clocks than the pool
    has, they tell nothing of each other, and ``in_step`` is False. Then ``peak_held`` is the most that were not free
    when a scheduler looked, whoever had them, and ``mean_held`` means nothing. ``partitioned_need`` and
    ``partitioned_sum`` do not when requests waited.
    ``mismatches`` are those of all ranks; ``rank_messages`` has the messages of each rank, all schedulers together.
    ``waits`` counts requests that waited at least one step for a slot. The percentiles, in microseconds, are
    of calls for slots that cost a message, and None if there was none. ``findings`` are the first lines
    about mismatches.
    """

    requests: int
    finished: int
    mismatches: int
    steps: int
    messages: int
    waits: int
    alloc_p50_us: float | None
    alloc_p99_us: float | None
    peak_held: int
    mean_held: float
    partitioned_need: int
    partitioned_sum: int
    seconds: float
    schedulers: int
    slots: int
    tp_size: int
    guarantee: int
    rank_messages: tuple[int, ...]
    findings: tuple[str, ...]
    in_step: bool

    @property
    def ok(self) -> bool:
        """Every request was served, and found in its slots what it had put there."""
        return self.mismatches == 0 and self.finished == self.requests

    def to_json(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self),
            "rank_messages": list(self.rank_messages),
            "findings": list(self.findings),
        }

    def rows(self) -> list[Row]:
        """The summary in words."""
        return [
            Row("requests", f"{self.requests:,}", self._schedulers_note()),
            Row("finished", f"{self.finished:,}", "all" if self.finished == self.requests else "not all"),
            Row("mismatches", f"{self.mismatches:,}", self._mismatches_note()),
            Row("steps", f"{self.steps:,}", "batched updates of the mapped states"),
            Row("messages", f"{self.messages:,}", self._messages_note()),
            Row("waits", f"{self.waits:,}", "requests that waited at least one step for a slot"),
            Row("alloc p50", _microseconds(self.alloc_p50_us), "of calls for slots that cost a message"),
            Row("alloc p99", _microseconds(self.alloc_p99_us), ""),
            Row("peak held", f"{self.peak_held:,}", self._peak_note()),
            _row_if(self.in_step, "mean held", f"{self.mean_held:.1f}", "over the time of the trace", _NO_MEAN),
            _row_if(not self.waits, "partitioned need", f"{self.partitioned_need:,}", _EQUAL_PARTS, _CUT_OFF),
            _row_if(not self.waits, "partitioned sum", f"{self.partitioned_sum:,}", _OWN_PARTS, _CUT_OFF),
            Row("seconds", f"{self.seconds:.1f}", f"{_ratio(self.steps, self.seconds):,.0f} steps a second"),
        ]

    def _schedulers_note(self) -> str:
        ranks = f" of {self.tp_size} ranks" if self.tp_size > 1 else ""
        return f"over {_count(self.schedulers, 'scheduler')}{ranks}"

    def _messages_note(self) -> str:
        per_rank = [f"{_ratio(messages, self.steps):.2f}" for messages in self.rank_messages]
        return f"{' + '.join(per_rank)} per step{', rank by rank' if self.tp_size > 1 else ''}"

    def _mismatches_note(self) -> str:
        if self.mismatches:
            return "states that somebody else wrote to, or frees that were refused"
        return "every state and track slot held what its request had put there"

    def _peak_note(self) -> str:
        if self.in_step:
            return f"of {self.slots:,} slots, all schedulers together"
        return f"of {self.slots:,} slots, as the pool saw it: {_NOT_IN_STEP}"


def summarize(options: ReplayOptions, requests: int, run: Run) -> ReplaySummary:
    """Put together what the schedulers found out."""
    # What all ranks do alike is told by rank 0.
    results = run.results[:: options.tp_size]
    by_rank = [run.results[rank :: options.tp_size] for rank in range(options.tp_size)]
    usage = merge([result.held for result in results])
    peaks = [result.held.peak for result in results]
    waits = sum(result.waits for result in results)
    in_step = not waits and usage.peak <= run.slots
    alloc_us = sorted(took_us for result in results for took_us in result.alloc_us)
    return ReplaySummary(
        requests=requests,
        finished=min(sum(result.finished for result in ranks) for ranks in by_rank),
        mismatches=sum(result.mismatches for result in run.results),
        steps=sum(result.steps for result in results),
        messages=sum(result.messages for result in run.results),
        waits=waits,
        alloc_p50_us=percentile(alloc_us, 50),
        alloc_p99_us=percentile(alloc_us, 99),
        peak_held=usage.peak if in_step else max(result.most_in_use for result in results),
        mean_held=round(usage.mean, 3),
        partitioned_need=options.schedulers * max(peaks),
        partitioned_sum=sum(peaks),
        seconds=round(run.seconds, 3),
        schedulers=options.schedulers,
        slots=run.slots,
        tp_size=options.tp_size,
        guarantee=options.guarantee,
        rank_messages=tuple(sum(result.messages for result in ranks) for ranks in by_rank),
        findings=tuple(line for result in run.results for line in result.findings),
        in_step=in_step,
    )


def percentile(ascending: Sequence[float], percent: float) -> float | None:
    """The nearest-rank percentile: the smallest value that so many percent of the values do not exceed."""
    if not ascending:
        return None
    rank = max(1, math.ceil(len(ascending) * percent / 100))
    return ascending[rank - 1]


def _row_if(means: bool, label: str, value: str, note: str, why_not: str) -> Row:
    """A figure and what it is; ``-`` and why it means nothing."""
    return Row(label, value, note) if means else Row(label, "-", why_not)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _microseconds(value: float | None) -> str:
    return "none" if value is None else f"{value:.0f} µs"
