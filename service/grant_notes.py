"""When requests were granted and what for: what audit shows of slots besides the slot table. Not durable.

Noted per request, not per slot: one store, whatever the size of the batch. What was freed is not looked for then,
but now and then: a request of which nothing is held any more is forgotten here.
"""

from __future__ import annotations

from mambapool.pool.slot_table import owner_word
from mambapool.service.sessions import Session

#: A session's notes may grow by so many before they are gone through, and by a 64th of the pool's slots: then looking
#: at every row is worth it.
NOTES_BEFORE_A_LOOK = 1024


def forget_what_was_freed(session: Session) -> None:
    """Drop the notes on requests of which the session holds nothing, once there are many."""
    if len(session.granted_at) + len(session.tags) <= session.most_notes:
        return
    table = session.pool.table
    held = set(table.requests[table.owners == owner_word(session.number)].tolist())
    session.granted_at = {request: at for request, at in session.granted_at.items() if request in held}
    session.tags = {
        # One that is open may still be waiting for its slots.
        request: tag
        for request, tag in session.tags.items()
        if request in held or request >= session.oldest_open
    }
    kept = len(session.granted_at) + len(session.tags)
    session.most_notes = 2 * kept + NOTES_BEFORE_A_LOOK + session.pool.slots // 64
