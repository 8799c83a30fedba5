from __future__ import annotations

import random
from typing import Any

import msgpack
import numpy as np
import pytest

from mambapool.pool import errors, protocol
from mambapool.pool.errors import ProtocolError
from mambapool.pool.protocol import pack, pack_ids, unpack, unpack_ids

MESSAGES: list[list[Any]] = [
    [],
    [0, -1, 2**63 - 1, 2**64 - 1, -(2**63)],
    ["", "default", "ä\U0001f40d", b"", b"\0\xff"],
    [True, False, None],
    [1.5, [1, [2, [3]]], {"a": {"b": [1, b"x"]}}],
    [1] * 1024,
    ["x" * 16 * 1024],
    [{str(key): key for key in range(1024)}],
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: repr(message)[:20])
def test_a_message_survives_the_wire(message: list[Any]) -> None:
    assert unpack(pack(message), 1000) == message
    assert unpack(pack(tuple(message)), 1000) == message


def test_text_and_bytes_stay_what_they_are() -> None:
    text, data = unpack(pack(["abc", b"abc"]), 3)
    assert (type(text), type(data)) == (str, bytes)


def test_one_packer_makes_many_bodies() -> None:
    packed = protocol.packer()
    assert [packed([1, "a"]), packed((2,)), packed([])] == [pack([1, "a"]), pack([2]), pack([])]


OVER_LIMITS = {
    "1,025 fields": [1] * 1025,
    "1,025 keys": [{str(key): key for key in range(1025)}],
    "long text": ["x" * (16 * 1024 + 1)],
    "long text in bytes": ["ä" * (8 * 1024 + 1)],
    "long bin": [bytes(101)],
    "extension": [msgpack.ExtType(1, b"x")],
    "time stamp": [msgpack.Timestamp(1, 2)],
}


@pytest.mark.parametrize("message", OVER_LIMITS.values(), ids=OVER_LIMITS.keys())
def test_what_is_over_a_limit_is_refused(message: list[Any]) -> None:
    with pytest.raises(ProtocolError, match="not a message: ValueError") as caught:
        unpack(msgpack.packb(message), 100)
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_bin_may_be_as_long_as_the_caller_says() -> None:
    assert unpack(pack([bytes(100)]), 100) == [bytes(100)]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "incomplete"),
        (b"\xc1", "FormatError"),
        (b"\xdd\xff\xff\xff\xff", "max_array_len"),
        (b"\xdf\xff\xff\xff\xff", "max_map_len"),
        (b"\xc6\xff\xff\xff\xff", "incomplete"),
        (b"\xdb\xff\xff\xff\xff", "incomplete"),
        (b"\x91" * 1025 + b"\xc0", "StackError"),
        (b"\x91\xa2\xff\xfe", "UnicodeDecodeError"),
        (b"\x90\x90", "extra data"),
        (b"\x92\x01", "incomplete"),
        (b"\x91\x81\x91\x01\x02", "not allowed for map key"),
        (b"\x91\x81\x01\x02", "not allowed for map key"),
        (b"\x80", "a message is an array, not dict"),
        (b"\xa1x", "a message is an array, not str"),
        (b"\xc0", "a message is an array, not NoneType"),
        (b"\x07", "a message is an array, not int"),
        (b"\xc7\x00\x05", "a message is an array, not ExtType"),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_what_is_no_message_is_refused_with_a_reason(body: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says) as caught:
        unpack(body, 100)
    assert len(str(caught.value)) <= 300


def test_random_bytes_are_messages_or_protocol_errors_and_nothing_else() -> None:
    source = random.Random(20)
    valid = [pack(message) for message in MESSAGES[:5]]
    for _ in range(20_000):
        body = bytearray(source.choice(valid) if source.random() < 0.5 else source.randbytes(source.randrange(40)))
        for _ in range(source.randrange(3)):
            if body:
                body[source.randrange(len(body))] = source.randrange(256)
        try:
            message = unpack(bytes(body), 100)
        except ProtocolError:
            continue
        assert type(message) is list


@pytest.mark.parametrize("slots", [[], [7], [-1], [1, 2], [2**31 - 1, -(2**31), 0], list(range(1000))])
def test_ids_survive_the_wire(slots: list[int]) -> None:
    packed = pack_ids(np.array(slots, np.int32))
    assert type(packed) is (int if len(slots) == 1 else bytes)
    assert unpack_ids(packed).tolist() == slots
    (travelled,) = unpack(pack([packed]), 4000)
    assert unpack_ids(travelled).tolist() == slots
    assert unpack_ids(travelled).dtype == np.int32


