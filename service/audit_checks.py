"""What is always true of a pool (DESIGN.md §4, invariant 1, and what it rests on), checked on a snapshot of it.

Each check looks at every slot and names those that are wrong. None relies on another one: where one part of the
allocator is wrong, the others still tell what they know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mambapool.pool import slot_table as st
from mambapool.service.audited import AuditedPool, Numbers
from mambapool.service.ledger import OFFERED
from mambapool.service.sessions import GUARANTEE_REQUEST


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that is not true and has to be; ``slots`` are those at fault, none if it is about a count."""

    what: str
    slots: tuple[int, ...] = ()


def violations(pool: AuditedPool) -> list[Violation]:
    """All that is wrong, in the order of the checks; empty: every slot is in exactly one state."""
    return [violation for check in _CHECKS for violation in check(pool)]


def _reserved_row(pool: AuditedPool) -> Iterator[Violation]:
    touched = pool.owner[0] or pool.generation[0] or pool.offered_to[0] or pool.ledger[0] >= 0
    if touched or (pool.free == 0).any():
        yield Violation("slot 0 is the reserved row: it was handed out, or is on the free list", (0,))


def _free_list(pool: AuditedPool) -> Iterator[Violation]:
    """In the ledger, each slot is either on the free list, once, or has a holder."""
    inside = (pool.free > 0) & (pool.free <= pool.slots)
    yield from _named(pool.free[~inside], f"on the free list, and no slots of 1 to {pool.slots}")
    times = np.bincount(pool.free[inside], minlength=pool.slots + 1)
    held = pool.ledger >= 0
    yield from _where(times > 1, "more than once on the free list")
    yield from _where((times > 0) & held, "on the free list, and held")
    yield from _where((times == 0) & ~held, "neither held nor on the free list")
    if pool.free_count != len(pool.free):
        yield Violation(f"{pool.free_count} slots are counted free, {len(pool.free)} are on the free list")


def _table_and_ledger(pool: AuditedPool) -> Iterator[Violation]:
    """The table tells what the ledger decides."""
    held, written = pool.ledger_holder, pool.holder
    yield from _where((held != 0) & (written == 0), "held, and free in the slot table")
    yield from _where((held == 0) & (written != 0), "free, and held in the slot table")
    yield from _where((held != 0) & (written != 0) & (held != written), "held by another in the slot table")
    offered = (pool.ledger >= 0) & (pool.ledger & OFFERED != 0)
    yield from _where(offered != (pool.offered_to != 0), "offered in one of slot table and ledger only")
    yield from _where(
        pool.generation != pool.ledger_generation, "handed out more often in one of slot table and ledger"
    )
    if pool.header[st.H_SEQ] != pool.header[st.H_DONE]:
        yield Violation("the slot table was left in the middle of a change")


def _order(pool: AuditedPool) -> Iterator[Violation]:
    """Free rows sorted by ``order`` are the free list."""
    free = np.flatnonzero(pool.owner[1:] == 0) + 1
    places, times = np.unique(pool.order[free], return_counts=True)
    shared = np.isin(pool.order[free], places[times > 1])
    yield from _named(free[shared], "on one place of the free list with another one, in the slot table")
    listed = free[np.argsort(pool.order[free], kind="stable")]
    if not shared.any() and len(listed) == len(pool.free):
        yield from _named(
            listed[listed != pool.free], "elsewhere on the free list than the slot table says", some=True
        )


def _holders(pool: AuditedPool) -> Iterator[Violation]:
    """Whoever holds or is offered something is there."""
    known = np.array(sorted(pool.holders), np.int64)
    held = pool.owner != 0
    yield from _where(held & (pool.owner & 0xFF != st.HELD), "held in a way that there is not")
    yield from _where(held & ~np.isin(pool.holder, known), "held by a session that there is not")
    ledger_held = pool.ledger_holder
    strangers = (ledger_held != 0) & ~np.isin(ledger_held, known) & (ledger_held != pool.holder)
    yield from _where(strangers, "held by a session that there is not, for the ledger")
    offered = pool.offered_to != 0
    yield from _where(offered & ~held, "offered, and held by nobody")
    yield from _where(offered & ~np.isin(pool.offered_to, known), "offered to a session that there is not")
    yield from _where(offered & held & (pool.offered_to == pool.holder), "offered to the session that holds them")
    yield from _where(held & (pool.generation == 0), "held, and were never handed out")


def _offers(pool: AuditedPool) -> Iterator[Violation]:
    """Each offered slot is in one offer, of its holder to the session that the table names."""
    expected = np.zeros(pool.slots + 1, np.int64)
    for giver, receiver, ids in pool.offers:
        slots = ids[(ids > 0) & (ids <= pool.slots)]
        again = expected[slots] != 0
        yield from _named(slots[again], "in more than one offer")
        expected[slots] = receiver
        yield from _named(slots[pool.holder[slots] != giver], f"offered by session {giver}, which has them not")
    yield from _where(expected != pool.offered_to, "in an offer that the slot table does not have, or not in one")


