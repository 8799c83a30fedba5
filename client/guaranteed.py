"""The allocator of a session with a guarantee: SGLang's list, run locally on slots that nobody else can have."""

from __future__ import annotations

import time
from collections import deque
from typing import SupportsIndex

import torch

from mambapool.client.allocator import SlotAllocator
from mambapool.client.arguments import check_timeout
from mambapool.client.forms import drain, packed, whole_number
from mambapool.client.slot_tensors import SlotTensors
from mambapool.client.transport import Transport
from mambapool.pool import protocol
from mambapool.pool.errors import MambaPoolError

#: How often an alloc that waits looks whether another thread has freed something.
_LOOK_S = 0.001


class GuaranteedAllocator(SlotAllocator):
    """:class:`SlotAllocator` over the slots that were granted whole at attach: no call costs a message.

    ``size`` and what ``available_size()`` counts are the guarantee; ids are those of the pool, up to its size.
    After a ``None`` freeing one slot makes the next alloc succeed, whatever other sessions do. Slots that came
    by a transfer are on top of the guarantee: freeing them gives them back to the pool.
    """

    _collects = False

    def __init__(
        self,
        transport: Transport,
        device: torch.device | str,
        *,
        tensors: SlotTensors | None = None,
        debug: bool = False,
    ) -> None:
        super().__init__(transport, device, tensors=tensors, debug=debug)
        granted: list[int] = protocol.unpack_ids(transport.session["granted"]).tolist()
        self._pool_size = self.size
        self.size = len(granted)
        self._guaranteed = frozenset(granted)
        self._tensors.make(granted)
        #: The free list, head first. Its popleft() is atomic, so that alloc(1) takes no lock.
        self._list = deque(granted)

    def available_size(self) -> int:
        """How many slots of the guarantee are free: local knowledge."""
        if self._unusable or self._refusals:
            self._check_usable()
        return len(self._list)

    @property
    def free_slots(self) -> torch.Tensor:
        """The free list, head first: a new int64 tensor on :attr:`device`."""
        self._check_usable()
        with self._lock:
            return self._tensors.copy_of(list(self._list))

    def alloc(
        self, need_size: SupportsIndex, timeout: float | None = None, tag: str | None = None
    ) -> torch.Tensor | None:
        """``need_size`` slots as an int64 tensor of shape ``(need_size,)``, or None: not so many are free.

        With ``timeout`` it waits so many seconds for another thread to free some. ``tag`` is checked and goes
        nowhere: the allocator does not hear which slots of a guarantee are in use, and what for.
        """
        if tag is not None:
            protocol.check_tag(tag)
        if need_size == 1:
            try:
                # Looked at first: an exception takes longer than all of this. Another thread may still be faster.
                slot = self._window.pop() if self._window else self._list.popleft()
            except IndexError:
                return self._alloc_more(need_size, timeout)
            self._marks[slot] = 1
            return self._cached[slot]
        return self._alloc_more(need_size, timeout)

    def alloc_group_begin(self, num_reqs: SupportsIndex, partial: bool = False, tag: str | None = None) -> None:
        """Open a window of ``num_reqs`` slots; all or nothing, unless ``partial``. No message either."""
        if tag is not None:
            protocol.check_tag(tag)
        count = whole_number(num_reqs)
        self._check_usable()
        self._end_window()
        with self._lock:
            taken = self._take(min(count, len(self._list)) if partial else count)
            if taken:
                taken.reverse()
                self._window = taken
                self._window_open = True

    def alloc_group_end(self) -> None:
        """Close the window: what is left unused goes to the end of the list."""
        self._check_usable()
        self._end_window()

    def clear(self) -> None:
        """Free everything that this client holds, but for what is on offer; the list is in ascending order again."""
        self._check_usable()
        drain(self._window)
        with self._lock:
            self._record.take_back_ended()
            transferred = [slot for slot in self._record.held() if slot not in self._guaranteed]
            # What is on offer may be the receiver's by now, and comes back if that one ends.
            self._record.clear(offers_end=False)
            self._list.clear()
            self._list.extend(sorted(self._guaranteed))
            self._window_open = False
            if transferred:
                self._give_transferred(transferred)
        self._transport.flush()

    def disable(self, reason: MambaPoolError) -> None:
        """Every later call raises ``reason``; takes no lock, so that a forked child can call it."""
        super().disable(reason)
        self._list = deque()

    def _largest_id(self) -> int:
        return self._pool_size

    def _take_back(self, slots: list[int]) -> None:
        """Under the lock: freed slots, in call order."""
        if not self._guaranteed.issuperset(slots):
            self._give_transferred([slot for slot in slots if slot not in self._guaranteed])
            slots = [slot for slot in slots if slot in self._guaranteed]
        self._list.extend(slots)

    def _give_transferred(self, slots: list[int]) -> None:
        """Under the lock: freed slots that came by a transfer, on their way to the allocator."""
        self._posted.append(protocol.FREE, packed(slots), len(slots))

    def _end_window(self) -> None:
        unused = drain(self._window)
        with self._lock:
            self._list.extend(unused)
            self._window_open = False

    def _alloc_more(self, need_size: SupportsIndex, timeout: float | None) -> torch.Tensor | None:
        count = whole_number(need_size)
        if timeout is not None:
            check_timeout(timeout)
        self._check_usable()
        if not timeout and count > len(self._list):
            return None
        deadline = time.monotonic() + (timeout or 0.0)
        while True:
            with self._lock:
                taken = self._take(count)
                if taken is not None:
                    self._record.hold(taken)
                    break
            if count > self.size or time.monotonic() >= deadline:
                return None
            time.sleep(_LOOK_S)
            self._check_usable()
        if count == 1:
            return self._tensors.get(taken[0])
        return self._tensors.copy_of(taken)

    def _take(self, count: int) -> list[int] | None:
        """Under the lock: so many from the head, or None."""
        if count > len(self._list):
            return None
        taken: list[int] = []
        try:
            for _ in range(count):
                taken.append(self._list.popleft())
        except IndexError:
            # Another thread's alloc(1), which takes no lock, was faster.
            self._list.extendleft(reversed(taken))
            return None
        return taken
