"""The allocator of a session on a GPU: what leaves the process waits in limbo until the GPU is done with it."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from mambapool.client.allocator import SlotAllocator
from mambapool.client.background import background
from mambapool.client.device_ids import DeviceIds
from mambapool.client.device_slots import DeviceSlotTensors
from mambapool.client.fenced_limbo import Entry, FencedLimbo
from mambapool.client.fences import Event, Fences
from mambapool.client.forms import packed, packed_ids
from mambapool.client.record import HELD, LEAVING
from mambapool.client.transport import Transport
from mambapool.pool import cuda_tensors, protocol
from mambapool.pool.errors import AllocatorUnavailable, DoubleFree, InvalidSlots
from mambapool.pool.index_tensors import check_form, check_ids, slot_ids

#: The background thread waits so long at most for an answer: other sessions are looked after by it, too.
_OFFER_S = 0.5


class Fenced(SlotAllocator):
    """What both allocators of a GPU have in common. Neither ``alloc(1)`` nor ``free`` waits for the device."""

    offers_later = True
    _collects = False

    def __init__(
        self,
        transport: Transport,
        device: torch.device | str,
        *,
        fences: Fences,
        tensors: DeviceSlotTensors | None = None,
        debug: bool = False,
    ) -> None:
        super().__init__(transport, device, tensors=tensors, debug=debug)
        self._fences = fences
        self._limbo = FencedLimbo()
        #: None when slot tensors are in the host's memory: then every id is read at once.
        self._ids = None if tensors is None else DeviceIds(tensors, self._marks, fences)
        #: Cells that were handed out, and whose ids turned out to be no slots of ours.
        self._void: set[int] = set()
        #: Frees that came while a graph was captured.
        self._held_back: list[tuple[torch.Tensor, tuple[Any, ...]]] = []
        self._ticking = threading.Lock()

    @property
    def is_busy(self) -> bool:
        """Whether the background thread has something to look at soon."""
        if self._unusable is not None:
            return False
        return bool(self._limbo) or self._fences.is_busy or bool(self._ids and self._ids.unknown)

    def free(self, free_index: torch.Tensor, after: Any = None) -> None:
        """Give slots back: an integer tensor of one dimension or none, or a list of ints. Never waits.

        Others get them when all GPU work that was queued before this call has finished: on the streams that
        ``worker.fence_streams`` named, else in the whole context; and when ``after``, events, are over. Ids on the
        device are taken as they are at this point of the current stream, and checked later: what is wrong with
        them is raised at a later call.
        """
        events = tuple(Event(event) for event in after) if after is not None else ()
        self._fences.check()
        self._catch_up()
        place = self._slot_of(free_index)
        if place >= 0:
            places = given = [place]
        elif self._ids is not None and isinstance(free_index, torch.Tensor) and self._is_ours(free_index):
            check_form(free_index, "free")
            self._free_unknown(free_index, events)
            return
        else:
            given = slot_ids(free_index, size=self._largest_id(), what="free")
            places = self._places_of(given)
        if self._unusable is not None or self._refusals:
            self._check_usable()
        if not places:
            return
        self._free_places(places, given, events)
        self._look_after_posted()

    def tick(self) -> None:
        """For the background thread: what the GPU is done with leaves the process."""
        if self._unusable is not None or not self._ticking.acquire(blocking=False):
            return
        try:
            self._fences.poll()
            if self._fences.failed is not None and self._fences.failed not in self._refusals:
                self._refusals.append(self._fences.failed)
                self._unusable = self._fences.failed
                return
            with self._lock:
                self._resolve()
                leaving = self._limbo.pop_passed(self._fences.passed, self.is_over, self._is_known)
                offers = [entry for entry in leaving if entry.receiver]
                for entry in leaving:
                    if not entry.receiver:
                        self._leave(entry)
            self._transport.flush()
            for entry in offers:
                self._send_offer(entry)
        finally:
            self._ticking.release()

    def offer_later(self, slots: torch.Tensor, receiver: int) -> None:
        """Offer slots to another session when the GPU is done with them; they cannot be freed from now on.

        Returns at once. An offer that the allocator refuses is raised at a later call, and the slots are plainly
        this client's again.
        """
        self._check_usable()
        self._fences.check()
        listed = [self._slot_of(slots)]
        if listed[0] < 0:
            listed = self._places_of(slot_ids(slots, size=self._pool_slots(), what="transfer"))
        if not listed:
            raise InvalidSlots("transfer: no slots were passed")
        with self._lock:
            self._refuse_unless_held(listed)
            for place in listed:
                self._marks[place] = LEAVING
            self._limbo.put(Entry(listed, self._fences.issue(), receiver=receiver))
        background().wake()

    def held(self) -> list[int]:
        """What this client holds and may free, ascending; also what was freed by an id that is not known yet."""
        with self._lock:
            self._record.take_back_ended()
            held = self._record.held()
            return sorted(slot for slot in map(self._slot_at, held) if slot is not None)

    def events(self) -> list[Event]:
        """The callers' events that have to be over before this session may end."""
        with self._lock:
            return self._limbo.events()

    # What the two allocators do differently.

    def _take_back_after(self, places: list[int], events: tuple[Any, ...]) -> None:
        """Under the lock: freed places, in call order."""
        raise NotImplementedError

    def _leave(self, entry: Entry) -> None:
        """Under the lock: nothing on the device can touch these any more."""
        slots = self._plain(entry.places)
        self._posted.append(protocol.FREE, packed(slots), len(slots))

    def _withdraw(self, place: int) -> bool:
        """Under the lock: forget a place that stands for no slot of ours; whether it was still here."""
        return self._limbo.remove(place)

    def _knows(self, _place: int) -> None:
        """Under the lock: it is known now which slot this place stands for."""

    def _free_places(self, places: list[int], given: list[int], events: tuple[Event, ...]) -> None:
        """``given``: what the caller said, slots, or a cell that stands for one."""
        with self._lock:
            places = self._given_back(places)
            self._take_back_after(places, events)

    def _free_copied(self, flat: torch.Tensor, events: tuple[Event, ...]) -> bool:
        """Free ids that only the device knows; False: they have to be read."""
        assert self._ids is not None
        with self._lock:
            places = self._ids.copy(flat)
            if places is not None:
                self._take_back_after(places, events)
        return places is not None

    # Ids that are known late.

    def _free_unknown(self, index: torch.Tensor, events: tuple[Any, ...]) -> None:
        if not index.numel():
            return
        if self._unusable is not None or self._refusals:
            self._check_usable()
        if cuda_tensors.is_capturing():
            # A copy would become part of the graph: these are freed when the capture is over, as they are then.
            self._held_back.append((index, events))
            return
        flat = index.reshape(-1).to(torch.int64)
        if self._free_copied(flat, events):
            self._look_after_posted()
        else:
            # More ids under way than there are cells: only now somebody waits.
            self.free(torch.tensor(flat.tolist()), after=[event.value for event in events])

    def _resolve(self) -> None:
        """Under the lock: check the ids that have come."""
        if self._ids is None:
            return
        for place, slot, copied in self._ids.arrived():
            try:
                check_ids([slot], self._pool_slots(), "free")
                if not self._ids.was_held(slot, copied):
                    self._refuse_late(slot)
            except InvalidSlots as error:
                self._refusals.append(error)
                if not self._withdraw(place):
                    self._void.add(place)
                else:
                    self._ids.leave(place)
                continue
            self._ids.stand_for(place, slot)
            self._knows(place)

    def _refuse_late(self, slot: int) -> None:
        if self._table.holder_of(slot) in (0, self._record.session):
            raise DoubleFree(f"slot {slot} was freed twice; its id was known only after the call", [slot])
        self._record.refuse([slot])

    def _given_back(self, places: list[int]) -> list[int]:
        """Under the lock: the caller has them no more; refused whole if it did not have them all."""
        if self._ids is None:
            self._record.give_back(places)
            return places
        ids = self._ids
        valid = []
        for place in places:
            if place in self._void:
                self._void.discard(place)
                ids.leave(place)
                continue
            if place > self._pool_slots() and self._marks[place] != HELD:
                # An old tensor of a slot that stands for itself again.
                slot = ids.slot_of(place)
                place = place if slot is None else ids.place_of(slot)
            valid.append(place)
        self._refuse_unless_held(valid)
        for place in valid:
            self._marks[place] = 0
        ids.note_freed(valid)
        return valid

    def _refuse_unless_held(self, places: list[int]) -> None:
        faulty = [place for place in places if self._marks[place] != HELD]
        if self._ids is None or all(place <= self._pool_slots() for place in faulty):
            if faulty:
                self._record.give_back(places)  # raises what is wrong, unless an offer of them has ended
                self._record.hold(places)
            return
        known = [slot for place in faulty if (slot := self._ids.slot_of(place)) is not None]
        raise DoubleFree(f"slots {known or 'whose ids are not known yet'} are already free", known)

    def _places_of(self, slots: list[int]) -> list[int]:
        if self._ids is None:
            return slots
        with self._lock:
            self._resolve()  # the caller may have waited for an id: then it is here, too
            return [self._ids.place_of(slot) for slot in slots]

    def _is_ours(self, value: torch.Tensor) -> bool:
        """Whether it is on this session's GPU: the order of another one's work is not known here."""
        if value.layout is not torch.strided or value.is_meta:
            return False
        return cuda_tensors.is_on_device(value, self._fences.context.device.ordinal)

    def _is_known(self, place: int) -> bool:
        return self._slot_at(place) is not None

    def _plain(self, places: list[int]) -> list[int]:
        return places if self._ids is None else [self._ids.plain(place) for place in places]

    def _slot_at(self, place: int) -> int | None:
        return place if self._ids is None else self._ids.slot_of(place)

    def _forget_held(self) -> None:
        if self._ids is not None:
            self._ids.forget()
            self._void.clear()
        self._record.clear(offers_end=False)

    def _pool_slots(self) -> int:
        return self._table.layout.slots

    # Fences and offers.

    def is_over(self, event: Event) -> bool:
        return self._fences.is_event_over(event.handle)

    def _catch_up(self) -> None:
        """What had to wait for the end of a capture."""
        self._fences.retry()
        if self._held_back and not cuda_tensors.is_capturing():
            held_back, self._held_back = self._held_back, []
            for index, events in held_back:
                self._free_unknown(index, events)

    def _look_after_posted(self) -> None:
        background().wake()
        if self._posted:
            self._transport.flush()
            self._forget_applied()

    def _send_offer(self, entry: Entry) -> None:
        with self._lock:
            slots = self._plain(entry.places)
            self._record.note_offer(slots)
        deadline = time.monotonic() + _OFFER_S
        try:
            self._transport.call(protocol.OFFER, packed_ids(slots), entry.receiver, deadline=deadline)
        except InvalidSlots as error:
            if self.end_offer(slots):
                self._refusals.append(error)
        except AllocatorUnavailable:
            # It is taken back, if it was made, before it is made again; one that was accepted is not ours to make.
            if any(self._table.holder_of(slot) == self._transport.number for slot in slots):
                with self._lock:
                    self._limbo.put_back(Entry(slots, 0, receiver=entry.receiver))
                return
        self.offered(slots)
