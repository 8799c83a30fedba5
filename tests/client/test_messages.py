"""What costs a message: one request and one one-way per scheduling step, however many requests it schedules."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from daemons import wait_until
from fresh_pool import FreshPoolFactory, granted, ids

from mambapool.client import Worker
from mambapool.client.transport import PING_S


class Meter:
    """Counts the messages of one client's calls."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._before = worker.messages

    def __call__(self) -> int:
        """Messages since the last look."""
        before, self._before = self._before, self.worker.messages
        return self._before - before


@pytest.fixture
def worker(fresh_pool: FreshPoolFactory) -> Worker:
    """Holds 1 to 4 of 64 slots."""
    worker = fresh_pool(64).connect()
    assert ids(worker.allocator.alloc(4)) == [1, 2, 3, 4]
    return worker


@pytest.fixture
def sent(worker: Worker) -> Meter:
    return Meter(worker)


@pytest.mark.parametrize("count", [1, 8, 32])
def test_a_step_is_one_request_and_one_one_way_message(worker: Worker, sent: Meter, count: int) -> None:
    allocator = worker.allocator
    allocator.alloc_group_begin(count)
    assert sent() == 1
    slots = [granted(allocator.alloc(1)) for _ in range(count)]
    for slot in (torch.tensor([1, 2]), torch.tensor(3), *slots[::2]):
        allocator.free(slot)
    assert sent() == 0
    allocator.alloc_group_end()
    assert sent() == 1


def test_an_alloc_beyond_the_window_carries_the_frees_along(worker: Worker, sent: Meter) -> None:
    worker.allocator.alloc_group_begin(1)
    assert worker.allocator.alloc(1) is not None
    worker.allocator.free(torch.tensor([1, 2]))
    assert sent() == 1
    assert worker.allocator.alloc(1) is not None
    assert sent() == 1
    # What was carried is not sent again.
    worker.allocator.alloc_group_end()
    assert sent() == 1
    assert worker.allocator.available_size() == 60


def test_a_begin_carries_what_the_window_before_has_left(worker: Worker, sent: Meter) -> None:
    worker.allocator.alloc_group_begin(3)
    worker.allocator.free(torch.tensor([1]))
    worker.allocator.alloc_group_begin(2)
    assert sent() == 2
    assert worker.allocator.available_size() == 64 - 3 - 2


Call = Callable[[Worker], object]


@pytest.mark.parametrize(
    ("call", "messages"),
    [
        (lambda worker: worker.allocator.alloc(1), 1),
        (lambda worker: worker.allocator.alloc(60), 1),
        (lambda worker: worker.allocator.alloc(0), 0),
        (lambda worker: worker.allocator.alloc(65), 0),
        (lambda worker: worker.allocator.free(torch.tensor([1, 2, 3])), 1),
        (lambda worker: worker.allocator.free(torch.empty(0)), 0),
        (lambda worker: worker.allocator.alloc_group_begin(0), 0),
        (lambda worker: worker.allocator.alloc_group_end(), 0),
        (lambda worker: worker.allocator.clear(), 1),
        (lambda worker: worker.allocator.available_size(), 0),
        (lambda worker: worker.allocator.schedulable_available_size(), 0),
        (lambda worker: worker.allocator.free_slots, 0),
        (lambda worker: (worker.states, worker.session, repr(worker)), 0),
    ],
)
def test_a_call_outside_a_window_costs_at_most_one_message(
    worker: Worker, sent: Meter, call: Call, messages: int
) -> None:
    call(worker)
    assert sent() == messages


def test_the_queue_of_posted_frees_stays_short_without_any_other_call(worker: Worker) -> None:
    """What is applied is forgotten: a client that never asks for a count does not grow."""
    for _ in range(2000):
        slot = granted(worker.allocator.alloc(1))
        worker.allocator.free(slot)
    assert len(worker._transport.posted.queue) < 10


def test_saying_that_one_lives_is_no_message_that_a_call_costs(worker: Worker, sent: Meter) -> None:
    transport = worker._transport
    # Nothing is sent from here on, so that this is no message that the background thread has seen.
    later = time.monotonic() + PING_S / 2
    wait_until(lambda: transport.quiet_since > later, "the background thread has sent a PING")
    wait_until(transport.lock.acquire, "its tick is over")
    transport.lock.release()
    assert sent() == 0
