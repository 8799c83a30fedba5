"""Calls that meet an allocator on its way down or up: they wait, then go on, and nothing is lost on the way."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from daemons import Daemon, wait_until
from fresh_pool import FreshPoolFactory, drain, granted
from leased_clients import outage, restart, successor_of
from soaking import allocator_processes

from mambapool.pool.errors import AllocatorUnavailable
from mambapool.service.serve import SHORT_LIFE_S


def test_an_allocator_that_is_killed_before_it_answers_is_brought_back_after_a_pause(
    lasting_daemon: Daemon,
) -> None:
    daemon = lasting_daemon
    wait_until(lambda: daemon.status()["uptime_s"] > 1.1 * SHORT_LIFE_S, "the allocator has lived for a while")
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
    assert connected[0]._transport.connection.lease.connected


def test_an_accept_that_gave_up_before_a_restart_gets_its_slots_after_it(
    lasting_daemon: Daemon, new_pool: FreshPoolFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next allocator finds them accepted, and must not take them from a receiver that cannot know."""
    pool = new_pool(8)
    giver, receiver = pool.connect(), pool.connect(timeout=20.0)
    slots = granted(giver.allocator.alloc(2))
    connection = receiver._transport.connection

    def give_up(_request: int, _deadline: float) -> None:
        raise AllocatorUnavailable("no answer: a test says so")

    giver.transfer(slots, to=receiver.session)
    with monkeypatch.context() as lost:  # every reply
        lost.setattr(connection, "drain", lambda: None)
        lost.setattr(connection, "receive", give_up)
        with pytest.raises(AllocatorUnavailable):
            receiver.accept(0.1)
    assert pool.held_by(receiver) == set(slots.tolist()), "the slots have changed hands"
    restart(lasting_daemon)
    assert granted(receiver.accept(1.0)).tolist() == slots.tolist()
    receiver.allocator.free(slots)
    assert receiver.accept() is None
    wait_until(lambda: pool.available == 8, "all slots are free")


def test_a_guaranteed_client_that_clears_leaves_its_offers_alone(new_pool: FreshPoolFactory) -> None:
    pool = new_pool(8)
    giver, receiver, engine = pool.connect(), pool.connect(), pool.connect(guarantee=2)
    giver.transfer(granted(giver.allocator.alloc(3)), to=engine.session)
    first, second, third = (torch.tensor([slot]) for slot in granted(engine.accept()).tolist())
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
