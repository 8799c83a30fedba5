"""A replay whose schedulers are started by somebody else, as containers are: `mambapool scheduler` joins it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import Command
from daemons import SMALL_STATE, Daemon, mambapool, wait_until

TRACE = Path(__file__).parents[2] / "bench/traces/mooncake_conversation_trace.jsonl.gz"

DaemonFactory = Callable[..., Daemon]


@pytest.fixture
def daemon_with_states(daemon_factory: DaemonFactory) -> Daemon:
    return daemon_factory(slots=300, states=SMALL_STATE)


@contextlib.contextmanager
def replay_of_two(daemon: Daemon, *more: str) -> Iterator[tuple[Command, list[Command]]]:
    """The replay, and two schedulers that were started before it."""
    with contextlib.ExitStack() as stack:
        schedulers = [
            stack.enter_context(Command("scheduler", "--dir", daemon.dir, "--name", f"worker-{number}"))
            for number in range(2)
        ]
        options = ("--dir", str(daemon.dir), "--elsewhere", "--schedulers", "2", "--json", *more)
        yield stack.enter_context(Command("replay", TRACE, *options)), schedulers


def test_schedulers_that_join_do_what_started_ones_do(daemon_with_states: Daemon) -> None:
    with replay_of_two(daemon_with_states, "--limit", "60") as (replay, schedulers):
        assert replay.wait(60.0) == 0, replay.stderr
        assert [scheduler.wait() for scheduler in schedulers] == [0, 0]
        assert replay.process.stdout is not None
        joined = json.loads(replay.process.stdout.read())
    arguments = ("--dir", str(daemon_with_states.dir), "--schedulers", "2", "--limit", "60", "--json")
    started = json.loads(mambapool("replay", str(TRACE), *arguments).stdout)
    same = ("requests", "finished", "mismatches", "steps", "waits", "peak_held", "schedulers", "slots")
    assert {key: joined[key] for key in same} == {key: started[key] for key in same}
    assert joined["messages"] == pytest.approx(started["messages"], rel=0.05)
    assert not (daemon_with_states.dir / "replay.sock").exists()


@pytest.mark.heavy
def test_the_ranks_of_a_scheduler_join_from_processes_that_nobody_started_together(
    daemon_factory: DaemonFactory,
) -> None:
    daemon = daemon_factory(slots=60, states=SMALL_STATE, options=("--tp-size", "2"))
    place = ("--dir", str(daemon.dir))
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(Command("scheduler", *place, "--name", f"worker-{rank}", "--rank", str(rank)))
            for rank in (1, 0)
        ]
        options = ("--elsewhere", "--schedulers", "1", "--tp-size", "2", "--limit", "30", "--json")
        replay = stack.enter_context(Command("replay", TRACE, *place, *options))
        assert replay.wait(60.0) == 0, replay.stderr
        assert [rank.wait() for rank in ranks] == [0, 0]
        assert replay.process.stdout is not None
        found = json.loads(replay.process.stdout.read())
    assert (found["finished"], found["mismatches"], found["tp_size"]) == (30, 0, 2)
    leader, follower = found["rank_messages"]
    assert leader > 0 == follower, "rank 0 asks, the other reads its answers"
    assert daemon.pool()["free"] == 60


def test_one_that_is_killed_is_named_and_the_others_end(daemon_with_states: Daemon) -> None:
    with replay_of_two(daemon_with_states, "--speed", "1") as (replay, schedulers):
        wait_until(lambda: len(daemon_with_states.pool()["holders"]) == 2, "both are attached", timeout=30.0)
        os.kill(schedulers[1].pid, signal.SIGKILL)
        assert replay.wait() == 1
        assert "(worker-1) ended without a result: its own log may say why" in replay.stderr
        assert schedulers[0].wait() == 1
        assert schedulers[0].stderr == ""
    wait_until(lambda: daemon_with_states.pool()["free"] == 300, "all slots are back")


@pytest.mark.heavy
def test_a_replay_that_is_killed_ends_its_schedulers(daemon_with_states: Daemon) -> None:
    with replay_of_two(daemon_with_states, "--speed", "1") as (replay, schedulers):
        wait_until(lambda: len(daemon_with_states.pool()["holders"]) == 2, "both are attached", timeout=30.0)
        os.kill(replay.pid, signal.SIGKILL)
        assert [scheduler.wait() for scheduler in schedulers] == [1, 1]
        assert [scheduler.stderr for scheduler in schedulers] == ["", ""]


def test_who_finds_no_replay_says_what_it_waited_for(daemon: Daemon) -> None:
    ended = mambapool("scheduler", "--dir", str(daemon.dir), "--wait", "100ms")
    assert ended.returncode == 4
    assert "no replay has waited for a scheduler at" in ended.stderr
    assert "mambapool replay TRACE --elsewhere" in ended.stderr
