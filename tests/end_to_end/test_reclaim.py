"""What a process held comes back whole when it ends, however it ends, and the log says whose it was."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from daemons import wait_until
from fresh_pool import FreshPool, FreshPoolFactory, drain, ids
from leased_clients import RECLAIM_S, RawClient, RemoteClient, all_free, log_lines
from processes import Children, paused

from mambapool.client.allocator import SlotAllocator
from mambapool.pool import protocol
from mambapool.pool import slot_table as st

ENDS = {
    "kill -9": ("os.kill(os.getpid(), signal.SIGKILL)", "is dead"),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", "is dead"),
    "os._exit": ("os._exit(3)", "is dead"),
    "sys.exit": ("sys.exit(3)", "left"),
    "an unhandled exception": ("raise KeyError('state')", "left"),
}


@contextmanager
def free_counts(pool: FreshPool) -> Iterator[list[int]]:
    """Every free count that the slot table has while this lasts, as fast as a thread can look, without repeats."""
    table = st.SlotTableReader(pool.daemon.directory.slot_table(pool.name))
    seen = [table.free_count]
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            if (free := table.free_count) != seen[-1]:
                seen.append(free)
            time.sleep(0)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield seen
    finally:
        over.set()
        looking.join()
        if table.free_count != seen[-1]:
            seen.append(table.free_count)


@pytest.mark.parametrize("end", ENDS)
def test_slots_window_offer_and_wait_of_an_ended_process_go_in_one_step(
    new_pool: FreshPoolFactory, children: Children, end: str
) -> None:
    pool = new_pool(32)
    remote = RemoteClient(children, pool)
    assert remote.ask("allocator.alloc(3)") == [1, 2, 3]
    assert remote.ask("allocator.alloc(2)") == [4, 5]
    remote.ask(f"worker.transfer(torch.tensor([4, 5]), to={pool.owner.session})")
    remote.ask("allocator.alloc_group_begin(7)")
    assert remote.ask("allocator.alloc(1)") == [6]
    remote.run("threading.Thread(target=allocator.alloc, args=(25, 60.0), daemon=True).start()")
    wait_until(lambda: pool.status()["waiting"] == 25, "it waits")
    status = pool.status()
    assert (status["free"], status["held"], status["windows"], status["offered"]) == (20, 3, 7, 2)
    how, said = ENDS[end]
    with free_counts(pool) as seen:
        remote.run(how)
        wait_until(lambda: pool.available == 32, "everything is free", timeout=3 * RECLAIM_S)
    # A polite end closes: its window, then the rest, each in one step. A death is one step.
    assert seen == [20, 32]
    status = pool.status()
    assert (status["waiting"], status["offered"], len(status["holders"])) == (0, 0, 1)
    assert pool.owner.accept() is None
    (line,) = log_lines(pool.daemon, f"{remote.log_line} {said}")
    assert line.endswith("12 slots freed: 1-12")
    if said == "is dead":
        assert re.search(r"is dead \((its process ended|its connection closed)\): ", line)
    assert sorted(drain(pool.owner.allocator)) == list(range(1, 33))


def test_the_others_go_on_at_full_speed_while_two_of_them_are_killed(
    new_pool: FreshPoolFactory, children: Children
) -> None:
    pool = new_pool(1000)
    killed = [RemoteClient(children, pool) for _ in range(2)]
    others = [pool.connect() for _ in range(3)]
    held = [set(ids(other.allocator.alloc(100))) for other in others]
    doomed = [remote.ask("allocator.alloc(100)") for remote in killed]
    over = threading.Event()
    failures: list[BaseException] = []

    def work(allocator: SlotAllocator) -> None:
        try:
            while not over.is_set():
                slots = allocator.alloc(5)
                assert slots is not None
                allocator.free(slots)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(other.allocator,)) for other in others]
    for thread in threads:
        thread.start()
    for remote in killed:
        remote.kill()
    table = st.SlotTableReader(pool.daemon.directory.slot_table(pool.name))
    wait_until(lambda: table.free_count > 650, "the killed ones' slots are free", timeout=RECLAIM_S)
    over.set()
    for thread in threads:
        thread.join()
    assert not failures
    wait_until(lambda: pool.available == 700, "what the others held for a moment is back")
    assert [pool.held_by(other) for other in others] == held
    assert len(set(drain(pool.owner.allocator))) == 700
    for remote, slots in zip(killed, doomed, strict=True):
        (line,) = log_lines(pool.daemon, f"{remote.log_line} is dead")
        assert line.endswith(f"100 slots freed: {slots[0]}-{slots[-1]}")


KILLED_BEFORE_IT_READS = """
    import os, signal, sys
    from mambapool.client import connect
    from mambapool.pool import protocol

    for round in range(int(sys.argv[3])):
        pid = os.fork()
        if pid == 0:
            worker = connect(sys.argv[1], pool=sys.argv[2], name="killed")
            connection = worker._transport.connection
            for request in range(2, 6):
                connection.transmit(request, protocol.ALLOC, (4, None, False), None)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
