"""Calls that meet an allocator on its way down or up: they wait, then go on, and nothing is lost on the way."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
from daemons import Daemon, wait_until
from fresh_pool import FreshPoolFactory, drain, granted
from leased_clients import outage, successor_of
from soaking import allocator_processes

from mambapool.pool.errors import AllocatorUnavailable
from mambapool.service.serve import SHORT_LIFE_S


def test_an_allocator_that_is_killed_before_it_answers_is_brought_back_after_a_pause(
    lasting_daemon: Daemon,
) -> None:
    daemon = lasting_daemon
    wait_until(lambda: daemon.status()["uptime_s"] > 2 * SHORT_LIFE_S, "the allocator has lived for a while")
    first = daemon.allocator_pid
    seen = [first]
    os.kill(first, signal.SIGKILL)
    for _ in range(3):

        def next_one() -> int:
            return next((pid for pid in allocator_processes(daemon.process.pid) if pid not in seen), 0)

        seen.append(wait_until(next_one, "an allocator is started"))
        os.kill(seen[-1], signal.SIGKILL)
    killed = time.monotonic()
    successor = successor_of(daemon, first)
    assert successor not in seen
    assert time.monotonic() - killed > 0.2, "brought back without the pause that it was said to take"
    assert daemon.log.count("did not come up: the allocator was killed by SIGKILL before it was ready") >= 3


def test_connect_waits_for_an_allocator_that_is_brought_back(
    lasting_daemon: Daemon, new_pool: FreshPoolFactory
) -> None:
    pool = new_pool(8)
    connected: list[Any] = []
    with outage(lasting_daemon):
        connecting = threading.Thread(
            target=lambda: connected.append(pool.connect(name="late", timeout=30.0)), daemon=True
        )
        connecting.start()
        wait_until(
            lambda: len(list(lasting_daemon.directory.leases.iterdir())) > 1, "the client has made its lease"
        )
    connecting.join(30.0)
    assert len(drain(connected[0].allocator)) == 8
    # Its lease is watched, too: the connection was made as soon as there was somebody to connect to.
    assert connected[0]._transport._lease.connected


def test_an_accept_that_gave_up_in_an_outage_gets_its_slots_afterwards(
    lasting_daemon: Daemon, new_pool: FreshPoolFactory
) -> None:
    """The next allocator finds them accepted, and must not take them from a receiver that cannot know."""
    pool = new_pool(8)
    giver, receiver = pool.connect(), pool.connect(timeout=0.3)
    slots = granted(giver.allocator.alloc(2))
    transport = receiver._transport
    received = transport._receive
    waited = threading.Event()

    def accept() -> None:
        with pytest.raises(AllocatorUnavailable):
            receiver.accept(0.2)
        waited.set()

    # Replies are lost from now on: the slots are the receiver's, and it does not know.
    drained = transport._drain
    transport._drain = lambda _request: None  # type: ignore[method-assign]
    transport._receive = lambda _request, _deadline: transport_gives_up(transport)  # type: ignore[method-assign]
    giver.transfer(slots, to=receiver.session)
    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    wait_until(lambda: pool.held_by(receiver) == set(slots.tolist()), "the slots have changed hands")
    assert waited.wait(20.0)
    with outage(lasting_daemon):
        transport._drain, transport._receive = drained, received  # type: ignore[method-assign]
    receiver._transport.timeout = 20.0
    assert granted(receiver.accept(1.0)).tolist() == slots.tolist()
    receiver.allocator.free(slots)
    assert receiver.accept() is None
    wait_until(lambda: pool.available == 8, "all slots are free")


def transport_gives_up(transport: Any) -> Any:
    raise transport._unavailable("a test says so")


def test_a_guaranteed_client_that_clears_leaves_its_offers_alone(new_pool: FreshPoolFactory) -> None:
    pool = new_pool(8)
    giver, receiver, engine = pool.connect(), pool.connect(), pool.connect(guarantee=2)
    giver.transfer(granted(giver.allocator.alloc(3)), to=engine.session)
    first, second, third = granted(engine.accept()).split(1)
    engine.transfer(first, to=receiver.session)
    engine.transfer(second, to=receiver.session)
    assert granted(receiver.accept()).tolist() == first.tolist()
    engine.allocator.clear()
    wait_until(lambda: int(third) not in pool.held_by(engine), "what came by a transfer is free")
    assert engine.allocator.available_size() == 2
    receiver.close()
    wait_until(lambda: not pool.held_by(receiver), "the receiver has ended")
    engine.allocator.free(second)
    wait_until(lambda: pool.available == 6, "all is free but the guarantee")
