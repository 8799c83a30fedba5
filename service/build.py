"""What an allocator starts with: its pools, and where the keepers have their memory."""

from __future__ import annotations

import hashlib
import os
import re

from mambapool.pool.descriptor import ShardDescriptor
from mambapool.pool.errors import GeometryMismatch, PoolLost
from mambapool.pool.handover import receive_block
from mambapool.pool.layout import Geometry
from mambapool.pool.runtime_dir import RuntimeDir
from mambapool.pool.slot_table import TableLayout
from mambapool.service.config import AllocatorConfig, PoolConfig
from mambapool.service.faults import pool_class
from mambapool.service.pools import Pool, Shard
from mambapool.service.registry import Registry
from mambapool.service.table_writer import SlotTableWriter

#: A keeper answers a connection at once; it does nothing else.
KEEPER_TIMEOUT_S = 2.0

_KEEPER_SOCKET = re.compile(r"keeper-(?P<pool>[a-z0-9_-]{1,32})-(?P<rank>[0-9]+)\.sock")


def build_registry(config: AllocatorConfig, directory: RuntimeDir, epoch: int) -> Registry:
    """The pools of ``config``, and of the keepers that live in the directory.

    Those of ``serve`` are all configured: what else keeps memory there belongs to an earlier one, and ends.
    """
    described = {pool.name: pool for pool in config.pools}
    if config.parent_pid is None:
        for kept in _kept_pools(directory):
            named = described.get(kept.name)
            if named is not None and named.slots != kept.slots:
                raise GeometryMismatch(
                    f"pool {kept.name}, slots: expected {named.slots}, its keepers have {kept.slots}"
                )
            described[kept.name] = kept
    pools = [_pool_with_shards(pool, directory, config, epoch) for pool in described.values()]

    def make_pool(name: str, slots: int) -> Pool:
        return _new_pool(
            PoolConfig(name, slots), (), os.urandom(16), directory, config, epoch, ends_with_last_session=True
        )

    return Registry(pools, make_pool)


def _kept_pools(directory: RuntimeDir) -> list[PoolConfig]:
    """The pools that have a living keeper here, as one of their keepers describes them."""
    kept: dict[str, PoolConfig] = {}
    for path in sorted(directory.path.glob("keeper-*.sock")):
        match = _KEEPER_SOCKET.fullmatch(path.name)
        if match is None or match["pool"] in kept:
            continue
        try:
            shard = _describe(directory, match["pool"], int(match["rank"]))
        except PoolLost as error:
            if isinstance(error.__cause__, ConnectionRefusedError | FileNotFoundError):
                continue  # the keeper was killed, or has ended just now
            raise
        kept[match["pool"]] = PoolConfig(match["pool"], shard.slots, shard.geometry, shard.tp_size)
    return list(kept.values())


def _pool_with_shards(pool: PoolConfig, directory: RuntimeDir, config: AllocatorConfig, epoch: int) -> Pool:
    shards = []
    for rank in range(pool.shards):
        descriptor = _describe(directory, pool.name, rank)
        _compare(pool, descriptor)
        shards.append(Shard(directory.keeper_socket(pool.name, rank).name, descriptor.uuid))
    # One name for all shards of this moment: a table of other shards' slots is not this pool's.
    uuid = hashlib.blake2b(b"".join(shard.uuid for shard in shards), digest_size=16).digest()
    return _new_pool(
        pool,
        tuple(shards),
        uuid if shards else os.urandom(16),
        directory,
        config,
        epoch,
        ends_with_last_session=False,
    )


def _new_pool(
    pool: PoolConfig,
    shards: tuple[Shard, ...],
    uuid: bytes,
    directory: RuntimeDir,
    config: AllocatorConfig,
    epoch: int,
    *,
    ends_with_last_session: bool,
) -> Pool:
    digest = pool.geometry.digest if pool.geometry else bytes(16)
    layout = TableLayout(pool.slots, config.max_sessions)
    table = SlotTableWriter(directory.slot_table(pool.name), layout, uuid=uuid, digest=digest, epoch=epoch)
    make = pool_class()
    return make(pool.name, table, uuid, pool.geometry, shards, ends_with_last_session=ends_with_last_session)


def _describe(directory: RuntimeDir, pool: str, rank: int) -> ShardDescriptor:
    descriptor, fd = receive_block(directory.keeper_socket(pool, rank), KEEPER_TIMEOUT_S)
    os.close(fd)  # the allocator never maps a state
    return descriptor


def _text(geometry: Geometry | None) -> str:
    return " ".join(map(str, geometry.tensors)) if geometry else "none"


def _compare(pool: PoolConfig, descriptor: ShardDescriptor) -> None:
    """All shards of a pool, and its configuration, must agree field by field."""
    for field, ours, kept in (
        ("slots", pool.slots, descriptor.slots),
        ("geometry", _text(pool.geometry), _text(descriptor.geometry)),
        ("tp_size", pool.tp_size, descriptor.tp_size),
    ):
        if ours != kept:
            raise GeometryMismatch(
                f"pool {pool.name}, rank {descriptor.rank}, {field}: expected {ours}, the keeper has {kept}"
            )
