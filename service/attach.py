"""HELLO: what a client asks for, checked field by field before anything is made for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mambapool.pool import protocol
from mambapool.pool.errors import AllocatorUnavailable, GeometryMismatch, ProtocolError, VersionMismatch
from mambapool.pool.group_page import GROUP_NAME, MAX_WORLD_SIZE
from mambapool.pool.layout import MAX_SLOTS, Geometry
from mambapool.pool.protocol import MAX_CREATED_SLOTS, MAX_NAME_BYTES, MAX_RANK
from mambapool.pool.runtime_dir import POOL_NAME

LEASE_BYTES = 16

_EXPECT_SHAPE = "HELLO: expect must be a list of [name, dtype, [layers, size, …]]"

#: Says who sent a message: "localhost:uid:gid:pid" on ipc (zmq_msg_gets(3), "Peer-Address", of a peer
#: whose credentials the kernel gave); asked for only where it matters.
PeerAddress = Callable[[], str | None]


def check_peer(peer: PeerAddress) -> None:
    """Only the daemon's own uid, or root, may attach or ask: the sockets' mode says so too."""
    address = peer()
    try:
        uid = int((address or "").split(":")[1])
    except (IndexError, ValueError):
        raise AllocatorUnavailable(f"no uid came with this connection ({address!r})") from None
    if uid not in (os.geteuid(), 0):
        raise AllocatorUnavailable(f"this daemon serves uid {os.geteuid()}, not uid {uid}")


@dataclass(frozen=True, slots=True)
class AttachRequest:
    """The map of a HELLO."""

    version: int
    lease: bytes
    pool: str
    name: str
    pid: int
    rank: int
    resume: int | None  # the session that a client has lost the connection of
    create_slots: int | None
    slots: int | None
    guarantee: int
    limit: int | None
    group: str | None
    world_size: int
    expect: tuple[tuple[str, str, tuple[int, ...]], ...]

    @classmethod
    def from_wire(cls, value: object) -> AttachRequest:
        """Raises :class:`ProtocolError` or :class:`VersionMismatch` that names the field."""
        if not isinstance(value, dict):
            raise ProtocolError(f"HELLO takes a map, not {type(value).__name__}")
        version = _agree_on_version(value.get("versions"))
        lease = value.get("lease")
        if type(lease) is not bytes or len(lease) != LEASE_BYTES:
            raise ProtocolError(f"HELLO: lease must be {LEASE_BYTES} random bytes")
        pool, name = _text(value, "pool"), _text(value, "name")
        if not POOL_NAME.fullmatch(pool):
            raise ProtocolError(f"HELLO: pool name {pool!r}: use 1 to 32 of a-z 0-9 _ -")
        rank = _number(value, "rank", 0, MAX_RANK)
        group, world_size = _group(value, rank)
        return cls(
            version=version,
            lease=lease,
            pool=pool,
            name=name,
            pid=_number(value, "pid", 0, 2**32),
            rank=rank,
            resume=_optional_number(value, "resume", 1, 2**63 - 1),
            create_slots=_optional_number(value, "create_slots", 1, MAX_CREATED_SLOTS),
            slots=_optional_number(value, "slots", 0, MAX_SLOTS),
            guarantee=_number(value, "guarantee", 0, MAX_SLOTS),
            limit=_optional_number(value, "limit", 1, MAX_SLOTS),
            group=group,
            world_size=world_size,
            expect=_expectations(value.get("expect")),
        )

    def compare(self, slots: int, geometry: Geometry | None, shards: int) -> None:
        """Raise :class:`GeometryMismatch` that names the first field that differs, with both values."""
        for field, expected in (("create_slots", self.create_slots), ("slots", self.slots)):
            if expected is not None and expected != slots:
                raise GeometryMismatch(f"{field}: expected {expected}, pool {self.pool!r} has {slots} slots")
        if shards and self.rank >= shards:
            raise GeometryMismatch(
                f"rank: expected {self.rank}, pool {self.pool!r} has shards for ranks 0 to {shards - 1}"
            )
        if self.group is not None and shards and self.world_size != shards:
            raise GeometryMismatch(
                f"world_size: group {self.group} has {self.world_size} ranks, pool {self.pool!r} has {shards} shards"
            )
        if self.limit is not None and self.limit < self.guarantee:
            raise ProtocolError(f"HELLO: limit {self.limit} is below the guarantee of {self.guarantee}")
        specs = {spec.name: spec for spec in geometry.tensors} if geometry else {}
        for name, dtype, shape in self.expect:
            spec = specs.get(name)
            if spec is None:
                has = ", ".join(specs) or "no tensors: it is allocator-only"
                raise GeometryMismatch(
                    f"tensor {name}: expected {dtype} {list(shape)}, pool {self.pool!r} has {has}"
                )
            if dtype != spec.dtype:
                raise GeometryMismatch(f"tensor {name}, dtype: expected {dtype}, the pool has {spec.dtype}")
            if shape != (spec.layers, *spec.shape):
                raise GeometryMismatch(
                    f"tensor {name}, shape: expected {list(shape)}, the pool has "
                    f"{[spec.layers, *spec.shape]} (layers first, without the slot dimension)"
                )


def _agree_on_version(value: object) -> int:
    """The highest version that both sides have."""
    if not isinstance(value, list) or len(value) != 2 or not all(type(v) is int for v in value):
        raise ProtocolError("HELLO: versions must be [oldest, newest]")
    oldest, newest = value
    version: int = min(newest, protocol.NEWEST_VERSION)
    if version < max(oldest, protocol.OLDEST_VERSION):
        raise VersionMismatch(
            f"version: the client speaks {oldest} to {newest}, the allocator {protocol.OLDEST_VERSION} to "
            f"{protocol.NEWEST_VERSION}: install the same mambapool on both sides"
        )
    return version


def _group(value: dict[Any, Any], rank: int) -> tuple[str | None, int]:
    """Its name and world size; None and 1 for a session of its own."""
    if value.get("group") is None:
        return None, 1
    name = _text(value, "group")
    if not GROUP_NAME.fullmatch(name):
        raise ProtocolError(f"HELLO: group name {name!r}: use 1 to 48 of A-Z a-z 0-9 . _ -")
    world_size = _number(value, "world_size", 1, MAX_WORLD_SIZE)
    if rank >= world_size:
        raise ProtocolError(f"HELLO: rank {rank} is out of range: group {name} has ranks 0 to {world_size - 1}")
    return name, world_size


def _text(value: dict[Any, Any], key: str) -> str:
    text = value.get(key)
    if type(text) is not str or not text or len(text.encode()) > MAX_NAME_BYTES or not text.isprintable():
        raise ProtocolError(f"HELLO: {key} must be 1 to {MAX_NAME_BYTES} bytes of printable text")
    return text


def _number(value: dict[Any, Any], key: str, low: int, high: int) -> int:
    number = value.get(key)
    if type(number) is not int or not low <= number <= high:
        shown = number if type(number) is int else type(number).__name__
        raise ProtocolError(f"HELLO: {key} must be a whole number from {low} to {high}, not {shown}")
    return number


def _optional_number(value: dict[Any, Any], key: str, low: int, high: int) -> int | None:
    return None if value.get(key) is None else _number(value, key, low, high)


def _expectations(value: object) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """``[[name, dtype, [layers, …]], …]``."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise ProtocolError(_EXPECT_SHAPE)
    found = []
    for entry in value:
        if not isinstance(entry, list) or len(entry) != 3:
            raise ProtocolError(_EXPECT_SHAPE)
        name, dtype, shape = entry
        if type(name) is not str or type(dtype) is not str or type(shape) is not list:
            raise ProtocolError(_EXPECT_SHAPE)
        if not all(type(size) is int for size in shape):
            raise ProtocolError(_EXPECT_SHAPE)
        found.append((name, dtype, tuple(shape)))
    return tuple(found)
