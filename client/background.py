"""The one background thread of a process: it looks after every session while no call does.

It sends posted messages that the pipe did not take, and reads what the allocator refused: also when nothing
is posted any more, for a refusal comes after the allocator has noted its message as applied.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class Ticking(Protocol):
    """Something that is looked after."""

    def tick(self) -> None:
        """Do what no call does; returns soon, raises nothing."""


#: How soon something that no call takes care of is taken care of.
TICK_S = 0.05


class Background:
    """Weakly knows the sessions of one process; started by the first."""

    def __init__(self) -> None:
        self._sessions: weakref.WeakSet[Ticking] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._started = False

    def add(self, session: Ticking) -> None:
        with self._lock:
            self._sessions.add(session)
            if not self._started:
                # A daemon: a client that is never closed keeps no process from ending.
                threading.Thread(target=self._run, name="mambapool", daemon=True).start()
                self._started = True

    def remove(self, session: object) -> None:
        with self._lock:
            self._sessions.discard(session)  # type: ignore[arg-type]

    def _run(self) -> None:
        while True:
            self._tick_all()
            _pause.wait(TICK_S)

    def _tick_all(self) -> None:
        # A function of its own: no name here keeps a session alive during the pause.
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            session.tick()


# Never set: a wait that, unlike time.sleep, ends with the interpreter.
_pause = threading.Event()
_of_process: dict[int, Background] = {}


def background() -> Background:
    """This process's; a forked child, which inherits no thread, gets its own."""
    return _of_process.setdefault(os.getpid(), Background())
