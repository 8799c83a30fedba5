"""The one background thread of a process: it looks after every session while no call does.

It sends posted messages that the pipe did not take, and reads what the allocator refused: also when nothing
is posted any more, for a refusal comes after the allocator has noted its message as applied. On a GPU it sees
which fences have passed.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import Protocol

_log = logging.getLogger("mambapool.client")

#: How soon something that no call takes care of is taken care of.
TICK_S = 0.05
#: … and while somebody waits for a GPU.
BUSY_TICK_S = 0.002


class LookedAfter(Protocol):
    """Something that is looked after; without an ``is_busy`` it is never in a hurry."""

    def tick(self) -> None:
        """Do what no call does; returns soon, raises nothing."""


class Background:
    """Weakly knows what it looks after; started by the first."""

    def __init__(self) -> None:
        self._known: weakref.WeakSet[LookedAfter] = weakref.WeakSet()
        #: What has raised from a tick, which is said once of each.
        self._failing: weakref.WeakSet[LookedAfter] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._started = False
        self._is_resting = False
        # A wait that, unlike time.sleep, ends with the interpreter.
        self._work = threading.Event()

    def add(self, looked_after: LookedAfter) -> None:
        with self._lock:
            self._known.add(looked_after)
            if not self._started:
                # A daemon: a client that is never closed keeps no process from ending.
                threading.Thread(target=self._run, name="mambapool", daemon=True).start()
                self._started = True

    def remove(self, looked_after: object) -> None:
        """Also what was never added."""
        with self._lock:
            self._known.discard(looked_after)  # type: ignore[arg-type]

    def wake(self) -> None:
        """There is something for a GPU to be asked."""
        if self._is_resting:
            self._work.set()

    def _run(self) -> None:
        while True:
            is_busy = self._tick_all()
            self._is_resting = not is_busy
            self._work.wait(BUSY_TICK_S if is_busy else TICK_S)
            self._work.clear()

    def _tick_all(self) -> bool:
        # A function of its own: no name here keeps anything alive during the pause.
        with self._lock:
            known = list(self._known)
        for looked_after in known:
            try:
                looked_after.tick()
            except Exception:
                # An error of one session's keeps no other from being looked after.
                if looked_after not in self._failing:
                    self._failing.add(looked_after)
                    _log.exception("a session could not be looked after; trying goes on")
        return any(getattr(looked_after, "is_busy", False) for looked_after in known)


_of_process: dict[int, Background] = {}


def background() -> Background:
    """This process's; a forked child, which inherits no thread, gets its own."""
    return _of_process.setdefault(os.getpid(), Background())
