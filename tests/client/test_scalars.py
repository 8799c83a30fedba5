"""Numbers and names that callers bring: whole numbers of any library work, everything else is refused unsent."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from fresh_pool import FreshPool, FreshPoolFactory, ids

from mambapool.pool.errors import MambaPoolError


@pytest.fixture
def pool(fresh_pool: FreshPoolFactory) -> FreshPool:
    return fresh_pool(16)


@pytest.mark.parametrize(
    "count",
    [2, np.int64(2), np.uint8(2), np.array(2), torch.tensor(2), torch.tensor(2, dtype=torch.int32)],
    ids=repr,
)
def test_whole_numbers_of_any_library_are_taken(pool: FreshPool, count: Any) -> None:
    allocator = pool.allocator()
    assert ids(allocator.alloc(count)) == [1, 2]
    allocator.alloc_group_begin(count)
    assert allocator.available_size() == 12
    assert [ids(allocator.alloc(1)) for _ in range(3)] == [[3], [4], [5]]


@pytest.mark.parametrize("one", [np.int32(1), torch.tensor(1), True], ids=repr)
def test_a_one_of_any_library_is_served_from_the_window(pool: FreshPool, one: Any) -> None:
    worker = pool.connect()
    worker.allocator.alloc_group_begin(2)
    before = worker.messages
    assert ids(worker.allocator.alloc(one)) == [1]
    assert worker.messages == before


@pytest.mark.parametrize("count", [2.0, "2", None, [2], torch.tensor(2.0), np.float32(2)], ids=repr)
@pytest.mark.parametrize("method", ["alloc", "alloc_group_begin"])
def test_anything_else_is_a_type_error_before_anything_is_sent(pool: FreshPool, method: str, count: Any) -> None:
    worker = pool.connect()
    before = worker.messages
    with pytest.raises(TypeError):
        getattr(worker.allocator, method)(count)
    assert (worker.messages, worker.allocator.available_size()) == (before, 16)
    assert ids(worker.allocator.alloc(1)) == [1]


@pytest.mark.parametrize("count", [17, 2**31, 2**64, 2**100])
def test_more_than_the_pool_has_is_never_an_error(pool: FreshPool, count: int) -> None:
    allocator = pool.allocator()
    assert allocator.alloc(count) is None
    allocator.alloc_group_begin(count)
    assert (allocator.available_size(), pool.status()["windows"]) == (16, 0)
    allocator.alloc_group_begin(count, partial=True)
    assert (allocator.available_size(), pool.status()["windows"]) == (0, 16)


@pytest.mark.parametrize(
    "name", [b"engine", "", "x" * 10_000, "x" * 100_000, "two\nlines", 7], ids=lambda n: repr(n)[:20]
)
def test_a_name_that_cannot_be_shown_is_refused_and_makes_no_session(pool: FreshPool, name: Any) -> None:
    with pytest.raises(MambaPoolError, match=r"name|message of 100\d{3} bytes is too long"):
        pool.connect(name=name, timeout=1.0)
    assert len(pool.status()["holders"]) == 1


def test_status_shows_the_name_and_process_of_every_session(pool: FreshPool) -> None:
    named, unnamed = pool.connect(name="engine-0 ä"), pool.connect()
    assert pool.holder(named)["name"] == "engine-0 ä"
    assert str(os.getpid()) in pool.holder(unnamed)["name"]
    assert pool.holder(unnamed)["pid"] == os.getpid()
