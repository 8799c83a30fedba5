"""What an allocator starts with: its pools, and where the keepers have their memory."""

from __future__ import annotations

import logging
import os
import time

from mambapool.pool.descriptor import ShardDescriptor
from mambapool.pool.digest import digest16
from mambapool.pool.errors import GeometryMismatch, MambaPoolError
from mambapool.pool.layout import Geometry
from mambapool.pool.runtime_dir import POOL_NAME, RuntimeDir
from mambapool.pool.slot_table import TableLayout
from mambapool.service.config import AllocatorConfig, PoolConfig
from mambapool.service.faults import pool_class
from mambapool.service.groups import remove_pages
from mambapool.service.keepers import describe_shard, kept_pools
from mambapool.service.leases import WatchedLock
from mambapool.service.pools import Pool, Shard
from mambapool.service.recovery import forget_left_over, recover_table, restore
from mambapool.service.registry import Registry
from mambapool.service.table_writer import SlotTableWriter
from mambapool.service.watcher import Watcher

_log = logging.getLogger("mambapool.allocator")


def build_registry(config: AllocatorConfig, directory: RuntimeDir, watcher: Watcher) -> tuple[Registry, int]:
    """The pools of ``config``, and of the keepers that live in the directory; and this allocator's epoch.

    A slot table that is there is taken over. Those of ``serve`` are all configured: what else keeps memory
    there belongs to an earlier one, and ends.
    """
    return _Builder(config, directory, watcher).build()


