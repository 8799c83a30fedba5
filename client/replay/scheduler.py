"""One scheduler of a replay: continuous batching over its share of a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mambapool.client.replay.admission import Holding, admit
from mambapool.client.replay.batch import Batch
from mambapool.client.replay.findings import Findings
from mambapool.client.replay.pool_api import Worker
from mambapool.client.replay.request import Request
from mambapool.client.replay.result import SchedulerResult
from mambapool.client.replay.slot_calls import SlotCalls
from mambapool.client.replay.usage import HeldTimeline


class Scheduler:
    """Runs requests on a shared pool, step by step, as an engine does.

    A step takes ``step_ms`` on the scheduler's own clock, which starts at the start of the trace: it admits
    what has arrived and can be served, advances every running request by one token, and gives back the slots
    of those that have ended. Requests are served in order of arrival, and a request takes ``1 + track``
    slots for as long as it runs. What its prompt would cost is left out: a prefill takes no step.

    No process, no real clock and no waiting in here: the caller decides when to call :meth:`step`.
    """

    def __init__(
        self,
        worker: Worker,
        requests: Sequence[Request],
        track: int,
        step_ms: float,
        in_use: Callable[[], int] = lambda: 0,
    ) -> None:
        """``requests`` must be in order of arrival; ``in_use`` says how many slots of the pool are not free now."""
        self._worker = worker
        self._requests = requests
        self._track = track
        self._step_ms = step_ms
        self._findings = Findings()
        self._calls = SlotCalls(worker, self._findings)
        self._batch = Batch(worker, self._findings)
        self._in_use = in_use
        self._most_in_use = 0
        self._held = HeldTimeline()
        self._waiting = HeldTimeline()
        self._messages_before = worker.messages
        self._clock_ms = 0.0
        # Service is in order, so the waiting requests are always those from _admitted up to _arrived.
        self._arrived = 0
        self._admitted = 0
        self._waits_counted_to = 0
        self._waits = 0
        self.steps = 0
        self.finished = 0

    @property
    def done(self) -> bool:
        return self.finished == len(self._requests)

    @property
    def clock_ms(self) -> float:
        """When the next step begins: at once, or with the next arrival if there is nothing to do before."""
        if len(self._batch) or self._admitted < self._arrived or self._arrived == len(self._requests):
            return self._clock_ms
        return max(self._clock_ms, self._requests[self._arrived].arrival_ms)

    def step(self) -> bool:
        """One step. Returns False when nothing runs and what waits cannot be served: the caller may sleep.

        The clock goes on even so, and no message is sent.
        """
        self._clock_ms = self.clock_ms
        self._receive()
        self._batch.start(self._admit())
        self._count_waits()
        self._waiting.record(self._clock_ms, self._arrived - self._admitted)
        runs = len(self._batch) > 0
        if runs:
            self._record_held()
            self._end(self._batch.step())
            self.steps += 1
        self._clock_ms += self._step_ms
        self._record_held()
        return runs

    def finish(self) -> SchedulerResult:
        """What was found out, once :attr:`done`; the last frees are confirmed first, which is not counted."""
        messages = self._worker.messages - self._messages_before
        alloc_us = list(self._calls.alloc_us)
        self._calls.confirm()
        return SchedulerResult(
            finished=self.finished,
            mismatches=len(self._findings),
            findings=self._findings.lines,
            steps=self.steps,
            messages=messages,
            waits=self._waits,
            alloc_us=alloc_us,
            held=self._held,
            waiting=self._waiting,
            most_in_use=self._most_in_use,
        )

    def _receive(self) -> None:
        while self._arrived < len(self._requests) and self._next_arrival_ms() <= self._clock_ms:
            self._arrived += 1

    def _next_arrival_ms(self) -> float:
        return self._requests[self._arrived].arrival_ms

    def _admit(self) -> list[Holding]:
        waiting = self._arrived - self._admitted
        if not waiting:
            return []
        servable = min(waiting, self._calls.available() // (1 + self._track))
        if not servable:
            return []
        holdings = admit(self._calls, self._requests[self._admitted : self._admitted + servable], self._track)
        # It grows by what somebody takes, and by nothing else.
        self._most_in_use = max(self._most_in_use, self._in_use())
        self._admitted += len(holdings)
        return holdings

    def _count_waits(self) -> None:
        if self._admitted < self._arrived:
            self._waits += self._arrived - max(self._admitted, self._waits_counted_to)
            self._waits_counted_to = self._arrived

    def _end(self, finished: list[Holding]) -> None:
        if finished:
            self._calls.give_back([slot for holding in finished for slot in holding.slots])
            self.finished += len(finished)

    def _record_held(self) -> None:
        self._held.record(self._clock_ms, len(self._batch) * (1 + self._track))
