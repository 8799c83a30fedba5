"""Which pools there are and who is attached to them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from mambapool.pool import protocol
from mambapool.pool.errors import AllocatorUnavailable, ProtocolError, UnknownPool
from mambapool.service.attach import AttachRequest
from mambapool.service.pools import Pool
from mambapool.service.sessions import Session

_log = logging.getLogger("mambapool.allocator")


class Registry:
    """The pools and sessions of one allocator. Session numbers are never used twice."""

    def __init__(self, pools: Iterable[Pool], make_pool: Callable[[str, int], Pool]) -> None:
        """``make_pool(name, slots)`` makes the allocator-only pools that clients ask for."""
        self.pools = {pool.name: pool for pool in pools}
        self.sessions: dict[int, Session] = {}
        #: When the daemon ends, it takes nobody new.
        self.ending = False
        #: No message that this allocator has a use for is longer.
        self.max_body_bytes = protocol.MAX_OVERHEAD_BYTES
        self._make_pool = make_pool
        self._by_lease: dict[bytes, Session] = {}
        self._next_number = 1
        self._set_limit()

    def attach(self, request: AttachRequest, identity: bytes) -> Session:
        """The session of that lease, made if there is none; ``identity`` speaks for it from now on."""
        session = self._by_lease.get(request.lease)
        if session is None:
            if request.resume is not None:
                raise AllocatorUnavailable(
                    f"session {request.resume} is not known here: the allocator was restarted; connect again"
                )
            session = self._new_session(request, identity)
        elif session.pool.name != request.pool:
            raise ProtocolError(f"this lease is attached to pool {session.pool.name!r}")
        session.identity = identity
        return session

    def detach(self, session: Session) -> None:
        """End a session; what it held is free. A pool that a client made goes with its last session."""
        pool = session.pool
        freed = len(pool.detach(session))
        del self.sessions[session.number]
        del self._by_lease[session.lease]
        _log.info("session %d (%s, pid %d) left: %d slots", session.number, session.name, session.pid, freed)
        if pool.ends_with_last_session and not pool.sessions:
            del self.pools[pool.name]
            pool.table.remove()
            self._set_limit()
            _log.info("pool %s ended with its last session", pool.name)

    def describe(self, session: Session) -> dict[str, Any]:
        """What HELLO tells a client of its session and pool."""
        pool = session.pool
        return {
            "session": session.number,
            "row": session.row,
            "applied": session.applied,
            "slots": pool.slots,
            "uuid": pool.uuid,
            "geometry": pool.geometry.to_wire() if pool.geometry else None,
            "table": pool.table.path.name,
            "shards": [[shard.socket_name, shard.uuid] for shard in pool.shards],
        }

    def check(self) -> None:
        """Every pool's invariants. O(slots)."""
        for pool in self.pools.values():
            pool.check()

    def _new_session(self, request: AttachRequest, identity: bytes) -> Session:
        if self.ending:
            raise AllocatorUnavailable("the allocator is ending and takes no new sessions")
        pool = self._pool_for(request)
        session = Session(
            number=self._next_number,
            row=pool.rows.take(),
            lease=request.lease,
            name=request.name,
            pid=request.pid,
            rank=request.rank,
            identity=identity,
            pool=pool,
        )
        self._next_number += 1
        pool.attach(session)
        self.sessions[session.number] = session
        self._by_lease[session.lease] = session
        _log.info("session %d (%s, pid %d) in pool %s", session.number, session.name, session.pid, pool.name)
        return session

    def _pool_for(self, request: AttachRequest) -> Pool:
        pool = self.pools.get(request.pool)
        if pool is not None:
            request.compare(pool.slots, pool.geometry, len(pool.shards))
            return pool
        if request.create_slots is None:
            served = ", ".join(sorted(self.pools)) or "none; a client can make one with create_slots=N"
            raise UnknownPool(f"there is no pool {request.pool!r}; pools here: {served}")
        request.compare(request.create_slots, None, 0)
        pool = self._make_pool(request.pool, request.create_slots)
        self.pools[pool.name] = pool
        self._set_limit()
        _log.info("pool %s of %d slots made for %s", pool.name, pool.slots, request.name)
        return pool

    def _set_limit(self) -> None:
        self.max_body_bytes = protocol.max_body_bytes(max((p.slots for p in self.pools.values()), default=0))
