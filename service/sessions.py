"""Sessions: who is attached to a pool, and which of their requests are still open."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from mambapool.pool.errors import AllocatorUnavailable, ProtocolError
from mambapool.pool.protocol import FIRST_REQUEST
from mambapool.service.leases import Lock
from mambapool.service.ledger import Ids

if TYPE_CHECKING:
    from mambapool.service.groups import Group
    from mambapool.service.pools import Pool

#: Open requests and barred ids of one session. A client has one open request per thread that waits.
MAX_OPEN = 1024

#: A client says something every second. Who is silent for longer is shown as suspect; nothing else follows.
SUSPECT_AFTER_S = 3.0

#: The request that grants a guarantee is a client's first one, HELLO.
GUARANTEE_REQUEST = FIRST_REQUEST


class Answer(NamedTuple):
    """The reply to an open request, kept until the client has it."""

    body: bytes
    #: What it handed out, as ids or as they went.
    granted: int | bytes | Ids | None = None
    #: An accepted transfer: no CANCEL gives it back, for then it would be nobody's.
    kept: bool = False


@dataclass(slots=True, eq=False)
class Session:
    """One ``connect()`` of a client process, and the holder of its slots."""

    number: int
    row: int  # in the slot table
    lease: Lock
    name: str
    pid: int
    rank: int
    pool: Pool
    limit: int
    #: Slots that are granted whole at attach; the client lists them itself.
    guarantee: int = 0
    #: The tensor-parallel group that it is a rank of; rank 0's session holds the slots of all.
    group: Group | None = None
    #: Its process has ended, and ranks of its group still live: what it holds is kept until they have ended, too.
    gone: bool = False
    #: The zmq routing id that speaks for it; empty until it has said HELLO to this allocator.
    identity: bytes = b""
    #: Request id and version of its last HELLO.
    hello: tuple[int, int] = (0, 0)
    #: When it was last heard of, on the monotonic clock.
    heard: float = 0.0
    #: Number of the last posted message that was applied.
    applied: int = 0
    #: Request id of the BEGIN whose window is open, 0: none.
    window: int = 0
    #: Slots held, those of an open window and of offers included.
    held: int = 0
    #: Slots of them that are offered to another session.
    offered: int = 0
    #: When it was found dead, on the monotonic clock, while its GPU work may still write to its slots.
    dead_since: float | None = None
    #: The ACCEPT that waits for an offer, 0: none.
    accepting: int = 0
    #: Requests below this id are closed: their replies have arrived, or nobody waits for them.
    oldest_open: int = 0
    answers: dict[int, Answer] = field(default_factory=dict)
    barred: set[int] = field(default_factory=set)
    #: What an allocator before this one granted, by request: any of it may be asked for again.
    recovered: dict[int, Ids] = field(default_factory=dict)
    #: When requests were granted, on the monotonic clock, and what for: not durable, only audit reads them.
    #: :mod:`~mambapool.service.grant_notes` forgets those of which nothing is held any more.
    granted_at: dict[int, float] = field(default_factory=dict)
    tags: dict[int, str] = field(default_factory=dict)
    most_notes: int = 0

    def state(self, now: float) -> str:
        """``live``, ``suspect`` or ``gone``; silence alone takes nothing away."""
        if self.gone or self.dead_since is not None:
            return "gone"
        return "live" if now - self.heard < SUSPECT_AFTER_S else "suspect"

    @property
    def quarantined(self) -> int:
        """Slots that are kept back because its process is dead; all that it has then."""
        return 0 if self.dead_since is None else self.held

    def close_requests_below(self, oldest_open: int) -> None:
        """Forget the replies that the client says it has."""
        if oldest_open <= self.oldest_open:
            return
        self.oldest_open = oldest_open
        answers = self.answers
        # Requests come in the order of their ids, but for repeats: what such a one hides is closed later.
        while answers and (oldest := next(iter(answers))) < oldest_open:
            del answers[oldest]
        if self.barred:
            self.barred = {known for known in self.barred if known >= oldest_open}
        if self.recovered:
            self.recovered = {known: ids for known, ids in self.recovered.items() if known >= oldest_open}

    def check_room(self) -> None:
        if len(self.answers) + len(self.barred) >= MAX_OPEN:
            raise ProtocolError(
                f"session {self.number} has {MAX_OPEN} open requests: read the replies, and say in "
                "oldest_open which of them arrived"
            )


class SessionRows:
    """Which rows of a slot table's session part are taken. Numbers are never used twice, rows are."""

    def __init__(self, max_sessions: int, taken: Iterable[int] = ()) -> None:
        self.max_sessions = max_sessions
        used = set(taken)
        self._free = [row for row in range(max_sessions - 1, -1, -1) if row not in used]

    def take(self) -> int:
        if not self._free:
            raise AllocatorUnavailable(f"all {self.max_sessions} sessions of this pool are in use")
        return self._free.pop()

    def give_back(self, row: int) -> None:
        self._free.append(row)
