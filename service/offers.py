"""Slots on their way from one session of a pool to another: durable, and never both hold one, or neither."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mambapool.pool import slot_table as st
from mambapool.pool.errors import AllocatorUnavailable, InvalidSlots, NotHolder
from mambapool.service.ledger import Ids
from mambapool.service.sessions import GUARANTEE_REQUEST, Session

if TYPE_CHECKING:
    from mambapool.service.pools import Pool


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """Slots that their holder offers to another session; still the giver's until they are accepted."""

    giver: Session
    ids: Ids
    #: What the slot table says of each of its slots: to whom, and which offer.
    word: int

    @property
    def receiver(self) -> int:
        return self.word & st.RECEIVER_BITS


class Offers:
    """Those of one pool, oldest first. Methods that say "staged" need a commit of the pool after them."""

    def __init__(self, pool: Pool) -> None:
        # Not its ledger: a recovery replaces that.
        self._pool = pool
        self._offers: list[Offer] = []

    def __iter__(self) -> Iterator[Offer]:
        return iter(self._offers)

    def __len__(self) -> int:
        return len(self._offers)

    def make(self, giver: Session, ids: Ids, receiver: int, request_id: int) -> None:
        """Offer slots of ``giver`` to another one of this pool; they stay its own, but cannot be freed."""
        pool = self._pool
        other = pool.sessions.get(receiver)
        if other is None or other is giver or other.gone or other.dead_since is not None:
            raise InvalidSlots(f"session {receiver} is no other session of pool {pool.name}", ids.tolist())
        if giver.guarantee:
            granted = [slot for slot in ids.tolist() if self._is_guaranteed(giver, slot)]
            if granted:
                raise NotHolder("slots of a guarantee cannot be transferred: they are its holder's", granted)
        pool.ledger.offer(ids, giver.number)
        giver.offered += len(ids)
        offer = Offer(giver, ids, st.offered_word(receiver, request_id))
        pool.table.offer(ids, offer.word)
        pool.commit()
        self._offers.append(offer)

    def restore(self, offer: Offer) -> None:
        """One that ledger and table know already."""
        self._offers.append(offer)

    def is_made(self, giver: Session, ids: Ids, receiver: int) -> bool:
        """Whether these very slots of ``giver`` are on offer to ``receiver`` already."""
        wanted = sorted(ids.tolist())
        return any(
            offer.giver is giver and offer.receiver == receiver and sorted(offer.ids.tolist()) == wanted
            for offer in self._offers
        )

    def accept(self, receiver: Session, request_id: int) -> Ids | None:
        """Take the oldest offer to ``receiver``, whole, or None if there is none; all holders change in one commit."""
        offer = next((offer for offer in self._offers if offer.receiver == receiver.number), None)
        if offer is None:
            return None
        if receiver.held + len(offer.ids) > receiver.limit:
            raise AllocatorUnavailable(
                f"{len(offer.ids)} slots are offered, and the limit of {receiver.limit} leaves room for "
                f"{receiver.limit - receiver.held}"
            )
        self._offers.remove(offer)
        pool = self._pool
        # Sorted as a repeated reply would be after a restart, which knows no other order.
        ids = offer.ids[np.argsort(pool.table.orders[offer.ids], kind="stable")]
        pool.ledger.hand_over(ids, receiver.number)
        offer.giver.held -= len(ids)
        offer.giver.offered -= len(ids)
        receiver.held += len(ids)
        pool.table.move(ids, st.owner_word(receiver.number), request_id)
        receiver.granted_at[request_id] = receiver.heard
        pool.commit()
        return ids

    def take_back(self, giver: Session, request_id: int) -> None:
        """End the one that a session made by that request, if there is one; staged."""
        made = st.offered_word(0, request_id)
        ended = [o for o in self._offers if o.giver is giver and o.word & ~st.RECEIVER_BITS == made]
        self._withdraw(ended)

    def end(self, session: Session) -> None:
        """Those of a session and those to it; staged."""
        self._withdraw([o for o in self._offers if o.giver is session or o.receiver == session.number])

    def end_to(self, receiver: Session) -> None:
        """Those to a session; staged."""
        self._withdraw([offer for offer in self._offers if offer.receiver == receiver.number])

    def forget(self, giver: Session) -> None:
        """Those of a session whose slots are all freed by the same change."""
        self._offers = [offer for offer in self._offers if offer.giver is not giver]

    def _withdraw(self, ended: list[Offer]) -> None:
        """The slots are plainly their givers' again."""
        for offer in ended:
            self._offers.remove(offer)
            self._pool.ledger.withdraw(offer.ids, offer.giver.number)
            offer.giver.offered -= len(offer.ids)
            self._pool.table.offer(offer.ids, 0)

    def _is_guaranteed(self, session: Session, slot: int) -> bool:
        table = self._pool.table
        return (
            0 < slot <= self._pool.slots
            and int(table.owners[slot]) == st.owner_word(session.number)
            and int(table.requests[slot]) == GUARANTEE_REQUEST
        )