def test_several_ids_are_little_endian_int32() -> None:
    assert pack_ids(np.array([1, -2], np.int32)) == b"\x01\0\0\0\xfe\xff\xff\xff"
    assert pack_ids(np.array([1, -2], ">i4")) == b"\x01\0\0\0\xfe\xff\xff\xff"


def test_one_id_may_come_as_a_bin_too() -> None:
    assert unpack_ids(b"\x07\0\0\0").tolist() == [7]


@pytest.mark.parametrize("value", [None, True, 1.0, "1", [1], {}, b"\1", b"\1\2\3\4\5", 2**31, -(2**31) - 1])
def test_what_are_no_ids_is_refused(value: object) -> None:
    with pytest.raises(ProtocolError):
        unpack_ids(value)


def test_the_longest_body_names_every_slot_once() -> None:
    everything = pack([protocol.FREE, 1, 0, 2**48, 1, 0, bytes(4 * 100_000)])
    assert len(everything) <= protocol.max_body_bytes(100_000)
    assert protocol.max_body_bytes(0) == 64 * 1024


def test_operations_have_names_and_numbers_of_their_own() -> None:
    assert len(set(protocol.OP_NAMES)) == len(set(protocol.OP_NAMES.values())) == 15
    assert all(getattr(protocol, name) == op for op, name in protocol.OP_NAMES.items())
    assert {protocol.OP_NAMES[op] for op in protocol.POSTED_OPS} == {"FREE", "END", "CLEAR", "CANCEL", "CLOSE"}


SLOT_ERRORS = [
    errors.DoubleFree,
    errors.NotHolder,
    errors.ReservedSlot,
    errors.SlotOutOfRange,
    errors.DuplicateSlot,
    errors.InvalidSlots,
]
TEXT_ERRORS = [
    errors.ProtocolError,
    errors.VersionMismatch,
    errors.UnknownPool,
    errors.GeometryMismatch,
    errors.AllocatorUnavailable,
    errors.GuaranteeExceeded,
    errors.PoolLost,
]


def over_the_wire(error: errors.MambaPoolError) -> errors.MambaPoolError:
    return protocol.error_from(unpack(pack(protocol.error_payload(error)), 1000))


@pytest.mark.parametrize("kind", SLOT_ERRORS)
@pytest.mark.parametrize("slots", [(), (7,), (3, 1, 2)])
def test_a_refusal_of_slots_arrives_as_the_same_exception(
    kind: type[errors.InvalidSlots], slots: tuple[int, ...]
) -> None:
    error = over_the_wire(kind("slots are wrong", slots))
    assert type(error) is kind
    assert isinstance(error, errors.InvalidSlots)
    assert (str(error), error.slots) == ("slots are wrong", slots)


def test_an_id_that_no_int32_holds_is_left_to_the_text() -> None:
    error = over_the_wire(errors.SlotOutOfRange("slots 2147483648, 5 are outside", [2**31, 5, -(2**31) - 1]))
    assert isinstance(error, errors.SlotOutOfRange)
    assert error.slots == (5,)


@pytest.mark.parametrize("kind", TEXT_ERRORS)
def test_a_refusal_with_a_text_arrives_as_the_same_exception(kind: type[errors.MambaPoolError]) -> None:
    error = over_the_wire(kind("no"))
    assert (type(error), str(error)) == (kind, "no")


@pytest.mark.parametrize("kind", [errors.RuntimeDirError, errors.NotEnoughMemory, errors.ClientClosed])
def test_what_only_the_allocator_can_mend_arrives_as_refused(kind: type[errors.MambaPoolError]) -> None:
    assert protocol.error_payload(kind("no room")) == [protocol.REFUSED, "no room"]
    assert type(over_the_wire(kind("no room"))) is errors.AllocatorUnavailable


@pytest.mark.parametrize(
    "payload",
    [
        [],
        [protocol.OK],
        [999, "text"],
        [-1, "text"],
        [protocol.MALFORMED],
        [protocol.MALFORMED, b"text"],
        [protocol.DOUBLE_FREE, "text"],
        [protocol.DOUBLE_FREE, None, "text"],
        [protocol.DOUBLE_FREE, b"\1", "text"],
        [protocol.DOUBLE_FREE, [1], "text"],
    ],
    ids=repr,
)
def test_a_refusal_that_cannot_be_understood_is_a_protocol_error(payload: list[Any]) -> None:
    assert type(protocol.error_from(payload)) is ProtocolError
