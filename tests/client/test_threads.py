"""One client, many threads: no slot is lost or doubled, and nobody gets another's answer."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import torch
from daemons import wait_until
from fresh_pool import FreshPool, FreshPoolFactory, drain, granted

from mambapool.client.allocator import SlotAllocator
from mambapool.client.posted import PostedQueue

THREADS = 16
ROUNDS = 250


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def run_all(bodies: list[Callable[[], None]]) -> None:
    """Run each in a thread of its own; raises what the first of them raised."""
    failures: list[BaseException] = []

    def run(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


class StampingThread:
    """Allocs and frees at random; writes its number into the rows of its slots, and looks before it frees."""

    def __init__(self, allocator: SlotAllocator, rows: list[int], number: int) -> None:
        self.allocator = allocator
        self.rows = rows
        self.number = number
        self.chance = random.Random(number)
        self.held: list[torch.Tensor] = []

    def __call__(self) -> None:
        for _ in range(ROUNDS):
            self.alloc(self.chance.choice((1, 1, 2, 5)))
            while len(self.held) > self.chance.randint(0, 4):
                self.free(self.held.pop(self.chance.randrange(len(self.held))))
            assert 0 <= self.allocator.available_size() <= 256
        for slots in self.held:
            self.free(slots)

    def alloc(self, count: int) -> None:
        slots = self.allocator.alloc(count)
        if slots is None:
            return
        assert len(slots) == count
        for slot in slots.tolist():
            assert self.rows[slot] == 0, f"slot {slot} is thread {self.rows[slot]}'s"
            self.rows[slot] = self.number
        self.held.append(slots)

    def free(self, slots: torch.Tensor) -> None:
        for slot in slots.tolist():
            assert self.rows[slot] == self.number
            self.rows[slot] = 0
        self.allocator.free(slots)


class WindowThread(StampingThread):
    """As a scheduler does it, with a window around every pass; all threads take from it."""

    def alloc(self, count: int) -> None:
        self.allocator.alloc_group_begin(8)
        for _ in range(count):
            super().alloc(1)
        if self.chance.random() < 0.8:
            self.allocator.alloc_group_end()


@pytest.mark.usefixtures("switching")
def test_many_threads_share_a_client_without_losing_or_doubling_a_slot(fresh_pool: FreshPoolFactory) -> None:
    pool = fresh_pool(256)
    allocator = pool.allocator()
    rows = [0] * 257
    kinds = [WindowThread] * 2 + [StampingThread] * (THREADS - 2)
    run_all([kind(allocator, rows, number) for number, kind in enumerate(kinds, 1)])
    allocator.alloc_group_end()
    assert rows == [0] * 257
    assert allocator.available_size() == 256
    assert sorted(drain(allocator)) == list(range(1, 257))


def test_a_clear_in_the_middle_of_another_threads_free_comes_before_or_after_it(
    fresh_pool: FreshPoolFactory,
) -> None:
    """Were it numbered between the free's check and its message, the allocator would refuse that message."""
    pool = fresh_pool(4)
    worker = pool.connect()
    slots = granted(worker.allocator.alloc(2))
    clearing = threading.Thread(target=worker.allocator.clear)

    def clear_now(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code is PostedQueue.append.__code__:
            sys.setprofile(None)
            clearing.start()
            clearing.join(0.1)

    sys.setprofile(clear_now)
    worker.allocator.free(slots)
    clearing.join()
    assert worker.allocator.free_slots.numel() == 4
    assert worker.allocator.alloc(1) is not None
    assert worker._transport.refusals == []


@pytest.mark.usefixtures("switching")
def test_frees_inside_a_window_count_also_while_another_thread_sends_them(fresh_pool: FreshPoolFactory) -> None:
    pool = fresh_pool(64)
    assert pool.allocator().alloc(1) is not None
    allocator, counts = pool.allocator(), set[int]()
    sending: list[int] = [0]  # the number of the round, 0 between them

    def count() -> None:
        while sending[0] >= 0:
            number = sending[0]
            available = allocator.available_size()
            if number and number == sending[0]:
                counts.add(available)

    def send() -> None:
        for number in range(1, 300):
            allocator.alloc_group_begin(32)
            for _ in range(32):
                allocator.free(granted(allocator.alloc(1)))
            sending[0] = number
            # One more than there are: the frees go along, and nothing comes back.
            assert allocator.alloc(64) is None
            sending[0] = 0
        sending[0] = -1

    run_all([send, count])
    assert counts == {63}


def test_two_clients_of_one_process_are_two_holders(fresh_pool: FreshPoolFactory) -> None:
    pool: FreshPool = fresh_pool(16)
    first, second = pool.connect(), pool.connect()
    assert first.allocator.alloc(4) is not None
    slots = granted(second.allocator.alloc(4))
    first.close()
    assert pool.available == 12
    assert pool.held_by(second) == {5, 6, 7, 8}
    second.allocator.free(slots)
    assert second.allocator.available_size() == 16


def test_signal_handlers_that_run_all_the_time_disturb_no_call(fresh_pool: FreshPoolFactory) -> None:
    """Handlers run in the main thread, in the middle of its calls, whose system calls they interrupt."""
    pool = fresh_pool(64)
    allocator = pool.allocator()
    rows, handled, done = [0] * 65, [0], threading.Event()

    def handle(_number: int, _frame: FrameType | None) -> None:
        handled[0] += 1

    def send_signals() -> None:
        while not done.wait(0.001):
            os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handle)
    others = [threading.Thread(target=StampingThread(allocator, rows, number)) for number in (1, 2, 3)]
    sender = threading.Thread(target=send_signals)
    try:
        for thread in (sender, *others):
            thread.start()
        StampingThread(allocator, rows, 9)()
        for thread in others:
            thread.join()
    finally:
        done.set()
        sender.join()
        signal.signal(signal.SIGUSR1, before)
    assert handled[0] > 20
    assert rows == [0] * 65
    assert sorted(drain(allocator)) == list(range(1, 65))


class _Overtaken(list[int]):
    """What is freed inside a window; just before something is added, another thread ends the window."""

    def __init__(self, end: Callable[[], None]) -> None:
        super().__init__()
        self._end = end

    def append(self, slot: int) -> None:
        self._end()
        super().append(slot)


@pytest.mark.parametrize("end", ["alloc_group_end", "alloc_group_begin"])
def test_a_free_that_is_overtaken_by_the_end_of_its_window_gets_through(
    fresh_pool: FreshPoolFactory, end: str
) -> None:
    """It takes no lock, so that a window may close between its look and its entry."""
    pool = fresh_pool(16)
    allocator = pool.allocator()
    allocator.alloc_group_begin(3)
    slot = granted(allocator.alloc(1))
    arguments = () if end == "alloc_group_end" else (2,)
    allocator._freed_inside = _Overtaken(lambda: getattr(allocator, end)(*arguments))
    allocator.free(slot)
    if end == "alloc_group_begin":  # a window is open again: it goes along with that
        allocator.alloc_group_end()
    wait_until(lambda: pool.available == 16, "what was freed has come back")
