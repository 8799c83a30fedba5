"""``naive_daemon.py ENDPOINT SLOTS``: the allocator daemon that one would write first.

Messages are maps, ids are lists, the free list is a deque, a poller waits for ``*_multipart`` messages. It knows who
holds what and finds a double free, like ours; it survives no crash, notices no death, and limits nothing.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

import msgpack
import zmq


class NaiveAllocator:
    """Slots 1..size, taken from the head, given back at the tail."""

    def __init__(self, size: int) -> None:
        self._free = deque(range(1, size + 1))
        self._holder: dict[int, bytes] = {}

    def answer(self, client: bytes, message: dict[str, Any]) -> dict[str, Any]:
        freed = message["free"] or []
        if any(self._holder.get(slot) != client for slot in freed):
            return {"id": message["id"], "ok": False, "slots": None}
        for slot in freed:
            del self._holder[slot]
        self._free.extend(freed)
        if message["n"] > len(self._free):
            return {"id": message["id"], "ok": False, "slots": None}
        slots = [self._free.popleft() for _ in range(message["n"])]
        for slot in slots:
            self._holder[slot] = client
        return {"id": message["id"], "ok": True, "slots": slots}


def main() -> None:
    endpoint, size = sys.argv[1], int(sys.argv[2])
    router: zmq.Socket[bytes] = zmq.Context().socket(zmq.ROUTER)
    router.bind(endpoint)
    poller = zmq.Poller()
    poller.register(router, zmq.POLLIN)
    allocator = NaiveAllocator(size)
    print("ready", flush=True)
    while True:
        if not poller.poll(1000):
            continue
        client, body = router.recv_multipart()
        reply = allocator.answer(client, msgpack.unpackb(body))
        router.send_multipart([client, msgpack.packb(reply)])


if __name__ == "__main__":
    main()
