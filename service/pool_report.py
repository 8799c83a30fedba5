"""What a pool says of itself: its part of ``status``, and whether all of it tells the same."""

from __future__ import annotations

from typing import Any

import numpy as np

from mambapool.pool import slot_table as st
from mambapool.service.pools import Pool


def check_pool(pool: Pool) -> None:
    """Look at every slot: list, table and sessions tell the same. O(N)."""
    pool.ledger.check()
    assert np.array_equal(pool.table.free_list(), pool.ledger.free_slots()), (
        f"pool {pool.name}: the slot table's free list is not the ledger's"
    )
    for session in pool.sessions.values():
        held = pool.ledger.held_by(session.number)
        assert len(held) == session.held, (
            f"pool {pool.name}: session {session.number} holds {len(held)} slots, counted {session.held}"
        )
        assert np.array_equal(held, pool.table.held_by(st.owner_word(session.number))), (
            f"pool {pool.name}: the slot table and the ledger differ on session {session.number}"
        )
    held_by_all = sum(session.held for session in pool.sessions.values())
    assert pool.ledger.free_count + held_by_all == pool.slots, (
        f"pool {pool.name}: {pool.ledger.free_count} free and {held_by_all} held of {pool.slots}"
    )
    offered = sorted(int(slot) for offer in pool.offers for slot in offer.ids)
    assert offered == np.flatnonzero(pool.table.offers).tolist(), (
        f"pool {pool.name}: the slot table and the offers differ"
    )


def pool_status(pool: Pool, now: float) -> dict[str, Any]:
    """The pool's part of ``status --json``; counts are of slots."""
    windows = pool.windows()
    holders = [
        {
            "session": session.number,
            "name": session.name,
            "pid": session.pid,
            "group": session.group.name if session.group else None,
            "rank": session.rank,
            "state": session.state(now),
            "held": session.held - session.offered - windows.get(session.number, 0) - session.quarantined,
            "windows": windows.get(session.number, 0),
            "offered": session.offered,
            "guarantee": session.guarantee,
            "limit": session.limit,
            **({"quarantined": session.quarantined} if session.dead_since is not None else {}),
        }
        for session in pool.sessions.values()
    ]
    return {
        "name": pool.name,
        "slots": pool.slots,
        "free": pool.ledger.free_count,
        "held": sum(holder["held"] for holder in holders),
        "windows": sum(windows.values()),
        "offered": sum(session.offered for session in pool.sessions.values()),
        "quarantined": sum(session.quarantined for session in pool.sessions.values()),
        "waiting": pool.waiting.slots,
        "lost": pool.lost,
        "bytes_per_slot": pool.geometry.bytes_per_slot if pool.geometry else 0,
        "backend": pool.backend,
        "shards": len(pool.shards),
        "holders": holders,
    }
