"""What an allocator answers, held to its form before anybody relies on it.

The allocator is trusted with slots, not with this process: a reply that is not what ``docs/protocol.md`` says, from
another version or from whatever else listens at the socket, is a :class:`ProtocolError` of the call, and the client
stays usable.
"""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np

from mambapool.pool import protocol
from mambapool.pool.errors import ProtocolError
from mambapool.pool.protocol import MAX_NUMBER, OK

#: Operations whose OK brings ids.
_GRANTING = frozenset((protocol.ALLOC, protocol.BEGIN, protocol.ACCEPT))

_unpack = msgpack.unpackb

_ONE = np.uint32(1)
#: Up to here Python compares faster than numpy is called.
_LOOKED_AT_ONE_BY_ONE = 128

_NUMBERS = ("session", "row", "applied", "slots", "limit", "guarantee")


def parse_reply(body: bytes, max_items: int | None = None) -> list[Any]:
    """``[request id, epoch, status, …]``; anything else is a :class:`ProtocolError`."""
    reply = protocol.unpack(body, len(body)) if max_items is None else protocol.unpack(body, len(body), max_items)
    if len(reply) < 3:
        raise ProtocolError(f"a reply has at least 3 fields, this one {len(reply)}")
    known, epoch, status = reply[0], reply[1], reply[2]
    # Written out: every call comes by here.
    if not (
        type(known) is type(epoch) is type(status) is int
        and 0 <= known < MAX_NUMBER
        and 0 <= epoch < MAX_NUMBER
        and 0 <= status < MAX_NUMBER
    ):
        raise ProtocolError("request id, epoch and status are whole numbers")
    if status == protocol.GAP and not (len(reply) == 4 and _is_number(reply[3])):
        raise ProtocolError("a GAP tells the number of the last posted message that was applied")
    return reply


def plain_grant(body: bytes, request_id: int) -> list[Any] | None:
    """The reply if it says OK, with one value, to that request: what most say. None for all else.

    What :func:`parse_reply` says of it, in one function; whether the value is ids is for :func:`check_form`.
    """
    try:
        reply = _unpack(body, max_array_len=4, max_map_len=0)
    except (ValueError, TypeError):
        return None
    if type(reply) is not list or len(reply) != 4:
        return None
    known, epoch, status, _ = reply
    if (
        known == request_id
        and status == OK
        and type(known) is type(epoch) is type(status) is int
        and 0 <= epoch < MAX_NUMBER
    ):
        return reply
    return None


def check_form(op: int, reply: list[Any], slots: int) -> None:
    """Raise unless it grants slots of a pool of so many, grants nothing, or refuses as the protocol says."""
    status = reply[2]
    if status == OK and op in _GRANTING:
        ids = reply[3] if len(reply) == 4 else None
        if type(ids) is bytes and ids and not len(ids) % 4:
            granted = _are_slots(ids, slots)
        else:
            granted = type(ids) is int and 0 < ids <= slots
        if not granted:
            raise ProtocolError(f"the allocator granted something else than slots from 1 to {slots}")
    elif status > protocol.NONE and not protocol.is_refusal(reply[2:]):
        raise protocol.error_from(reply[2:])


def _are_slots(ids: bytes, slots: int) -> bool:
    """Whether these little-endian int32 are all from 1 to ``slots``."""
    if len(ids) <= 4 * _LOOKED_AT_ONE_BY_ONE:
        listed = memoryview(ids).cast("i").tolist()  # little-endian, as every machine that this runs on
        return min(listed) > 0 and max(listed) <= slots
    # As unsigned, and one less: 0 and what is negative become larger than all others.
    return bool((np.frombuffer(ids, np.uint32) - _ONE).max() < slots)


def session_of(reply: list[Any]) -> dict[str, Any]:
    """What HELLO was answered with: the session, its pool, and where both are found."""
    session = reply[3] if len(reply) == 4 else None
    if not isinstance(session, dict):
        raise ProtocolError("the allocator answered HELLO with something else than a session")
    for key in _NUMBERS:
        if not _is_number(session.get(key)):
            raise ProtocolError(f"the allocator answered HELLO without a number in {key}")
    table, uuid, shards = session.get("table"), session.get("uuid"), session.get("shards")
    if type(table) is not str or "/" in table or "\0" in table:
        raise ProtocolError("the allocator answered HELLO without the name of a slot table")
    if type(uuid) is not bytes or len(uuid) != 16:
        raise ProtocolError("the allocator answered HELLO without the pool's uuid")
    if not isinstance(shards, list) or not all(map(_is_shard, shards)):
        raise ProtocolError("the allocator answered HELLO without a list of shards")
    # In a group they are told to rank 0, or to nobody: the others find them in the slot table.
    if session["guarantee"] and session.get("group") is None and type(session.get("granted")) not in (int, bytes):
        raise ProtocolError("the allocator answered HELLO without the slots of the guarantee")
    return session


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value < MAX_NUMBER


def _is_shard(value: object) -> bool:
    """``[file name of the keeper's socket, uuid of its memory]``."""
    if not isinstance(value, list) or len(value) != 2:
        return False
    name, uuid = value
    return type(name) is str and "/" not in name and "\0" not in name and type(uuid) is bytes
