"""How long the slots of a dead process are kept back.

The lock of a lease is released before its process has ended: 64 ms before, of 312, for a process of 2 GB. A GPU may
write on behalf of the process until then. So on a GPU a quarantine lasts until the process has ended, and its time has
passed; without a way to see the end, for longer.
"""

from __future__ import annotations

from mambapool.pool.descriptor import SHM
from mambapool.service.sessions import Session

#: … after which no process is believed to be ending still, where the kernel cannot tell.
UNSEEN_END_S = 30.0


def needs_quarantine(session: Session) -> bool:
    """Whether its process may still write to slots when it is dead: its own, or those of its group, all of whose
    ranks have a shard. Nothing writes to memory of the host then; the threads are gone before the lock is."""
    if session.pool.backend in (SHM, None):
        return False
    return session.held > 0 or (session.group is not None and session.group.formed)


def is_over(session: Session, has_ended: bool | None, quarantine_s: float, now: float) -> bool:
    """``has_ended``: whether its process has, None where nobody knows."""
    assert session.dead_since is not None
    if has_ended is None:
        return now - session.dead_since >= max(quarantine_s, UNSEEN_END_S)
    return has_ended and now - session.dead_since >= quarantine_s
