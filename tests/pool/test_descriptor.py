from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mambapool.pool.cuda_export import CudaExport
from mambapool.pool.descriptor import MAX_DESCRIPTOR_BYTES, ShardDescriptor, unpack
from mambapool.pool.errors import ConfigError, ProtocolError, VersionMismatch
from mambapool.pool.layout import DTYPE_BYTES, Geometry, TensorSpec

FIELDS = [
    "version",
    "backend",
    "pool",
    "uuid",
    "rank",
    "tp_size",
    "slots",
    "geometry",
    "geometry_digest",
    "size_bytes",
    "tensors",
    "pid",
]

names = st.text(string.ascii_lowercase, min_size=1, max_size=32)
sizes = st.integers(1, 300)
specs = st.builds(
    TensorSpec,
    names,
    st.sampled_from(list(DTYPE_BYTES)),
    sizes,
    st.lists(sizes, min_size=1, max_size=3).map(tuple),
)
geometries = st.lists(specs, min_size=1, max_size=5, unique_by=lambda spec: spec.name).map(
    lambda tensors: Geometry(tuple(tensors))
)
descriptors = st.integers(1, 64).flatmap(
    lambda tp_size: st.builds(
        ShardDescriptor,
        pool=names,
        uuid=st.binary(min_size=16, max_size=16),
        rank=st.integers(0, tp_size - 1),
        tp_size=st.just(tp_size),
        slots=st.integers(1, 100_000),
        geometry=geometries,
        pid=st.integers(0, 2**22),
        cuda=st.none()
        | st.builds(
            CudaExport,
            handle=st.binary(min_size=64, max_size=64),
            device=st.binary(min_size=16, max_size=16),
            pid_namespace=st.integers(0, 2**32),
            ipc_namespace=st.integers(0, 2**32),
        ),
    )
)
DESCRIPTOR = ShardDescriptor(
    pool="default",
    uuid=bytes(range(16)),
    rank=1,
    tp_size=2,
    slots=8,
    geometry=Geometry((TensorSpec.parse("conv=bfloat16:2x8x3"), TensorSpec.parse("temporal=float32:2x4x4"))),
    pid=4242,
)
CUDA = {"handle": bytes(range(64)), "device": bytes(range(16)), "pid_namespace": 4026531836, "ipc_namespace": 0}


def changed(**fields: Any) -> bytes:
    """The descriptor's message with other values; None leaves the field away."""
    message = msgpack.unpackb(DESCRIPTOR.pack()) | fields
    packed: bytes = msgpack.packb({name: value for name, value in message.items() if value is not None})
    return packed


@given(descriptors)
def test_what_is_packed_is_unpacked(descriptor: ShardDescriptor) -> None:
    packed = descriptor.pack()

    assert unpack(packed) == descriptor
    assert len(packed) <= MAX_DESCRIPTOR_BYTES


def test_tensors_lie_where_the_geometry_places_them() -> None:
    layout = DESCRIPTOR.geometry.place(DESCRIPTOR.slots)

    assert DESCRIPTOR.tensors == layout.tensors
    assert DESCRIPTOR.size_bytes == layout.size_bytes
    assert DESCRIPTOR.geometry_digest == DESCRIPTOR.geometry.digest


def test_the_message_has_the_documented_fields() -> None:
    assert list(msgpack.unpackb(DESCRIPTOR.pack())) == FIELDS


