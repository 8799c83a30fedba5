from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from mambapool.client.replay.options import ReplayOptions
from mambapool.client.replay.result import SchedulerResult
from mambapool.client.replay.runner import Run
from mambapool.client.replay.summary import ReplaySummary, percentile, summarize
from mambapool.client.replay.usage import HeldTimeline

#: The keys that users' scripts rely on, in their order.
FIXED_KEYS = [
    "requests",
    "finished",
    "mismatches",
    "steps",
    "messages",
    "waits",
    "alloc_p50_us",
    "alloc_p99_us",
    "peak_held",
    "mean_held",
    "partitioned_need",
    "partitioned_sum",
    "seconds",
]


def result(**changes: Any) -> SchedulerResult:
    held = HeldTimeline([(0.0, 6), (60.0, 0)], 60.0)
    return dataclasses.replace(SchedulerResult(5, 0, [], 10, 20, 0, [30.0, 10.0], held), **changes)


def summary(*results: SchedulerResult, requests: int = 10) -> ReplaySummary:
    options = ReplayOptions(Path("trace.jsonl"), schedulers=len(results))
    return summarize(options, requests, Run(list(results), 512, 1.23456))


def test_json_has_the_fixed_keys_first() -> None:
    as_json = json.loads(json.dumps(summary(result(), result()).to_json()))
    assert list(as_json)[: len(FIXED_KEYS)] == FIXED_KEYS


def test_counts_are_sums_and_peaks_are_told_apart() -> None:
    later = HeldTimeline([(60.0, 9), (90.0, 0)], 120.0)
    found = summary(result(), result(held=later, alloc_us=[40.0, 20.0]))
    assert (found.finished, found.steps, found.messages, found.waits) == (10, 20, 40, 0)
    assert (found.peak_held, found.mean_held) == (9, (6 * 60 + 9 * 30) / 120)
    assert (found.partitioned_need, found.partitioned_sum) == (18, 15)
    assert (found.alloc_p50_us, found.alloc_p99_us) == (20.0, 40.0)
    assert (found.schedulers, found.slots, found.seconds) == (2, 512, 1.235)


def test_ranks_do_alike_and_are_verified_each() -> None:
    options = ReplayOptions(Path("trace.jsonl"), schedulers=2, tp_size=2, guarantee=50)
    ranks = [result(), result(messages=0, alloc_us=[])] * 2
    found = summarize(options, 10, Run(ranks, 512, 1.0))
    assert found.ok
    assert (found.finished, found.steps, found.messages) == (10, 20, 40)
    assert (found.rank_messages, found.tp_size, found.guarantee) == ((40, 0), 2, 50)
    assert (found.peak_held, found.partitioned_need) == (12, 12)
    rows = {row.label: row for row in found.rows()}
    assert rows["requests"].note == "over 2 schedulers of 2 ranks"
    assert rows["messages"].note == "2.00 + 0.00 per step, rank by rank"
    ranks[3] = result(finished=4)
    assert not summarize(options, 10, Run(ranks, 512, 1.0)).ok
    ranks[3] = result(mismatches=1, findings=["rank 1 of the second"])
    assert summarize(options, 10, Run(ranks, 512, 1.0)).findings == ("rank 1 of the second",)


@pytest.mark.parametrize(
    ("results", "ok"),
    [
        ([result(), result()], True),
        ([result(), result(finished=4)], False),
        ([result(), result(mismatches=1, findings=["request 7"])], False),
    ],
)
def test_a_replay_is_ok_when_all_finished_and_nothing_was_found(results: list[SchedulerResult], ok: bool) -> None:
    assert summary(*results).ok is ok


def test_findings_of_all_schedulers_are_kept() -> None:
    found = summary(result(findings=["a"], mismatches=1), result(findings=["b"], mismatches=1))
    assert found.findings == ("a", "b")
    assert found.to_json()["findings"] == ["a", "b"]


def test_the_rows_say_what_each_figure_means() -> None:
    rows = {label: (value, note) for label, value, note in summary(result(), result()).rows()}
    assert rows["finished"] == ("10", "all")
    assert rows["messages"] == ("40", "2.00 per step")
    assert "equal parts" in rows["partitioned need"][1]


def test_what_means_nothing_where_requests_waited_is_not_told() -> None:
    found = summary(result(most_in_use=400), result(waits=1, most_in_use=512))
    assert (found.waits, found.in_step, found.peak_held) == (1, False, 512), "as the pool saw it"
    assert all(isinstance(found.to_json()[key], int | float) for key in FIXED_KEYS[8:])
    rows = {row.label: row for row in found.rows()}
    assert rows["peak held"].note == "of 512 slots, as the pool saw it: the schedulers' clocks were not in step"
    for label in ("mean held", "partitioned need", "partitioned sum"):
        assert rows[label].value == "-"
        assert "says nothing" in rows[label].note


def test_clocks_by_which_more_was_held_than_there_is_are_not_believed() -> None:
    """Nobody waited: one was done before the other had come so far. Each one's own peak is as it was."""
    held = HeldTimeline([(0.0, 300), (60.0, 0)], 60.0)
    found = summary(result(held=held, most_in_use=300), result(held=held, most_in_use=310))
    assert (found.waits, found.in_step, found.peak_held) == (0, False, 310)
    assert (found.partitioned_need, found.partitioned_sum) == (600, 600)


def test_no_call_that_cost_a_message_has_no_percentile() -> None:
    found = summary(result(alloc_us=[]))
    assert found.alloc_p50_us is None
    assert {row.label: row.value for row in found.rows()}["alloc p99"] == "none"


@pytest.mark.parametrize(
    ("percent", "value"), [(0, 1.0), (1, 1.0), (50, 50.0), (50.5, 51.0), (99, 99.0), (100, 100.0)]
)
def test_percentiles_are_by_nearest_rank(percent: float, value: float) -> None:
    assert percentile([float(n) for n in range(1, 101)], percent) == value
