"""Which pools there are and who is attached to them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from mambapool.pool import protocol
from mambapool.pool.errors import (
    AllocatorUnavailable,
    PoolLost,
    ProtocolError,
    RuntimeDirError,
    UnknownPool,
)
from mambapool.pool.group_page import DIED, EVICTED, LEFT
from mambapool.service.attach import AttachRequest
from mambapool.service.groups import Group, new_group, those_ranks
from mambapool.service.leases import Leases, Lock
from mambapool.service.ledger import Ids
from mambapool.service.pool_report import check_pool
from mambapool.service.pools import Pool
from mambapool.service.quarantine import is_over, needs_quarantine
from mambapool.service.ranges import ranges
from mambapool.service.sessions import Session

_log = logging.getLogger("mambapool.allocator")

#: A log line names so many slots at most.
_SLOTS_IN_LOG = 128


class Registry:
    """The pools and sessions of one allocator. Session numbers are never used twice."""

    def __init__(
        self,
        pools: Iterable[Pool],
        make_pool: Callable[[str, int], Pool],
        leases: Leases,
        *,
        quarantine_s: float = 1.0,
    ) -> None:
        """``make_pool(name, slots)`` makes the allocator-only pools that clients ask for."""
        self.pools = {pool.name: pool for pool in pools}
        self.sessions = {
            number: s for pool in self.pools.values() for number, s in pool.sessions.items() if not s.gone
        }
        #: When the daemon ends, it takes nobody new.
        self.ending = False
        #: No message that this allocator has a use for is longer.
        self.max_body_bytes = protocol.MAX_OVERHEAD_BYTES
        self._quarantine_s = quarantine_s
        #: Sessions of dead processes whose slots are kept back.
        self._quarantined = [session for session in self.sessions.values() if session.dead_since is not None]
        self._make_pool = make_pool
        self._leases = leases
        self._by_lease = {session.lease.name: session for session in self.sessions.values()}
        self._next_number = max((1, *(pool.table.next_session for pool in self.pools.values())))
        for pool in [p for p in self.pools.values() if p.ends_with_last_session and not p.sessions]:
            self._remove(pool)  # taken over, and the last of its clients died while no allocator ran
        self._set_limit()

    def attach(self, request: AttachRequest, identity: bytes) -> tuple[Session, bool]:
        """The session of that lease, and whether it was made now; ``identity`` speaks for it from now on."""
        session = self._by_lease.get(request.lease)
        if session is not None:
            if session.pool.name != request.pool:
                raise ProtocolError(f"this lease is attached to pool {session.pool.name!r}")
            if session.dead_since is not None:
                raise AllocatorUnavailable(
                    f"session {session.number} is dead, its lease was released: connect again, with another one"
                )
            session.identity = identity
            # A client says at which of its messages it is: what it has acknowledged is in its requests.
            return session, False
        if request.resume is not None:
            raise AllocatorUnavailable(
                f"session {request.resume} is not known here: the allocator was restarted, or the session "
                "was ended; connect again"
            )
        return self._new_session(request, identity), True

    def end(self, session: Session, how: str, *, dead: bool) -> Ids:
        """End a session; what it held is free, unless other ranks of its group live: then it is kept for them.

        A pool that a client made goes with its last session.
        """
        pool, group = session.pool, session.group
        self._forget(session, dead=dead)
        if group is not None and group.formed:
            group.lose(session, DIED if dead else LEFT)
            pool.stop_waiting(session)
            pool.commit()
            if group.living:
                kept = sum(member.held for member in group.members.values())
                _log.info(
                    "%s %s: rank %d of group %s, whose %d slots are kept until %s ended, too",
                    *(_named(session), how, session.rank, group.name, kept, those_ranks(group.living)),
                )
                return np.empty(0, np.int32)
            freed = self._end_group(group, pool)
            how = f"{how}, the last rank of group {group.name}"
        else:
            freed = pool.detach(session)
            if group is not None:
                group.drop(session)
                if not group.members:
                    self._remove_group(group, pool)
        _log.info("%s %s: %s", _named(session), how, _slots(freed))
        self._end_if_last(pool)
        return freed

    def find(self, number: int) -> Session | None:
        """A session by its number, one whose process is gone and whose group lives, too."""
        known = (pool.sessions.get(number) for pool in self.pools.values())
        return next((session for session in known if session is not None), None)

    def evict(self, session: Session) -> Ids:
        """The operator ends a session, or all those of its group."""
        group, pool = session.group, session.pool
        if group is None or not group.formed:
            return self.end(session, "was evicted", dead=not session.lease.is_held())
        for member in group.living:
            self._forget(member, dead=not member.lease.is_held())
            group.lose(member, EVICTED)
        freed = self._end_group(group, pool)
        _log.info("group %s (%s) was evicted: %s", group.name, _named(session), _slots(freed))
        self._end_if_last(pool)
        return freed

    def bury(self, lease_name: bytes, how: str, now: float = 0.0) -> Pool | None:
        """A lease was seen released; its session's pool, if that is so and there was one."""
        session = self._by_lease.get(lease_name)
        # The hint may be late or wrong: the lock is the proof.
        if session is None or session.dead_since is not None or session.lease.is_held():
            return None
        if needs_quarantine(session):
            session.pool.quarantine(session, now)
            self._quarantined.append(session)
            _log.info("%s is dead (%s): its %d slots are quarantined", _named(session), how, session.held)
        else:
            self.end(session, f"is dead ({how})", dead=True)
        return session.pool

    def release_quarantined(self, now: float) -> set[Pool]:
        """Free what was kept back long enough; the pools that it is of."""
        pools = set()
        for session in list(self._quarantined):
            if is_over(session, self._leases.has_ended(session.lease.name), self._quarantine_s, now):
                self.end(session, "was quarantined", dead=True)
                pools.add(session.pool)
        return pools

    def lose(self, pool_name: str, reason: str) -> None:
        """A keeper of that pool died."""
        pool = self.pools.get(pool_name)
        if pool is not None and pool.lost is None:
            _log.error("pool %s is lost: %s", pool_name, reason)
            pool.lose(reason)

    def describe(self, session: Session) -> dict[str, Any]:
        """What HELLO tells a client of its session and pool."""
        pool = session.pool
        described = {
            "session": session.number,
            "row": session.row,
            "applied": session.applied,
            "slots": pool.slots,
            "limit": session.limit,
            "guarantee": session.group.guarantee if session.group else session.guarantee,
            "uuid": pool.uuid,
            "geometry": pool.geometry.to_wire() if pool.geometry else None,
            "table": pool.table.path.name,
            "shards": [[shard.socket_name, shard.uuid] for shard in pool.shards],
        }
        if session.group is not None:
            described["group"] = session.group.page.path.name
        return described

    def pool_named(self, name: str) -> Pool:
        """Raises :class:`UnknownPool`, which lists those that there are."""
        if name not in self.pools:
            served = ", ".join(sorted(self.pools)) or "none; a client can make one with create_slots=N"
            raise UnknownPool(f"there is no pool {name!r}; pools here: {served}")
        return self.pools[name]

    def check(self) -> None:
        """Every pool's invariants. O(slots)."""
        for pool in self.pools.values():
            check_pool(pool)

    def _new_session(self, request: AttachRequest, identity: bytes) -> Session:
        if self.ending:
            raise AllocatorUnavailable("the allocator is ending and takes no new sessions")
        # Before anything is made for it: who shows no lease that it holds gets nothing.
        lease = self._leases.open(request.lease)
        try:
            pool = self._pool_for(request)
            try:
                return self._attach(pool, request, identity, lease)
            except BaseException:
                self._end_if_last(pool)  # made for this session, which does not come
                raise
        except BaseException:
            self._leases.forget(lease, dead=False)
            raise

    def _attach(self, pool: Pool, request: AttachRequest, identity: bytes, lease: Lock) -> Session:
        if pool.lost is not None:
            raise PoolLost(f"pool {pool.name} is lost: {pool.lost}")
        number = self._next_number
        limit = min(request.limit or pool.slots, pool.slots)
        group = None if request.group is None else pool.groups.get(request.group)
        if group is not None:
            group.check_join(request, limit)
        # Rank 0's session holds the slots of its group, and their guarantee.
        guarantee = request.guarantee if request.group is None or not request.rank else 0
        pool.check_guarantee(guarantee)
        session = Session(
            number=number,
            row=pool.rows.take(),
            lease=lease,
            name=request.name,
            pid=request.pid,
            rank=request.rank,
            identity=identity,
            pool=pool,
            guarantee=guarantee,
            limit=limit,
        )
        if request.group is not None:
            try:
                session.group = group or new_group(request, number, limit, pool)
            except RuntimeDirError:
                pool.rows.give_back(session.row)
                raise
        self._next_number += 1
        pool.attach(session)
        if session.group is not None:
            pool.groups[session.group.name] = session.group
            session.group.add(session)
        self.sessions[session.number] = session
        self._by_lease[lease.name] = session
        _log.info("session %d (%s, pid %d) in pool %s", session.number, session.name, session.pid, pool.name)
        return session

    def _pool_for(self, request: AttachRequest) -> Pool:
        pool = self.pools.get(request.pool)
        if pool is not None:
            request.compare(pool.slots, pool.geometry, len(pool.shards))
            return pool
        if request.create_slots is None:
            return self.pool_named(request.pool)
        request.compare(request.create_slots, None, 0)
        pool = self._make_pool(request.pool, request.create_slots)
        self.pools[pool.name] = pool
        self._set_limit()
        _log.info("pool %s of %d slots made for %s", pool.name, pool.slots, request.name)
        return pool

    def _forget(self, session: Session, *, dead: bool) -> None:
        """Its process has nothing to say any more."""
        if session.dead_since is not None:
            self._quarantined.remove(session)
        del self.sessions[session.number]
        del self._by_lease[session.lease.name]
        self._leases.forget(session.lease, dead=dead)

    def _end_group(self, group: Group, pool: Pool) -> Ids:
        freed = pool.detach_all(list(group.members.values()))
        self._remove_group(group, pool)
        return freed

    def _remove_group(self, group: Group, pool: Pool) -> None:
        del pool.groups[group.name]
        group.page.remove()

    def _end_if_last(self, pool: Pool) -> None:
        if pool.ends_with_last_session and not pool.sessions:
            self._remove(pool)
            self._set_limit()

    def _remove(self, pool: Pool) -> None:
        del self.pools[pool.name]
        pool.table.remove()
        _log.info("pool %s ended with its last session", pool.name)

    def _set_limit(self) -> None:
        self.max_body_bytes = protocol.max_body_bytes(max((p.slots for p in self.pools.values()), default=0))


def _named(session: Session) -> str:
    return f"session {session.number} ({session.name}, pid {session.pid})"


def _slots(ids: Ids) -> str:
    """``3 slots freed: 1-2, 7``."""
    if not len(ids):
        return "it held no slots"
    listed = ranges(ids[:_SLOTS_IN_LOG].tolist())
    more = f" and {len(ids) - _SLOTS_IN_LOG} more" if len(ids) > _SLOTS_IN_LOG else ""
    return f"{len(ids)} slots freed: {listed}{more}"
