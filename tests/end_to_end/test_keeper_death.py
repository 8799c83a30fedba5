"""A keeper that dies takes the states with it: everybody is told at the next call, and nothing goes on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import children_of, running
from daemons import SMALL_STATE, Daemon, wait_until
from fresh_pool import ids
from leased_clients import values

from mambapool.client import Worker, connect
from mambapool.client.background import TICK_S
from mambapool.client.operators import ask_status
from mambapool.pool.errors import AllocatorUnavailable, PoolLost
from mambapool.pool.exits import EXIT_FAILED
from mambapool.pool.runtime_dir import RuntimeDir

DaemonFactory = Callable[..., Daemon]


def kill_keeper(daemon: Daemon) -> int:
    """The last of ``serve``'s keepers; its pid."""
    keepers = sorted(set(children_of(daemon.process.pid)) - {daemon.allocator_pid})
    os.kill(keepers[-1], signal.SIGKILL)
    return keepers[-1]


def is_lost(call: Callable[[], object]) -> bool:
    try:
        call()
    except PoolLost as error:
        return "keeper died" in str(error)
    return False


def calls_of(worker: Worker, slots: torch.Tensor) -> dict[str, Callable[[], object]]:
    allocator = worker.allocator
    return {
        "alloc": lambda: allocator.alloc(1),
        "alloc of several": lambda: allocator.alloc(2),
        "alloc that waits": lambda: allocator.alloc(2, timeout=5.0),
        "begin": lambda: allocator.alloc_group_begin(2),
        "end": lambda: allocator.alloc_group_end(),
        "free": lambda: allocator.free(slots),
        "clear": lambda: allocator.clear(),
        "available_size": lambda: allocator.available_size(),
        "free_slots": lambda: allocator.free_slots,
        "states": lambda: worker.states,
        "pool": lambda: worker.pool,
        "transfer": lambda: worker.transfer(slots, to=1),
    }


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A pool of two ranks, and an allocator-only one."""
    path = tmp_path / "pools.toml"
    states = ", ".join(f'"{state}"' for state in SMALL_STATE)
    default = f"[[pool]]\nslots = 16\ntp-size = 2\nstate = [{states}]\n"
    path.write_text(default + '[[pool]]\npool = "other"\nslots = 4\n')
    return path


def test_every_client_of_every_rank_is_told_and_serve_ends_with_a_failure(
    daemon_factory: DaemonFactory, config: Path
) -> None:
    daemon = daemon_factory(slots=None, options=("--config", str(config)))
    workers = [daemon.connect(rank=0), daemon.connect(rank=1), daemon.connect(guarantee=4)]
    held = [worker.allocator.alloc(2) for worker in workers]
    other = daemon.connect(pool="other", timeout=0.3)
    assert ids(other.allocator.alloc(1)) == [1]
    temporal = workers[0].states["temporal"]
    temporal[:, 1] = 7
    for worker in workers:
        worker.allocator.alloc_group_begin(2)
    waiting_error: list[BaseException] = []

    def wait() -> None:
        with pytest.raises(PoolLost) as lost:
            daemon.connect().allocator.alloc(12, timeout=60.0)
        waiting_error.append(lost.value)

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_until(lambda: daemon.pool()["waiting"] == 12, "one waits")
    pid = kill_keeper(daemon)
    # Slots of the open window come without a message: these too stop, within a tick or so.
    wait_until(lambda: all(is_lost(w.allocator.available_size) for w in workers), "all are told", timeout=2.0)
    for worker in workers:
        wait_until(lambda a=worker.allocator: is_lost(lambda: a.alloc(1)), "no slot comes", timeout=20 * TICK_S)  # type: ignore[misc]
    for worker, slots in zip(workers, held, strict=True):
        assert slots is not None
        for name, call in calls_of(worker, slots).items():
            assert is_lost(call), name
    waiting.join()
    assert len(waiting_error) == 1
    assert values(temporal[:, 1]) == {7}, "what was taken stays readable: nobody is killed by it"
    assert daemon.process.wait(10.0) == EXIT_FAILED
    assert "pool default is lost: the keeper of pool default, rank 1 died" in daemon.log
    assert "the keeper of pool default rank 1 was killed by SIGKILL: its states are gone" in daemon.log
    assert not Path(f"/proc/{pid}").exists()
    # It ends as a whole: its operator starts all of it again, rather than a daemon with half its pools.
    with pytest.raises(AllocatorUnavailable):
        other.allocator.alloc(1)
    with pytest.raises(AllocatorUnavailable):
        daemon.connect(timeout=0.2)
    for worker in workers:
        worker.close()


def test_an_allocator_alone_says_which_pool_is_lost_and_attaches_nobody_to_it(runtime_dir: Path) -> None:
    states = [word for state in SMALL_STATE for word in ("--state", state)]
    with (
        running("keeper", "--dir", runtime_dir, "--slots", "8", *states) as keeper,
        running("allocator", "--dir", runtime_dir) as allocator,
    ):
        with connect(runtime_dir) as worker:
            assert ids(worker.allocator.alloc(2)) == [1, 2]
            keeper.end(signal.SIGKILL)
            wait_until(lambda: is_lost(worker.allocator.available_size), "its client is told")
            (pool,) = ask_status(RuntimeDir(runtime_dir), 5.0)["pools"]
            assert "the keeper of pool default, rank 0 died" in pool["lost"]
        with pytest.raises(PoolLost, match="rank 0 died"):
            connect(runtime_dir, timeout=5.0)
        assert allocator.end() == 0