"""


def test_what_is_granted_to_the_dead_is_nobodys(new_pool: FreshPoolFactory, children: Children) -> None:
    pool = new_pool(32)
    pid = pool.daemon.allocator_pid
    bystander = pool.connect()
    killing = children.start(KILLED_BEFORE_IT_READS, pool.daemon.dir, pool.name, 30)
    deadline = time.monotonic() + 60.0
    stopped_for = 0
    while killing._status is None and not killing._told.waiting() and time.monotonic() < deadline:
        slot = bystander.allocator.alloc(1, timeout=5.0)
        assert slot is not None
        bystander.allocator.free(slot)
        if stopped_for < 3:
            # Some of the messages of the dead are read when their sender is long gone.
            with paused(pool.daemon):
                time.sleep(0.02)
            stopped_for += 1
    assert killing.wait() == 0
    all_free(pool, within=3.0)
    wait_until(lambda: len(pool.status()["holders"]) == 2, "no session of the dead is left", timeout=3.0)
    assert pool.daemon.allocator_pid == pid
    assert sorted(drain(pool.owner.allocator)) == list(range(1, 33))


def test_a_grant_whose_reply_was_dropped_comes_again_and_nothing_is_granted_twice(
    new_pool: FreshPoolFactory,
) -> None:
    """A client that sends thousands of requests and reads nothing: replies beyond its pipe are dropped."""
    pool = new_pool(512)
    bystander = pool.connect()
    with RawClient(pool.daemon.directory, high_water_mark=10) as raw:
        assert raw.hello(pool.name)[2] == protocol.OK
        slowest = 0.0
        # The ids of requests are kept open, as by a client that has read nothing; 1,024 may be open at most.
        for request in range(2, 1002):
            raw.request(protocol.ALLOC, request, 1, None, False)
            if request % 50 == 0:
                began = time.monotonic()
                slot = bystander.allocator.alloc(1)
                slowest = max(slowest, time.monotonic() - began)
                if slot is not None:
                    bystander.allocator.free(slot)
        answers: dict[int, list[object]] = {}
        while len(answers) < 1000:
            while (reply := raw.receive(timeout=0.1)) is not None:
                assert answers.setdefault(reply[0], reply) == reply, "a repeat is answered the same way"
            for request in sorted(set(range(2, 1002)) - set(answers))[:200]:
                raw.request(protocol.ALLOC, request, 1, None, False)
        granted = [reply[3] for reply in answers.values() if reply[2] == protocol.OK]
        assert len(granted) == len(set(granted)) == 512 - pool.available
        assert len(granted) >= 511
        assert slowest < 1.0
    all_free(pool)


def test_six_that_ask_for_what_looked_free_get_it_whole_or_none(
    new_pool: FreshPoolFactory, children: Children
) -> None:
    pool = new_pool(20)
    asking = [children.start(LOOKS_AND_ASKS, pool.daemon.dir, pool.name, number) for number in range(6)]
    for child in asking:
        assert child.hear() == "None, 17 times"
    for child in asking:
        child.say_no_more()
    for child in asking:
        assert child.rest() == []
    all_free(pool)


LOOKS_AND_ASKS = """
    import random, sys, threading, time
    from mambapool.client import connect

    chance, nothing, over = random.Random(int(sys.argv[3])), 0, threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    with connect(sys.argv[1], pool=sys.argv[2], timeout=20.0) as worker:
        while not over.is_set():
            count = min(worker.allocator.available_size(), 8) + 1
            slots = worker.allocator.alloc(count)
            if slots is not None:
                assert len(slots) == count
                time.sleep(chance.random() * 0.001)
                worker.allocator.free(slots)
                continue
            nothing += 1
            if nothing == 17:
                print("None, 17 times", flush=True)
"""


def test_slots_of_several_grants_are_freed_in_another_thread_and_by_the_end_of_a_process(
    new_pool: FreshPoolFactory, children: Children
) -> None:
    pool = new_pool(30)
    allocator = pool.allocator()
    for _ in range(50):
        composite = torch.cat([allocator.alloc(1), allocator.alloc(2)])  # type: ignore[list-item]
        thread = threading.Thread(target=allocator.free, args=(composite,))
        thread.start()
        thread.join()
        assert allocator.available_size() == 30
    remote = RemoteClient(children, pool)
    assert remote.ask("[allocator.alloc(1).tolist(), allocator.alloc(2).tolist()]")
    assert pool.available == 27
    remote.child.say_no_more()
    all_free(pool)


def test_the_forgotten_slots_of_a_living_client_are_its_own(new_pool: FreshPoolFactory) -> None:
    pool = new_pool(64)
    worker = pool.connect(name="forgetful")
    requests = [worker.allocator.alloc(1) for _ in range(40)]
    for slot in requests[:20]:
        assert slot is not None
        worker.allocator.free(slot)
    forgotten = {int(slot) for slot in requests[20:] if slot is not None}
    del requests
    wait_until(lambda: pool.available == 44, "what was freed is free")
    assert pool.held_by(worker) == forgotten
    assert pool.holder(worker)["held"] == 20
    worker.close()
    all_free(pool)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_free_that_was_posted_before_the_end_is_no_loss(
    new_pool: FreshPoolFactory, children: Children, number: signal.Signals
) -> None:
    pool = new_pool(16)
    remote = RemoteClient(children, pool)
    assert remote.ask("allocator.alloc(16)") == list(range(1, 17))
    remote.run(f"[allocator.free([slot]) for slot in range(1, 17)]; os.kill(os.getpid(), {int(number)})")
    all_free(pool)
