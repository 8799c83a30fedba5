"""The allocator that schedulers see: SGLang's ``MambaSlotAllocator``, over the slots of a shared pool."""

from __future__ import annotations

import contextlib
import operator
import struct
import threading
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch

from mambapool.client.posted import Posted
from mambapool.client.record import HELD, Record
from mambapool.client.slot_tensors import SlotTensors
from mambapool.client.transport import Transport
from mambapool.client.turn import Turn
from mambapool.pool import protocol
from mambapool.pool.errors import MambaPoolError, PoolLost
from mambapool.pool.index_tensors import slot_ids
from mambapool.pool.slot_table import H_DONE, H_FREE_COUNT, H_LOST, H_SEQ, H_WAITING, S_APPLIED


class SlotAllocator:
    """Hands out slots of a pool that other processes use too. SGLang's names, meanings and order.

    Exhaustion is ``None``; a window is all or nothing. Misuse raises an
    :class:`~mambapool.pool.errors.InvalidSlots` that names the slots and changes nothing.

    Safe to use from several threads; a window belongs to the client, not to the thread that opened it.
    After a fork the child's copy raises :class:`~mambapool.pool.errors.ForkedClient`. Slot tensors are shared
    views: clone one before writing into it.
    """

    #: Whether slots are offered by :meth:`offer_later`, when a GPU is done with them.
    offers_later = False
    #: Whether what is freed inside a window goes along with the next message, and nowhere else.
    _collects = True

    def __init__(
        self,
        transport: Transport,
        device: torch.device | str,
        *,
        tensors: SlotTensors | None = None,
        debug: bool = False,
    ) -> None:
        table = transport.table
        #: Slots of the pool; ids are 1..size.
        self.size = table.layout.slots
        #: Where slot tensors live, as it was given.
        self.device = device
        self._transport = transport
        self._posted = transport.posted
        self._unapplied = transport.posted.queue
        self._refusals = transport.refusals
        self._table = table
        self._table_items = table.items
        self._row = transport.session["row"]
        self._applied = table.layout.session(self._row) + S_APPLIED
        self._limit: int = min(transport.session["limit"], self.size)
        #: Whether available_size() has more to look at than the free count: a limit, or a reason to raise.
        self._careful = self._limit < self.size
        #: How often clear() was called: an alloc that waited over one does not know what it has.
        self._clears = 0
        self._tensors = tensors or SlotTensors(self.size, torch.device(device))
        self._cached = self._tensors.cached
        #: Empty where each free shall look whether a slot tensor was written into.
        self._slot_by_id = {} if debug else self._tensors.slot_by_id
        self._record = Record(table, transport.number, len(self._cached) - self.size - 1)
        self._marks = self._record.marks
        self._debug = debug
        #: The open window's slots that alloc(1) has not handed out, next one last.
        self._window: list[int] = []
        self._window_open = False
        #: What was freed inside the open window, in call order: it travels with the next message.
        self._freed_inside: list[int] = []
        # One call at a time changes what the allocator is asked for; the other lock guards the record and
        # is held for microseconds, so that free() never waits for a call. What is posted is numbered under the
        # other lock too: the allocator then sees frees and clears in the order in which the record did.
        self._calls = Turn(transport)
        self._lock = threading.Lock()
        self._unusable: MambaPoolError | None = None

    def __repr__(self) -> str:
        window = f", window of {len(self._window)} left" if self._window_open else ""
        return f"SlotAllocator(session={self._transport.number}, size={self.size}{window})"

    def available_size(self) -> int:
        """How many slots an ``alloc`` could get now; no message: read from the slot table.

        Free slots, and those that this client has given back and the allocator has not yet applied; within its
        limit. 0 while somebody waits for slots: they are theirs first.
        """
        # In this order: what is freed inside is posted before it is taken off its list.
        if self._freed_inside or self._unapplied or self._refusals or self._careful:
            return self._available_with_pending()
        items = self._table_items
        return 0 if items[H_WAITING] else items[H_FREE_COUNT]

    def schedulable_available_size(self) -> int:
        """The same number: this pool is static, as SGLang's is."""
        return self.available_size()

    @property
    def free_slots(self) -> torch.Tensor:
        """The free list as far as this client can know it, head first: int64 on :attr:`device`.

        A new tensor at each call: changing it frees nothing. Waits until what was posted is applied.
        """
        with self._calls:
            self._check_usable()
            return self._list_of(self._transport.settle())

    def alloc(
        self, need_size: SupportsIndex, timeout: float | None = None, tag: str | None = None
    ) -> torch.Tensor | None:
        """``need_size`` slots as an int64 tensor of shape ``(need_size,)``, or None: not so many are free.

        ``alloc(1)`` inside a window costs no message; everything else is one round trip. With ``timeout`` it
        waits so many seconds for slots, first come, first served; while somebody waits, nobody overtakes.

        ``tag``, 1 to 128 bytes of printable text, is shown by ``mambapool audit``: what the slots are for. Inside a
        window that of the window stands.
        """
        if tag is not None:
            protocol.check_tag(tag)
        if need_size == 1:
            try:
                slot = self._window.pop()
            except IndexError:
                pass
            else:
                self._marks[slot] = 1
                return self._cached[slot]
            if self._collects and timeout is None and tag is None:
                return self._alloc_one()
        return self._alloc_by_message(need_size, timeout, tag)

    def alloc_group_begin(self, num_reqs: SupportsIndex, partial: bool = False, tag: str | None = None) -> None:
        """Open a window of ``num_reqs`` slots, which ``alloc(1)`` then drains without messages.

        All or nothing, unless ``partial``: then as many as there are. When nothing comes, no window is open
        and ``alloc`` asks one by one. The rest of a window that is still open is given back first.

        ``tag`` is shown by ``mambapool audit`` for all of its slots.
        """
        if tag is not None:
            protocol.check_tag(tag)
        count = whole_number(num_reqs)
        with self._calls:
            self._check_usable()
            if count == 0:
                self._end()
                return
            carried = self._close_window(protocol.FREE)
            # No pool has more slots, and the wire carries no larger number than an int32.
            reply = self._ask(protocol.BEGIN, carried, min(count, self.size + 1), bool(partial), *tagged(tag))
            if reply[2] == protocol.NONE:
                return
            self._open_window(reply)

    def alloc_group_end(self) -> None:
        """Close the window: one message, unawaited, with what was freed inside and what is left unused."""
        with self._calls:
            self._check_usable()
            self._end()

    def free(self, free_index: torch.Tensor, after: Any = None) -> None:
        """Give slots back: an integer tensor of one dimension or none, or a list of ints. Never waits.

        Values are taken as they are at the call. Empty ones do nothing. A free that the allocator refuses is
        raised at this client's next call. ``after`` is for GPUs: memory of the host has no work under way.
        """
        slot = self._slot_by_id.get(id(free_index), 0)
        if slot and self._window_open and self._collects and not self._refusals:
            # What an engine frees most. Without the lock, which takes longer than all of this: each step is one that
            # the GIL makes whole. If two threads free the same slot at once, the allocator finds it.
            marks = self._marks
            if marks[slot] == HELD:
                marks[slot] = 0
                self._freed_inside.append(slot)
                if not self._window_open:
                    self._leave_late()  # what closed the window may not have seen it
                return
        slot = slot or self._slot_of(free_index)
        slots = [slot] if slot > 0 else slot_ids(free_index, size=self._largest_id(), what="free")
        if self._unusable is not None or self._refusals:
            self._check_usable()
        if not slots:
            return
        with self._lock:
            if slot > 0 and self._marks[slot] == HELD:
                self._marks[slot] = 0
            else:
                self._record.give_back(slots)
            self._take_back(slots)
        if self._unapplied and not self._window_open:
            self._transport.flush()
            self._forget_applied()

    def clear(self) -> None:
        """Free everything that this client holds, and nothing of anybody else; ends its window.

        When that leaves the whole pool free, its list is 1..size again.
        """
        with self._calls:
            self._check_usable()
            unused = drain(self._window)
            with self._lock:
                self._window_open = False
                freed = len(self._freed_inside)
                count = self._record.clear() + freed + len(unused)
                self._posted.append(protocol.CLEAR, None, count)
                del self._freed_inside[:freed]
                self._clears += 1
            self._transport.flush()

    def held(self) -> list[int]:
        """What this client holds and may free, ascending; its window's unused slots are not among it."""
        with self._lock:
            return self._record.held()

    def disable(self, reason: MambaPoolError) -> None:
        """Every later call raises ``reason``; takes no lock, so that a forked child can call it."""
        self._unusable = reason
        self._careful = True
        self._window = []
        self._window_open = False
        # In a forked child the old one may be held by a thread that exists in the parent only.
        self._calls = Turn(self._transport)

    def hold(self, slots: list[int]) -> torch.Tensor:
        """These became this client's by a transfer: as the tensor that ``alloc`` would return."""
        with self._lock:
            self._record.hold(slots)
        return self._tensors.copy_of(slots)

    def offer(self, slots: list[int]) -> None:
        """These are offered to another session: not to be freed from now on."""
        self._check_usable()
        with self._lock:
            self._record.offer(slots)

    def end_offer(self, slots: list[int]) -> bool:
        """The allocator refuses an offer of these: they are plainly this client's again.

        False if none of them is: an allocator that died before it answered had made the offer, and the receiver
        was there before the repeat.
        """
        with self._lock:
            return self._record.end_offer(slots)

    def offer_later(self, slots: torch.Tensor, receiver: int) -> None:
        """Offer slots to another session without waiting; only if :attr:`offers_later`."""
        raise NotImplementedError

    def _largest_id(self) -> int:
        return self.size

    def _take_back(self, slots: list[int]) -> None:
        """Under the lock: freed slots, in call order, on their way to the allocator."""
        if self._window_open:
            self._freed_inside += slots
        else:
            self._posted.append(protocol.FREE, packed(slots), len(slots))

    def _alloc_by_message(
        self, need_size: SupportsIndex, timeout: float | None, tag: str | None
    ) -> torch.Tensor | None:
        count = whole_number(need_size)
        if timeout is not None and timeout > 0:
            return self._alloc_in_turn(count, timeout, tag)
        with self._calls:
            self._check_usable()
            if not 0 < count <= self.size:
                return None if count else self._tensors.copy_of([])
            reply = self._ask(protocol.ALLOC, self._take_freed(), count, False, *tagged(tag))
            return self._granted(reply)

    def _alloc_one(self) -> torch.Tensor | None:
        """:meth:`_alloc_by_message` of one, in as few steps as there are: it is what most messages are for."""
        turn = self._calls
        if turn.lock.acquire(blocking=False):
            deadline = None
        else:
            turn.take()
            deadline = turn.deadline
        try:
            if self._unusable is not None or self._refusals or self._table_items[H_LOST]:
                self._check_usable()
            carried = frees = None
            if self._freed_inside:
                with self._lock:
                    carried = self._post_freed(protocol.FREE)
                    frees = None if carried is None else carried.argument
            reply = self._transport.call(protocol.ALLOC, 1, frees, False, frees=carried, deadline=deadline)
            if self._refusals:
                self._take_back_grant(reply)
            if reply[2] == protocol.NONE:
                return None
            slot = reply[3]
            if type(slot) is not int:
                return self._granted(reply)
            self._marks[slot] = 1
            tensor = self._cached[slot]
            return self._tensors.get(slot) if tensor is None else tensor
        finally:
            turn.lock.release()

    def _alloc_in_turn(self, count: int, timeout: float, tag: str | None) -> torch.Tensor | None:
        """Not under the lock of calls: other threads free, and so on, while this one waits."""
        self._check_usable()
        if not 0 < count <= self.size:
            return None if count else self._tensors.copy_of([])
        with self._lock:
            clears = self._clears
            carried = self._post_freed(protocol.FREE)
        frees = None if carried is None else carried.argument
        arguments = (count, frees, True, *tagged(tag))
        reply = self._transport.call_and_wait(protocol.ALLOC, *arguments, frees=carried, wait=timeout)
        if reply is None:
            self._check_usable()
            return None
        with self._lock:
            if clears == self._clears:
                return self._granted(reply, locked=True)
        # A clear() went by: whether before the grant or after it, nobody here can tell.
        self._transport.post(protocol.CANCEL, reply[0], 0)
        return None

    def _granted(self, reply: list[Any], *, locked: bool = False) -> torch.Tensor | None:
        """What a reply hands out, entered in the record."""
        if reply[2] == protocol.NONE:
            return None
        slots = reply[3]
        if type(slots) is int:
            self._marks[slots] = 1
            return self._tensors.get(slots)
        ids = protocol.unpack_ids(slots)
        with contextlib.nullcontext() if locked else self._lock:
            self._record.hold(ids.tolist())
        return self._tensors.copy_of(ids)

    def _ask(self, op: int, carried: Posted | None, count: int, *more: Any) -> list[Any]:
        """A request that carries along what was freed; raises what the allocator refused before it."""
        frees = None if carried is None else carried.argument
        reply = self._transport.call(op, count, frees, *more, frees=carried, deadline=self._calls.deadline)
        if self._refusals:
            self._take_back_grant(reply)
        return reply

    def _take_back_grant(self, reply: list[Any]) -> None:
        """The allocator refused something before: as if this call had not been made."""
        self._transport.post(protocol.CANCEL, reply[0], 0)
        self._check_usable()

    def _end(self) -> None:
        if self._window_open:
            self._close_window(protocol.END)
            self._transport.flush()
            self._forget_applied()

    def _take_freed(self) -> Posted | None:
        """What was freed inside an open window, for a request to carry."""
        with self._lock:
            return self._post_freed(protocol.FREE)

    def _next_of_window(self) -> torch.Tensor | None:
        """As alloc(1) does inside a window; None when nothing is left of it, or there is none."""
        try:
            slot = self._window.pop()
        except IndexError:
            return None
        self._marks[slot] = 1
        return self._cached[slot]

    def _list_of(self, free: npt.NDArray[np.int64]) -> torch.Tensor:
        """The free list, of which the slot table knows ``free``."""
        with self._lock:
            ids = np.concatenate((free, np.array(self._freed_inside, np.int64)))
        return self._tensors.copy_of(ids)

    def _close_window(self, op: int) -> Posted | None:
        """Post what goes back with it: frees in call order, then the unused rest. That is SGLang's order."""
        # Taken one by one: a thread in alloc(1) may still have the list, and each pop goes to one of us.
        unused = drain(self._window)
        with self._lock:
            # In this order: see free().
            self._window_open = False
            self._freed_inside += unused
            return self._post_freed(op)

    def _post_freed(self, op: int) -> Posted | None:
        """Number what was freed inside the window, to be sent; under the lock of the record."""
        # Never another list: a thread in free() may be about to append to this one.
        freed = self._freed_inside[:]
        if not freed and op == protocol.FREE:
            return None
        posted = self._posted.append(op, packed(freed) if freed else None, len(freed))
        del self._freed_inside[: len(freed)]
        return posted

    def _leave_late(self) -> None:
        """Post what was freed inside a window that another thread has closed meanwhile."""
        with self._lock:
            if not self._window_open:
                self._post_freed(protocol.FREE)
        self._transport.flush()

    def _open_window(self, reply: list[Any]) -> None:
        """What a BEGIN was granted is what alloc(1) hands out from now on."""
        ids = reply[3]
        # Little-endian, as every machine that this runs on; without numpy, whose caches are cold here.
        slots = [ids] if type(ids) is int else memoryview(ids).cast("i").tolist()
        self._tensors.make(slots)
        slots.reverse()
        with self._lock:
            self._window = slots
            self._window_open = True

    def _available_with_pending(self) -> int:
        self._check_usable()
        with self._lock:
            applied, free = self._table.applied_and_free(self._row)
            pending = self._posted.forget_applied(applied) + len(self._freed_inside)
            if self._table_items[H_WAITING]:
                return 0
            if self._limit == self.size:
                return free + pending
            held = self._record.count() + len(self._window)
            return max(min(free + pending, self._limit - held), 0)

    def _forget_applied(self) -> None:
        """Keep the queue short, without waiting. Not in the middle of a change: the free count comes last."""
        items = self._table_items
        done = items[H_DONE]
        applied = items[self._applied]
        if items[H_SEQ] == done:
            self._posted.forget_applied(applied)

    def _slot_of(self, value: object) -> int:
        """The slot, if ``value`` is one of our slot tensors or a view of one; read from its address."""
        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.is_meta:
            return -1
        slot = self._tensors.slot_at(value.data_ptr())
        if slot > 0 and value.dtype is torch.int64 and value.numel() == 1 and value.dim() < 2:
            if self._debug:
                self._tensors.check()
            return slot
        return -1

    def _check_usable(self) -> None:
        if (reason := self._unusable) is not None:
            # A new one each time: an exception that is raised again keeps the frames of every raise.
            raise type(reason)(*reason.args)
        if self._table_items[H_LOST]:
            raise PoolLost("the memory of this pool is gone, its keeper died: connect again when it is back")
        if self._refusals:
            with contextlib.suppress(IndexError):  # another thread raises it
                raise self._refusals.pop(0)


def whole_number(value: SupportsIndex) -> int:
    """A count of slots: a ``TypeError`` or ``ValueError`` unless it is a whole number of at least 0."""
    count = operator.index(value)
    if count < 0:
        raise ValueError(f"{count} slots: expected 0 or more")
    return count


def tagged(tag: str | None) -> tuple[str, ...]:
    """The last field of a request that has a tag."""
    return () if tag is None else (tag,)


def packed(slots: list[int]) -> int | bytes:
    """Slots as a message carries them."""
    first: int = slots[0]
    return first if len(slots) == 1 else packed_ids(slots)


def packed_ids(slots: list[int]) -> bytes:
    return struct.pack(f"<{len(slots)}i", *slots)  # from a list, three times faster than numpy


def drain(window: list[int]) -> list[int]:
    """Take what is left of a window, next one first; a thread in alloc(1) may take some, too."""
    rest = []
    try:
        while True:
            rest.append(window.pop())
    except IndexError:
        return rest
