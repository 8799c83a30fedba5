"""The invariants as the slot table and ``status`` tell them, looked at from outside the allocator."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mambapool.pool import slot_table as st

#: What was posted just before a check is applied by then.
SETTLES_S = 5.0


def check_until_settled(check: Callable[[], None]) -> None:
    """Run a check of two views that are not of one moment: again while they differ, but not for long."""
    deadline = time.monotonic() + SETTLES_S
    while True:
        try:
            check()
            return
        except AssertionError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.02)


def check_table(path: Path, pool: dict[str, Any]) -> None:
    """Raise unless every slot is free once or held by exactly one living session, and all counts agree."""
    table = st.SlotTableReader(path)
    layout = table.layout
    words = table.words
    owners, _, generations, orders, offered = (
        words[layout.field(field) :][: layout.slots + 1].copy() for field in range(st.ROW_FIELDS)
    )
    offered &= np.uint64(st.RECEIVER_BITS)
    assert layout.slots == pool["slots"]
    assert table.items[st.H_SEQ] == table.items[st.H_DONE], "in the middle of a change"
    assert owners[0] == generations[0] == 0, "the reserved row was handed out"
    free = np.flatnonzero(owners[1:] == 0) + 1
    assert len(free) == table.free_count == pool["free"]
    assert len(np.unique(orders[free])) == len(free), "two free slots have one place in the list"
    assert ((owners[owners != 0] & np.uint64(0xFF)) == st.HELD).all()
    holders = owners >> np.uint64(8)
    parts = ("held", "windows", "offered", "quarantined")
    counts = {h["session"]: (sum(h.get(part, 0) for part in parts), h["offered"]) for h in pool["holders"]}
    assert _by_session(holders) == {session: held for session, (held, _) in counts.items() if held}
    assert _by_session(holders[offered != 0]) == {session: n for session, (_, n) in counts.items() if n}
    assert set(offered[offered != 0].tolist()) <= counts.keys(), "a slot is offered to nobody"
    assert not ((offered != 0) & (offered == holders)).any(), "a slot is offered to its holder"
    assert ((generations[1:] > 0) | (owners[1:] == 0)).all(), "a slot is held that was never handed out"


def _by_session(holders: st.Words) -> dict[int, int]:
    """How many rows each session has."""
    sessions, counts = np.unique(holders[holders != 0], return_counts=True)
    return dict(zip(sessions.tolist(), counts.tolist(), strict=True))
