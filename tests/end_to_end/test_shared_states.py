"""The states are one memory: what one process writes, every other reads, and it outlives who mapped it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from daemons import SMALL_STATE, Daemon
from fresh_pool import granted, ids
from processes import Children

from mambapool.pool import protocol
from mambapool.pool.errors import ClientClosed, PoolLost

DaemonFactory = Callable[..., Daemon]


@pytest.fixture
def daemon(daemon_factory: DaemonFactory) -> Daemon:
    """Eight slots with states."""
    return daemon_factory(slots=8, states=SMALL_STATE)


def values(tensor: torch.Tensor) -> set[float]:
    """Which values there are in it."""
    return set(tensor.flatten().tolist())


# Writes or reads rows as it is told: "write SLOT VALUE", "read SLOT" gives the values found in a slot's state.
STATES = """
    import sys
    from mambapool.client import connect

    with connect(sys.argv[1]) as worker:
        print(worker.allocator.alloc(1).item(), flush=True)
        for line in sys.stdin:
            verb, slot, *value = line.split()
            rows = [tensor[:, int(slot)] for tensor in worker.states.values()]
            if verb == "write":
                for row in rows:
                    row.fill_(float(value[0]))
            print(sorted({element for row in rows for element in row.flatten().tolist()}), flush=True)
"""


def test_three_processes_see_one_anothers_writes_at_once(daemon: Daemon, children: Children) -> None:
    processes = []
    for slot in (1, 2, 3):
        processes.append(children.start(STATES, daemon.dir))
        assert processes[-1].hear() == str(slot)
    for value in range(1, 4):
        for slot, writer in enumerate(processes, 1):
            writer.say(f"write {slot} {value * slot}")
            assert writer.hear() == f"[{value * slot}.0]"
            for reader in processes:
                reader.say(f"read {slot}")
                assert reader.hear() == f"[{value * slot}.0]"
    for process in processes:
        process.say_no_more()
        process.rest()
    # And who comes later finds what they left, and nothing in the rows that nobody wrote.
    states = daemon.connect().states
    assert [values(states["temporal"][:, slot]) for slot in range(5)] == [{0}, {3}, {6}, {9}, {0}]


def test_the_row_of_slot_0_is_there_for_everybody_and_never_handed_out(daemon: Daemon, children: Children) -> None:
    other = children.start(STATES, daemon.dir)
    assert other.hear() == "1"
    worker = daemon.connect()
    assert ids(worker.allocator.alloc(7)) == [2, 3, 4, 5, 6, 7, 8]
    worker.states["temporal"][:, 0] = 5
    worker.states["conv"][:, 0] = 5
    other.say("read 0")
    assert other.hear() == "[5.0]"
    assert {tensor.shape[1] for tensor in worker.states.values()} == {9}
    assert worker.allocator.alloc(1) is None


def test_states_that_were_taken_stay_readable_after_close(daemon: Daemon) -> None:
    with daemon.connect() as worker:
        temporal, view = worker.states["temporal"], worker.states["conv"][:, 3]
        temporal.fill_(4)
        view.fill_(2)
    with pytest.raises(ClientClosed):
        _ = worker.states
    assert (values(temporal), values(view)) == ({4}, {2})
    daemon.stop()
    assert values(temporal + 1) == {5}


def test_clear_and_copy_work_on_what_others_see(daemon: Daemon) -> None:
    first, second = daemon.connect(), daemon.connect()
    slots = granted(first.allocator.alloc(3))
    for tensor in first.states.values():
        tensor[:, slots] = 1
    first.pool.clear(slots[:1])
    first.pool.copy(slots[1:2], torch.tensor([8]))
    seen = [values(second.states["conv"][:, slot]) for slot in (1, 2, 3, 4, 8)]
    assert seen == [{0}, {1}, {1}, {0}, {1}]


FORKED = """
    import os, sys
    from mambapool.client import connect, errors

    worker = connect(sys.argv[1])
    worker.states["conv"].fill_(3)
    if os.fork() == 0:
        for use in (lambda: worker.states, lambda: worker.pool.clear([1])):
            try:
                use()
            except errors.ForkedClient:
                print("refused", flush=True)
        with connect(sys.argv[1]) as mine:
            print(mine.states["conv"].unique().tolist(), flush=True)
        os._exit(0)
    os.wait()
    print(worker.states["conv"].unique().tolist())
    worker.close()
"""


def test_a_forked_child_maps_the_states_anew(daemon: Daemon, children: Children) -> None:
    assert children.run(FORKED, daemon.dir) == ["refused", "refused", "[3.0]", "[3.0]"]


def test_an_attach_that_finds_no_memory_is_a_named_error_and_leaves_no_session(daemon: Daemon) -> None:
    keeper = daemon.directory.keeper_socket("default", 0)
    keeper.rename(keeper.with_name("gone"))
    with pytest.raises(PoolLost, match="keeper of pool default rank 0"):
        daemon.connect(timeout=1.0)
    assert daemon.pool()["holders"] == []
    keeper.with_name("gone").rename(keeper)
    assert daemon.connect().states["conv"].shape == (2, 9, 6, 3)


def test_what_an_attach_sends_does_not_grow_with_the_pool(daemon_factory: DaemonFactory) -> None:
    """No tensor travels by value: the answer to HELLO names files and sockets."""
    daemon = daemon_factory(slots=50_000, states=SMALL_STATE)
    answer = protocol.pack([daemon.connect()._transport.session])
    assert len(answer) < 1024


def test_nothing_of_the_states_lies_in_dev_shm(daemon: Daemon) -> None:
    before = set(os.listdir("/dev/shm"))
    daemon.connect().states["conv"].fill_(1)
    assert set(os.listdir("/dev/shm")) == before
    maps = Path("/proc/self/maps").read_text()
    assert "memfd:" in maps
