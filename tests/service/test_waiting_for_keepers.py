"""An allocator that is started alone: before its keepers, and until nobody needs it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from commands import Command, running
from daemons import SMALL_STATE, mambapool, wait_until

from mambapool.client import connect
from mambapool.pool.idle import Idle

STATE = ("--state", SMALL_STATE[0], "--state", SMALL_STATE[1])


def keeper(directory: Path, *more: str, slots: int = 8) -> tuple[str | Path, ...]:
    return ("keeper", "--dir", directory, "--slots", str(slots), *STATE, *more)


def pools(directory: Path) -> list[str]:
    named: list[str] = json.loads((directory / "ready").read_text())["pools"]
    return named


def test_the_keepers_of_a_named_pool_are_waited_for_whatever_comes_first(runtime_dir: Path) -> None:
    shards = [keeper(runtime_dir, "--rank", str(rank), "--tp-size", "2") for rank in (0, 1)]
    with Command("allocator", "--dir", runtime_dir, "--pool", "default") as allocator:
        wait_until((runtime_dir / "allocator.lock").exists, "the allocator has started")
        with running(*shards[1]), running(*shards[0]):
            allocator.ready_line()
            assert pools(runtime_dir) == ["default"]
            with connect(runtime_dir, timeout=20.0, rank=1) as worker:
                assert set(worker.states) == {"conv", "temporal"}


def test_a_keeper_that_does_not_come_is_named_with_the_wait(runtime_dir: Path) -> None:
    with running(*keeper(runtime_dir, "--tp-size", "2")):
        ended = mambapool("allocator", "--dir", str(runtime_dir), "--pool", "default", "--wait", "200ms")
    assert ended.returncode == 1
    assert "waited 0.2 s for the keepers of pool default: keeper of pool default rank 1" in ended.stderr
    assert "is not there" in ended.stderr
    assert not (runtime_dir / "ready").exists()


def test_a_pool_that_cannot_be_is_not_waited_for(runtime_dir: Path) -> None:
    ended = mambapool("allocator", "--dir", str(runtime_dir), "--pool", "No Pool", "--wait", "20s")
    assert ended.returncode == 2
    assert "pool name 'No Pool'" in ended.stderr


def test_a_keeper_says_by_itself_whether_it_is_there(runtime_dir: Path) -> None:
    of_keeper = ("status", "--keeper", "--dir", str(runtime_dir))
    missing = mambapool(*of_keeper)
    assert missing.returncode == 4
    assert "keeper of pool default rank 0" in missing.stderr
    with running(*keeper(runtime_dir, "--tp-size", "2", "--rank", "1")) as kept:
        found = mambapool(*of_keeper, "--rank", "1")
        assert (found.returncode, found.stderr) == (0, "")
        assert found.stdout.startswith("keeper of pool default, rank 1 of 2: 8 slots, ")
        told = json.loads(mambapool(*of_keeper, "--json", MAMBAPOOL_RANK="1").stdout)
        assert (told["pool"], told["rank"], told["tp_size"], told["slots"]) == ("default", 1, 2, 8)
        assert told["pid"] == kept.pid
        os.kill(kept.pid, signal.SIGSTOP)
        silent = mambapool(*of_keeper, "--rank", "1", "--timeout", "200ms")
        os.kill(kept.pid, signal.SIGCONT)
        assert silent.returncode == 4
        assert "did not answer within 0.2 s" in silent.stderr


def test_they_end_when_the_last_session_has_ended_and_not_when_the_allocator_crashed(runtime_dir: Path) -> None:
    idle = ("--exit-idle", "300ms")
    with running(*keeper(runtime_dir, *idle)) as kept:
        with running("allocator", "--dir", runtime_dir, *idle) as crashed, connect(runtime_dir, timeout=20.0):
            crashed.end(signal.SIGKILL)
        with running("allocator", "--dir", runtime_dir, *idle) as allocator:
            with connect(runtime_dir, timeout=20.0) as worker, connect(runtime_dir, timeout=20.0):
                worker.allocator.alloc(2)
            assert allocator.wait() == 0
            assert "no session for 0.3 s" in allocator.stderr
        assert kept.wait() == 0
        assert "no allocator for 0.3 s" in kept.stderr


def test_idle_is_who_was_used_and_is_not_any_more() -> None:
    idle, never = Idle(2.0), Idle(None)
    assert not idle.is_over(100.0), "nobody has come yet"
    for used in (101.0, 103.0):
        idle.use(used)
        never.use(used)
        assert not idle.is_over(used + 1.9)
    assert idle.is_over(105.0)
    assert not never.is_over(1e9)
