"""Transfers of a group: all its ranks call them, rank 0 does them for all."""

from __future__ import annotations

import torch

from mambapool.client.forms import packed_ids
from mambapool.client.group import Group
from mambapool.client.group_calls import GroupCalls
from mambapool.client.transport import Transport
from mambapool.pool import protocol
from mambapool.pool.errors import InvalidSlots
from mambapool.pool.group_calls import ACCEPT, TRANSFER, call_word, digest
from mambapool.pool.index_tensors import slot_ids


class GroupTransfers:
    """:class:`~mambapool.client.transfers.Transfers` of one rank. Its states go along on every rank's shard."""

    def __init__(self, transport: Transport, allocator: GroupCalls, group: Group) -> None:
        self._transport = transport
        self._allocator = allocator
        self._group = group
        self._size = transport.table.layout.slots

    def offer(self, slots: torch.Tensor, receiver: int) -> None:
        """Offer ``slots`` to another session, or to the group that it is in.

        Rank 0 waits until every rank has come here: what they have written before is there for the receiver.
        """
        ids = slot_ids(slots, size=self._size, what="transfer")
        if not ids:
            raise InvalidSlots("transfer: no slots were passed")
        what = packed_ids(ids)

        def offer() -> None:
            self._allocator.check_offer(before)
            self._group.await_ranks(self._group.position)
            try:
                self._transport.call(protocol.OFFER, what, receiver)
            except InvalidSlots:
                # An allocator that died had made the offer, and it was accepted before it was asked for again.
                if self._allocator.are_ours(ids):
                    raise

        call = call_word(TRANSFER, len(ids), digest(what + receiver.to_bytes(8, "little")))
        with self._allocator.in_turn():
            before = self._allocator.begin_offer(ids)
            try:
                self._allocator.shared.slots(call, offer)
            except InvalidSlots:
                self._allocator.undo_offer(ids, before)
                raise

    def accept(self, timeout: float) -> torch.Tensor | None:
        """The slots of the oldest offer to this group, the same ones on every rank; None: there was none."""

        def accept() -> list[int] | None:
            self._allocator.check_refused()
            reply = self._transport.call_and_wait(protocol.ACCEPT, True, wait=timeout, kept=True)
            if reply is None or reply[2] == protocol.NONE:
                return None
            slots: list[int] = protocol.unpack_ids(reply[3]).tolist()
            return slots

        with self._allocator.in_turn():
            slots = self._allocator.shared.slots(call_word(ACCEPT), accept, timeout)
        return None if slots is None else self._allocator.hold(slots)
