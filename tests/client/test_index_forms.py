"""What slots look like: dtype and shape of grants, and every form in which callers bring them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from fresh_pool import FreshPool, FreshPoolFactory, ids

from mambapool.client import Worker
from mambapool.pool.errors import BadIndexTensor, ConfigError, DuplicateSlot, InvalidSlots

INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32]


@pytest.fixture
def pool(fresh_pool: FreshPoolFactory) -> FreshPool:
    return fresh_pool(16)


@pytest.fixture
def worker(pool: FreshPool) -> Worker:
    """Holds 1 to 4."""
    worker = pool.connect()
    assert ids(worker.allocator.alloc(4)) == [1, 2, 3, 4]
    return worker


class TensorSubclass(torch.Tensor):
    pass


def test_every_grant_is_a_contiguous_int64_vector_of_the_asked_length(worker: Worker) -> None:
    allocator = worker.allocator
    grants = [(count, allocator.alloc(count)) for count in (0, 1, 5)]
    allocator.alloc_group_begin(2)
    grants += [(1, allocator.alloc(1)), (2, allocator.alloc(2))]
    allocator.clear()
    grants.append((3, allocator.alloc(3)))
    for count, slots in grants:
        assert slots is not None
        assert (slots.dtype, tuple(slots.shape), slots.device.type) == (torch.int64, (count,), "cpu")
        assert slots.is_contiguous()


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_of_any_width_are_taken(pool: FreshPool, worker: Worker, dtype: torch.dtype) -> None:
    worker.allocator.free(torch.tensor([2, 4], dtype=dtype))
    assert worker.allocator.available_size() == 14
    pool.settle()
    assert pool.held_by(worker) == {1, 3}


@pytest.mark.parametrize(
    ("form", "freed"),
    [
        (lambda t: t[0], {1}),
        (lambda t: t[1:2], {2}),
        (lambda t: t[::2], {1, 3}),
        (lambda t: t.flip(0), {1, 2, 3, 4}),
        (lambda t: torch.stack((t, t + 90), dim=1)[:, 0], {1, 2, 3, 4}),
        (lambda t: t.reshape(2, -1)[1], {3, 4}),
        (lambda t: t.as_subclass(TensorSubclass), {1, 2, 3, 4}),
        (lambda t: t.tolist()[:2], {1, 2}),
        (lambda t: tuple(t.tolist()), {1, 2, 3, 4}),
        (lambda t: [np.int32(4), np.int64(1)], {1, 4}),
        (lambda t: t.numpy(), {1, 2, 3, 4}),
    ],
)
@pytest.mark.parametrize("in_window", [False, True])
def test_exactly_the_named_slots_are_freed(
    pool: FreshPool, worker: Worker, form: Callable[[torch.Tensor], Any], freed: set[int], in_window: bool
) -> None:
    if in_window:
        worker.allocator.alloc_group_begin(1)
    worker.allocator.free(form(torch.arange(1, 5)))
    worker.allocator.alloc_group_end()
    pool.settle()
    assert pool.held_by(worker) == {1, 2, 3, 4} - freed


@pytest.mark.parametrize(
    "value",
    [torch.empty(0, dtype=dtype) for dtype in (torch.int64, torch.int32, torch.float32, torch.bool)] + [[], ()],
    ids=str,
)
def test_empty_ones_of_any_dtype_do_nothing_and_cost_nothing(worker: Worker, value: Any) -> None:
    before = worker.messages
    worker.allocator.free(value)
    assert (worker.messages, worker.allocator.available_size()) == (before, 12)


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([True, True]),
        torch.tensor([1.0, 2.0]),
        torch.tensor([1.0], dtype=torch.float16),
        torch.tensor([1 + 0j]),
        torch.tensor([[1, 2], [3, 4]]),
        torch.tensor([1, 2]).expand(2, -1),
        torch.tensor([[1]]),
        None,
        1,
        "12",
        b"\x01\x02",
        {1: 2}.items(),
        [1, 2.0],
        [True],
        [[1], [2]],
        np.array([1.0]),
        pytest.param(object(), id="an object"),
    ],
    ids=str,
)
def test_anything_else_is_a_type_error_that_says_what_to_pass(worker: Worker, value: Any) -> None:
    before = worker.messages
    with pytest.raises(BadIndexTensor, match="pass ") as caught:
        worker.allocator.free(value)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, InvalidSlots)
    assert (worker.messages, worker.allocator.available_size()) == (before, 12)
    worker.allocator.free(torch.arange(1, 5))
    assert worker.allocator.available_size() == 16


def test_an_expanded_view_names_one_slot_twice(pool: FreshPool, worker: Worker) -> None:
    with pytest.raises(DuplicateSlot):
        worker.allocator.free(torch.tensor([3]).expand(2))
    assert pool.held_by(worker) == {1, 2, 3, 4}


@pytest.mark.parametrize("in_window", [False, True])
def test_values_are_taken_as_they_are_at_the_call(pool: FreshPool, worker: Worker, in_window: bool) -> None:
    if in_window:
        worker.allocator.alloc_group_begin(1)
    slots = torch.tensor([2, 3])
    worker.allocator.free(slots)
    slots.fill_(1)
    worker.allocator.alloc_group_end()
    assert worker.allocator.available_size() == 14
    pool.settle()
    assert pool.held_by(worker) == {1, 4}


@pytest.mark.parametrize("layout", ["sparse", "meta"])
def test_a_tensor_without_plain_values_is_refused(worker: Worker, layout: str) -> None:
    ones = torch.ones(3, dtype=torch.int64)
    with pytest.raises(BadIndexTensor, match=layout):
        worker.allocator.free(ones.to_sparse() if layout == "sparse" else ones.to("meta"))
    assert worker.allocator.available_size() == 12


@pytest.mark.parametrize("device", ["cuda", "nonsense"])
def test_a_device_that_is_not_there_is_named_before_anything_is_asked_for(pool: FreshPool, device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    sessions = len(pool.status()["holders"])
    with pytest.raises(ConfigError, match=device):
        pool.connect(device=device)
    assert len(pool.status()["holders"]) == sessions
