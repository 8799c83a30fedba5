"""A tag on what is held: refused before anything happens when it is none, and free of charge where none is sent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fresh_pool import FreshPool, FreshPoolFactory, granted, ids

from mambapool.client.allocator import SlotAllocator

NO_TAGS = [
    ("", ValueError),
    ("x" * 129, ValueError),
    ("a\nb", ValueError),
    ("\ud800", ValueError),
    (17, TypeError),
]

CALLS: dict[str, Callable[[SlotAllocator, str], object]] = {
    "alloc": lambda allocator, tag: allocator.alloc(1, tag=tag),
    "alloc of several": lambda allocator, tag: allocator.alloc(2, tag=tag),
    "alloc that waits": lambda allocator, tag: allocator.alloc(2, timeout=1.0, tag=tag),
    "begin": lambda allocator, tag: allocator.alloc_group_begin(2, tag=tag),
}


def tags(pool: FreshPool) -> dict[int, str | None]:
    return {holding.slot: holding.tag for holding in pool.daemon.audit(pool.name).holdings()}


@pytest.mark.parametrize("guarantee", [0, 8])
@pytest.mark.parametrize("call", CALLS)
def test_a_tag_that_is_none_is_refused_and_changes_nothing(
    fresh_pool: FreshPoolFactory, call: str, guarantee: int
) -> None:
    pool = fresh_pool(8)
    worker = pool.connect(guarantee=guarantee)
    worker.allocator.alloc_group_begin(3)
    before = (worker.messages, worker.allocator.available_size())
    for tag, kind in NO_TAGS:
        with pytest.raises(kind, match="tag"):
            CALLS[call](worker.allocator, tag)  # type: ignore[arg-type]
    assert (worker.messages, worker.allocator.available_size()) == before
    assert ids(worker.allocator.alloc(1)) == [1]


def test_what_is_held_is_seen_with_its_tag(fresh_pool: FreshPoolFactory) -> None:
    pool = fresh_pool(16)
    allocator = pool.allocator()
    one = granted(allocator.alloc(1, tag="one"))
    granted(allocator.alloc(2, tag="two"))
    granted(allocator.alloc(1, timeout=1.0, tag="waited"))
    allocator.alloc_group_begin(2, tag="window")
    assert ids(allocator.alloc(1, tag="of the window stands")) == [5]
    assert tags(pool) == {1: "one", 2: "two", 3: "two", 4: "waited", 5: "window", 6: "window"}
    allocator.free(one)
    allocator.alloc_group_end()
    assert ids(allocator.alloc(1)) == [7]
    assert tags(pool) == {2: "two", 3: "two", 4: "waited", 5: "window", 7: None}


def test_of_a_guarantee_no_tag_is_seen_and_none_is_sent(fresh_pool: FreshPoolFactory) -> None:
    pool = fresh_pool(8)
    worker = pool.connect(guarantee=4)
    sent = worker.messages
    granted(worker.allocator.alloc(2, tag="stays here"))
    worker.allocator.alloc_group_begin(1, tag="too")
    assert worker.messages == sent
    assert tags(pool) == dict.fromkeys([1, 2, 3, 4])
