"""Interleaved measuring: blocks of a few calls of each contender, in random order; ratios within a block.

What disturbs the machine disturbs neighbouring blocks alike, so that ratios hold where absolute times do not.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

#: Makes so many calls, one after the other; returns the nanoseconds that each took.
Contender = Callable[[int], list[int]]

WARM_UP_CALLS = 3


def timed(call: Callable[[], object]) -> Contender:
    """The contender that makes this call."""

    def contender(calls: int) -> list[int]:
        times = []
        now = time.perf_counter_ns
        for _ in range(calls):
            began = now()
            call()
            times.append(now() - began)
        return times

    return contender


@dataclass
class Samples:
    """Of each contender: the median of every block, and all single calls; nanoseconds."""

    medians: dict[str, list[float]] = field(default_factory=dict)
    calls: dict[str, list[int]] = field(default_factory=dict)

    def ratio(self, name: str, base: str) -> float:
        """How many times as long as ``base`` it took: the median over the blocks."""
        return statistics.median(
            mine / theirs for mine, theirs in zip(self.medians[name], self.medians[base], strict=True)
        )

    def percentile(self, name: str, percent: float) -> float:
        """Of the single calls, nanoseconds."""
        ordered = sorted(self.calls[name])
        return float(ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))])

    def lines(self) -> list[str]:
        """For people: p50 and p99 of every contender."""
        return [
            f"{name:32} p50 {self.percentile(name, 50) / 1e3:9.2f} µs   p99 {self.percentile(name, 99) / 1e3:9.2f} µs"
            for name in self.calls
        ]


def interleave(contenders: Mapping[str, Contender], *, blocks: int, calls: int, seed: int = 1) -> Samples:
    """Measure ``blocks`` blocks of ``calls`` calls of each."""
    chance = random.Random(seed)
    names = list(contenders)
    samples = Samples({name: [] for name in names}, {name: [] for name in names})
    for _ in range(blocks):
        chance.shuffle(names)
        for name in names:
            contenders[name](WARM_UP_CALLS)
            times = contenders[name](calls)
            samples.medians[name].append(statistics.median(times))
            samples.calls[name] += times
    return samples
