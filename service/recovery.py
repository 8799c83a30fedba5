"""What an allocator takes over from the one before it: the slot table, and the sessions that still live.

``docs/recovery.md`` has the durable fields and the write order that this relies on.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from pathlib import Path

import numpy as np

from mambapool.pool.errors import GeometryMismatch, MambaPoolError, ProtocolError, RuntimeDirError
from mambapool.pool.runtime_dir import RuntimeDir
from mambapool.service.groups import remove_pages, restore_end, restore_member
from mambapool.service.leases import Leases, Lock, ReleasedLock, open_lease
from mambapool.service.ledger import Ids, Ledger
from mambapool.service.offers import Offer
from mambapool.service.pool_report import check_pool
from mambapool.service.pools import Pool
from mambapool.service.quarantine import needs_quarantine
from mambapool.service.sessions import GUARANTEE_REQUEST, Session, SessionRows
from mambapool.service.table_contents import SessionRow
from mambapool.service.table_writer import SlotTableWriter

_log = logging.getLogger("mambapool.allocator")


def recover_table(path: Path, slots: int, digest: bytes, uuid: bytes | None) -> SlotTableWriter:
    """The table of a pool of that description, with the change finished that a crash cut off.

    ``uuid`` is the memory's, None for an allocator-only pool. Any difference is refused with what to do.
    """
    try:
        table = SlotTableWriter.recover(path)
    except MambaPoolError as error:
        raise RuntimeDirError(f"cannot take over the slot table: {error}; remove it if nobody needs it") from error
    if table.layout.slots != slots:
        raise GeometryMismatch(
            f"the slot table {path} has {table.layout.slots} slots, the pool {slots}: start with --slots "
            f"{table.layout.slots}, or remove the table if nobody needs it"
        )
    if table.digest != digest:
        raise GeometryMismatch(f"the slot table {path} is of another geometry: remove it if nobody needs it")
    if uuid is not None and table.uuid != uuid:
        raise RuntimeDirError(
            f"the slot table {path} belongs to memory that is gone (its keepers were started anew), and sessions of "
            "it still live: end them first, or remove it"
        )
    return table


def forget_left_over(directory: RuntimeDir, pool: str, uuid: bytes) -> bool:
    """Whether the pool's slot table is of memory before that of ``uuid``, and none of its sessions lives.

    So it is after a stop and a start of everything, or a reboot, where the runtime directory lasts longer than
    its processes. Then it says nothing about anybody, and its sessions' lease files are removed.
    """
    try:
        table = SlotTableWriter.recover(directory.slot_table(pool))
    except MambaPoolError:
        return False  # refused with its reason, where it is taken over
    if table.uuid == uuid:
        return False
    leases = [row.lease for row in table.sessions()]
    if any(_is_held(directory, lease) for lease in leases):
        return False
    for lease in leases:
        directory.lease(lease).unlink(missing_ok=True)
    _log.info("pool %s starts anew: the memory of the slot table that was left here is gone", pool)
    return True


def _is_held(directory: RuntimeDir, lease: bytes) -> bool:
    try:
        open_lease(directory, lease).close()
    except ProtocolError:
        return False
    return True


def restore(pool: Pool, leases: Leases, now: float) -> None:
    """Fill a pool whose table was recovered: list, sessions and offers; the dead are buried at once."""
    table = pool.table
    pool.taken_over_at = now
    holders = (table.owners >> np.uint64(8)).astype(np.int32)
    pool.ledger = Ledger.restore(holders, table.orders, table.generations)
    rows = table.sessions()
    pool.rows = SessionRows(table.layout.max_sessions, [row.row for row in rows])
    dead = []
    for row in rows:
        session, lives = _session(pool, row, leases, now)
        session.held = int(np.count_nonzero(holders == row.number))
        pool.sessions[session.number] = session
        if row.group:
            restore_member(pool, row, session)
        if not lives:
            dead.append(session)
    _restore_answers(pool)
    _restore_offers(pool)
    table.set_waiting(0)
    quarantined = [session for session in dead if needs_quarantine(session)]
    for session in quarantined:
        # Since when it is dead, nobody knows.
        pool.quarantine(session, now)
        _log.info("session %d died while no allocator ran: its slots are quarantined", session.number)
    dead = [session for session in dead if session not in quarantined]
    for session in dead:
        leases.forget(session.lease, dead=True)
    _bury(pool, dead)
    remove_pages(table.path, [group.number for group in pool.groups.values()])
    check_pool(pool)
    held = sum(session.held for session in pool.sessions.values())
    _log.info("pool %s taken over: %d sessions hold %d slots", pool.name, len(pool.sessions), held)


def _bury(pool: Pool, dead: list[Session]) -> None:
    """End the dead; ranks of a group of which others live are kept, as gone."""
    for session in [session for session in dead if session.group is None]:
        freed = pool.detach(session)
        _log.info(
            "session %d (%s, pid %d) died while no allocator ran: %d slots freed",
            session.number,
            session.name,
            session.pid,
            len(freed),
        )
    for group in list(pool.groups.values()):
        ended = restore_end(group, dead)
        for session in group.members.values():
            if session.gone:
                pool.stop_waiting(session)
        pool.commit()
        if not ended:
            continue
        if not group.formed:
            for session in ended:
                group.drop(session)
        freed = pool.detach_all(ended)
        _log.info(
            "%d ranks of group %s died while no allocator ran: %d slots freed", len(ended), group.name, len(freed)
        )
        if (len(group.members) == len(ended) and group.formed) or not group.members:
            del pool.groups[group.name]


def _session(pool: Pool, row: SessionRow, leases: Leases, now: float) -> tuple[Session, bool]:
    lease: Lock
    try:
        lease, lives = leases.open(row.lease), True
    except ProtocolError:
        lease, lives = ReleasedLock(row.lease), False
    session = Session(
        number=row.number,
        row=row.row,
        lease=lease,
        name=row.name,
        pid=row.pid,
        rank=row.rank,
        pool=pool,
        limit=row.limit,
        # Of a group, rank 0 has it.
        guarantee=0 if row.group and row.rank else row.guarantee,
        heard=now,
        applied=row.applied,
        window=row.window,
    )
    return session, lives


def _restore_answers(pool: Pool) -> None:
    """Per session and request what is still held by it, in the order in which it was granted.

    A reply that did not arrive is among them whole: its client could not free what it does not know of.
    """
    table = pool.table
    held = np.flatnonzero(table.owners)
    held = held[np.argsort(table.orders[held], kind="stable")]
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for slot, owner, request in zip(held, table.owners[held], table.requests[held], strict=True):
        found[int(owner) >> 8, int(request)].append(int(slot))
    for (number, request), slots in found.items():
        session = pool.sessions[number]
        if not (session.guarantee and request == GUARANTEE_REQUEST):
            session.recovered[request] = np.array(slots, np.int32)


def _restore_offers(pool: Pool) -> None:
    """Those of a giver in the order in which it made them; whose came first is not known any more."""
    table = pool.table
    offered = np.flatnonzero(table.offers)
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for slot in offered[np.argsort(table.orders[offered], kind="stable")]:
        found[int(table.owners[slot]) >> 8, int(table.offers[slot])].append(int(slot))
    for (giver, word), slots in sorted(found.items()):
        ids: Ids = np.array(slots, np.int32)
        session = pool.sessions[giver]
        pool.ledger.offer(ids, giver)
        session.offered += len(ids)
        pool.offers.restore(Offer(session, ids, word))
