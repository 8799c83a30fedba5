"""Which core runs what. An idle virtual core halts, and waking it costs more than what is measured here."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Literal

#: ``same``: client and servers share a core; ``diff``: the servers have the other one.
Place = Literal["same", "diff"]


def client_core() -> int:
    return sorted(_ALLOWED)[0]


def server_core(place: Place) -> int:
    """Where servers go; the client's own when there is no other one."""
    return client_core() if place == "same" else sorted(_ALLOWED)[-1]


@contextlib.contextmanager
def pinned(core: int) -> Iterator[None]:
    """This thread, and every process and thread that is started inside, stay on ``core``."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def kept_awake(seconds: float = 60.0) -> Iterator[None]:
    """No core halts inside: a SCHED_IDLE process on each runs whenever nothing else wants to."""
    burners = [_burn(core, seconds) for core in sorted(_ALLOWED)]
    try:
        yield
    finally:
        for pid in burners:
            os.kill(pid, 9)
            os.waitpid(pid, 0)


def _burn(core: int, seconds: float) -> int:
    """Start one; it ends by itself should its parent be killed."""
    pid = os.fork()
    if pid:
        return pid
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pass
    os._exit(0)


_ALLOWED = os.sched_getaffinity(0)
