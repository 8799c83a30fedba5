"""An allocator that is killed comes back, and its clients go on: nothing lost, nothing twice, no call wrong."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import running
from daemons import SMALL_STATE, Daemon, wait_until
from fresh_pool import FreshPool, FreshPoolFactory, drain, ids
from leased_clients import RemoteClient, all_free, log_lines, outage, restart, values
from processes import Children

from mambapool.client import connect
from mambapool.client.operators import ask_status
from mambapool.pool.errors import AllocatorUnavailable, UnknownPool
from mambapool.pool.runtime_dir import RuntimeDir

DaemonFactory = Callable[..., Daemon]


@pytest.fixture
def pool(new_pool: FreshPoolFactory) -> FreshPool:
    return new_pool(16)


def test_keepers_and_states_are_untouched_and_clients_go_on(daemon_factory: DaemonFactory) -> None:
    daemon = daemon_factory(slots=8, states=SMALL_STATE)
    worker, other = daemon.connect(), daemon.connect()
    slots = worker.allocator.alloc(3)
    assert slots is not None
    worker.states["temporal"][:, slots] = 5
    before, ready = daemon.status(), daemon.directory.read_ready()
    keepers = log_lines(daemon, "keeping pool")
    restart(daemon)
    assert ids(worker.allocator.alloc(1)) == [4]
    assert values(other.states["temporal"][:, slots]) == {5}
    other.states["temporal"][:, slots] = 6
    assert values(worker.states["temporal"][:, slots]) == {6}
    after = daemon.status()
    assert after["epoch"] == before["epoch"] + 1
    assert daemon.directory.read_ready() == {**(ready or {}), "pid": after["pid"], "epoch": after["epoch"]}
    assert log_lines(daemon, "keeping pool") == keepers, "no keeper was started again"
    sessions = [holder["session"] for holder in after["pools"][0]["holders"]]
    assert sessions == [worker.session, other.session]
    assert log_lines(daemon, "the allocator was killed by SIGKILL; it is brought back")
    # Who comes new finds the same memory.
    assert values(daemon.connect().states["temporal"][:, slots]) == {6}


#: What a client of sixteen slots asks first, and the answer; it holds 1 to 8, or 1 to 4 and a window of 5 to 8.
FIRST_CALLS: dict[str, tuple[str, object]] = {
    "alloc": ("allocator.alloc(1)", [9]),
    "alloc of several": ("allocator.alloc(3)", [9, 10, 11]),
    "alloc that waits": ("allocator.alloc(2, timeout=20.0)", [9, 10]),
    "alloc in the window": ("allocator.alloc(1)", [5]),
    "end of the window": ("allocator.alloc_group_end()", None),
    "begin over the window": ("allocator.alloc_group_begin(2)", None),
    "free": ("allocator.free([1, 2])", None),
    "clear": ("allocator.clear()", None),
    "available_size": ("allocator.available_size()", 8),
    "free_slots": ("allocator.free_slots", list(range(9, 17))),
    "accept": ("worker.accept(timeout=0.1)", None),
    "close": ("worker.close()", None),
}


def test_every_call_works_as_the_first_one_after_a_restart(new_pool: FreshPoolFactory, children: Children) -> None:
    """A client and a pool for each, over one restart."""
    clients = []
    for call in FIRST_CALLS:
        pool = new_pool(16)
        remote = RemoteClient(children, pool, timeout=20.0)
        assert remote.ask("allocator.alloc(4)") == [1, 2, 3, 4]
        remote.ask("allocator.alloc_group_begin(4)" if "window" in call else "allocator.alloc(4)")
        clients.append((call, pool, remote))
    restart(clients[0][1].daemon)
    for call, pool, remote in clients:
        expression, answer = FIRST_CALLS[call]
        assert remote.ask(expression) == answer, call
        # And what it holds is whole: all of it comes back.
        if call != "close":
            remote.ask("allocator.alloc_group_end()")
            remote.ask("allocator.clear()")
        all_free(pool, within=5.0)
        assert sorted(drain(pool.owner.allocator)) == list(range(1, 17)), call


@pytest.mark.parametrize("order", list(itertools.permutations(("read", "alloc", "free"))))
def test_ids_are_kept_whatever_is_called_first(order: tuple[str, ...], restarted: list[FreshPool]) -> None:
    pool = restarted.pop()
    worker = pool.workers[1]
    if len(restarted) % 2:
        assert pool.owner.allocator.alloc(8) is None, "three of eight are held"
    expected = {"held": 3}
    for call in order:
        if call == "read":
            # Those that were freed count already.
            assert worker.allocator.available_size() == 8 - expected["held"]
        elif call == "alloc":
            assert ids(worker.allocator.alloc(1)) == [4]
            expected["held"] += 1
        else:
            worker.allocator.free(torch.tensor([1, 2, 3]))
            expected["held"] -= 3
    wait_until(lambda: pool.held_by(worker) == {4}, "the frees are applied")


@pytest.fixture(scope="module")
def restarted(lasting_daemon: Daemon) -> list[FreshPool]:
    """Pools of eight slots over one restart; in each the second session holds 1, 2 and 3."""
    pools = [FreshPool(lasting_daemon, 8) for _ in range(6)]
    for pool in pools:
        assert ids(pool.allocator().alloc(3)) == [1, 2, 3]
    restart(lasting_daemon)
    return pools


def test_frees_posted_during_the_outage_are_applied_once(pool: FreshPool) -> None:
    worker, other = pool.connect(), pool.connect()
    allocator = worker.allocator
    assert len(ids(allocator.alloc(12))) == 12
    with outage(pool.daemon):
        for slot in (7, 3, 11):
            allocator.free(torch.tensor([slot]))
        assert allocator.available_size() == 7, "its own frees are there for it at once"
        assert other.allocator.available_size() == 4
    wait_until(lambda: pool.available == 7, "the background thread sends them, without a call")
    assert pool.owner.allocator.free_slots.tolist() == [13, 14, 15, 16, 7, 3, 11]
    assert pool.held_by(worker) == {1, 2, 4, 5, 6, 8, 9, 10, 12}
    # Nothing of it comes again, for their next holder.
    assert len(ids(other.allocator.alloc(7))) == 7
    assert (allocator.available_size(), len(pool.held_by(other))) == (0, 7)


def test_a_window_over_the_restart_ends_in_its_order(pool: FreshPool) -> None:
    worker = pool.connect()
    allocator = worker.allocator
    allocator.alloc_group_begin(6)
    assert ids(allocator.alloc(1)) == [1]
    with outage(pool.daemon):
        assert [ids(allocator.alloc(1)) for _ in range(2)] == [[2], [3]]
        allocator.free(torch.tensor([2]))
        allocator.alloc_group_end()
        assert allocator.available_size() == 14
    wait_until(lambda: pool.available == 14, "the end of the window is applied")
    assert pool.owner.allocator.free_slots.tolist() == [*range(7, 17), 2, 4, 5, 6]
    assert pool.status()["windows"] == 0


def test_an_alloc_in_the_outage_waits_and_is_answered(pool: FreshPool) -> None:
    first, second = pool.connect(timeout=30.0), pool.connect(timeout=30.0)
    got: list[torch.Tensor | None] = []
    threads = [
        threading.Thread(target=lambda: got.append(first.allocator.alloc(2))),
        threading.Thread(target=lambda: got.append(second.allocator.alloc(3, timeout=30.0))),
    ]
    before = [first.messages, second.messages]
    with outage(pool.daemon):
        for thread in threads:
            thread.start()
        wait_until(lambda: first.messages > before[0] and second.messages > before[1], "both have asked")
        assert not got
    for thread in threads:
        thread.join()
    assert sorted(slot for slots in got for slot in ids(slots)) == [1, 2, 3, 4, 5]
    assert (len(pool.held_by(first)), len(pool.held_by(second))) == (2, 3)


def test_a_call_in_the_outage_waits_for_its_timeout_only(pool: FreshPool) -> None:
    worker = pool.connect(timeout=0.3)
    calls: dict[str, Callable[[], object]] = {
        "alloc": lambda: worker.allocator.alloc(2),
        "begin": lambda: worker.allocator.alloc_group_begin(2),
        # Not None: that would be an answer.
        "alloc that waits": lambda: worker.allocator.alloc(2, timeout=0.1),
    }
    with outage(pool.daemon):
        for name, call in calls.items():
            began = time.monotonic()
            with pytest.raises(AllocatorUnavailable, match=rf"{pool.daemon.dir}.*0\.3 s"):
                call()
            assert 0.3 <= time.monotonic() - began < 1.0, name
    # What it was granted after all, if so, is given back.
    wait_until(lambda: pool.available == 16, "nothing is held")
    worker._transport.timeout = 20.0
    assert len(ids(worker.allocator.alloc(16))) == 16


def test_waiting_allocs_keep_waiting_over_a_restart(pool: FreshPool) -> None:
    holder, waiting = pool.allocator(), pool.connect()
    assert len(ids(holder.alloc(16))) == 16
    got: list[torch.Tensor | None] = []
    thread = threading.Thread(target=lambda: got.append(waiting.allocator.alloc(4, timeout=30.0)))
    thread.start()
    wait_until(lambda: pool.status()["waiting"] == 4, "it waits")
    restart(pool.daemon)
    wait_until(lambda: pool.status()["waiting"] == 4, "it waits at the next allocator")
    assert pool.available == 0
    holder.free(torch.tensor([4, 3, 2, 1]))
    thread.join()
    assert ids(got[0]) == [4, 3, 2, 1]


def test_a_client_that_dies_in_the_outage_is_reclaimed_at_recovery(pool: FreshPool, children: Children) -> None:
    remote = RemoteClient(children, pool)
    assert remote.ask("allocator.alloc(5)") == [1, 2, 3, 4, 5]
    remote.ask("allocator.alloc_group_begin(3)")
    with outage(pool.daemon):
        remote.kill()
        remote.child.wait()
    assert pool.available == 16
    (line,) = log_lines(pool.daemon, f"{remote.log_line} died")
    assert "died while no allocator ran" in line
    assert "8 slots freed" in line
    assert pool.connect().session > remote.session, "a number is never used twice"


def test_a_pool_of_clients_lives_on_as_long_as_one_of_them(new_pool: FreshPoolFactory, children: Children) -> None:
    pool = new_pool(16)
    doomed = f"{pool.name}-doomed"
    remote = children.start(MAKES_A_POOL, pool.daemon.dir, doomed)
    assert remote.hear() == "[1, 2]"
    table = pool.daemon.directory.slot_table(doomed)
    assert table.exists()
    slots = pool.owner.allocator.alloc(2)
    assert slots is not None
    with outage(pool.daemon):
        os.kill(remote.pid, signal.SIGKILL)
        remote.wait()
    assert {found["name"] for found in pool.daemon.status()["pools"]} >= {pool.name}
    assert doomed not in {found["name"] for found in pool.daemon.status()["pools"]}
    assert not table.exists()
    with pytest.raises(UnknownPool):
        connect(pool.daemon.dir, pool=doomed)
    pool.owner.allocator.free(slots)
    assert len(drain(pool.owner.allocator)) == 16


MAKES_A_POOL = """
    import signal, sys
    from mambapool.client import connect

    worker = connect(sys.argv[1], pool=sys.argv[2], create_slots=4)
    print(worker.allocator.alloc(2).tolist(), flush=True)
    signal.pause()
