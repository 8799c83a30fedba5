"""How a client's grants, frees and windows go by message; what they mean is for :mod:`mambapool.client.allocator`."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, SupportsIndex

import torch

from mambapool.client.arguments import check_timeout
from mambapool.client.forms import drain, packed, tagged, whole_number
from mambapool.client.posted import Posted
from mambapool.client.record import Record
from mambapool.client.slot_tensors import SlotTensors
from mambapool.client.transport import Transport
from mambapool.client.turn import Turn
from mambapool.pool import protocol
from mambapool.pool.errors import MambaPoolError, PoolLost
from mambapool.pool.slot_table import H_DONE, H_LOST, H_SEQ, S_APPLIED


class SlotMessages:
    """What a client knows of its slots, and the steps in which the allocator hears and tells of them."""

    #: Whether what is freed inside a window goes along with the next message, and nowhere else.
    _collects = True
    _record_kind: type[Record] = Record

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
        self._record = self._record_kind(table, transport.number, len(self._cached) - self.size - 1)
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

    def _alloc_by_message(
        self, need_size: SupportsIndex, timeout: float | None, tag: str | None
    ) -> torch.Tensor | None:
        count = whole_number(need_size)
        if timeout is not None:
            check_timeout(timeout)
            if timeout > 0:
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
        with self._transport.waited_for(protocol.ALLOC, *arguments, frees=carried, wait=timeout) as reply:
            if reply is None:
                self._check_usable()
                return None
            with self._lock:
                if clears == self._clears:
                    return self._granted(reply, locked=True)
                # A clear() went by: whether before the grant or after it, nobody here can tell.
                self._posted.append(protocol.CANCEL, reply[0], 0)
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
        return self._transport.call(op, count, frees, *more, frees=carried, deadline=self._calls.deadline)

    def _take_freed(self) -> Posted | None:
        """What was freed inside an open window, for a request to carry."""
        with self._lock:
            return self._post_freed(protocol.FREE)

    def _end(self) -> None:
        if self._window_open:
            self._close_window(protocol.END)
            self._transport.flush()
            self._forget_applied()

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

    def _next_of_window(self) -> torch.Tensor | None:
        """As alloc(1) does inside a window; None when nothing is left of it, or there is none."""
        try:
            slot = self._window.pop()
        except IndexError:
            return None
        self._marks[slot] = 1
        return self._cached[slot]

    def _forget_applied(self) -> None:
        """Keep the queue short, without waiting. Not in the middle of a change: the free count comes last."""
        items = self._table_items
        done = items[H_DONE]
        applied = items[self._applied]
        if items[H_SEQ] == done:
            self._posted.forget_applied(applied)

    def _check_usable(self) -> None:
        if (reason := self._unusable) is not None:
            # A new one each time: an exception that is raised again keeps the frames of every raise.
            raise type(reason)(*reason.args)
        if self._table_items[H_LOST]:
            raise PoolLost("the memory of this pool is gone, its keeper died: connect again when it is back")
        if self._refusals:
            with contextlib.suppress(IndexError):  # another thread raises it
                raise self._refusals.pop(0)
