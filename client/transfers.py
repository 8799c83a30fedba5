"""Handing slots over to another session: from prefill to decode, or to continue from a copied state."""

from __future__ import annotations

import threading
from typing import Any

import torch

from mambapool.client.allocator import SlotAllocator
from mambapool.client.forms import packed_ids
from mambapool.client.transport import Transport
from mambapool.pool import protocol
from mambapool.pool.errors import InvalidSlots
from mambapool.pool.index_tensors import slot_ids


class Transfers:
    """Offers and accepts slots of one session. Never do both sessions hold a slot, and never neither."""

    def __init__(self, transport: Transport, allocator: SlotAllocator) -> None:
        self._transport = transport
        self._allocator = allocator
        self._size = transport.table.layout.slots
        self._lock = threading.Lock()
        #: An ACCEPT's answer whose slots are not held yet: the allocator was not there to tell what a clear() did.
        self._taking: list[Any] | None = None
        #: How often ``clear()`` had been called when that ACCEPT was made.
        self._clears = 0

    def offer(self, slots: torch.Tensor, receiver: int) -> None:
        """Offer ``slots`` to another session; they stay this one's, but cannot be freed, until it accepts.

        When the allocator does not answer, the offer is taken back, unless it was accepted before. On a GPU the offer
        is made later, when nothing writes to them.
        """
        if self.offer_later(slots, receiver):
            return
        ids = self.begin_offer(slots)
        try:
            self._transport.call(protocol.OFFER, packed_ids(ids), receiver)
        except InvalidSlots:
            if self._allocator.end_offer(ids):
                raise
        finally:
            self._allocator.offered(ids)

    def accept(self, timeout: float) -> torch.Tensor | None:
        """The slots of the oldest offer to this session, waited for ``timeout`` seconds; None: there was none."""
        with self._lock:
            self.check_usable()
            if self._taking is None:
                if not self._transport.has_unresolved:
                    self._clears = self.clears
                reply = self._transport.call_and_wait(protocol.ACCEPT, True, wait=timeout, kept=True)
                if reply is None:
                    return None
                self._taking = reply
            taken = self._take(self._taking)
            self._taking = None
            return taken

    def _take(self, reply: list[Any]) -> torch.Tensor | None:
        """What an ACCEPT was answered with is this session's, but for what a ``clear()`` has freed since."""
        slots = self.taken(reply)
        while slots:
            if (tensor := self.hold(slots, self._clears)) is not None:
                return tensor
            clears = self.clears
            self._transport.settle()
            slots, self._clears = self.still_ours(slots, reply), clears
        return None

    # The steps, of which none waits.

    def offer_later(self, slots: torch.Tensor, receiver: int) -> bool:
        """On a GPU: offered by the background thread, when nothing writes to them. False elsewhere."""
        if self._allocator.offers_later:
            self._allocator.offer_later(slots, receiver)
        return self._allocator.offers_later

    def begin_offer(self, slots: torch.Tensor) -> list[int]:
        """These cannot be freed from now on."""
        ids = slot_ids(slots, size=self._size, what="transfer")
        if not ids:
            raise InvalidSlots("transfer: no slots were passed")
        self._allocator.offering(ids)
        return ids

    def end_offer(self, ids: list[int]) -> bool:
        """The offer was refused; see :meth:`SlotAllocator.end_offer`."""
        return self._allocator.end_offer(ids)

    def offered(self, ids: list[int]) -> None:
        """The offer is no longer under way; see :meth:`SlotAllocator.offered`."""
        self._allocator.offered(ids)

    @property
    def clears(self) -> int:
        return self._allocator.clears

    @staticmethod
    def taken(reply: list[Any]) -> list[int]:
        """What an ACCEPT was answered with."""
        slots: list[int] = [] if reply[2] == protocol.NONE else protocol.unpack_ids(reply[3]).tolist()
        return slots

    def hold(self, slots: list[int], clears: int) -> torch.Tensor | None:
        """They are this session's; None if ``clear()`` was called since then, which may have freed them."""
        return self._allocator.hold_unless_cleared(slots, clears)

    def still_ours(self, slots: list[int], reply: list[Any]) -> list[int]:
        """Those of an ACCEPT's slots that no ``clear()`` has freed; all that was posted has to be applied."""
        table = self._transport.table
        number, request = self._transport.number, reply[0]
        return [slot for slot in slots if table.holder_of(slot) == number and table.request_of(slot) == request]

    def check_usable(self) -> None:
        """Raises what every call raises after a close, a fork, or the session's end."""
        self._allocator._check_usable()
