"""Faults that tests switch on, to show that the checks around the allocator can fail.

``MAMBAPOOL_FAULT=double-grant:K`` hands a slot that somebody else holds to whoever makes the K-th grant, or
the first one after it at which another session holds something: a fault on the way to the client, which only
the client can see. The others are faults of the allocator's own lists, for ``mambapool audit``; at the K-th grant:

- ``lose-slot:K`` takes a slot off the free list for nobody;
- ``list-twice:K`` puts a slot of the grant on the free list, in place of one that is there;
- ``stray-owner:K`` writes a session that there is not into the slot's row.

Never set it outside a test.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from mambapool.pool.errors import ConfigError
from mambapool.pool.slot_table import owner_word
from mambapool.service.ledger import Ids
from mambapool.service.pools import Pool
from mambapool.service.sessions import Session

ENVIRONMENT_VARIABLE = "MAMBAPOOL_FAULT"

_log = logging.getLogger("mambapool.allocator")


class FaultyPool(Pool):
    """A pool that does something wrong, once."""

    fault = ""
    grants_until_fault = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.one_slot = self.batches = None  # every grant comes by grant()

    def grant(self, session: Session, count: int, request_id: int) -> int | Ids | None:
        granted = super().grant(session, count, request_id)
        self.grants_until_fault -= 1
        if granted is None or self.grants_until_fault > 0:
            return granted
        return _FAULTS[self.fault](self, session, granted)

    def double_grant(self, session: Session, granted: int | Ids) -> int | Ids:
        others = [s for s in self.sessions.values() if s is not session and s.held]
        if not others:
            return granted
        self.grants_until_fault = 2**62
        slot = int(self.ledger.held_by(others[0].number)[0])
        _log.warning("fault: slot %d of session %d goes to session %d too", slot, others[0].number, session.number)
        if isinstance(granted, int):
            return slot
        changed = granted.copy()
        changed[0] = slot
        return changed

    def lose_slot(self, _session: Session, granted: int | Ids) -> int | Ids:
        self.grants_until_fault = 2**62
        _log.warning("fault: slot %d is lost", self.ledger.take_one(_NOBODY))
        return granted

    def list_twice(self, _session: Session, granted: int | Ids) -> int | Ids:
        if self.ledger.free_count:
            self.grants_until_fault = 2**62
            slot = _first(granted)
            _log.warning("fault: slot %d is on the free list, too", slot)
            self.ledger._ring[self.ledger._head] = slot
        return granted

    def stray_owner(self, _session: Session, granted: int | Ids) -> int | Ids:
        self.grants_until_fault = 2**62
        slot = _first(granted)
        _log.warning("fault: the row of slot %d names session %d", slot, _NOBODY)
        self.commit()
        self.table.owners[slot] = owner_word(_NOBODY)
        return granted


#: No session has this number yet.
_NOBODY = 1 << 20

_FAULTS = {
    "double-grant": FaultyPool.double_grant,
    "lose-slot": FaultyPool.lose_slot,
    "list-twice": FaultyPool.list_twice,
    "stray-owner": FaultyPool.stray_owner,
}


def _first(granted: int | Ids) -> int:
    return granted if isinstance(granted, int) else int(granted[0])


def pool_class() -> type[Pool]:
    """The class that the environment asks for: :class:`Pool`, unless a fault is switched on."""
    fault = os.environ.get(ENVIRONMENT_VARIABLE)
    if not fault:
        return Pool
    kind, _, count = fault.partition(":")
    if kind not in _FAULTS or not count.isdigit():
        raise ConfigError(f"{ENVIRONMENT_VARIABLE}={fault!r}: expected one of {', '.join(_FAULTS)}, and :K")
    _log.warning("fault switched on: %s", fault)
    return type("FaultyPool", (FaultyPool,), {"fault": kind, "grants_until_fault": int(count)})
