"""A pool's snapshot as the operator's process has it: arrays again, and what is held as people want to read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mambapool.pool import slot_table as st
from mambapool.pool.errors import ProtocolError
from mambapool.service.ledger import OFFERED
from mambapool.service.sessions import GUARANTEE_REQUEST

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Holding:
    """One slot that somebody holds, as the slot table has it."""

    slot: int
    session: int
    name: str
    pid: int
    state: str  # of the session: live, suspect, gone
    kind: str  # held, window, offered, guarantee, quarantined
    offered_to: int | None
    generation: int
    request: int
    #: For how long, in seconds; None when nothing is known of it. At least so long if ``at_least``: the allocator
    #: was restarted since, and remembers no ages.
    age_s: float | None
    at_least: bool
    tag: str | None


class AuditedPool:
    """The reply to AUDIT, decoded. Arrays that are indexed by slot begin with the reserved row."""

    def __init__(self, reply: dict[str, Any]) -> None:
        try:
            self._decode(reply)
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"the allocator answered AUDIT with something else: {error}") from error

    def _decode(self, reply: dict[str, Any]) -> None:
        self.name: str = reply["name"]
        self.slots: int = reply["slots"]
        self.lost: str | None = reply["lost"]
        self.now: float = reply["now"]
        self.taken_over_at: float | None = reply["taken_over_at"]
        # What the allocator decides by.
        self.free_count: int = reply["free_count"]
        self.free = _numbers(reply["free"], "<i4")
        self.ledger = _numbers(reply["state"], "<i4", self.slots + 1)
        self.ledger_generation = _numbers(reply["generation"], "<u8", self.slots + 1)
        self.holders: dict[int, dict[str, Any]] = {holder["session"]: holder for holder in reply["holders"]}
        self.offers = [(giver, receiver, _numbers(ids, "<i4")) for giver, receiver, ids in reply["offers"]]
        # What it has written.
        self.header = _numbers(reply["header"], "<u8", st.H_WAITING + 1)
        rows = _numbers(reply["rows"], "<u8", st.ROW_FIELDS * (self.slots + 1)).reshape(st.ROW_FIELDS, -1)
        self.owner, self.request, self.generation, self.order, offered = rows
        self.offered_to = offered & st.RECEIVER_BITS
        self.session_words = _numbers(reply["sessions"], "<u8").reshape(-1, st.SESSION_WORDS)

    @property
    def ledger_holder(self) -> Numbers:
        """Per slot the session that holds it for the ledger, 0: free."""
        return np.maximum(self.ledger, 0) & ~OFFERED

    @property
    def holder(self) -> Numbers:
        """Per slot the session that holds it for the table, 0: free."""
        return self.owner >> 8

    @property
    def in_window(self) -> npt.NDArray[np.bool_]:
        """Per slot, whether it is in its session's open window."""
        open_ones = [(number, holder["window"]) for number, holder in self.holders.items() if holder["window"]]
        numbers, requests = np.array(sorted(open_ones), np.int64).reshape(-1, 2).T
        if not len(numbers):
            return np.zeros(self.slots + 1, np.bool_)
        place = np.searchsorted(numbers, self.holder).clip(max=len(numbers) - 1)
        of_window: npt.NDArray[np.bool_] = (numbers[place] == self.holder) & (requests[place] == self.request)
        plain: npt.NDArray[np.bool_] = of_window & (self.offered_to == 0)
        return plain

    @property
    def quarantined(self) -> npt.NDArray[np.bool_]:
        """Per slot, whether it is kept back because its holder is dead."""
        return np.isin(self.holder, [number for number, holder in self.holders.items() if "quarantined" in holder])

    def counts(self) -> dict[str, int]:
        """Slots by what they are, from the rows."""
        held = self.owner[1:] != 0
        offered = held & (self.offered_to[1:] != 0)
        windows = self.in_window[1:] & held
        quarantined = self.quarantined[1:]
        return {
            "free": int(np.count_nonzero(~held)),
            "held": int(np.count_nonzero(held & ~offered & ~windows & ~quarantined)),
            "windows": int(np.count_nonzero(windows)),
            "offered": int(np.count_nonzero(offered)),
            "quarantined": int(np.count_nonzero(quarantined)),
        }

    def holdings(self, older_than_s: float = 0.0) -> list[Holding]:
        """What is held, for at least so long, the longest first."""
        in_window = self.in_window
        notes = {number: _notes(holder) for number, holder in self.holders.items()}
        found = []
        for slot in np.flatnonzero(self.owner).tolist():
            session, request = int(self.holder[slot]), int(self.request[slot])
            holder = self.holders.get(session, {})
            granted_at, tags = notes.get(session, ({}, {}))
            at = granted_at.get(request)
            since = self.taken_over_at if at is None else at
            age_s = None if since is None else max(self.now - since, 0.0)
            if older_than_s and (age_s is None or age_s < older_than_s):
                continue
            offered_to = int(self.offered_to[slot]) or None
            kind = "offered" if offered_to else "window" if in_window[slot] else "held"
            if request == GUARANTEE_REQUEST and holder.get("guarantee"):
                kind = "guarantee"
            if "quarantined" in holder:
                kind = "quarantined"
            found.append(
                Holding(
                    slot=slot,
                    session=session,
                    name=holder.get("name", "?"),
                    pid=holder.get("pid", 0),
                    state=holder.get("state", "gone"),
                    kind=kind,
                    offered_to=offered_to,
                    generation=int(self.generation[slot]),
                    request=request,
                    age_s=age_s,
                    at_least=at is None and age_s is not None,
                    tag=tags.get(request),
                )
            )
        return sorted(found, key=lambda holding: -(holding.age_s or 0.0))


def _notes(holder: dict[str, Any]) -> tuple[dict[int, float], dict[int, str]]:
    requests = _numbers(holder["requests"], "<u8").tolist()
    times = np.frombuffer(holder["granted_at"], "<f8").tolist()
    return dict(zip(requests, times, strict=True)), dict(holder["tags"])


def _numbers(value: bytes, dtype: str, count: int | None = None) -> Numbers:
    """Every number on the wire and in the table is below 2^63, but for what is wrong."""
    numbers = np.frombuffer(value, dtype).astype(np.int64)
    if count is not None and len(numbers) != count:
        raise ValueError(f"{len(numbers)} numbers instead of {count}")
    return numbers
