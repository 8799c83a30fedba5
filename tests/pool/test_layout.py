"""Tensor specs, how they lie in a block, and how a geometry is told apart and sent."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mambapool.pool.errors import ConfigError
from mambapool.pool.layout import (
    ALIGNMENT_BYTES,
    DTYPE_BYTES,
    MAX_BLOCK_BYTES,
    MAX_DIMENSIONS,
    MAX_SLOTS,
    Geometry,
    TensorSpec,
    check_slots,
)

QWEN3_NEXT = Geometry(
    (
        TensorSpec("conv", "bfloat16", 36, (8192, 3)),
        TensorSpec("temporal", "float32", 36, (32, 128, 128)),
    )
)

sizes = st.integers(1, 70)
specs = st.builds(
    TensorSpec,
    name=st.from_regex(r"[a-z][a-z0-9_.]{0,31}", fullmatch=True),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    layers=sizes,
    shape=st.lists(sizes, min_size=1, max_size=4).map(tuple),
)
geometries = st.lists(specs, min_size=1, max_size=4, unique_by=lambda spec: spec.name).map(
    lambda tensors: Geometry(tuple(tensors))
)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("conv=bfloat16:4x96x3", TensorSpec("conv", "bfloat16", 4, (96, 3))),
        ("temporal=float32:4x2x16x8", TensorSpec("temporal", "float32", 4, (2, 16, 8))),
        ("conv.0=float16:1x1", TensorSpec("conv.0", "float16", 1, (1,))),
        ("a_1=float32:01x002", TensorSpec("a_1", "float32", 1, (2,))),
        (f"{'n' * 32}=float32:1x1", TensorSpec("n" * 32, "float32", 1, (1,))),
    ],
)
def test_a_state_flag_reads_as_name_dtype_layers_and_shape(text: str, spec: TensorSpec) -> None:
    assert TensorSpec.parse(text) == spec


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected NAME=DTYPE:LAYERSxDIM"),
        ("conv", "expected NAME=DTYPE:LAYERSxDIM"),
        ("conv=bfloat16", "expected NAME=DTYPE:LAYERSxDIM"),
        ("conv=bfloat16:4", "expected NAME=DTYPE:LAYERSxDIM"),
        ("conv=bfloat16:4x", "expected NAME=DTYPE:LAYERSxDIM"),
        ("conv=bfloat16:x4", "expected NAME=DTYPE:LAYERSxDIM"),
        ("conv=bfloat16:4x-3", "expected NAME=DTYPE:LAYERSxDIM"),
        ("conv=bfloat16:4x3.0", "expected NAME=DTYPE:LAYERSxDIM"),
        ("conv=bfloat16:4x 3", "expected NAME=DTYPE:LAYERSxDIM"),
        ("conv=bfloat16:4X3", "expected NAME=DTYPE:LAYERSxDIM"),
        ("conv=bfloat16:4x3\n", "expected NAME=DTYPE:LAYERSxDIM"),
        ("conv=bfloat16:4x٣", "expected NAME=DTYPE:LAYERSxDIM"),  # the Arabic digit is a digit to Python
        ("conv=bfloat16:4x" + "9" * 5000, "expected NAME=DTYPE:LAYERSxDIM"),
        ("conv=bfloat16:0x3", "size 0 is not a whole number from 1"),
        ("conv=bfloat16:4x0", "size 0 is not a whole number from 1"),
        ("conv=bfloat16:4x" + "9" * 18, "is not a whole number from 1 to 72057594037927936"),
        ("conv=int8:4x3", "dtype 'int8' is not one of float32, float16, bfloat16"),
        ("conv=:4x3", "dtype '' is not one of"),
        ("=bfloat16:4x3", "tensor name ''"),
        ("Conv=bfloat16:4x3", "tensor name 'Conv'"),
        ("0conv=bfloat16:4x3", "tensor name '0conv'"),
        (f"{'n' * 33}=float32:1x1", "use 1 to 32 of a-z 0-9 _ ."),
        ("conv=float32:1" + "x1" * (MAX_DIMENSIONS + 1), "needs 1 to 16 dimensions"),
    ],
)
def test_a_malformed_state_flag_is_refused_with_what_is_accepted(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        TensorSpec.parse(text)


@pytest.mark.parametrize(
    "change",
    [
        {"name": 7},
        {"dtype": ["float32"]},
        {"layers": True},
        {"layers": 1.0},
        {"layers": MAX_BLOCK_BYTES + 1},
        {"shape": ()},
        {"shape": [2, 3]},
        {"shape": (2, 3.0)},
        {"shape": (2, False)},
        {"shape": (1,) * (MAX_DIMENSIONS + 1)},
    ],
)
def test_a_spec_of_wrong_types_or_sizes_cannot_be_made(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="tensor"):
        replace(TensorSpec("a", "float32", 1, (2, 3)), **change)


@given(specs)
def test_a_spec_reads_back_as_it_is_written(spec: TensorSpec) -> None:
    assert TensorSpec.parse(str(spec)) == spec


def test_a_geometry_needs_tensors_of_different_names() -> None:
    tensor = TensorSpec("conv", "float32", 1, (2,))
    with pytest.raises(ConfigError, match="at least one tensor"):
        Geometry(())
    with pytest.raises(ConfigError, match="conv is named twice"):
        Geometry((tensor, replace(tensor, layers=2)))


def test_bytes_per_slot_counts_no_padding_and_no_reserved_row() -> None:
    assert QWEN3_NEXT.bytes_per_slot == 77266944
    assert Geometry((TensorSpec("a", "float16", 3, (5, 7)),)).bytes_per_slot == 3 * 5 * 7 * 2


def test_tensors_are_placed_in_order_layers_first_then_one_row_more_than_slots() -> None:
    layout = Geometry(
        (
            TensorSpec("conv", "bfloat16", 2, (5, 3)),
            TensorSpec("temporal", "float32", 3, (2, 4)),
        )
    ).place(slots=9)
    conv, temporal = layout.tensors
    assert (conv.name, conv.dtype, conv.shape, conv.stride) == (
        "conv",
        "bfloat16",
        (2, 10, 5, 3),
        (150, 15, 3, 1),
    )
    assert (temporal.name, temporal.dtype, temporal.shape, temporal.stride) == (
        "temporal",
        "float32",
        (3, 10, 2, 4),
        (80, 8, 4, 1),
    )
    # conv takes 2 * 10 * 15 elements of 2 bytes: 600, so temporal begins at 768 and takes 960 bytes.
    assert (conv.offset, conv.size_bytes) == (0, 600)
    assert (temporal.offset, temporal.size_bytes) == (768, 960)
    assert (layout.slots, layout.size_bytes) == (9, 1792)


@given(geometries, st.integers(1, 2000))
def test_placed_tensors_are_aligned_contiguous_and_apart(geometry: Geometry, slots: int) -> None:
    layout = geometry.place(slots)
    assert [tensor.name for tensor in layout.tensors] == [spec.name for spec in geometry.tensors]
    for spec, tensor in zip(geometry.tensors, layout.tensors, strict=True):
        assert tensor.offset % ALIGNMENT_BYTES == 0
        assert tensor.shape == (spec.layers, slots + 1, *spec.shape)
        assert tensor.stride == tuple(math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape)))
        assert tensor.size_bytes == spec.bytes_per_slot * (slots + 1)
    ends = [tensor.offset + tensor.size_bytes for tensor in layout.tensors]
    gaps = [after.offset - end for end, after in zip(ends, layout.tensors[1:], strict=False)]
    assert all(0 <= gap < ALIGNMENT_BYTES for gap in [*gaps, layout.size_bytes - ends[-1]])
    assert layout.size_bytes % ALIGNMENT_BYTES == 0


def test_more_slots_than_can_be_addressed_are_refused() -> None:
    geometry = Geometry((TensorSpec("a", "float32", 2**40, (1,)),))
    assert geometry.place(2**14 - 1).size_bytes == MAX_BLOCK_BYTES
    with pytest.raises(ConfigError, match="more than can be addressed"):
        geometry.place(2**14)


@pytest.mark.parametrize("slots", [0, -1, MAX_SLOTS + 1, True, 3.0, "3", None])
def test_slots_must_be_a_whole_number_that_an_int32_id_reaches(slots: Any) -> None:
    with pytest.raises(ConfigError, match="expected a whole number from 1 to 2147483646"):
        check_slots(slots)
    with pytest.raises(ConfigError, match="slots"):
        QWEN3_NEXT.place(slots)


def test_20_gib_hold_276_states_of_qwen3_next() -> None:
    assert QWEN3_NEXT.slots_that_fit(20 * 2**30) == 276


@given(geometries, st.integers(0, 2**34))
def test_slots_that_fit_is_the_largest_number_whose_block_fits(geometry: Geometry, memory_bytes: int) -> None:
    slots = geometry.slots_that_fit(memory_bytes)
    if slots:
        assert geometry.place(slots).size_bytes <= memory_bytes
    assert geometry.place(slots + 1).size_bytes > memory_bytes


@given(geometries, st.integers(1, 1000))
def test_exactly_the_memory_of_n_slots_holds_n_and_a_byte_less_does_not(geometry: Geometry, slots: int) -> None:
    size_bytes = geometry.place(slots).size_bytes
    assert geometry.slots_that_fit(size_bytes) >= slots
    assert geometry.slots_that_fit(size_bytes - 1) < slots


@pytest.mark.parametrize("memory_bytes", [-1, 0, 1, 2 * 77266944 - 1])
def test_memory_for_less_than_one_slot_and_the_reserved_row_holds_none(memory_bytes: int) -> None:
    assert QWEN3_NEXT.slots_that_fit(memory_bytes) == 0


def test_memory_beyond_what_can_be_addressed_still_holds_only_what_can_be_placed() -> None:
    small = Geometry((TensorSpec("a", "float16", 1, (1,)),))
    assert small.slots_that_fit(2**80) == MAX_SLOTS
    large = Geometry((TensorSpec("a", "float32", 2**40, (3,)),))
    slots = large.slots_that_fit(2**80)
    assert large.place(slots).size_bytes <= MAX_BLOCK_BYTES
    with pytest.raises(ConfigError, match="more than can be addressed"):
        large.place(slots + 1)


@given(geometries, geometries)
def test_digests_are_equal_exactly_when_geometries_are(one: Geometry, other: Geometry) -> None:
    assert len(one.digest) == 16
    assert one.digest == Geometry(one.tensors).digest
    assert (one.digest == other.digest) == (one == other)


def test_every_field_of_a_spec_and_the_order_of_tensors_change_the_digest() -> None:
    spec = TensorSpec("a", "float16", 2, (3, 4))
    second = TensorSpec("b", "float16", 2, (3, 4))
    changed = [
        (spec,),
        (replace(spec, name="c"),),
        (replace(spec, dtype="bfloat16"),),
        (replace(spec, layers=3),),
        (replace(spec, shape=(4, 3)),),
        (replace(spec, shape=(12,)),),
        (spec, second),
        (second, spec),
    ]
    digests = [Geometry(tensors).digest for tensors in changed]
    assert all(one != other for one, other in itertools.combinations(digests, 2))


def test_the_largest_sizes_have_a_digest() -> None:
    spec = TensorSpec("a", "float32", MAX_BLOCK_BYTES, (MAX_BLOCK_BYTES,) * MAX_DIMENSIONS)
    assert len(Geometry((spec,)).digest) == 16


@given(geometries)
def test_a_geometry_survives_the_wire(geometry: Geometry) -> None:
    sent = msgpack.unpackb(msgpack.packb(geometry.to_wire()))
    assert Geometry.from_wire(sent) == geometry
    assert Geometry.from_wire(sent).digest == geometry.digest


@pytest.mark.parametrize(
    "value",
    [
        None,
        5,
        "conv",
        b"conv",
        {},
        {"conv": 1},
        [],
        [5],
        ["abcd"],
        [[]],
        [["a", "float32", 1]],
        [["a", "float32", 1, [2], 3]],
        [["a", "float32", 1, 2]],
        [["a", "float32", 1, "23"]],
        [["a", "float32", 1, b"\x02\x03"]],
        [["a", "float32", 1, {2: 3}]],
        [["a", "float32", 1, []]],
        [["a", "float32", 1, [[2]]]],
        [["a", "float32", 1, [2.0]]],
        [["a", "float32", 1, [None]]],
        [["a", "float32", 0, [2]]],
        [["a", "float32", True, [2]]],
        [["a", "float32", 2**64 - 1, [2]]],
        [["a", "float32", 1, [1] * 100_000]],
        [["a", ["float32"], 1, [2]]],
        [["a", None, 1, [2]]],
        [[b"a", "float32", 1, [2]]],
        [[None, "float32", 1, [2]]],
        [["a", "float32", 1, [2]], ["a", "float32", 1, [2]]],
    ],
)
def test_a_malformed_wire_value_is_a_config_error(value: Any) -> None:
    with pytest.raises(ConfigError):
        Geometry.from_wire(value)
