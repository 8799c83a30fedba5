"""Which place of a replay a scheduler gets that joins it; the schedulers here are bare connections."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from daemons import wait_until

from mambapool.client.replay.failure import ReplayFailed
from mambapool.client.replay.joining import JoinedScheduler, joined_schedulers
from mambapool.client.replay.messages import Job
from mambapool.client.replay.options import ReplayOptions
from mambapool.client.replay.runner import jobs_of

GROUPS_OF_TWO = {"schedulers": 2, "tp_size": 2}


class Gathering:
    """A replay that waits for schedulers, and what those that connect are given."""

    def __init__(self, directory: Path, closing: ExitStack, **options: Any) -> None:
        self._directory = directory
        self._closing = closing
        asked = ReplayOptions(Path("trace.jsonl"), directory, elsewhere=True, **options)
        thread = closing.enter_context(ThreadPoolExecutor(1))
        self._joined: list[JoinedScheduler] = []
        self._all: Future[None] = thread.submit(
            lambda: self._joined.extend(joined_schedulers(asked, jobs_of(asked)))
        )
        wait_until((directory / "replay.sock").exists, "the replay has its socket")

    def connect(self, name: str, scheduler: int | None = None, rank: int | None = None) -> socket.socket:
        connection = self._closing.enter_context(socket.socket(socket.AF_UNIX))
        connection.settimeout(10.0)
        address = str(self._directory / "replay.sock")
        # There before it is listened to.
        wait_until(lambda: connection.connect_ex(address) in (0, errno.EISCONN), "the replay listens")
        hello = {"name": name, "dir": f"/its/{name}", "scheduler": scheduler, "rank": rank}
        connection.sendall(json.dumps(hello).encode() + b"\n")
        return connection

    def job(self, name: str, scheduler: int | None = None, rank: int | None = None) -> Job:
        return Job.from_line(self.connect(name, scheduler, rank).makefile("rb").readline())

    def end(self) -> list[str]:
        try:
            self._all.result(10.0)
        finally:
            for process in self._joined:
                process.close()
        return [str(process) for process in self._joined]


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    place = tmp_path / "run"
    place.mkdir(mode=0o700)
    return place


def test_each_rank_gets_the_place_that_it_asks_for(directory: Path, closing: ExitStack) -> None:
    gathering = Gathering(directory, closing, **GROUPS_OF_TWO)
    asked = [(1, 0), (0, 1), (1, 1), (0, 0)]
    jobs = [gathering.job(f"worker-{2 * place[0] + place[1]}", *place) for place in asked]
    assert [(job.scheduler, job.rank) for job in jobs] == asked
    assert [job.options.dir for job in jobs] == [
        "/its/worker-2",
        "/its/worker-1",
        "/its/worker-3",
        "/its/worker-0",
    ]
    assert jobs[0].group == jobs[2].group != jobs[1].group == jobs[3].group
    assert gathering.end() == [
        f"scheduler {scheduler}, rank {rank} (worker-{2 * scheduler + rank})" for scheduler, rank in asked
    ]


def test_who_does_not_mind_gets_the_next_place_that_is_free(directory: Path, closing: ExitStack) -> None:
    gathering = Gathering(directory, closing, **GROUPS_OF_TWO)
    places = [("a", None, None), ("b", 1, None), ("c", None, 1), ("d", None, None)]
    jobs = [gathering.job(*place) for place in places]
    assert [(job.scheduler, job.rank) for job in jobs] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    gathering.end()


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ((0, 0), "late cannot be rank 0 of scheduler 0"),
        ((2, None), "late cannot be scheduler 2"),
        ((1, 2), "rank 2"),
    ],
)
def test_a_place_that_is_taken_or_not_there_ends_the_replay_with_the_reason(
    directory: Path, closing: ExitStack, place: tuple[int, int | None], told: str
) -> None:
    gathering = Gathering(directory, closing, **GROUPS_OF_TWO)
    gathering.job("first", 0, 0)
    late = gathering.connect("late", *place)
    with pytest.raises(ReplayFailed, match="schedulers are 0 to 1, ranks 0 to 1,") as raised:
        gathering.end()
    assert told in str(raised.value)
    assert late.recv(1) == b"", "and it is sent away"


def test_no_two_replays_have_groups_of_one_name() -> None:
    """Their pids may be equal: in containers of their own both are process 1."""
    options = ReplayOptions(Path("trace.jsonl"), schedulers=2, tp_size=2)
    names = {job.group for _ in range(2) for job in jobs_of(options)}
    assert len(names) == 4
    assert {job.group for job in jobs_of(ReplayOptions(Path("trace.jsonl")))} == {None}
