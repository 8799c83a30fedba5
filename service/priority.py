"""The allocator's share of a busy processor.

It is one process that every scheduler waits for. Where those have more to run than there are processors, the kernel
shares fairly among processes: an allocator that answers seven busy ones has used up its share, and waits for a turn
of each of them before it answers an eighth (``bench/bystander.py``: 9 × as long at p99, 2.5 × with this).
"""

from __future__ import annotations

import contextlib
import os

#: As ``nice(1)`` has it: a process of 0 next to it gets a tenth of its time when both have enough to do.
NICE = -10


def raise_priority() -> int:
    """Let this thread, and those that it starts, go before others; returns the nice value that holds now.

    Needs root, CAP_SYS_NICE or RLIMIT_NICE, and is left without them. A process that was given a nice value of its
    own (``nice -n 1 mambapool serve``) keeps it.
    """
    if os.getpriority(os.PRIO_PROCESS, 0) == 0:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, NICE)
    return os.getpriority(os.PRIO_PROCESS, 0)