@pytest.mark.parametrize("field", FIELDS)
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(ProtocolError, match=f"{field} is missing"):
        unpack(changed(**{field: None}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (field, value)
        for field in FIELDS
        for value in (True, 1.0, 1, "text", b"bytes", [1], {"a": 1})
        if type(value) is not type(msgpack.unpackb(DESCRIPTOR.pack())[field])
    ],
)
def test_a_field_of_another_type_is_named(field: str, value: object) -> None:
    with pytest.raises(ProtocolError, match=f"{field} is {type(value).__name__}, expected"):
        unpack(changed(**{field: value}))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"backend": "cuda-vmm"}, "backend 'cuda-vmm'"),
        ({"backend": "cuda-ipc"}, "cuda must have handle, device, pid_namespace, ipc_namespace"),
        ({"backend": "cuda-ipc", "cuda": CUDA | {"more": 1}}, "cuda must have handle"),
        ({"backend": "cuda-ipc", "cuda": CUDA | {"handle": bytes(63)}}, "handle must have 64 bytes"),
        ({"backend": "cuda-ipc", "cuda": CUDA | {"device": "GPU-1"}}, "device must have 16 bytes"),
        ({"backend": "cuda-ipc", "cuda": CUDA | {"ipc_namespace": -1}}, "ipc_namespace must be a whole number"),
        ({"cuda": CUDA}, "unknown field 'cuda'"),
        ({"pool": "Not A Pool"}, "pool name 'Not A Pool'"),
        ({"uuid": bytes(15)}, "uuid has 15 bytes"),
        ({"rank": 2}, "rank 2: expected a whole number from 0 to 1"),
        ({"rank": -1}, "rank -1"),
        ({"tp_size": 0}, "tp_size 0"),
        ({"slots": 0}, "slots 0"),
        ({"slots": 2**31}, "slots 2147483648"),
        ({"geometry": []}, "geometry: a state needs at least one tensor"),
        ({"geometry": [["conv", "int8", 2, [3]]]}, "geometry: .*int8"),
        ({"geometry": [["conv", "float32", 2]]}, "geometry: not the geometry"),
        ({"geometry": [["conv", "float32", 2**40, [2**40]]]}, "more than can be addressed"),
        ({"pid": -1}, "pid -1 is negative"),
        ({"more": 1}, "unknown field 'more'"),
    ],
)
def test_a_value_that_cannot_be_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ProtocolError, match=named):
        unpack(changed(**fields))


def test_another_version_is_named_with_ours_whatever_else_it_has() -> None:
    with pytest.raises(VersionMismatch, match=r"version 2.*reads 1"):
        unpack(msgpack.packb({"version": 2, "of": "the future"}))


def moved(change: Callable[[list[Any]], None]) -> bytes:
    tensors = msgpack.unpackb(DESCRIPTOR.pack())["tensors"]
    change(tensors)
    return changed(tensors=tensors)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (changed(geometry_digest=bytes(16)), "geometry_digest"),
        (changed(size_bytes=DESCRIPTOR.size_bytes - 1), "size_bytes"),
        (changed(slots=1000), "size_bytes"),
        (moved(lambda tensors: tensors[1].__setitem__(4, 0)), "tensors"),
        (moved(lambda tensors: tensors[1].__setitem__(4, float(tensors[1][4]))), "tensors"),
        (moved(lambda tensors: tensors[0][3].__setitem__(3, True)), "tensors"),
        (moved(lambda tensors: tensors.pop()), "tensors"),
        (moved(lambda tensors: tensors.reverse()), "tensors"),
    ],
)
def test_a_placement_that_the_geometry_does_not_give_is_refused(message: bytes, field: str) -> None:
    with pytest.raises(ProtocolError, match=f"{field} is not what the geometry and"):
        unpack(message)


@given(st.binary(max_size=200))
@example(b"")
@example(b"\x91" * 5000)
@example(b"\x81" * 5000)
@example(msgpack.packb([1, 2, 3]))
@example(msgpack.packb({1: 2}))
@example(msgpack.packb({"version": msgpack.ExtType(5, b"x")}))
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\xdb\xff\xff\xff\xff")
@example(b"\x81\xa1\xff\x01")
def test_bytes_that_are_no_descriptor_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="descriptor: "):
        unpack(data)


@given(st.data())
def test_a_damaged_descriptor_is_refused_or_harmless(data: st.DataObject) -> None:
    packed = bytearray(DESCRIPTOR.pack())
    packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        descriptor = unpack(bytes(packed))
    except (ProtocolError, VersionMismatch):
        return
    assert descriptor.geometry == DESCRIPTOR.geometry
    assert descriptor.tensors == DESCRIPTOR.tensors


def test_a_message_that_is_too_long_is_not_decoded() -> None:
    with pytest.raises(ProtocolError, match="at most 65536 are read"):
        unpack(changed(more="x" * MAX_DESCRIPTOR_BYTES))


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(tuple(TensorSpec(f"t{i}", "float32", 1, (1,)) for i in range(257))),
        Geometry(
            tuple(TensorSpec(f"a_name_of_many_bytes_{i}", "float32", 1, (1,) * 15 + (2**40,)) for i in range(250))
        ),
    ],
)
def test_a_geometry_that_fits_no_message_is_refused_when_packed(geometry: Geometry) -> None:
    descriptor = ShardDescriptor("default", bytes(16), 0, 1, 1, geometry, 1)
    with pytest.raises(ConfigError, match="descriptor of pool default has"):
        descriptor.pack()
