"""Several client processes that do the same at the same time, for so long, and count."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Self

from measuring.cores import pinned

#: Makes a client's call, in the client's process.
MakeCall = Callable[[], Callable[[], object]]

START_S = 0.002

#: The ends of pipes that this process keeps: a forked one that had them too would hide this one's end.
_kept: list[int] = []


class Crew:
    """Forked: make it before this process has a zmq context, a session or a thread."""

    def __init__(self, size: int, make_call: MakeCall, core: int) -> None:
        self._members = [_Member(make_call, core) for _ in range(size)]
        for member in self._members:
            member.wait_until_ready()

    def start(self, seconds: float) -> None:
        """All at once, for so long; :meth:`rate` waits for the end of it."""
        begin = time.monotonic() + START_S
        for member in self._members:
            member.tell([begin, begin + seconds])
        self._seconds = seconds

    def rate(self) -> float:
        """Calls per second, of all members together."""
        return sum(member.count() for member in self._members) / self._seconds

    def close(self) -> None:
        for member in self._members:
            member.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class _Member:
    def __init__(self, make_call: MakeCall, core: int) -> None:
        orders, give = os.pipe()
        take, results = os.pipe()
        _kept.extend((give, take))
        self.pid = os.fork()
        if self.pid == 0:
            for fd in _kept:
                os.close(fd)
            try:
                with pinned(core):
                    _obey(make_call, orders, results)
            finally:
                os._exit(1)
        os.close(orders)
        os.close(results)
        self._orders = os.fdopen(give, "w", buffering=1)
        self._results = os.fdopen(take)

    def wait_until_ready(self) -> None:
        if not self._results.readline():
            raise RuntimeError(f"client process {self.pid} could not start; its error is above")

    def tell(self, span: list[float]) -> None:
        self._orders.write(json.dumps(span) + "\n")

    def count(self) -> int:
        line = self._results.readline()
        if not line:
            raise RuntimeError(f"client process {self.pid} ended; its error is above")
        return int(line)

    def close(self) -> None:
        for pipe in (self._orders, self._results):
            _kept.remove(pipe.fileno())
            pipe.close()
        os.waitpid(self.pid, 0)


def _obey(make_call: MakeCall, orders: int, results: int) -> None:
    """In the forked process: until the orders end."""
    import traceback

    try:
        call = make_call()
        os.write(results, b"ready\n")
        for line in os.fdopen(orders):
            begin, end = json.loads(line)
            time.sleep(max(begin - time.monotonic(), 0))
            count = 0
            while time.monotonic() < end:
                call()
                count += 1
            os.write(results, f"{count}\n".encode())
    except BaseException:
        traceback.print_exc()
        raise
    os._exit(0)