"""


def test_an_allocator_alone_is_taken_over_with_its_sessions_and_finds_the_living_keeper(runtime_dir: Path) -> None:
    states = [word for state in SMALL_STATE for word in ("--state", state)]
    with (
        running("keeper", "--dir", runtime_dir, "--slots", "8", *states),
        running("allocator", "--dir", runtime_dir) as first,
        connect(runtime_dir, timeout=30.0) as worker,
    ):
        slots = worker.allocator.alloc(3)
        assert slots is not None
        worker.states["temporal"][:, slots] = 5
        worker.allocator.alloc_group_begin(2)
        assert first.end() == 0
        assert not RuntimeDir(runtime_dir).ready.exists()
        with running("allocator", "--dir", runtime_dir) as second:
            assert ids(worker.allocator.alloc(1)) == [4]
            worker.allocator.alloc_group_end()
            status = ask_status(RuntimeDir(runtime_dir), 10.0)
            assert status["pid"] == second.pid
            (found,) = status["pools"]
            assert (found["backend"], found["slots"]) == ("shm", 8)
            assert [holder["session"] for holder in found["holders"]] == [worker.session]
            with connect(runtime_dir) as other:
                assert values(other.states["temporal"][:, slots]) == {5}
                wait_until(lambda: other.allocator.available_size() == 4, "the end of the window is applied")
                assert ids(other.allocator.alloc(4)) == [6, 7, 8, 5]
            worker.close()
