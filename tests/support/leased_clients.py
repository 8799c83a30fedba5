"""One daemon that outlives its allocators, pools of its own for each test, and clients as processes to be killed.

A plugin for the tests that need it: ``pytest_plugins = ["leased_clients"]``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from daemons import Daemon, start_daemon, wait_until
from fresh_pool import FreshPool, FreshPoolFactory
from processes import Child, Children

from mambapool.client import Worker
from mambapool.client.lease import Lease
from mambapool.pool import protocol
from mambapool.pool.runtime_dir import RuntimeDir
from mambapool.service.serve import SHORT_LIFE_S

#: How soon what a dead process held has to be free.
RECLAIM_S = 1.0

_names = itertools.count(1)


@pytest.fixture(scope="session")
def lasting_daemon() -> Iterator[Daemon]:
    """A daemon without a pool of its own, whose allocator may be killed: ``serve`` brings it back."""
    parent = Path(tempfile.mkdtemp(prefix="mambapool-"))
    daemon = start_daemon(parent / "run", slots=None)
    yield daemon
    daemon.close()
    shutil.rmtree(parent)


@pytest.fixture
def new_pool(lasting_daemon: Daemon) -> Iterator[FreshPoolFactory]:
    """Makes pools of so many slots in :func:`lasting_daemon`; each is checked at the end of the test."""
    made: list[FreshPool] = []

    def make(slots: int) -> FreshPool:
        made.append(FreshPool(lasting_daemon, slots))
        return made[-1]

    yield make
    try:
        for pool in made:
            pool.check()
    finally:
        for pool in made:
            pool.close()


def successor_of(daemon: Daemon, pid: int) -> int:
    """Wait for the allocator that comes after ``pid``; its pid."""

    def successor() -> int:
        ready = daemon.directory.read_ready()
        return ready["pid"] if ready is not None and ready["pid"] != pid else 0

    found: int = wait_until(successor, "another allocator is ready", timeout=30.0)
    return found


@contextlib.contextmanager
def outage(daemon: Daemon) -> Iterator[None]:
    """Inside, the allocator is dead (SIGKILL) and ``serve`` is stopped; afterwards there is another one."""
    # Only lives of some length in between: serve gives up over short ones.
    wait_until(lambda: daemon.status()["uptime_s"] > SHORT_LIFE_S, "the allocator has lived for a while")
    pid = daemon.allocator_pid
    os.kill(daemon.process.pid, signal.SIGSTOP)
    try:
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: _has_ended(pid), "the allocator is dead")
        yield
    finally:
        os.kill(daemon.process.pid, signal.SIGCONT)
    successor_of(daemon, pid)


def restart(daemon: Daemon) -> None:
    """Kill the allocator and wait until the next one answers."""
    with outage(daemon):
        pass


def _has_ended(pid: int) -> bool:
    """Also while nobody has waited for it."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "Z"


_REMOTE = """
    import json, os, signal, sys, threading, time
    import torch
    from mambapool.client import connect
    from mambapool.pool import errors

    worker = connect(sys.argv[1], **json.loads(sys.argv[2]))
    allocator = worker.allocator
    print(json.dumps(worker.session), flush=True)
    for line in sys.stdin:
        line = json.loads(line)
        if line.startswith("!"):
            exec(line[1:])
            continue
        try:
            said = eval(line)
        except errors.MambaPoolError as error:
            said = [type(error).__name__, str(error)]
        if isinstance(said, torch.Tensor):
            said = said.tolist()
        print(json.dumps(said), flush=True)
"""


class RemoteClient:
    """A session in a process of its own, which does what it is told with its ``worker`` and ``allocator``."""

    def __init__(self, children: Children, pool: FreshPool, **options: Any) -> None:
        self.name = options.setdefault("name", f"remote-{next(_names)}")
        self.child: Child = children.start(_REMOTE, pool.daemon.dir, json.dumps({"pool": pool.name, **options}))
        self._session: int | None = None

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def session(self) -> int:
        """Waits until it is attached."""
        if self._session is None:
            self._session = int(self.child.hear())
        return self._session

    def ask(self, expression: str) -> Any:
        """What an expression is there; a tensor as a list, an error of ours as ``[type, text]``."""
        _ = self.session
        self.begin(expression)
        return self.answer()

    def begin(self, expression: str) -> None:
        """Like :meth:`ask`, without waiting for :meth:`answer`."""
        _ = self.session
        self.child.say(json.dumps(expression))

    def answer(self) -> Any:
        return json.loads(self.child.hear())

    def run(self, statement: str) -> None:
        """Let it execute something that may end it, and that answers nothing."""
        self.begin("!" + statement)

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    @property
    def log_line(self) -> str:
        """What the allocator's log says of this session's end: the start of the line."""
        return f"session {self.session} ({self.name}, pid {self.pid})"


class RawClient:
    """What a client sends and receives, message by message, without a client. A context manager."""

    def __init__(self, directory: RuntimeDir, *, high_water_mark: int = 0) -> None:
        self.lease = Lease(directory)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.sndhwm = 0
        self._socket.rcvhwm = high_water_mark
        self._socket.connect(directory.endpoint)
        self.session = 0
        self.epoch = 0

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_error: object) -> None:
        self.lease.close()
        self._socket.close()
        self._context.term()

    def hello(self, pool: str, **changes: Any) -> list[Any]:
        """Attach; the reply, whatever it is."""
        fields = {"versions": [1, 1], "lease": self.lease.name, "pool": pool, "name": "raw", "pid": os.getpid()}
        self.send(protocol.HELLO, 0, 1, 0, 0, 0, {**fields, "rank": 0, "guarantee": 0, **changes})
        reply = self.receive()
        assert reply is not None
        if reply[2] == protocol.OK:
            self.session, self.epoch = reply[3]["session"], reply[1]
        return reply

    def send(self, *fields: Any) -> None:
        self._socket.send(protocol.pack(fields))

    def request(self, op: int, request_id: int, *arguments: Any, posted: int = 0, oldest_open: int = 0) -> None:
        """Send a message of this session; 0 is the request id of posted ones."""
        self.send(op, self.session, request_id, self.epoch, posted, oldest_open, *arguments)

    def receive(self, timeout: float = 5.0) -> list[Any] | None:
        """The next message, or None if none came in time."""
        if not self._socket.poll(int(timeout * 1000)):
            return None
        body = self._socket.recv()
        return protocol.unpack(body, len(body))


def all_free(pool: FreshPool, within: float = RECLAIM_S) -> float:
    """Wait until every slot is free; how long that took, in seconds."""
    began = time.monotonic()
    wait_until(lambda: pool.available == pool.slots, "every slot is free", timeout=within)
    return time.monotonic() - began


def waits(pool: FreshPool, slots: int) -> None:
    """Wait until so many slots are waited for."""
    wait_until(lambda: pool.status()["waiting"] == slots, f"{slots} slots are waited for")


def knows(pool: FreshPool, holder: Worker | RemoteClient) -> bool:
    """Whether the allocator still has that session."""
    session = holder.session  # first: a remote one may have to be waited for
    return any(entry["session"] == session for entry in pool.status()["holders"])


def values(rows: torch.Tensor) -> set[float]:
    """What there is in the states of slots."""
    return set(rows.flatten().tolist())


def log_lines(daemon: Daemon, text: str) -> list[str]:
    """The lines of the daemon's log that contain ``text``."""
    return [line for line in daemon.log.splitlines() if text in line]
