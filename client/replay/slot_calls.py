"""The allocator as a scheduler calls it: timed where a call costs a message, refusals written down."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from mambapool.client.replay.findings import Findings
from mambapool.client.replay.pool_api import Worker
from mambapool.pool.errors import DuplicateSlot, InvalidSlots

Result = TypeVar("Result")

#: A refusal of a posted free is raised once, at a later call. More in a row than this mean that the call
#: itself is refused: then it is raised.
_MOST_REFUSALS = 16


class SlotCalls:
    """Calls of one scheduler to its allocator; ``alloc_us`` holds how long those took that sent a message.

    A replay frees only what it was granted, so a refusal (:class:`InvalidSlots`) is a fault to report. It
    goes to the findings and the replay goes on: the faults after it are worth seeing too.
    """

    def __init__(self, worker: Worker, findings: Findings) -> None:
        self._worker = worker
        self._allocator = worker.allocator
        self._findings = findings
        self.alloc_us: list[float] = []

    def available(self) -> int:
        return self._past_refusals(self._allocator.available_size)

    def open_window(self, n: int) -> None:
        self._timed(lambda: self._allocator.alloc_group_begin(n))

    def close_window(self) -> None:
        self._past_refusals(self._allocator.alloc_group_end)

    def take(self) -> torch.Tensor | None:
        """One slot, from the window if one is open and has some left; None if there is none."""
        return self._timed(lambda: self._allocator.alloc(1))

    def give_back(self, slots: Sequence[torch.Tensor]) -> None:
        """Free all in one call; that is refused whole, so then the rest goes without what was at fault."""
        left = list(slots)
        for _ in range(_MOST_REFUSALS):
            if not left:
                return
            try:
                self._allocator.free(torch.cat(left))
                return
            except DuplicateSlot as refusal:
                self._findings.refused(refusal)
                left = list({int(slot): slot for slot in left}.values())
            except InvalidSlots as refusal:
                self._findings.refused(refusal)
                left = [slot for slot in left if int(slot) not in refusal.slots]
        raise RuntimeError(f"a free was refused {_MOST_REFUSALS} times, each time for other slots")

    def confirm(self) -> None:
        """Bring out what was refused of the frees so far: they are posted, and a refusal comes with a reply."""
        slot = self.take()
        if slot is None:
            self.available()
        else:
            self.give_back([slot])

    def _timed(self, call: Callable[[], Result]) -> Result:
        before = self._worker.messages
        started = time.perf_counter_ns()
        result = self._past_refusals(call)
        took_ns = time.perf_counter_ns() - started
        if self._worker.messages != before:
            self.alloc_us.append(took_ns / 1000)
        return result

    def _past_refusals(self, call: Callable[[], Result]) -> Result:
        for _ in range(_MOST_REFUSALS):
            try:
                return call()
            except InvalidSlots as refusal:
                self._findings.refused(refusal)
        return call()
