"""A real allocator whose replies are spoiled on their way: the call fails with an error of ours, the next one works."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from daemons import Daemon
from dispatching import NOT_MESSAGES
from fresh_pool import ids
from fuzzing import STRANGE

from mambapool.client import Worker, connect, transport
from mambapool.client.operators import ask_status
from mambapool.pool import protocol
from mambapool.pool.errors import AllocatorUnavailable, MambaPoolError, ProtocolError
from mambapool.pool.protocol import OK
from mambapool.pool.runtime_dir import RuntimeDir

Spoil = Callable[[bytes], bytes]


class Between:
    """Stands between a client and the allocator; gives each reply to ``spoil`` first, if there is one."""

    def __init__(self, daemon: Daemon, directory: Path) -> None:
        self.spoil: Spoil | None = None
        self.repeats_too = False
        self.spoiled = 0
        self._seen: set[tuple[bytes, int]] = set()
        self._context = zmq.Context()
        self._clients: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._clients.bind(f"ipc://{directory}/allocator.sock")
        self._endpoint = daemon.directory.endpoint
        self._allocators: dict[bytes, zmq.Socket[bytes]] = {}
        self._stop = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop:
            while self._clients.poll(1):
                identity, body = self._clients.recv_multipart()
                self._allocator(identity).send(body)
            for identity, allocator in self._allocators.items():
                while allocator.poll(0):
                    self._clients.send_multipart([identity, self._spoiled(identity, allocator.recv())])

    def _spoiled(self, identity: bytes, body: bytes) -> bytes:
        """What is asked again and answered again may be late: it goes through, unless all are to be spoiled."""
        reply = (identity, protocol.unpack(body, len(body))[0])
        if self.spoil is None or (not self.repeats_too and reply in self._seen):
            return body
        self._seen.add(reply)
        self.spoiled += 1
        return self.spoil(body)

    def _allocator(self, identity: bytes) -> zmq.Socket[bytes]:
        if identity not in self._allocators:
            self._allocators[identity] = self._context.socket(zmq.DEALER)
            self._allocators[identity].connect(self._endpoint)
        return self._allocators[identity]

    @contextlib.contextmanager
    def spoiling(self, spoil: Spoil, *, repeats_too: bool = False) -> Iterator[None]:
        self.repeats_too = repeats_too
        self.spoil = spoil
        try:
            yield
        finally:
            self.spoil = None

    def close(self) -> None:
        self._stop = True
        self._thread.join()
        self._context.destroy(linger=0)


@pytest.fixture
def directory(runtime_dir: Path, shared_daemon: Daemon) -> Path:
    """All but the allocator's socket is the daemon's."""
    runtime_dir.mkdir(mode=0o700)
    for name in ("ready", "leases", "lease.sock"):
        os.symlink(shared_daemon.dir / name, runtime_dir / name)
    return runtime_dir


@pytest.fixture
def between(directory: Path, shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Between]:
    monkeypatch.setattr(transport, "REPEAT_S", 0.03)  # what has no answer is asked again so often
    between = Between(shared_daemon, directory)
    yield between
    between.close()


@pytest.fixture
def attach(directory: Path, between: Between, shared_daemon: Daemon) -> Iterator[Callable[[], Worker]]:
    name = f"spoiled-{directory.parent.name[-8:].lower().replace('.', '-')}"
    with connect(shared_daemon.dir, pool=name, create_slots=8):
        # The same file: a link would not be followed.
        os.link(shared_daemon.dir / f"{name}.table", directory / f"{name}.table")
        with contextlib.ExitStack() as workers:
            yield lambda: workers.enter_context(connect(directory, pool=name, timeout=2.0))


def changed(*fields: Any, to: int = OK) -> Spoil:
    """The reply with other fields after its status: granted is what the allocator says."""
    return lambda body: msgpack.packb([*protocol.unpack(body, len(body))[:2], to, *fields])


NO_GRANTS: list[tuple[Any, ...]] = [
    *[(), (None,), (0,), (-1,), (9,), (2**62,), (True,), (1.5,), ("1",), ([1, 2],), ({},), (1, 1)],
    *[(b"",), (b"\1\0\0",), (bytes(8),), (b"\1\0\0\0\xff\xff\xff\xff",), (b"\1\0\0\0\x09\0\0\0",)],
]


@pytest.mark.parametrize("call", ["alloc(2)", "alloc(1)", "alloc(2, timeout=1.0)", "alloc_group_begin(3)"])
def test_grants_of_something_else_than_slots_are_refused(
    attach: Callable[[], Worker], between: Between, call: str
) -> None:
    worker = attach()
    for fields in NO_GRANTS:
        with between.spoiling(changed(*fields)), pytest.raises(ProtocolError, match="granted something else"):
            eval(f"allocator.{call}", {"allocator": worker.allocator})
        assert worker.allocator.free_slots.numel() == 8, "what was granted is given back"
        assert not worker._transport.connection.waiting, "no request stays open"
    assert sorted(ids(worker.allocator.alloc(8))) == list(range(1, 9))


def test_bytes_that_are_no_reply_are_an_error_of_the_call_and_the_next_one_works(
    attach: Callable[[], Worker], between: Between
) -> None:
    worker = attach()
    # Three of them are replies, to a request number 5.
    bodies = [body for name, body in NOT_MESSAGES.items() if not name.startswith(("long bin", "empty "))]
    bodies += [msgpack.packb(fields) for fields in ([1, 2], ["1", 2, 0], [1, 2, -1])]
    bodies += [msgpack.packb([0, 2, protocol.GAP, *tail]) for tail in ((), ("x",), (-1,), (1, 2))]
    for bad in bodies:
        seen = between.spoiled
        with between.spoiling(lambda _, bad=bad: bad), pytest.raises(ProtocolError):  # type: ignore[misc]
            worker.allocator.alloc(2)
        assert between.spoiled > seen
        assert len(ids(worker.allocator.alloc(2))) == 2
        worker.allocator.clear()
    assert worker.allocator.available_size() == 8


def test_statuses_that_there_are_not_are_named(attach: Callable[[], Worker], between: Between) -> None:
    worker = attach()
    for status in (3, 19, 99, 2**31):
        with between.spoiling(changed("text", to=status)), pytest.raises(ProtocolError, match=f"status {status}"):
            worker.allocator.alloc(1)
    assert worker.allocator.free_slots.numel() == 8


@pytest.mark.parametrize("status", [protocol.GAP, protocol.UNKNOWN_SESSION, protocol.WRONG_EPOCH])
def test_an_allocator_that_never_comes_to_the_point_is_given_up_in_time(
    attach: Callable[[], Worker], between: Between, status: int
) -> None:
    worker = attach()
    worker._transport.timeout = 0.4

    def put_off(body: bytes) -> bytes:
        fields = protocol.unpack(body, len(body))
        if fields[2] == OK and len(fields) == 4 and isinstance(fields[3], dict):
            return body  # HELLO, said again each time
        return protocol.pack([fields[0], fields[1] + 1, status, 0])

    started = time.monotonic()
    with between.spoiling(put_off, repeats_too=True), pytest.raises(AllocatorUnavailable):
        worker.allocator.alloc(2)
    assert time.monotonic() - started < 2
    worker._transport.timeout = 5.0
    worker.allocator.clear()
    assert sorted(ids(worker.allocator.alloc(8))) == list(range(1, 9))


FIELDS = ("session", "row", "applied", "slots", "limit", "guarantee", "uuid", "table", "shards")


@pytest.mark.parametrize("field", FIELDS)
def test_a_greeting_that_lacks_something_is_refused_and_leaves_no_session(
    attach: Callable[[], Worker], between: Between, field: str
) -> None:
    def spoil(body: bytes, value: Any) -> bytes:
        *head, session = protocol.unpack(body, len(body))
        if isinstance(session, dict):
            session = {key: held for key, held in session.items() if key != field or value is not ...}
            session = {**session, field: value} if value is not ... else session
        spoiled: bytes = msgpack.packb([*head, session])
        return spoiled

    for value in (..., None, "x/y", -1, b"short", [1], 2**63):
        with between.spoiling(lambda body, value=value: spoil(body, value)), pytest.raises(MambaPoolError):  # type: ignore[misc]
            attach()
    assert len(ids(attach().allocator.alloc(8))) == 8


def test_status_of_something_else_is_an_error_of_ours(between: Between, directory: Path) -> None:
    place = RuntimeDir(directory)
    replies: tuple[tuple[Any, ...], ...] = ((), (None,), (1,), ("x",), ([],))
    for fields in replies:
        for status in (OK, protocol.REFUSED, protocol.MALFORMED, 99):
            with between.spoiling(changed(*fields, to=status)), pytest.raises(MambaPoolError):
                ask_status(place, 1.0)
    for body in NOT_MESSAGES.values():
        with between.spoiling(lambda _, body=body: body), pytest.raises(MambaPoolError):  # type: ignore[misc]
            ask_status(place, 1.0)
    assert ask_status(place, 1.0)["pools"] is not None


def test_replies_spoiled_at_random_break_no_client(attach: Callable[[], Worker], between: Between) -> None:
    worker = attach()
    worker._transport.timeout = 0.3
    chance = random.Random(76)

    def spoil(body: bytes) -> bytes:
        if chance.random() < 0.5:
            return body
        if chance.random() < 0.5:
            fields = protocol.unpack(body, len(body))
            fields[chance.randrange(len(fields))] = chance.choice(STRANGE)
            spoiled: bytes = msgpack.packb(fields)
            return spoiled
        data = bytearray(body)
        data[chance.randrange(len(data))] = chance.randrange(256)
        return bytes(data[: chance.randrange(len(data) + 1)] if chance.random() < 0.3 else data)

    errors = 0
    with between.spoiling(spoil):
        for _ in range(150):
            try:
                chance.choice(
                    (
                        lambda: worker.allocator.alloc(chance.randint(1, 3)),
                        lambda: worker.allocator.alloc_group_begin(2),
                        lambda: worker.allocator.alloc_group_end(),
                        lambda: worker.allocator.clear(),
                    )
                )()
            except MambaPoolError:
                errors += 1
    assert errors > 20
    worker._transport.timeout = 5.0
    for _ in range(errors):  # what was refused meanwhile is raised one by one
        with contextlib.suppress(MambaPoolError):
            worker.allocator.clear()
    worker.allocator.clear()
    # A grant that was made to look like none is held, and nobody knows: until the session ends.
    worker.close()
    assert sorted(ids(attach().allocator.alloc(8))) == list(range(1, 9))
