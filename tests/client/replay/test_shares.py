"""What each scheduler serves: its share of one trace, or a trace of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mambapool.client.replay.messages import Job
from mambapool.client.replay.options import ReplayOptions
from mambapool.client.replay.shares import count_requests, requests_of
from mambapool.pool.errors import TraceError


@pytest.fixture
def traces(tmp_path: Path) -> tuple[Path, Path]:
    """Three requests of Mooncake's kind, two of Azure's."""
    mooncake, azure = tmp_path / "m.jsonl", tmp_path / "a.csv"
    fields = {"input_length": 1, "output_length": 2, "hash_ids": []}
    mooncake.write_text("".join(json.dumps({"timestamp": ms, **fields}) + "\n" for ms in (0, 10, 20)))
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,7\n2023-11-16 18:15:47,396,8\n"
    )
    return mooncake, azure


def test_of_one_trace_each_has_a_share(traces: tuple[Path, Path]) -> None:
    options = ReplayOptions(traces[0], schedulers=2)
    assert [[r.index for r in requests_of(options, scheduler)] for scheduler in (0, 1)] == [[0, 2], [1]]
    assert count_requests(options) == 3


def test_of_several_traces_each_has_one_and_no_two_requests_have_one_number(traces: tuple[Path, Path]) -> None:
    options = ReplayOptions(traces[0], schedulers=2, more_traces=traces[1:])
    first, second = requests_of(options, 0), requests_of(options, 1)
    assert [(r.index, r.arrival_ms, r.output_length) for r in first] == [(0, 0, 2), (2, 10, 2), (4, 20, 2)]
    assert [(r.index, r.arrival_ms, r.output_length) for r in second] == [(1, 0, 7), (3, 1000, 8)]
    assert count_requests(options) == 5
    assert Job.from_line(Job(1, options).to_line()).options == options


def test_a_limit_is_of_each_trace(traces: tuple[Path, Path]) -> None:
    options = ReplayOptions(traces[0], schedulers=2, more_traces=traces[1:], limit=1)
    assert [len(requests_of(options, scheduler)) for scheduler in (0, 1)] == [1, 1]
    assert count_requests(options) == 2


def test_a_trace_that_cannot_be_read_is_named(traces: tuple[Path, Path]) -> None:
    options = ReplayOptions(traces[0], schedulers=2, more_traces=(traces[1].with_name("none.csv"),))
    with pytest.raises(TraceError, match=r"none\.csv: cannot be read"):
        count_requests(options)
