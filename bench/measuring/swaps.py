"""The call that most goals measure: slots are allocated and the ones before them given back, in one message."""

from __future__ import annotations

from collections.abc import Callable

from mambapool.client import Worker
from mambapool.pool import protocol
from measuring.blocks import Contender, timed


def swapping_one(worker: Worker) -> Callable[[], object]:
    """``alloc(1)`` that carries a free along: one message there, one back."""
    allocator = worker.allocator
    # Inside a window whose slots are used up: what is freed there travels with the next message.
    allocator.alloc_group_begin(1)
    last = allocator.alloc(1)

    def call() -> None:
        nonlocal last
        assert last is not None
        allocator.free(last)
        last = allocator.alloc(1)

    return call


def swapping(worker: Worker, count: int) -> Contender:
    """The same for any count: of a group it is the beginning of a window, which carries along that many frees.

    Handing out the window's slots one by one, and freeing them, costs no message and is not timed.
    """
    if count == 1:
        return timed(swapping_one(worker))
    allocator = worker.allocator

    def use_up() -> None:
        for slot in [allocator.alloc(1) for _ in range(count)]:
            assert slot is not None
            allocator.free(slot)

    allocator.alloc_group_begin(count)
    return timed(lambda: allocator.alloc_group_begin(count), use_up)


def hand_out_all(worker: Worker) -> None:
    """Each slot once, so that its tensor is made: an engine at work has seen all of its slots.

    In sixteenths, so that several clients can do it at once.
    """
    allocator = worker.allocator
    step = -(-allocator.size // 16)
    for _ in range(16):
        allocator.alloc_group_begin(step)
    allocator.alloc_group_end()


def message_sizes(count: int) -> tuple[int, int]:
    """Bytes of a swap's request and of its reply, of a call in the middle of a measurement."""
    epoch = 2**47  # a number of 48 bits, of which a new slot table starts at a random one
    ids = 60_000 if count == 1 else bytes(4 * count)
    request = protocol.pack((protocol.ALLOC, 1, 2000, epoch, 2000, 2000, count, ids, False))
    reply = protocol.pack((2000, epoch, protocol.OK, ids))
    return len(request), len(reply)
