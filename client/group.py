"""One rank's part in its tensor-parallel group: its numbered calls, and what the other ranks' calls say of them.

Every call of a rank is numbered and noted in the group page (:mod:`mambapool.pool.group_page`) before anything is
done for it. A call that needs an answer is answered by rank 0, which puts the answer into the page; the others look
there. Nothing here knows slots.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mambapool.pool import group_page as gp
from mambapool.pool.errors import GroupBroken, MambaPoolError, RankDiverged
from mambapool.pool.group_calls import call_text
from mambapool.pool.group_page import Answer, GroupPage

if TYPE_CHECKING:
    from mambapool.client.rank_fences import RankFences

#: Calls that are compared with rank 0's together.
COMPARE_EVERY = 16

#: Rank 0 answers with an error itself when its own wait is over: the others give it so much more time for that.
_GRACE_S = 1.0

_LOOKS_BEFORE_SLEEP = 16
_COMPARE_TURNS = 32
_LONGEST_SLEEP_S = 0.0005


class Group:
    """Use it under :attr:`lock`, a call at a time; :meth:`tick` takes the lock itself."""

    def __init__(self, page: Path, name: str, rank: int, timeout: float) -> None:
        self.page = GroupPage(page)
        self.name = name
        self.rank = rank
        self.world_size = self.page.layout.world_size
        #: Bounds every wait for another rank, in seconds.
        self.timeout = timeout
        self.lock = threading.Lock()
        #: The number of this rank's last call.
        self.position = 0
        #: Of a rank on a GPU.
        self.fences: RankFences | None = None
        self._items = self.page.items
        self._compared = 0
        self._compare_at = COMPARE_EVERY
        self._room_until = gp.LEAD
        self._fault: MambaPoolError | None = None
        self.page.set_fence(rank, gp.NO_FENCE)

    def __repr__(self) -> str:
        return f"Group({self.name!r}, rank {self.rank} of {self.world_size}, call {self.position})"

    @property
    def holder(self) -> int:
        """The session that holds the group's slots: rank 0's."""
        return self.page.word(0, gp.R_SESSION)

    def join(self, session: int, end: Callable[[], MambaPoolError | None], deadline: float) -> None:
        """Wait until all ranks have joined and rank 0 is ready; :class:`GroupBroken` names who is missing.

        ``session`` is this rank's, ``end()`` why that is gone.
        """
        began = time.monotonic()
        turn = 0
        while not self.page.is_complete():
            self._check_joining(1, session, end)
            if time.monotonic() >= deadline:
                raise GroupBroken(f"group {self.name}: {self._missing()} within {time.monotonic() - began:.1f} s")
            turn = pause(turn)
        # Not before the first call: who was faster may have made all of its own, and left.
        self._check_joining(0, session, end)

    def begin(self, call: int) -> int:
        """Number this rank's next call and note it; raises when the group does not go on."""
        number = self.position + 1
        if self._fault is not None or self._items[gp.H_TROUBLE]:
            self._check(number)
        if number > self._room_until:
            self._await_room(number)
        if number >= self._compare_at:
            self.compare()
        self.page.log(self.rank, number, call)
        self.position = number
        if self.fences is not None:
            if call >> 56 in self.fences.kinds:
                self.fences.note(number)
            else:
                self.fences.retry()
        return number

    def leave(self, reason: MambaPoolError) -> None:
        """This rank makes no call any more; one that waits raises ``reason`` when the page says that it has ended."""
        self._fault = reason

    def compare(self) -> None:
        """Compare this rank's calls with rank 0's, as far as both have come."""
        page, rank = self.page, self.rank
        self._compare_at = self.position + COMPARE_EVERY
        if not rank:
            return
        last = min(self.position, page.position(0))
        while self._compared < last:
            first = self._compared + 1
            # Up to where the ring of calls begins anew.
            end = min(last, first - first % gp.LOG + gp.LOG - 1)
            if page.logs_equal(rank, first, end):
                self._compared = end
                continue
            for number in range(first, end + 1):
                ours, theirs = page.logged(rank, number), page.logged(0, number)
                if ours is None or theirs is None:
                    return  # not seen whole yet
                if ours != theirs:
                    self.diverged(number, ours, theirs)
                self._compared = number

    def answer(self, number: int, call: int, wait: float = 0.0) -> Answer:
        """Rank 0's answer to this rank's call ``number``, which is ``call``.

        ``wait``: how long the call itself may take rank 0, besides the timeout.
        """
        page = self.page
        turn = 0
        arrived = False
        deadline = 0.0
        while True:
            answer = page.answer(number)
            if answer is not None:
                if answer.call != call:
                    self.diverged(number, call, answer.call)
                return answer
            theirs = page.logged(0, number)
            if theirs is not None and theirs != call:
                self.diverged(number, call, theirs)
            if turn % _COMPARE_TURNS == 0:
                self.compare()  # what it waits for may never come
            now = time.monotonic()
            if not deadline or (theirs is not None and not arrived):
                # It is there now, and waits for the allocator, as long as it may itself.
                arrived = theirs is not None
                deadline = now + self.timeout + (wait + _GRACE_S if arrived else 0.0)
            if self._items[gp.H_TROUBLE]:
                self._check(number)
            if now >= deadline:
                self._lagged(0, number)
            turn = pause(turn)

    def data(self, number: int, answer: Answer) -> bytes:
        """The int32 items that an answer points to."""
        deadline = time.monotonic() + self.timeout
        turn = 0
        while (data := self.page.data(answer)) is None:
            if time.monotonic() >= deadline:
                self._lagged(0, number)
            turn = pause(turn)
        return data

    def await_ranks(self, number: int) -> None:
        """Rank 0: until every rank has made call ``number``, and finished what it did before."""
        self._await_all(self.page.passed, number)

    def meet(self) -> None:
        """Until every rank has made the call that this rank made last; for the work of GPUs nobody waits."""
        self._await_all(lambda: self.page.slowest()[0], self.position)

    def _await_all(self, come_to: Callable[[], int], number: int) -> None:
        deadline = time.monotonic() + self.timeout
        turn = 0
        while come_to() < number:
            if self._items[gp.H_TROUBLE]:
                self._check(number)
            if time.monotonic() >= deadline:
                self._lagged(self.page.slowest()[1], number)
            turn = pause(turn)

    def passed(self) -> int:
        """The last call before which every rank has finished everything: slots freed up to it may leave the group."""
        return self.page.passed()

    def use_fences(self, fences: RankFences) -> None:
        """From now on what this rank has queued on a GPU counts, too: see :meth:`fenced`. Else its calls say it all."""
        self.page.set_fence(self.rank, self.position)
        self.fences = fences

    def fenced(self, call: int) -> None:
        """This rank's GPU has finished all that was queued before its call number ``call``; only grows."""
        self.page.set_fence(self.rank, call)

    def oldest_unread(self) -> int:
        """Rank 0: the oldest answer that some rank may still have to read."""
        return self.page.slowest()[0]

    def await_readers(self, number: int, up_to: int) -> None:
        """Rank 0: until every rank has read the answers before call ``up_to``; there is no room for ``number``'s."""
        deadline = time.monotonic() + self.timeout
        turn = 0
        while self.oldest_unread() < up_to:
            self._check(number)
            if time.monotonic() >= deadline:
                self._lagged(self.page.slowest()[1], number)
            turn = pause(turn)

    def diverged(self, number: int, ours: int, theirs: int) -> None:
        """This rank's call is not rank 0's: both are named, and no rank goes on."""
        self.page.accuse(self.rank, gp.DIVERGED, self.rank, number)
        self._fail(
            RankDiverged(
                f"group {self.name}, call {number}: rank {self.rank} called {call_text(ours)}, rank 0 called "
                f"{call_text(theirs)}"
            )
        )

    def tick(self) -> None:
        """For the background thread: compare what has come since the last call; the next call raises."""
        if not self.lock.acquire(blocking=False):
            return
        try:
            if self._fault is None:
                self.compare()
        except MambaPoolError:
            pass  # kept: the next call raises it
        finally:
            self.lock.release()

    def _await_room(self, number: int) -> None:
        """Until the slowest rank is less than the lead behind."""
        deadline = time.monotonic() + self.timeout
        turn = 0
        while True:
            position, slowest = self.page.slowest()
            self._room_until = position + gp.LEAD
            if number <= self._room_until:
                return
            if self._items[gp.H_TROUBLE]:
                self._check(number)
            if time.monotonic() >= deadline:
                self._lagged(slowest, number)
            turn = pause(turn)

    def _lagged(self, of: int, number: int) -> None:
        """Waited too long: without this call the group cannot go on, so that it is broken for all."""
        self.compare()
        self.page.accuse(self.rank, gp.LAGGED, of, number)
        behind = self.page.position(of)
        self._fail(
            GroupBroken(
                f"group {self.name}: rank {of} ({self._session(of)}) has made {behind} calls and did not come to call "
                f"{number} of rank {self.rank} within {self.timeout:g} s"
            )
        )

    def _check(self, number: int) -> None:
        """Raise if this call cannot be made any more."""
        if (fault := self._fault) is not None:
            # A new one each time: an exception that is raised again keeps the frames of every raise.
            raise type(fault)(*fault.args)
        self.check_ends(number)
        self.compare()
        for rank in range(self.world_size):
            kind = self.page.word(rank, gp.R_FAULT)
            if not kind or rank == self.rank:
                continue
            call, of = self.page.word(rank, gp.R_FAULT_CALL), kind >> 8
            what = "made another call than rank 0"
            if kind & 0xFF == gp.LAGGED:
                what = f"waited too long for rank {of} ({self._session(of)})"
            self._fail(GroupBroken(f"group {self.name}: rank {rank} {what} at call {call}"))

    def check_ends(self, number: int = 0) -> None:
        """Raise if a rank has ended that is needed; one that left has made its calls up to its last."""
        for rank in range(self.world_size):
            end = self.page.word(rank, gp.R_END)
            if not end or (end == gp.LEFT and number <= self.page.position(rank)):
                continue
            self._fail(
                GroupBroken(
                    f"group {self.name}: rank {rank} ({self._session(rank)}) {gp.END_TEXTS.get(end, 'ended')} after "
                    f"{self.page.position(rank)} calls; the group's slots are kept until all its ranks have ended"
                )
            )

    def _check_joining(self, number: int, session: int, end: Callable[[], MambaPoolError | None]) -> None:
        """Raise if a rank has ended, this one included: until all have joined another process may take its place."""
        self.check_ends(number)
        if (reason := end()) is not None:
            raise reason
        if self.page.word(self.rank, gp.R_SESSION) != session:
            raise GroupBroken(
                f"group {self.name}: rank {self.rank} is not session {session} any more, but "
                f"{self._session(self.rank)}: connect again"
            )

    def _fail(self, fault: MambaPoolError) -> None:
        self._fault = fault
        raise fault

    def _missing(self) -> str:
        joined = [rank for rank in range(self.world_size) if self.page.word(rank, gp.R_SESSION)]
        missing = [rank for rank in range(self.world_size) if rank not in joined]
        if not missing:
            return "rank 0 has joined, and did not get its guarantee"
        there = f"{_ranks(joined)} of {self.world_size} joined" if joined else "nobody joined"
        return f"{there}, {_ranks(missing)} did not"

    def _session(self, rank: int) -> str:
        return f"session {self.page.word(rank, gp.R_SESSION)}, pid {self.page.word(rank, gp.R_PID)}"


def pause(turn: int) -> int:
    """Between two looks at the page: give the core away at first, then sleep."""
    if turn < _LOOKS_BEFORE_SLEEP:
        time.sleep(0)
    else:
        time.sleep(min(20e-6 * 1.3 ** min(turn - _LOOKS_BEFORE_SLEEP, 32), _LONGEST_SLEEP_S))
    return turn + 1


def _ranks(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks))
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"
