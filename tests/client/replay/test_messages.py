from __future__ import annotations

from pathlib import Path

import pytest

from mambapool.client.replay.messages import (
    Failed,
    Go,
    Job,
    Loaded,
    Progress,
    Ready,
    Report,
    parse_report,
    report_line,
)
from mambapool.client.replay.options import ReplayOptions
from mambapool.client.replay.result import SchedulerResult
from mambapool.client.replay.usage import HeldTimeline

RESULT = SchedulerResult(
    finished=3,
    mismatches=1,
    findings=["request 7, slot 4 …\nand more"],
    steps=100,
    messages=12,
    waits=1,
    alloc_us=[12.5, 80.25],
    held=HeldTimeline([(0.0, 3), (60.5, 0)], 90.0),
)


@pytest.mark.parametrize(
    "report",
    [Loaded(), Ready(512, 2), Progress(7, 900, blocked=True), Failed("PoolLost", "gone\nfor ever"), RESULT],
    ids=lambda report: type(report).__name__,
)
def test_a_report_arrives_as_it_was_sent_on_one_line(report: Report) -> None:
    line = report_line(report)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert parse_report(line) == report


@pytest.mark.parametrize("directory", [None, "/run/mambapool", Path("/run/mambapool")])
def test_a_job_arrives_as_it_was_sent(directory: str | Path | None) -> None:
    options = ReplayOptions(Path("traces/a trace.jsonl"), directory, "other", 3, 1, 12.5, 2.0, "prefix", 10, 1.0)
    arrived = Job.from_line(Job(2, options).to_line())
    assert (arrived.scheduler, arrived.rank, arrived.group) == (2, 0, None)
    assert arrived.options.trace == options.trace
    assert arrived.options.dir == (None if directory is None else str(directory))
    assert (arrived.options.pool, arrived.options.schedulers, arrived.options.track) == ("other", 3, 1)
    assert (arrived.options.step_ms, arrived.options.speed, arrived.options.route) == (12.5, 2.0, "prefix")
    assert (arrived.options.limit, arrived.options.timeout) == (10, 1.0)


def test_a_ranks_job_arrives_as_it_was_sent() -> None:
    job = Job(2, ReplayOptions(Path("trace.jsonl"), tp_size=4, guarantee=9), 3, "replay-7-2")
    assert Job.from_line(job.to_line()) == job


def test_the_start_of_the_trace_arrives_exactly() -> None:
    assert Go.from_line(Go(12345.678901234567).to_line()) == Go(12345.678901234567)
