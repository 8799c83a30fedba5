"""Whether the schedulers of a replay still get anywhere."""

from __future__ import annotations

import time

from mambapool.client.replay.failure import ReplayFailed
from mambapool.client.replay.messages import Progress
from mambapool.client.replay.options import ReplayOptions


class Watch:
    """How far the schedulers are, and whether they still get anywhere."""

    def __init__(self, options: ReplayOptions) -> None:
        self._options = options
        self._last: dict[int, Progress] = {}
        self._ended: dict[int, int] = {}
        self._moved_s = time.monotonic()

    @property
    def finished(self) -> int:
        return sum(self._ended.values()) + sum(report.finished for report in self._last.values())

    def note(self, scheduler: int, report: Progress) -> None:
        before = self._last.get(scheduler)
        self._last[scheduler] = report
        if not report.blocked or before is None or before.steps != report.steps:
            self._moved_s = time.monotonic()

    def note_end(self, scheduler: int, finished: int) -> None:
        self._last.pop(scheduler, None)
        self._ended[scheduler] = finished
        self._moved_s = time.monotonic()

    def check(self) -> None:
        """Raise when all that still run have been waiting for slots that nobody of them holds."""
        stuck_s = time.monotonic() - self._moved_s
        blocked = bool(self._last) and all(report.blocked for report in self._last.values())
        if blocked and stuck_s > self._options.timeout:
            raise ReplayFailed(
                f"nothing runs, and for {stuck_s:.1f} s no scheduler got the "
                f"{self._options.slots_per_request} slots that a request takes: others hold the slots of "
                f"pool {self._options.pool} (mambapool status shows who)"
            )
