"""Messages that no client would send, made at random: the same ones for the same seed.

Random bytes are refused at the door. To get further in, most messages here are nearly right: recorded ones
(``messages.json``) or new ones, with the number, epoch and place of a session that exists, and then broken.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
from dispatching import golden

from mambapool.pool import protocol

#: What no field expects, or only just not.
STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(
        0.5,
        float("nan"),
        float("inf"),
        "",
        "x",
        "\0",
        "é" * 200,
        "x" * 20_000,
        b"",
        b"\0",
        b"\xff" * 5,
        bytes(400),
    ),
    *([], [[]], [1, 2, 3], [None] * 40, {}, {"a": {}}, {"a": [1]}, msgpack.Timestamp(1), msgpack.ExtType(5, b"x")),
)

_PARTS = ("session", "turns", "notices", "refusals", "status", "lost")
#: What ends a session is rare: nothing is deep without one.
_RARE = (protocol.HELLO, protocol.DETACH, protocol.EVICT, protocol.STATUS)
_OPS = tuple(op for op in protocol.OP_NAMES for _ in range(1 if op in _RARE else 8))

#: HELLO may make pools: not of gigabytes, here.
MOST_CREATED_SLOTS = 10_000


@dataclass
class Target:
    """A session to speak for. ``applied`` tells the number of its last posted message that was applied."""

    session: int
    epoch: int
    slots: int
    lease: bytes
    applied: Callable[[], int]
    #: Another session of the pool, to offer slots to.
    other: int = 0
    request_id: int = 1


class MessageFuzzer:
    """Makes bodies of messages."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        recorded = [exchange for part in _PARTS for exchange in golden(part)]
        self._bodies = [exchange.request for exchange in recorded]
        self._fields = [exchange.request_fields for exchange in recorded]

    def body(self, target: Target | None) -> bytes:
        """One message; of ``target``'s session, more or less, if there is one."""
        draw = self._chance.random()
        if draw < 0.1:
            return self._chance.randbytes(self._chance.randrange(300))
        if draw < 0.2:
            return self._scramble(self._chance.choice(self._bodies))
        fields = list(self._chance.choice(self._fields)) if draw < 0.45 else self._sensible(target)
        if target is not None:
            self._address(fields, target)
        for _ in range(self._chance.choice((0, 0, 0, 1, 1, 2))):
            self._break(fields)
        body: bytes = msgpack.packb(fields)
        return self._scramble(body) if self._chance.random() < 0.1 else body

    def _sensible(self, target: Target | None) -> list[Any]:
        """A message that could be a client's."""
        chance = self._chance
        op = chance.choice(_OPS)
        frees = chance.choice((None, None, self._ids(target)))
        other = target.other if target is not None and chance.random() < 0.7 else chance.randrange(8)
        tail: dict[int, list[Any]] = {
            protocol.HELLO: [self._hello(target)],
            protocol.ALLOC: [chance.randint(1, 6), frees, chance.random() < 0.2],
            protocol.BEGIN: [chance.randint(1, 6), frees, chance.random() < 0.5],
            protocol.FREE: [self._ids(target)],
            protocol.END: [chance.choice((None, self._ids(target)))],
            protocol.CLEAR: [None],
            protocol.CANCEL: [chance.randint(1, target.request_id if target is not None else 9)],
            protocol.OFFER: [self._ids(target), other],
            protocol.ACCEPT: [chance.random() < 0.3],
            protocol.EVICT: [other, chance.random() < 0.3],
        }
        return [op, 0, 0, 0, 0, 0, *tail.get(op, [])]

    def _ids(self, target: Target | None) -> Any:
        most = target.slots if target is not None else 16
        ids = [self._chance.randint(1, most) for _ in range(self._chance.choice((1, 1, 2, 3, 9)))]
        if self._chance.random() < 0.1:
            ids[0] = self._chance.choice((0, -1, most + 1, 2**31 - 1, -(2**31)))
        return protocol.pack_ids(np.array(ids, np.int32))

    def _hello(self, target: Target | None) -> dict[str, Any]:
        chance = self._chance
        lease = target.lease if target is not None and chance.random() < 0.8 else chance.randbytes(16)
        hello: dict[str, Any] = {"versions": [1, 1], "lease": lease, "pool": "default", "name": "fuzz", "pid": 1}
        hello |= {"rank": 0, "guarantee": chance.choice((0, 0, 3)), "limit": None, "slots": None, "expect": None}
        if chance.random() < 0.1:
            # With a guarantee of more than that, or somebody else's lease, it is refused: then there is no such pool.
            hello |= {"pool": f"made-{chance.randrange(4)}", "create_slots": chance.choice((4, 100))}
            hello["guarantee"] = chance.choice((0, 3, 101))
        return hello

    def _address(self, fields: list[Any], target: Target) -> None:
        """Make it a message of that session, of now, most of the time."""
        if len(fields) < 6:
            return
        chance = self._chance
        target.request_id += 1
        if fields[0] == protocol.HELLO and isinstance(fields[-1], dict) and chance.random() < 0.8:
            fields[-1] = {**fields[-1], "lease": target.lease}
        if fields[0] in (protocol.HELLO, protocol.STATUS, protocol.EVICT):
            return
        applied = target.applied()
        posted = fields[0] in protocol.POSTED_OPS or (len(fields) > 8 and fields[7] is not None)
        fields[1], fields[3] = target.session, target.epoch
        fields[2] = 0 if fields[0] in protocol.POSTED_OPS else target.request_id - chance.choice((0, 0, 0, 1, 2))
        fields[4] = applied + posted + chance.choice((0, 0, 0, 0, 0, 1, -1, 7))
        fields[5] = chance.choice((0, fields[2], max(target.request_id - 20, 0)))
        fields[4] = max(fields[4], 0)

    def _break(self, fields: list[Any]) -> None:
        """One field is another one, too many, or missing."""
        chance = self._chance
        place = chance.randrange(len(fields)) if fields else 0
        draw = chance.random()
        if draw < 0.15:
            fields.insert(place, chance.choice(STRANGE))
        elif draw < 0.3 and fields:
            del fields[place]
        elif fields and isinstance(fields[place], dict):
            inner = dict(fields[place])
            key = chance.choice([*inner, "x", 7])
            inner[key] = chance.choice(STRANGE)
            fields[place] = inner
        elif fields:
            fields[place] = chance.choice((chance.choice(STRANGE), chance.randrange(300)))

    def _scramble(self, body: bytes) -> bytes:
        """Bytes changed, cut off, put in, or another message's end."""
        chance = self._chance
        data = bytearray(body)
        for _ in range(chance.randint(1, 3)):
            place = chance.randrange(len(data) + 1)
            match chance.randrange(4):
                case 0 if place < len(data):
                    data[place] = chance.randrange(256)
                case 1:
                    del data[place:]
                case 2:
                    data[place:place] = chance.randbytes(chance.randint(1, 9))
                case _:
                    data[place:] = chance.choice(self._bodies)[chance.randrange(20) :]
        return bytes(data)


def is_allowed(body: bytes, protected: Sequence[int]) -> bool:
    """False for the few random messages that are right and would do what they say: to evict somebody whom the test
    needs, to make a pool of gigabytes."""
    try:
        fields = msgpack.unpackb(body, strict_map_key=False)
        if fields[0] == protocol.EVICT:
            return fields[6] not in protected
        if fields[0] == protocol.HELLO:
            created = fields[6].get("create_slots")
            return not isinstance(created, int) or created <= MOST_CREATED_SLOTS
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        pass
    return True


def check_reply(body: bytes) -> list[Any]:
    """A reply as ``docs/protocol.md`` says: ``[request id, epoch, status, …]``; its fields."""
    fields = protocol.unpack(body, len(body), protocol.MAX_STATUS_ITEMS)
    assert len(fields) >= 3, fields
    assert all(type(field) is int and 0 <= field < protocol.MAX_NUMBER for field in fields[:3]), fields
    return fields