class _Builder:
    """The steps of :func:`build_registry`, in order."""

    def __init__(self, config: AllocatorConfig, directory: RuntimeDir, watcher: Watcher) -> None:
        self._config = config
        self._directory = directory
        self._watcher = watcher
        self._epoch = 0

    def build(self) -> tuple[Registry, int]:
        described = self._described()
        kept = [(pool, *self._shards(pool)) for pool in described.values()]
        tables = {pool.name: self._recovered(pool, uuid) for pool, _, uuid in kept}
        created = self._created_by_clients(set(described))
        before = [table.epoch for table in (*tables.values(), *created) if table is not None]
        # Random at first, so that no message of an earlier allocator's client can carry it by chance.
        self._epoch = max(before) + 1 if before else int.from_bytes(os.urandom(6), "little") or 1
        pools = [self._pool(pool, shards, uuid, tables[pool.name]) for pool, shards, uuid in kept]
        pools += [self._restored(table.path.stem, table) for table in created]
        registry = Registry(pools, self.make_pool, self._watcher, quarantine_s=self._config.quarantine_s)
        return registry, self._epoch

    def make_pool(self, name: str, slots: int) -> Pool:
        """The allocator-only pool that a client asks for; it ends with its last session."""
        return self._new_pool(PoolConfig(name, slots), (), os.urandom(16), created_by_client=True)

    def _described(self) -> dict[str, PoolConfig]:
        described = {pool.name: pool for pool in self._config.pools}
        if self._config.parent_pid is not None:
            return described
        for kept in kept_pools(self._directory):
            named = described.get(kept.name)
            if named is not None and named.slots != kept.slots:
                raise GeometryMismatch(
                    f"pool {kept.name}, slots: expected {named.slots}, its keepers have {kept.slots}"
                )
            described[kept.name] = kept
        return described

    def _shards(self, pool: PoolConfig) -> tuple[tuple[Shard, ...], bytes | None]:
        """A pool's shards, whose keepers are looked after, and the name of this very memory."""
        shards = []
        for rank in range(pool.shards):
            descriptor = describe_shard(self._directory, pool.name, rank)
            _compare(pool, descriptor)
            lock = WatchedLock(keeper_lock_name(pool.name, rank), self._directory.keeper_lock(pool.name, rank))
            self._watcher.watch_process(lock, descriptor.pid)
            socket_name = self._directory.keeper_socket(pool.name, rank).name
            shards.append(Shard(socket_name, descriptor.uuid, descriptor.backend))
        if not shards:
            return (), None
        # One name for all shards of this moment: a table of other shards' slots is not this pool's.
        return tuple(shards), digest16(b"".join(s.uuid for s in shards))

    def _recovered(self, pool: PoolConfig, uuid: bytes | None) -> SlotTableWriter | None:
        path = self._directory.slot_table(pool.name)
        if not os.path.lexists(path):
            return None
        if self._config.fresh and uuid is not None:
            # The keepers were started just now: whatever was held is gone with the memory before.
            return None
        if uuid is not None and forget_left_over(self._directory, pool.name, uuid):
            return None
        return recover_table(path, pool.slots, _digest(pool), uuid)

    def _created_by_clients(self, described: set[str]) -> list[SlotTableWriter]:
        """Tables of allocator-only pools that clients made and still use."""
        found = []
        for path in sorted(self._directory.path.glob("*.table")):
            if path.stem in described or not POOL_NAME.fullmatch(path.stem):
                continue
            try:
                table = SlotTableWriter.recover(path)
            except MambaPoolError as error:
                _log.warning("left alone: %s", error)
                continue
            if table.created_by_client:
                found.append(table)
        return found

    def _pool(
        self, pool: PoolConfig, shards: tuple[Shard, ...], uuid: bytes | None, table: SlotTableWriter | None
    ) -> Pool:
        if table is None:
            return self._new_pool(pool, shards, uuid or os.urandom(16), created_by_client=False)
        return self._restored(pool.name, table, pool.geometry, shards)

    def _new_pool(
        self, pool: PoolConfig, shards: tuple[Shard, ...], uuid: bytes, *, created_by_client: bool
    ) -> Pool:
        remove_pages(self._directory.slot_table(pool.name))
        table = SlotTableWriter.create(
            self._directory.slot_table(pool.name),
            TableLayout(pool.slots, self._config.max_sessions),
            uuid=uuid,
            digest=_digest(pool),
            epoch=self._epoch,
            created_by_client=created_by_client,
        )
        return self._make(pool.name, table, pool.geometry, shards)

    def _restored(
        self,
        name: str,
        table: SlotTableWriter,
        geometry: Geometry | None = None,
        shards: tuple[Shard, ...] = (),
    ) -> Pool:
        pool = self._make(name, table, geometry, shards)
        restore(pool, self._watcher, time.monotonic())
        # Last: a client that sees it finds everything there.
        table.epoch = self._epoch
        return pool

    def _make(
        self, name: str, table: SlotTableWriter, geometry: Geometry | None, shards: tuple[Shard, ...]
    ) -> Pool:
        return pool_class()(
            name,
            table,
            table.uuid,
            geometry,
            shards,
            ends_with_last_session=table.created_by_client,
            max_waiters=self._config.max_waiters,
        )


def keeper_lock_name(pool: str, rank: int) -> bytes:
    """What the watcher calls a keeper's lock; no lease has so long a name."""
    return f"keeper of pool {pool}, rank {rank}".encode()


def _digest(pool: PoolConfig) -> bytes:
    return pool.geometry.digest if pool.geometry else bytes(16)


def _text(geometry: Geometry | None) -> str:
    return " ".join(map(str, geometry.tensors)) if geometry else "none"


def _compare(pool: PoolConfig, descriptor: ShardDescriptor) -> None:
    """All shards of a pool, and its configuration, must agree field by field."""
    on = "cpu" if descriptor.cuda is None else "cuda"
    for field, ours, kept in (
        ("device", pool.device, on),
        ("slots", pool.slots, descriptor.slots),
        ("geometry", _text(pool.geometry), _text(descriptor.geometry)),
        ("tp_size", pool.tp_size, descriptor.tp_size),
    ):
        if ours != kept:
            raise GeometryMismatch(
                f"pool {pool.name}, rank {descriptor.rank}, {field}: expected {ours}, the keeper has {kept}"
            )
