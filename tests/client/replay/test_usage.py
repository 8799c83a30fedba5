from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mambapool.client.replay.usage import HeldTimeline, PoolUsage, merge


def timeline(*changes: tuple[float, int]) -> HeldTimeline:
    held = HeldTimeline()
    for clock_ms, slots in changes:
        held.record(clock_ms, slots)
    return held


def test_only_changes_are_kept() -> None:
    assert timeline((0, 3), (30, 3), (60, 3), (90, 0)).changes == [(0, 3), (90, 0)]


def test_the_last_word_of_a_moment_counts() -> None:
    # Given back at the end of one step and taken again at the start of the next: held throughout.
    held = timeline((0, 3), (30, 0), (30, 3), (60, 0))
    assert held.changes == [(0, 3), (60, 0)]
    assert timeline((0, 3), (0, 0)).peak == 0


def test_the_pool_is_the_sum_of_its_schedulers_by_the_clock_of_the_trace() -> None:
    usage = merge([timeline((0, 6), (50, 3), (100, 0)), timeline((40, 9), (60, 0)), timeline()])
    assert usage.peak == 15
    assert usage.mean == (6 * 40 + 15 * 10 + 12 * 10 + 3 * 40) / 100


def test_what_one_gives_back_when_another_takes_is_not_counted_twice() -> None:
    assert merge([timeline((0, 6), (30, 0)), timeline((30, 6), (60, 0))]).peak == 6


def test_the_mean_counts_idle_time_from_the_start_of_the_trace_to_its_end() -> None:
    assert merge([timeline((50, 4), (75, 0), (100, 0))]) == PoolUsage(peak=4, mean=1.0)


def test_nothing_held_is_no_usage() -> None:
    assert merge([timeline(), timeline()]) == PoolUsage(0, 0.0)


CHANGES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), max_size=12).map(
    lambda changes: sorted(changes, key=lambda change: change[0])
)


@settings(deadline=None)
@given(st.lists(CHANGES, min_size=1, max_size=4))
def test_merging_agrees_with_looking_at_every_millisecond(parts: list[list[tuple[int, int]]]) -> None:
    timelines = [timeline(*changes) for changes in parts]
    end = max((changes[-1][0] for changes in parts if changes), default=0)
    sums = [
        sum(next((held for at, held in reversed(changes) if at <= ms), 0) for changes in parts)
        for ms in range(end + 1)
    ]
    usage = merge(timelines)
    assert usage.peak == max(sums)
    assert usage.mean == pytest.approx(sum(sums[:end]) / end if end else 0.0)
