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

    def offer(self, slots: torch.Tensor, receiver: int) -> None:
        """Offer ``slots`` to another session; they stay this one's, but cannot be freed, until it accepts.

        When the allocator does not answer, the offer may have been made or not: whether a slot is still ours,
        the slot table tells when it is freed. On a GPU the offer is made later, when nothing writes to them.
        """
        if self.offer_later(slots, receiver):
            return
        ids = self.begin_offer(slots)
        try:
            self._transport.call(protocol.OFFER, packed_ids(ids), receiver)
        except InvalidSlots:
            if self._allocator.end_offer(ids):
                raise

    def accept(self, timeout: float) -> torch.Tensor | None:
        """The slots of the oldest offer to this session, waited for ``timeout`` seconds; None: there was none."""
        with self._lock:
            self.check_usable()
            reply = self._transport.call_and_wait(protocol.ACCEPT, True, wait=timeout, kept=True)
            return None if reply is None else self.take(reply)

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
        self._allocator.offer(ids)
        return ids

    def end_offer(self, ids: list[int]) -> bool:
        """The offer was refused; see :meth:`SlotAllocator.end_offer`."""
        return self._allocator.end_offer(ids)

    def take(self, reply: list[Any]) -> torch.Tensor | None:
        """What an ACCEPT was answered with is this session's."""
        if reply[2] == protocol.NONE:
            return None
        slots: list[int] = protocol.unpack_ids(reply[3]).tolist()
        return self._allocator.hold(slots)

    def check_usable(self) -> None:
        """Raises what every call raises after a close, a fork, or the session's end."""
        self._allocator._check_usable()
