"""Interleaved measuring: blocks of a few calls of each contender, in random order; ratios within a block.

What disturbs the machine disturbs neighbouring blocks alike, so that ratios hold where absolute times do not.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from measuring.figures import Effort, say

#: Makes so many calls, one after the other; returns the nanoseconds that each took.
Contender = Callable[[int], list[int]]

WARM_UP_CALLS = 3


def timed(call: Callable[[], object], before: Callable[[], object] | None = None) -> Contender:
    """The contender that makes this call, each after ``before``, which is not timed."""

    def contender(calls: int) -> list[int]:
        times = []
        now = time.perf_counter_ns
        for _ in range(calls):
            if before is not None:
                before()
            began = now()
            call()
            times.append(now() - began)
        return times

    return contender


@dataclass
class Samples:
    """Of each contender: the median of every block, and all single calls; nanoseconds."""

    medians: dict[str, list[float]]
    calls: dict[str, list[int]]

    def ratio(self, name: str, base: str) -> float:
        """How many times as long as ``base`` it took: the median over the blocks."""
        return statistics.median(
            mine / theirs for mine, theirs in zip(self.medians[name], self.medians[base], strict=True)
        )

    def percentile(self, name: str, percent: float) -> float:
        """Of the single calls, nanoseconds."""
        ordered = sorted(self.calls[name])
        return float(ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))])


def interleave(contenders: Mapping[str, Contender], effort: Effort) -> Samples:
    """Measure so many blocks of each."""
    chance = random.Random(1)
    names = list(contenders)
    samples = Samples({name: [] for name in names}, {name: [] for name in names})
    for _ in range(effort.blocks):
        chance.shuffle(names)
        for name in names:
            contenders[name](WARM_UP_CALLS)
            times = contenders[name](effort.calls)
            samples.medians[name].append(statistics.median(times))
            samples.calls[name] += times
    return samples


class Runs:
    """Several runs of one comparison, each with everything started anew."""

    def __init__(self, title: str, run: Callable[[Effort], Samples], effort: Effort) -> None:
        self.samples = [run(effort) for _ in range(effort.runs)]
        say(title)
        for name in sorted(self.samples[0].calls):
            say(
                f"  {name:36} p50 {self.percentile_us(name, 50):10.2f} µs   p99 {self.percentile_us(name, 99):10.2f} µs"
            )

    def ratio(self, name: str, base: str) -> float:
        """The median of the runs' ratios."""
        return self._median(lambda samples: samples.ratio(name, base))

    def percentile_us(self, name: str, percent: float) -> float:
        """Of single calls, microseconds: the median over the runs."""
        return self._median(lambda samples: samples.percentile(name, percent)) / 1e3

    def _median(self, value: Callable[[Samples], float]) -> float:
        return float(statistics.median(value(samples) for samples in self.samples))
