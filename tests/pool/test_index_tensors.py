from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mambapool.pool.errors import BadIndexTensor, DuplicateSlot, InvalidSlots, ReservedSlot, SlotOutOfRange
from mambapool.pool.index_tensors import slot_ids

INTEGERS = ["uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_of_any_width_are_read(dtype: str) -> None:
    assert slot_ids(torch.tensor([3, 1, 2], dtype=getattr(torch, dtype)), size=3) == [3, 1, 2]


@pytest.mark.parametrize(
    ("value", "ids"),
    [
        (torch.tensor(3), [3]),
        (torch.arange(10)[1::3], [1, 4, 7]),
        (torch.arange(10).reshape(2, 5).T[2], [2, 7]),
        ([3, 1], [3, 1]),
        ((3, 1), [3, 1]),
        (range(1, 4), [1, 2, 3]),
        (np.array([3, 1], dtype=np.int32), [3, 1]),
        ([torch.tensor(3), torch.tensor(1)], [3, 1]),
        ([], []),
        (torch.tensor([]), []),
        (torch.zeros(0, dtype=torch.bool), []),
    ],
)
def test_tensors_and_sequences_are_read_in_order(value: Any, ids: list[int]) -> None:
    assert slot_ids(value, size=10) == ids


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (torch.tensor([True, False]), r"mask\.nonzero\(\)"),
        (torch.tensor([1.0]), r"torch\.float32; pass integers"),
        (torch.tensor([1j]), "pass integers"),
        (torch.tensor([[1]]), r"shape \(1, 1\); pass one dimension"),
        (torch.zeros(0, 3), "pass one dimension"),
        ([True], "mask"),
        ([1.5], "1.5 is not an int"),
        (["1"], "'1' is not an int"),
        ([None], "None is not an int"),
        ([[1]], "is not an int"),
        ("12", "pass a tensor of integers or a list"),
        (b"12", "pass a tensor of integers or a list"),
        (3, "pass a tensor of integers or a list"),
        (None, "pass a tensor of integers or a list"),
    ],
)
def test_what_is_no_list_of_ids_is_refused_with_advice(value: Any, advice: str) -> None:
    with pytest.raises(BadIndexTensor, match=f"^dst: .*{advice}") as refused:
        slot_ids(value, size=10, what="dst")
    assert isinstance(refused.value, TypeError)


@pytest.mark.parametrize("value", [[11, 3, -1], torch.tensor([11, 3, -1])])
def test_ids_outside_of_the_pool_are_named(value: Any) -> None:
    with pytest.raises(SlotOutOfRange, match="slot 11, -1 is not one of 1 to 10") as refused:
        slot_ids(value, size=10)
    assert refused.value.slots == (11, -1)


def test_an_id_beyond_int64_is_named_as_it_is() -> None:
    with pytest.raises(SlotOutOfRange) as refused:
        slot_ids(torch.tensor([2**64 - 1], dtype=torch.uint64), size=10)
    assert refused.value.slots == (2**64 - 1,)


def test_the_reserved_slot_is_refused() -> None:
    with pytest.raises(ReservedSlot) as refused:
        slot_ids([1, 0], size=10)
    assert refused.value.slots == (0,)


def test_a_slot_named_twice_is_refused_where_it_matters() -> None:
    with pytest.raises(DuplicateSlot) as refused:
        slot_ids([4, 2, 4, 3, 2, 4], size=10)
    assert refused.value.slots == (4, 2)
    assert slot_ids([4, 4], size=10, distinct=False) == [4, 4]


def test_a_message_stays_short_and_the_error_has_all_slots() -> None:
    with pytest.raises(SlotOutOfRange, match="slot 11, 12, 13, 14, 15, 16, 17, 18 and 32 more is") as refused:
        slot_ids(range(11, 51), size=10)
    assert refused.value.slots == tuple(range(11, 51))


@given(st.lists(st.integers(-3, 13), max_size=6))
def test_exactly_distinct_ids_of_the_pool_pass(ids: list[int]) -> None:
    if all(1 <= slot <= 10 for slot in ids) and len(set(ids)) == len(ids):
        assert slot_ids(torch.tensor(ids, dtype=torch.int64), size=10) == ids
    else:
        with pytest.raises(InvalidSlots):
            slot_ids(torch.tensor(ids, dtype=torch.int64), size=10)
