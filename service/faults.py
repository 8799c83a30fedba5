"""Faults that tests switch on, to show that the checks around the allocator can fail.

``MAMBAPOOL_FAULT=double-grant:K`` hands a slot that somebody else holds to whoever makes the K-th grant, or
the first one after it at which another session holds something. Never set it outside a test.
"""

from __future__ import annotations

import logging
import os

from mambapool.pool.errors import ConfigError
from mambapool.service.ledger import Ids
from mambapool.service.pools import Pool
from mambapool.service.sessions import Session

ENVIRONMENT_VARIABLE = "MAMBAPOOL_FAULT"

_log = logging.getLogger("mambapool.allocator")


class DoublingPool(Pool):
    """A pool that gives one slot to two holders, once."""

    grants_until_fault = 0

    def grant(self, session: Session, count: int, request_id: int) -> int | Ids | None:
        granted = super().grant(session, count, request_id)
        self.grants_until_fault -= 1
        others = [s for s in self.sessions.values() if s is not session and s.held]
        if granted is None or self.grants_until_fault > 0 or not others:
            return granted
        self.grants_until_fault = 2**62
        slot = int(self.ledger.held_by(others[0].number)[0])
        _log.warning("fault: slot %d of session %d goes to session %d too", slot, others[0].number, session.number)
        if isinstance(granted, int):
            return slot
        granted[0] = slot
        return granted


def pool_class() -> type[Pool]:
    """The class that the environment asks for: :class:`Pool`, unless a fault is switched on."""
    fault = os.environ.get(ENVIRONMENT_VARIABLE)
    if not fault:
        return Pool
    kind, _, count = fault.partition(":")
    if kind != "double-grant" or not count.isdigit():
        raise ConfigError(f"{ENVIRONMENT_VARIABLE}={fault!r}: expected double-grant:K")
    _log.warning("fault switched on: %s", fault)
    return type("DoublingPool", (DoublingPool,), {"grants_until_fault": int(count)})
