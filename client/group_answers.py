"""Calls that rank 0 does for the whole group: it writes the answers into the group page, the others read them there.

Both sides are used alike: ``slots(call, work)`` does the work on rank 0, and gives its answer, or raises its error,
on every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from mambapool.client.group import Group
from mambapool.pool import protocol
from mambapool.pool.errors import AllocatorUnavailable, MambaPoolError
from mambapool.pool.group_calls import digest
from mambapool.pool.group_page import Answer

#: An error's text is cut to so many bytes in the page.
_MAX_TEXT_BYTES = 2000

_T = TypeVar("_T")


class Leading:
    """Rank 0: does the work, and answers for all; waits for the slowest rank while its unread answers leave no room."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._page = group.page
        #: Place of the next item in the endless data ring.
        self._next = 0
        #: Where the data of recent calls begins.
        self._starts: deque[tuple[int, int]] = deque()

    def slots(self, call: int, work: Callable[[], list[int] | None], wait: float = 0.0) -> list[int] | None:
        """A call that hands out slots, or None; it may take ``wait`` seconds besides the timeout."""
        return self._answered(call, work, self._write_slots)

    def number(self, call: int, work: Callable[[], int]) -> int:
        """A call whose answer is a number."""
        return self._answered(call, work, self._write_number)

    def _answered(self, call: int, work: Callable[[], _T], write: Callable[[int, int, _T], None]) -> _T:
        number = self._group.begin(call)
        try:
            result = work()
        except MambaPoolError as error:
            self._write_error(number, call, error)
            raise
        except BaseException as error:  # Ctrl-C: the others are not left waiting
            interrupted = AllocatorUnavailable(f"the call was interrupted: {type(error).__name__}")
            self._write_error(number, call, interrupted)
            raise
        write(number, call, result)
        return result

    def _write_slots(self, number: int, call: int, slots: list[int] | None) -> None:
        if slots is None:
            self._write_number(number, call, 0, protocol.NONE)
        elif len(slots) == 1:
            self._write_number(number, call, slots[0])
        else:
            self._write_data(number, call, protocol.OK, np.array(slots, "<i4").tobytes())

    def _write_number(self, number: int, call: int, value: int, status: int = protocol.OK) -> None:
        self._page.write_answer(number, Answer(call, status, value, 0, 0, 0))

    def _write_error(self, number: int, call: int, error: MambaPoolError) -> None:
        status, *slots, _ = protocol.error_payload(error)
        ids = slots[0] if slots else b""
        text = str(error).encode()[:_MAX_TEXT_BYTES]
        self._write_data(number, call, status, ids + text + b" " * (-len(text) % 4), len(ids) // 4)

    def _write_data(self, number: int, call: int, status: int, data: bytes, value: int = 0) -> None:
        start = self._room(number, len(data) // 4)
        self._page.write_data(start, data)
        self._page.write_answer(number, Answer(call, status, value, len(data) // 4, start, digest(data)))

    def _room(self, number: int, count: int) -> int:
        starts = self._starts
        end = self._next + count
        oldest = self._group.oldest_unread()
        while starts and starts[0][0] < oldest:
            starts.popleft()
        while starts and end - starts[0][1] > self._page.layout.data_items:
            self._group.await_readers(number, starts.popleft()[0] + 1)
        start, self._next = self._next, end
        starts.append((number, start))
        return start


class Following:
    """The other ranks: no work, and rank 0's answer."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def slots(self, call: int, work: Callable[[], list[int] | None], wait: float = 0.0) -> list[int] | None:
        """As :meth:`Leading.slots`."""
        number, answer = self._answer(call, wait)
        if answer.status == protocol.NONE:
            return None
        if answer.value:
            return [answer.value]
        slots: list[int] = np.frombuffer(self._group.data(number, answer), "<i4").tolist()
        return slots

    def number(self, call: int, work: Callable[[], int]) -> int:
        """As :meth:`Leading.number`."""
        return self._answer(call, 0.0)[1].value

    def _answer(self, call: int, wait: float) -> tuple[int, Answer]:
        number = self._group.begin(call)
        answer = self._group.answer(number, call, wait)
        # Rank 0 has come as far: frees and ends before this call, which wait for no answer, can be compared.
        self._group.compare()
        if answer.status > protocol.NONE:
            data = self._group.data(number, answer)
            ids, text = data[: 4 * answer.value], data[4 * answer.value :].decode("utf-8", "ignore").rstrip()
            raise protocol.error_from([answer.status, ids, f"rank 0: {text}"])
        return number, answer
