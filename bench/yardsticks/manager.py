"""``manager.py ENDPOINT SLOTS``: a ``multiprocessing`` BaseManager with a deque, what the standard library offers.

ENDPOINT is ``ipc://PATH``; the manager listens at PATH. It knows no holders and checks nothing.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from multiprocessing.managers import BaseManager

AUTHKEY = b"bench"


class DequeAllocator:
    """Slots 1..size, taken from the head, given back at the tail."""

    def __init__(self, size: int) -> None:
        self._free = deque(range(1, size + 1))

    def swap(self, count: int, freed: list[int]) -> list[int]:
        """Give some back, take so many."""
        self._free.extend(freed)
        return [self._free.popleft() for _ in range(count)]


class Manager(BaseManager):
    """Has one allocator, for all clients."""

    def allocator(self) -> DequeAllocator:
        raise NotImplementedError("registered when it is served, or connected to")


def call(endpoint: str, count: int) -> Callable[[], object]:
    """A client's call: allocates so many, gives back those of the call before."""
    Manager.register("allocator")
    manager = Manager(endpoint.removeprefix("ipc://"), AUTHKEY)
    manager.connect()
    allocator = manager.allocator()
    held: list[int] = []

    def swap() -> None:
        nonlocal held
        held = allocator.swap(count, held)

    return swap


def main() -> None:
    endpoint, size = sys.argv[1], int(sys.argv[2])
    allocator = DequeAllocator(size)
    Manager.register("allocator", callable=lambda: allocator)
    server = Manager(endpoint.removeprefix("ipc://"), AUTHKEY).get_server()
    print("ready", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
