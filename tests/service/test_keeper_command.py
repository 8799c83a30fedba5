"""Keepers and an allocator that were started one by one, as containers do it."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import Command, is_running, running
from daemons import SMALL_STATE, mambapool

from mambapool.client import Worker, connect, errors
from mambapool.client.operators import ask_status
from mambapool.pool.runtime_dir import RuntimeDir

STATE = ("--state", SMALL_STATE[0], "--state", SMALL_STATE[1])


def keeper(directory: Path, rank: int, *more: str, slots: int = 8, tp_size: int = 2) -> tuple[str | Path, ...]:
    """The command line of one keeper."""
    shard = ("--slots", str(slots), "--rank", str(rank), "--tp-size", str(tp_size))
    return ("keeper", "--dir", directory, *shard, *(more or STATE))


@contextlib.contextmanager
def two_keepers(directory: Path) -> Iterator[tuple[Command, Command]]:
    """Both shards of pool default, of 8 slots."""
    with Command(*keeper(directory, 0)) as first, Command(*keeper(directory, 1)) as second:
        for rank, command in enumerate((first, second)):
            assert (
                command.ready_line() == f"mambapool ready: keeper of default, rank {rank} of 2, in {directory}\n"
            )
        yield first, second


def attach(directory: Path, **options: Any) -> Worker:
    return connect(directory, timeout=20.0, **options)


def test_an_allocator_serves_the_keepers_that_it_finds_and_another_one_after_it(runtime_dir: Path) -> None:
    with two_keepers(runtime_dir) as keepers:
        with Command("allocator", "--dir", runtime_dir) as allocator:
            line = allocator.ready_line()
            assert line == f"mambapool ready: pid {allocator.pid}, ipc://{runtime_dir}/allocator.sock\n"
            (pool,) = ask_status(RuntimeDir(runtime_dir), 5.0)["pools"]
            assert (pool["name"], pool["slots"], pool["shards"], pool["backend"]) == ("default", 8, 2, "shm")
            with attach(runtime_dir, rank=0) as zero, attach(runtime_dir, rank=1) as one:
                zero.states["temporal"][:] = 10
                one.states["temporal"][:] = 11
            with pytest.raises(errors.GeometryMismatch, match=r"rank: expected 2, .* ranks 0 to 1"):
                attach(runtime_dir, rank=2)
            assert allocator.end() == 0
        assert all(is_running(command.pid) for command in keepers)

        with running("allocator", "--dir", runtime_dir):
            for rank in (0, 1):
                with attach(runtime_dir, rank=rank, slots=8) as worker:
                    shape = worker.states["temporal"].shape
                    assert worker.states["temporal"].eq(10 + rank).all(), "the states outlived the allocator"
                    assert shape == (2, 9, 2, 4, 4)
    for command in keepers:
        assert command.process.returncode == 0
    left = {path.name for path in runtime_dir.iterdir()}
    locks = {"allocator.lock", "keeper-default-0.lock", "keeper-default-1.lock"}
    assert left == {*locks, "leases", "default.table"}, "the table is the next allocator's"


@pytest.mark.parametrize(("there", "missing"), [(0, 1), (1, 0)])
def test_a_missing_rank_is_named(runtime_dir: Path, there: int, missing: int) -> None:
    with running(*keeper(runtime_dir, there)):
        done = mambapool("allocator", "--dir", str(runtime_dir))
    assert done.returncode == 1
    assert f"keeper of pool default rank {missing} " in done.stderr
    assert "is not there" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (runtime_dir / "ready").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"slots": 9}, "pool default, rank 1, slots: expected 8, the keeper has 9"),
        ({"tp_size": 3}, "pool default, rank 1, tp_size: expected 2, the keeper has 3"),
        (
            {"more": ("--state", SMALL_STATE[0])},
            f"pool default, rank 1, geometry: expected {' '.join(SMALL_STATE)}, the keeper has {SMALL_STATE[0]}",
        ),
    ],
)
def test_a_shard_that_does_not_fit_the_others_is_refused_with_rank_and_field(
    runtime_dir: Path, options: dict[str, Any], said: str
) -> None:
    more = options.pop("more", ())
    with running(*keeper(runtime_dir, 0)), running(*keeper(runtime_dir, 1, *more, **options)):
        done = mambapool("allocator", "--dir", str(runtime_dir))
    assert (done.returncode, done.stderr) == (1, f"mambapool: {said}\n")


def test_slots_that_are_named_to_the_allocator_are_compared_with_its_keepers(runtime_dir: Path) -> None:
    with running(*keeper(runtime_dir, 0, tp_size=1)):
        other = mambapool("allocator", "--dir", str(runtime_dir), MAMBAPOOL_SLOTS="9")
        assert other.returncode == 1
        assert other.stderr == "mambapool: pool default, slots: expected 9, its keepers have 8\n"
        with running("allocator", "--dir", runtime_dir, MAMBAPOOL_SLOTS="8"), attach(runtime_dir) as worker:
            assert set(worker.states) == {"conv", "temporal"}, "not an allocator-only pool of the same name"


def test_a_killed_keepers_socket_is_no_pool_and_a_new_keeper_replaces_it(runtime_dir: Path) -> None:
    with running(*keeper(runtime_dir, 0, tp_size=1)) as first:
        first.end(signal.SIGKILL)
    assert (runtime_dir / "keeper-default-0.sock").is_socket()
    with running("allocator", "--dir", runtime_dir) as allocator:
        assert json.loads((runtime_dir / "ready").read_text())["pools"] == []
        assert allocator.end() == 0
    with running(*keeper(runtime_dir, 0, tp_size=1)), running("allocator", "--dir", runtime_dir):
        assert json.loads((runtime_dir / "ready").read_text())["pools"] == ["default"]


def test_a_keeper_that_does_not_answer_is_not_taken_for_a_dead_one(runtime_dir: Path) -> None:
    with running(*keeper(runtime_dir, 0, tp_size=1)) as stopped:
        stopped.process.send_signal(signal.SIGSTOP)
        done = mambapool("allocator", "--dir", str(runtime_dir))
        stopped.process.send_signal(signal.SIGCONT)
    assert done.returncode == 1
    assert "keeper of pool default rank 0" in done.stderr
    assert "did not answer within 2 s" in done.stderr
