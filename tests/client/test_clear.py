"""``clear()`` frees what this client holds, and nothing of anybody else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fresh_pool import FreshPoolFactory, drain, granted, ids

from mambapool.pool.errors import DoubleFree


def test_others_keep_what_they_hold(fresh_pool: FreshPoolFactory) -> None:
    pool = fresh_pool(64)
    clearing, other = pool.connect(), pool.connect()
    assert clearing.allocator.alloc(10) is not None
    kept = granted(other.allocator.alloc(20))
    clearing.allocator.clear()
    assert clearing.allocator.available_size() == 44
    pool.settle()
    assert pool.held_by(other) == set(ids(kept))
    other.allocator.free(kept)
    assert other.allocator.free_slots.numel() == 64
    assert sorted(ids(clearing.allocator.alloc(64))) == list(range(1, 65))


def test_when_all_are_free_the_list_begins_at_one_again(fresh_pool: FreshPoolFactory) -> None:
    allocator = fresh_pool(8).allocator()
    slots = granted(allocator.alloc(5))
    allocator.free(slots.flip(0))
    assert allocator.free_slots.tolist() == [6, 7, 8, 5, 4, 3, 2, 1]
    assert ids(allocator.alloc(2)) == [6, 7]
    allocator.clear()
    assert allocator.free_slots.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_it_ends_the_window_and_takes_its_slots_back(fresh_pool: FreshPoolFactory) -> None:
    pool = fresh_pool(8)
    worker = pool.connect()
    worker.allocator.alloc_group_begin(6)
    first = granted(worker.allocator.alloc(1))
    assert worker.allocator.alloc(1) is not None
    worker.allocator.free(first)
    worker.allocator.clear()
    assert worker.allocator.available_size() == 8
    before = worker.messages
    worker.allocator.alloc_group_end()
    assert worker.messages == before
    assert ids(worker.allocator.alloc(1)) == [1]
    assert pool.holder(worker)["windows"] == 0


def test_what_was_held_before_cannot_be_freed_after(fresh_pool: FreshPoolFactory) -> None:
    allocator = fresh_pool(8).allocator()
    slots = granted(allocator.alloc(3))
    allocator.clear()
    with pytest.raises(DoubleFree) as caught:
        allocator.free(slots)
    assert caught.value.slots == (1, 2, 3)
    assert sorted(drain(allocator)) == list(range(1, 9))


def test_it_comes_after_the_frees_before_it(fresh_pool: FreshPoolFactory) -> None:
    pool = fresh_pool(64)
    allocator = pool.allocator()
    assert ids(pool.allocator().alloc(1)) == [1]
    for _ in range(200):
        for slot in ids(allocator.alloc(8)):
            allocator.free(torch.tensor(slot))
        assert allocator.alloc(8) is not None
        allocator.clear()
        assert allocator.available_size() == 63
    assert len(drain(allocator)) == 63


def test_a_client_that_holds_nothing_may_clear(fresh_pool: FreshPoolFactory) -> None:
    pool = fresh_pool(4)
    holder, idle = pool.connect(), pool.connect()
    assert ids(holder.allocator.alloc(2)) == [1, 2]
    idle.allocator.clear()
    assert idle.allocator.free_slots.tolist() == [3, 4]
    assert pool.held_by(holder) == {1, 2}


def test_what_is_granted_over_a_clear_goes_back_whatever_was_asked_meanwhile(
    fresh_pool: FreshPoolFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread waits, another clears: the grant may be of before or after. A third one asks for something else."""
    pool = fresh_pool(8)
    worker = pool.connect()
    ask = worker._transport.call_and_wait

    def overtaken(op: int, *arguments: Any, **options: Any) -> list[Any] | None:
        worker.allocator.clear()
        reply = ask(op, *arguments, **options)
        worker.allocator.free(granted(worker.allocator.alloc(1)))
        return reply

    monkeypatch.setattr(worker._transport, "call_and_wait", overtaken)
    assert worker.allocator.alloc(2, timeout=5.0) is None
    pool.settle()
    assert pool.held_by(worker) == set(worker.allocator.held()) == set()
    assert sorted(drain(worker.allocator)) == list(range(1, 9))
