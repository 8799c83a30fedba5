"""What a slot table says, read back by the process that writes it: for recovery, checks and counts."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mambapool.pool import slot_table as st
from mambapool.service.ledger import Ids


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session as the table has it."""

    row: int
    number: int
    lease: bytes
    applied: int
    window: int
    rank: int
    guarantee: int
    limit: int
    pid: int
    name: str
    group: int  # the session that founded its group, 0: none
    world_size: int
    group_name: str


class SlotTableContents:
    """A mapped slot table; of what may not be seen half written, its writer takes care."""

    def __init__(self, path: Path, layout: st.TableLayout, mapping: mmap.mmap) -> None:
        self.path = path
        self.layout = layout
        self.mapping = mapping
        self.items = memoryview(mapping).cast("Q")
        self._words = np.frombuffer(mapping, np.uint64)
        count = layout.slots + 1
        fields = [self._words[layout.field(field) :][:count] for field in range(st.ROW_FIELDS)]
        self._owner, self._request, self._generation, self._order, self._offered = fields

    @property
    def uuid(self) -> bytes:
        return self._words[st.H_UUID : st.H_UUID + 2].tobytes()

    @property
    def digest(self) -> bytes:
        return self._words[st.H_DIGEST : st.H_DIGEST + 2].tobytes()

    @property
    def created_by_client(self) -> bool:
        return bool(self.items[st.H_CREATED])

    @property
    def next_session(self) -> int:
        return self.items[st.H_NEXT_SESSION]

    @property
    def owners(self) -> st.Words:
        return self._owner

    @property
    def requests(self) -> st.Words:
        return self._request

    @property
    def generations(self) -> st.Words:
        return self._generation

    @property
    def orders(self) -> st.Words:
        return self._order

    @property
    def offers(self) -> st.Words:
        return self._offered

    def words(self, at: int, count: int) -> st.Words:
        """So many words as they are."""
        words: st.Words = self._words[at : at + count]
        return words

    def session_words(self) -> st.Words:
        """The words of every session that the table has, a row each."""
        layout = self.layout
        rows = self.words(layout.sessions, layout.max_sessions * st.SESSION_WORDS).reshape(-1, st.SESSION_WORDS)
        used: st.Words = rows[rows[:, st.S_NUMBER] != 0]
        return used

    def sessions(self) -> list[SessionRow]:
        """Every session that the table has, by row."""
        found = []
        for row in range(self.layout.max_sessions):
            at = self.layout.session(row)
            items = self.items
            if not items[at + st.S_NUMBER]:
                continue
            found.append(
                SessionRow(
                    row=row,
                    number=items[at + st.S_NUMBER],
                    lease=self._words[at + st.S_LEASE : at + st.S_LEASE + 2].tobytes(),
                    applied=items[at + st.S_APPLIED],
                    window=items[at + st.S_WINDOW],
                    rank=items[at + st.S_RANK],
                    guarantee=items[at + st.S_GUARANTEE],
                    limit=items[at + st.S_LIMIT],
                    pid=items[at + st.S_PID],
                    name=self._text(at + st.S_NAME),
                    group=items[at + st.S_GROUP],
                    world_size=items[at + st.S_WORLD_SIZE],
                    group_name=self._text(at + st.S_GROUP_NAME),
                )
            )
        return found

    def _text(self, at: int) -> str:
        return self._words[at : at + st.NAME_BYTES // 8].tobytes().rstrip(b"\0").decode("utf-8", "ignore")

    def free_list(self) -> Ids:
        """The free list as the table tells it: free rows by their order."""
        free = np.flatnonzero(self._owner[1:] == 0) + 1
        return free[np.argsort(self._order[free], kind="stable")].astype(np.int32)

    def held_by(self, owner: int) -> Ids:
        """The slots whose owner word this is, ascending."""
        return np.flatnonzero(self._owner == owner).astype(np.int32)

    def granted_by(self, ids: Ids, owner: int, request: int) -> npt.NDArray[np.bool_]:
        """Per id, whether it still belongs to ``owner`` by that very request."""
        same: npt.NDArray[np.bool_] = (self._owner[ids] == owner) & (self._request[ids] == request)
        return same

    def count_granted_by(self, request_of_owner: dict[int, int]) -> dict[int, int]:
        """Per owner word, how many slots it still has of one request; one pass over the rows."""
        if not request_of_owner:
            return {}
        owners = np.array(sorted(request_of_owner), np.uint64)
        requests = np.array([request_of_owner[int(owner)] for owner in owners], np.uint64)
        place = np.searchsorted(owners, self._owner).clip(max=len(owners) - 1)
        matches = (owners[place] == self._owner) & (requests[place] == self._request)
        counts = np.bincount(place[matches], minlength=len(owners))
        return {int(owner): int(count) for owner, count in zip(owners, counts, strict=True)}
