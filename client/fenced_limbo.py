"""Limbo: slots that were freed and not yet given back, because GPU work queued before may still write to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, eq=False)
class Entry:
    """Places of one free, its fence, and the caller's events that have to be over, too.

    ``receiver`` is the session to which they are to be offered, 0: they are to be free. ``is_clear``: they are
    all that the client had.
    """

    places: list[int]
    fence: int
    after: tuple[Any, ...] = ()
    receiver: int = 0
    is_clear: bool = False


class FencedLimbo:
    """Entries in the order in which they were freed. The caller of its methods locks."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()
        #: Slots that the client itself may have again.
        self.count = 0

    def __bool__(self) -> bool:
        return bool(self._entries)

    def put(self, entry: Entry) -> None:
        if entry.places:
            self._entries.append(entry)
            self.count += 0 if entry.receiver else len(entry.places)

    def put_back(self, entry: Entry) -> None:
        """In front of all: it was taken by mistake, or could not be given back."""
        self._entries.appendleft(entry)
        self.count += 0 if entry.receiver else len(entry.places)

    def take(self, count: int) -> Entry:
        """At most ``count`` places for the client's own use, longest freed first, as one entry."""
        taken = Entry([], 0)
        for entry in list(self._entries):
            if entry.receiver:
                continue
            piece = entry.places[: count - len(taken.places)]
            if piece:
                del entry.places[: len(piece)]
                entry.is_clear = False
                taken.places += piece
                taken.fence = max(taken.fence, entry.fence)
                taken.after += entry.after
            if not entry.places:
                self._entries.remove(entry)
        self.count -= len(taken.places)
        return taken

    def remove(self, place: int) -> bool:
        """Forget one place; whether it was there."""
        for entry in self._entries:
            if place in entry.places:
                entry.places.remove(place)
                self.count -= 0 if entry.receiver else 1
                if not entry.places:
                    self._entries.remove(entry)
                return True
        return False

    def pop_passed(
        self, passed: int, is_over: Callable[[Any], bool], is_known: Callable[[int], bool]
    ) -> list[Entry]:
        """Take out the entries that nothing on the device can touch any more, and whose ids are known."""
        leaving = []
        for entry in list(self._entries):
            if entry.fence > passed:
                break  # fences only grow
            entry.after = tuple(event for event in entry.after if not is_over(event))
            if not entry.after and all(is_known(place) for place in entry.places):
                self._entries.remove(entry)
                self.count -= 0 if entry.receiver else len(entry.places)
                leaving.append(entry)
        return leaving

    def all(self) -> list[int]:
        """Every place that the client may have again, longest freed first."""
        return [place for entry in self._entries if not entry.receiver for place in entry.places]

    def events(self) -> list[Any]:
        """The callers' events that are not over yet."""
        return [event for entry in self._entries for event in entry.after]

    def clear(self) -> list[int]:
        """Forget everything, and return its places: those that were to be offered are not."""
        places = [place for entry in self._entries for place in entry.places]
        self._entries.clear()
        self.count = 0
        return places