def _counts(pool: AuditedPool) -> Iterator[Violation]:
    """The counts are those of the rows, and add up to the number of slots."""
    free = int(np.count_nonzero(pool.owner[1:] == 0))
    for where, count in (
        ("in the slot table", int(pool.header[st.H_FREE_COUNT])),
        ("by the ledger", pool.free_count),
    ):
        if count != free:
            yield Violation(f"{count} slots are counted free {where}, {free} rows are")
    held_by_all = sum(holder["held"] for holder in pool.holders.values())
    if pool.free_count + held_by_all != pool.slots:
        yield Violation(f"{pool.free_count} slots are counted free and {held_by_all} held, of {pool.slots}")
    if pool.header[st.H_SLOTS] != pool.slots:
        yield Violation(f"the slot table is of {pool.header[st.H_SLOTS]} slots, the pool has {pool.slots}")


def _sessions(pool: AuditedPool) -> Iterator[Violation]:
    """Per session: what is counted is what it has, and its words in the table are what the allocator goes by."""
    words = {int(row[st.S_NUMBER]): row for row in pool.session_words}
    holds, offers = _by_session(pool.holder), _by_session(pool.holder[pool.offered_to != 0])
    for number in words.keys() - pool.holders.keys():
        yield Violation(f"session {number} is in the slot table, and there is no such session")
    if len(words) != len(pool.session_words):
        yield Violation("a session is more than once in the slot table")
    for number, holder in pool.holders.items():
        who = f"session {number} ({holder['name']})"
        for what, counted, has in (("hold", holder["held"], holds), ("have offered", holder["offered"], offers)):
            if counted != has.get(number, 0):
                slots = tuple(np.flatnonzero(pool.holder == number).tolist())
                yield Violation(f"{who} is counted to {what} {counted} slots, not {has.get(number, 0)}", slots)
        if holder["held"] > holder["limit"]:
            yield Violation(f"{who} holds {holder['held']} slots, with a limit of {holder['limit']}")
        row = words.get(number)
        if row is None:
            yield Violation(f"{who} is not in the slot table")
            continue
        for word, field in _SESSION_WORDS:
            if row[word] != holder[field]:
                yield Violation(f"{who}: {field} is {holder[field]}, in the slot table {row[word]}")


def _guarantees(pool: AuditedPool) -> Iterator[Violation]:
    """What is guaranteed is granted whole, and never more than there is."""
    guarantees = {number: holder for number, holder in pool.holders.items() if holder["guarantee"]}
    # One in quarantine keeps its slots for a moment, and promises nothing.
    promised = sum(holder["guarantee"] for holder in guarantees.values() if "quarantined" not in holder)
    if promised > pool.slots:
        yield Violation(f"{promised} slots are guaranteed, of {pool.slots}")
    for number, holder in guarantees.items():
        granted = (pool.holder == number) & (pool.request == GUARANTEE_REQUEST)
        count = np.count_nonzero(granted)
        most = 0 if holder["waits"] else holder["guarantee"]
        # Who has posted nothing has given nothing back.
        if count > most or (count < most and not holder["applied"]):
            yield Violation(
                f"session {number} ({holder['name']}) has {count} slots of its guarantee of {holder['guarantee']}",
                tuple(np.flatnonzero(granted).tolist()),
            )
        yield from _where(granted & (pool.offered_to != 0), "of a guarantee, and offered")


_SESSION_WORDS = (
    (st.S_APPLIED, "applied"),
    (st.S_WINDOW, "window"),
    (st.S_RANK, "rank"),
    (st.S_GUARANTEE, "promised"),
    (st.S_LIMIT, "limit"),
    (st.S_PID, "pid"),
)

_CHECKS: tuple[Callable[[AuditedPool], Iterator[Violation]], ...] = (
    _reserved_row,
    _free_list,
    _table_and_ledger,
    _order,
    _holders,
    _offers,
    _counts,
    _sessions,
    _guarantees,
)


def _by_session(holders: Numbers) -> dict[int, int]:
    sessions, counts = np.unique(holders, return_counts=True)
    return dict(zip(sessions.tolist(), counts.tolist(), strict=True))


def _where(faulty: npt.NDArray[np.bool_], what: str) -> Iterator[Violation]:
    """Per slot, whether it is at fault; the reserved row has a check of its own."""
    yield from _named(np.flatnonzero(faulty[1:]) + 1, what)


def _named(slots: Numbers, what: str, *, some: bool = False) -> Iterator[Violation]:
    """``some``: one wrong place moves every slot behind it, so that the first few tell enough."""
    if len(slots):
        yield Violation(what, tuple(slots[:16].tolist() if some else sorted(set(slots.tolist()))))
