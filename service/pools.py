"""A pool as the allocator has it: the list, the table, the sessions. Each change is one commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mambapool.pool import slot_table as st
from mambapool.pool.descriptor import SHM
from mambapool.pool.errors import GuaranteeExceeded
from mambapool.pool.group_page import DIED
from mambapool.pool.layout import Geometry
from mambapool.service.batch_commits import BatchCommits
from mambapool.service.groups import Group
from mambapool.service.ledger import Ids, Ledger
from mambapool.service.offers import Offers
from mambapool.service.one_slot_commits import OneSlotCommits
from mambapool.service.sessions import GUARANTEE_REQUEST, Session, SessionRows
from mambapool.service.table_writer import SlotTableWriter
from mambapool.service.waiting import WaitQueue


@dataclass(frozen=True, slots=True)
class Shard:
    """Where one rank's memory is had: the keeper's socket in the runtime directory, its uuid, what it is."""

    socket_name: str
    uuid: bytes
    backend: str = SHM


class Pool:
    """The slots of one pool and everybody who may hold them.

    Every method that changes something leaves ledger, table and session telling the same; a refusal leaves
    them as they were, but for the number of the posted message that carried it. Methods that say "staged"
    need a :meth:`commit` after them.
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
        max_waiters: int = 1024,
    ) -> None:
        self.name = name
        self.slots = table.layout.slots
        self.ledger = Ledger(self.slots)
        self.table = table
        self.uuid = uuid
        self.geometry = geometry
        self.shards = shards
        self.ends_with_last_session = ends_with_last_session
        #: The keeper of a shard died: why, for everybody who asks.
        self.lost: str | None = None
        #: When it was taken over from another allocator, on the monotonic clock: what is held is at least so old.
        self.taken_over_at: float | None = None
        self.sessions: dict[int, Session] = {}
        self.groups: dict[str, Group] = {}
        self.offers = Offers(self)
        self.waiting = WaitQueue(max_waiters)
        self.rows = SessionRows(table.layout.max_sessions)
        #: Commits of one slot in one go; None where each change has to go step by step.
        self.one_slot: OneSlotCommits | None = OneSlotCommits(table)
        #: The same of several slots.
        self.batches: BatchCommits | None = BatchCommits(table)

    def __repr__(self) -> str:
        return f"Pool({self.name!r}, {self.ledger!r}, sessions={len(self.sessions)})"

    @property
    def backend(self) -> str | None:
        """What the states are kept in; None without any. All shards of a pool are of one kind."""
        return self.shards[0].backend if self.shards else None

    def attach(self, session: Session) -> None:
        """Enter a new session, whose row was taken from :attr:`rows`."""
        self.check_guarantee(session.guarantee)
        table = self.table
        base = table.layout.session(session.row)
        words = {st.H_NEXT_SESSION: session.number + 1}
        for offset in range(st.SESSION_WORDS):
            words[base + offset] = 0
        texts = [(st.S_LEASE, session.lease.name), (st.S_NAME, _padded(session.name))]
        words[base + st.S_RANK] = session.rank
        words[base + st.S_GUARANTEE] = session.guarantee
        if (group := session.group) is not None:
            words[base + st.S_GROUP] = group.number
            words[base + st.S_WORLD_SIZE] = group.world_size
            words[base + st.S_GUARANTEE] = group.guarantee
            texts.append((st.S_GROUP_NAME, _padded(group.name)))
        for at, text in texts:
            for offset, value in enumerate(np.frombuffer(text, np.uint64).tolist()):
                words[base + at + offset] = value
        words[base + st.S_LIMIT] = session.limit
        words[base + st.S_PID] = session.pid
        words[base + st.S_NUMBER] = session.number
        for address, value in words.items():
            table.word(address, value)
        self.commit()
        self.sessions[session.number] = session

    def detach(self, session: Session) -> Ids:
        """End a session, in order or dead: what it holds becomes free, its offers and those to it end."""
        return self.detach_all([session])

    def detach_all(self, sessions: Sequence[Session]) -> Ids:
        """:meth:`detach` of all of a group's sessions, in one change."""
        freed = [np.empty(0, np.int32)]
        for session in sessions:
            self.stop_waiting(session)
            self.offers.forget(session)
            if session.held or session is sessions[-1]:
                freed.append(self._release(session))
            self.table.word(self.table.layout.session(session.row) + st.S_NUMBER, 0)
        self.commit()
        for session in sessions:
            del self.sessions[session.number]
            self.rows.give_back(session.row)
        return np.concatenate(freed)

    def stop_waiting(self, session: Session) -> None:
        """Nobody is there for it any more: what it waits for, and offers to it, end; staged."""
        self.waiting.remove(session)
        self.offers.end_to(session)

    def quarantine(self, session: Session, now: float) -> None:
        """Its process is dead, but not its work on the GPU: its slots stay its own, everything else of it ends.

        :meth:`detach` ends the quarantine. An allocator that is restarted meanwhile finds the session in the table,
        and its lease released.
        """
        self.waiting.remove(session)
        session.accepting = 0
        session.identity = b""  # nobody speaks for it any more
        session.dead_since = now
        if session.group is not None and session.group.formed:
            session.group.page.end(session.rank, DIED)  # the others need not wait for it
        self.offers.end(session)
        if session.window:
            self._set_window(session, 0)
        self.commit()

    def clear(self, session: Session, number: int) -> None:
        """Apply posted message ``number``: free all that this session holds, its window included; staged."""
        self.offers.forget(session)
        self._release(session)
        self.close_window(session)
        self.skip(session, number)

    def give_back(self, session: Session, ids: int | Ids, number: int) -> None:
        """Apply posted message ``number``, which frees ``ids``; staged."""
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
        """Apply posted message ``number``, which frees nothing, or was refused; staged."""
        self.table.word(self._applied_address(session), number)
        session.applied = number

    def grant(self, session: Session, count: int, request_id: int) -> int | Ids | None:
        """Hand out ``count`` ≥ 1 slots, or None if fewer are free, or within its limit; staged."""
        if session.held + count > session.limit:
            return None
        ledger = self.ledger
        owner = st.owner_word(session.number)
        if count == 1:
            slot = ledger.take_one(session.number)
            if not slot:
                return None
            self.table.grant_one(slot, ledger.generation_of(slot), owner, request_id)
            session.held += 1
            session.granted_at[request_id] = session.heard
            return slot
        taken = ledger.take(count, session.number)
        if taken is None:
            return None
        ids, generations = taken
        self.table.grant(ids, generations, owner, request_id)
        session.held += count
        session.granted_at[request_id] = session.heard
        return ids

    def open_window(self, session: Session, request_id: int) -> None:
        """Slots granted by ``request_id`` are in a window from now on; staged."""
        self._set_window(session, request_id)

    def close_window(self, session: Session) -> None:
        """What is left of the window's slots is plainly held from now on; staged."""
        if session.window:
            self._set_window(session, 0)

    def holder(self, number: int) -> int:
        """The session that holds slots for session ``number``: its group's rank 0, or itself."""
        session = self.sessions.get(number)
        if session is None or session.group is None or 0 not in session.group.members:
            return number
        return session.group.members[0].number

    def commit(self) -> None:
        self.table.commit(self.ledger.free_count)

    def check_guarantee(self, guarantee: int) -> None:
        """Refuse a guarantee that the sum of all would not leave room for, whoever frees what."""
        granted = self._guaranteed()
        promised = sum(session.guarantee for session in granted)
        if guarantee and promised + guarantee > self.slots:
            who = ", ".join(f"{s.name} (session {s.number}) {s.guarantee}" for s in granted) or "nobody"
            raise GuaranteeExceeded(
                f"a guarantee of {guarantee} is not to be had: pool {self.name} has {self.slots} slots, "
                f"guaranteed are {promised}: {who}"
            )

    @property
    def not_promised(self) -> int:
        """How many slots there are besides all guarantees; looks at every session."""
        return self.slots - sum(session.guarantee for session in self._guaranteed())

    def _guaranteed(self) -> list[Session]:
        # One in quarantine keeps its slots for a moment, and promises nothing.
        return [s for s in self.sessions.values() if s.guarantee and s.dead_since is None]

    def guaranteed_ids(self, session: Session) -> Ids:
        """The slots of a session's guarantee, in the order of the list they came from."""
        return self._granted_to(session, GUARANTEE_REQUEST)

    def still_granted(self, session: Session, granted: int | Ids, request_id: int) -> Ids:
        """Those of a reply's slots that its session still holds by that very request and has not offered."""
        ids = np.array([granted], np.int32) if isinstance(granted, int) else granted
        still = self.table.granted_by(ids, st.owner_word(session.number), request_id)
        plain: Ids = ids[still & (self.table.offers[ids] == 0)]
        return plain

    def windows(self) -> dict[int, int]:
        """Session number → slots in its open window. Looks at every slot."""
        by_owner = {st.owner_word(s.number): s.window for s in self.sessions.values() if s.window}
        counts = self.table.count_granted_by(by_owner)
        return {owner >> 8: count for owner, count in counts.items()}

    def lose(self, reason: str) -> None:
        """The states are gone: every client sees it in the table, and hears it."""
        self.lost = reason
        self.table.set_lost()

    def _granted_to(self, session: Session, request_id: int) -> Ids:
        """What a session holds by one request, in the order in which it was granted."""
        table = self.table
        mine = (table.owners == st.owner_word(session.number)) & (table.requests == request_id)
        ids = np.flatnonzero(mine).astype(np.int32)
        return ids[np.argsort(table.orders[ids], kind="stable")]

    def _release(self, session: Session) -> Ids:
        order = self.ledger.next_order
        ids = self.ledger.release(session.number)
        address = self._applied_address(session)
        if session.offered:
            self.table.offer(ids, 0)
        if len(ids):
            self.table.free(ids, order, address, session.applied)
        if self.ledger.free_count == self.slots:
            # The list is 1..N again, whatever order its slots came back in.
            order = self.ledger.next_order - self.slots
            self.table.free(self.ledger.free_slots(), order, address, session.applied)
        session.held = session.offered = 0
        return ids

    def _set_window(self, session: Session, request_id: int) -> None:
        self.table.word(self.table.layout.session(session.row) + st.S_WINDOW, request_id)
        session.window = request_id

    def _applied_address(self, session: Session) -> int:
        return self.table.layout.session(session.row) + st.S_APPLIED


def _padded(name: str) -> bytes:
    return name.encode()[: st.NAME_BYTES].ljust(st.NAME_BYTES, b"\0")
