"""A pool as the allocator has it: the list, the table, the sessions. Each change is one commit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mambapool.pool import slot_table as st
from mambapool.pool.layout import Geometry
from mambapool.service.ledger import Ids, Ledger
from mambapool.service.sessions import Session, SessionRows
from mambapool.service.table_writer import SlotTableWriter


@dataclass(frozen=True, slots=True)
class Shard:
    """Where one rank's memory is had: the keeper's socket in the runtime directory, and its uuid."""

    socket_name: str
    uuid: bytes


class Pool:
    """The slots of one pool and everybody who may hold them.

    Every method that changes something leaves ledger, table and session telling the same; a refusal leaves
    them as they were, but for the number of the posted message that carried it.
    """

    def __init__(
        self,
        name: str,
        table: SlotTableWriter,
        uuid: bytes,
        geometry: Geometry | None,
        shards: tuple[Shard, ...],
        *,
        ends_with_last_session: bool,
    ) -> None:
        self.name = name
        self.slots = table.layout.slots
        self.ledger = Ledger(self.slots)
        self.table = table
        self.uuid = uuid
        self.geometry = geometry
        self.shards = shards
        self.ends_with_last_session = ends_with_last_session
        self.sessions: dict[int, Session] = {}
        self.rows = SessionRows(table.layout.max_sessions)

    def __repr__(self) -> str:
        return f"Pool({self.name!r}, {self.ledger!r}, sessions={len(self.sessions)})"

    def attach(self, session: Session) -> None:
        """Enter a new session, whose row was taken from :attr:`rows`."""
        table = self.table
        base = table.layout.session(session.row)
        for offset in range(st.SESSION_WORDS):
            table.word(base + offset, 0)
        lease = np.frombuffer(session.lease, np.uint64)
        table.word(base + st.S_LEASE, int(lease[0]))
        table.word(base + st.S_LEASE + 1, int(lease[1]))
        table.word(base + st.S_RANK, session.rank)
        table.word(base + st.S_NUMBER, session.number)
        table.commit(self.ledger.free_count)
        self.sessions[session.number] = session

    def detach(self, session: Session) -> Ids:
        """End a session: what it holds becomes free, in the same commit."""
        ids = self._release(session)
        self.table.word(self.table.layout.session(session.row) + st.S_NUMBER, 0)
        self.table.commit(self.ledger.free_count)
        del self.sessions[session.number]
        self.rows.give_back(session.row)
        return ids

    def clear(self, session: Session, number: int) -> None:
        """Apply posted message ``number``: free all that this session holds, its window included; staged."""
        self._release(session)
        self.close_window(session)
        self.skip(session, number)

    def give_back(self, session: Session, ids: int | Ids, number: int) -> None:
        """Apply posted message ``number``, which frees ``ids``; staged only: call :meth:`commit`."""
        ledger = self.ledger
        order = ledger.next_order
        address = self._applied_address(session)
        if type(ids) is int:
            ledger.give_back_one(ids, session.number)
            self.table.free_one(ids, order, address, number)
            session.held -= 1
        else:
            assert not isinstance(ids, int)
            ledger.give_back(ids, session.number)
            self.table.free(ids, order, address, number)
            session.held -= len(ids)
        session.applied = number

    def skip(self, session: Session, number: int) -> None:
        """Apply posted message ``number``, which frees nothing, or was refused; staged only."""
        self.table.word(self._applied_address(session), number)
        session.applied = number

    def grant(self, session: Session, count: int, request_id: int) -> int | Ids | None:
        """Hand out ``count`` ≥ 1 slots, or None if fewer are free; staged only: call :meth:`commit`."""
        ledger = self.ledger
        owner = st.owner_word(session.number)
        if count == 1:
            slot = ledger.take_one(session.number)
            if not slot:
                return None
            self.table.grant_one(slot, ledger.generation_of(slot), owner, request_id)
            session.held += 1
            return slot
        taken = ledger.take(count, session.number)
        if taken is None:
            return None
        ids, generations = taken
        self.table.grant(ids, generations, owner, request_id)
        session.held += count
        return ids

    def open_window(self, session: Session, request_id: int) -> None:
        """Slots granted by ``request_id`` are in a window from now on; staged only."""
        self._set_window(session, request_id)

    def close_window(self, session: Session) -> None:
        """What is left of the window's slots is plainly held from now on; staged only."""
        if session.window:
            self._set_window(session, 0)

    def commit(self) -> None:
        self.table.commit(self.ledger.free_count)

    def still_granted(self, session: Session, granted: int | Ids, request_id: int) -> Ids:
        """Those of a reply's slots that its session still holds by that very request."""
        ids = np.array([granted], np.int32) if isinstance(granted, int) else granted
        return ids[self.table.granted_by(ids, st.owner_word(session.number), request_id)]

    def windows(self) -> dict[int, int]:
        """Session number → slots in its open window. Looks at every slot."""
        by_owner = {st.owner_word(s.number): s.window for s in self.sessions.values() if s.window}
        counts = self.table.count_granted_by(by_owner)
        return {owner >> 8: count for owner, count in counts.items()}

    def check(self) -> None:
        """Look at every slot: list, table and sessions tell the same. O(N)."""
        self.ledger.check()
        assert np.array_equal(self.table.free_list(), self.ledger.free_slots()), (
            f"pool {self.name}: the slot table's free list is not the ledger's"
        )
        for session in self.sessions.values():
            held = self.ledger.held_by(session.number)
            assert len(held) == session.held, (
                f"pool {self.name}: session {session.number} holds {len(held)} slots, counted {session.held}"
            )
            assert np.array_equal(held, self.table.held_by(st.owner_word(session.number))), (
                f"pool {self.name}: the slot table and the ledger differ on session {session.number}"
            )
        held_by_all = sum(session.held for session in self.sessions.values())
        assert self.ledger.free_count + held_by_all == self.slots, (
            f"pool {self.name}: {self.ledger.free_count} free and {held_by_all} held of {self.slots}"
        )

    def status(self) -> dict[str, Any]:
        """The pool's part of ``status --json``; counts are of slots."""
        windows = self.windows()
        holders = [
            {
                "session": session.number,
                "name": session.name,
                "pid": session.pid,
                "group": None,
                "rank": session.rank,
                "state": "live",
                "held": session.held - windows.get(session.number, 0),
                "windows": windows.get(session.number, 0),
                "guarantee": 0,
                "limit": self.slots,
            }
            for session in self.sessions.values()
        ]
        return {
            "name": self.name,
            "slots": self.slots,
            "free": self.ledger.free_count,
            "held": sum(session.held for session in self.sessions.values()) - sum(windows.values()),
            "windows": sum(windows.values()),
            "offered": 0,
            "quarantined": 0,
            "bytes_per_slot": self.geometry.bytes_per_slot if self.geometry else 0,
            "backend": "shm" if self.shards else None,
            "shards": len(self.shards),
            "holders": holders,
        }

    def _release(self, session: Session) -> Ids:
        order = self.ledger.next_order
        ids = self.ledger.release(session.number)
        if len(ids):
            self.table.free(ids, order, self._applied_address(session), session.applied)
        if self.ledger.free_count == self.slots:
            # The list is 1..N again, whatever order its slots came back in.
            order = self.ledger.next_order - self.slots
            self.table.free(self.ledger.free_slots(), order, self._applied_address(session), session.applied)
        session.held = 0
        return ids

    def _set_window(self, session: Session, request_id: int) -> None:
        self.table.word(self.table.layout.session(session.row) + st.S_WINDOW, request_id)
        session.window = request_id

    def _applied_address(self, session: Session) -> int:
        return self.table.layout.session(session.row) + st.S_APPLIED
