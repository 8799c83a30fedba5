"""How many slots were held when, by the clock of the trace."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(slots=True)
class HeldTimeline:
    """The slots that one scheduler held, each change with the moment at which it took effect.

    Moments are milliseconds on the clock of the trace, which all schedulers of a replay share, and never go
    back. Before the first change nothing was held. ``end_ms`` is when the scheduler was done.
    """

    changes: list[tuple[float, int]] = field(default_factory=list)
    end_ms: float = 0.0

    def record(self, clock_ms: float, held: int) -> None:
        if self.changes and self.changes[-1][0] == clock_ms:
            # What was given back at the end of a step and taken again at the start of the next one was
            # held throughout: of one moment, the last word counts.
            self.changes.pop()
        if held != (self.changes[-1][1] if self.changes else 0):
            self.changes.append((clock_ms, held))
        self.end_ms = clock_ms

    def to_json(self) -> list[Any]:
        return [self.changes, self.end_ms]

    @classmethod
    def from_json(cls, value: list[Any]) -> Self:
        changes, end_ms = value
        return cls([(clock_ms, held) for clock_ms, held in changes], end_ms)

    @property
    def peak(self) -> int:
        return max((held for _, held in self.changes), default=0)


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """What all schedulers held together: the most at any moment, and the mean over time."""

    peak: int
    mean: float


def merge(timelines: Sequence[HeldTimeline]) -> PoolUsage:
    """Add up the schedulers' timelines, from the start of the trace to the end of the last of them."""
    end_ms = max((timeline.end_ms for timeline in timelines), default=0.0)
    moments = sorted(itertools.chain.from_iterable(map(_deltas, timelines)))
    held = peak = 0
    clock_ms = area = 0.0
    for moment_ms, group in itertools.groupby(moments, key=lambda moment: moment[0]):
        area += held * (moment_ms - clock_ms)
        held += sum(delta for _, delta in group)
        peak = max(peak, held)
        clock_ms = moment_ms
    area += held * (end_ms - clock_ms)
    return PoolUsage(peak, area / end_ms if end_ms else 0.0)


def _deltas(timeline: HeldTimeline) -> list[tuple[float, int]]:
    """The changes as differences, at the same moments."""
    before = 0
    deltas = []
    for clock_ms, held in timeline.changes:
        deltas.append((clock_ms, held - before))
        before = held
    return deltas
