"""Holding a scheduler's clock to real time."""

from __future__ import annotations

import time
from collections.abc import Callable

#: The longest sleep in one piece, so that a sleeping scheduler still reports and can be stopped.
_NAP_S = 0.05


class Pace:
    """A clock of the trace that is never ahead of ``speed`` times real time; without a speed it runs free.

    ``origin_s`` is when the trace starts, on the clock of :func:`time.monotonic`, which all processes of a
    host share: so do all schedulers.
    """

    def __init__(self, speed: float | None, origin_s: float) -> None:
        self._speed = speed
        self._origin_s = origin_s

    def hold(self, clock_ms: float, meanwhile: Callable[[], None]) -> None:
        """Sleep until real time has come to ``clock_ms``, calling ``meanwhile`` every now and then."""
        if self._speed is None:
            return
        due_s = self._origin_s + clock_ms / 1000 / self._speed
        while (left_s := due_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _NAP_S))
            meanwhile()
