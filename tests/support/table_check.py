"""The invariants as the slot table and ``status`` tell them, looked at from outside the allocator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mambapool.pool import slot_table as st


def check_table(path: Path, pool: dict[str, Any]) -> None:
    """Raise unless every slot is free once or held by exactly one living session, and all counts agree."""
    table = st.SlotTableReader(path)
    layout = table.layout
    words = table.words
    owners, _, generations, orders, offered = (
        words[layout.field(field) :][: layout.slots + 1].copy() for field in range(st.ROW_FIELDS)
    )
    assert layout.slots == pool["slots"]
    assert table.items[st.H_SEQ] == table.items[st.H_DONE], "in the middle of a change"
    assert owners[0] == generations[0] == 0, "the reserved row was handed out"
    free = np.flatnonzero(owners[1:] == 0) + 1
    assert len(free) == table.free_count == pool["free"]
    assert len(np.unique(orders[free])) == len(free), "two free slots have one place in the list"
    assert not offered.any()
    held = owners[owners != 0]
    assert ((held & np.uint64(0xFF)) == st.HELD).all()
    by_session = dict(zip(*(a.tolist() for a in np.unique(held >> np.uint64(8), return_counts=True)), strict=True))
    expected = {h["session"]: h["held"] + h["windows"] for h in pool["holders"] if h["held"] + h["windows"]}
    assert by_session == expected
    assert ((generations[1:] > 0) | (owners[1:] == 0)).all(), "a slot is held that was never handed out"
