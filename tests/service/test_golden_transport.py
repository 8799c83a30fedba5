"""The bytes of every message, on the client's side: over a real socket, to an allocator that is a script."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq
from daemons import wait_until
from dispatching import EPOCH, Exchange, golden, ids, make_pool

from mambapool.client.allocator import SlotAllocator
from mambapool.client.operators import ask_audit, ask_status, evict
from mambapool.client.transport import PING_S, Transport
from mambapool.pool import protocol
from mambapool.pool.errors import AllocatorUnavailable, DoubleFree, InvalidSlots, MambaPoolError
from mambapool.pool.protocol import ACCEPT, ALLOC, BEGIN, CLEAR, END, FREE, NONE, OFFER, OK
from mambapool.pool.runtime_dir import RuntimeDir
from mambapool.pool.slot_table import S_NUMBER

Attach = Callable[[dict[str, Any]], Transport]

#: Bounds every wait here, and is waited for once, by the call whose reply is lost.
TIMEOUT_S = 2.0

HELLO_MAP: dict[str, Any] = golden("session")[0].request_fields[6]
GUARANTEED_MAP: dict[str, Any] = golden("turns")[1].request_fields[6]


class ScriptedAllocator:
    """Sockets and a slot table in the allocator's place: expects the golden requests in turn, answers as they say.

    Messages of one connection only: the others are as if they had come meanwhile.
    """

    def __init__(self, directory: RuntimeDir) -> None:
        self._table = make_pool(directory.path).table
        self._watcher = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._watcher.bind(str(directory.lease_socket))
        self._watcher.listen()
        self._context = zmq.Context()
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._router.rcvtimeo = int(5 * TIMEOUT_S * 1000)
        self._router.bind(directory.endpoint)

    @contextlib.contextmanager
    def plays(self, script: list[Exchange], connections: tuple[int, ...] = (1, 2)) -> Iterator[None]:
        """Play ``script`` in another thread; at the end every request must have come as it is written."""
        came: list[tuple[str, bytes]] = []
        player = threading.Thread(target=self._play, args=(script, connections, came))
        player.start()
        try:
            yield
        finally:
            player.join()
        assert came == [(each.name, each.request) for each in script if each.connection in connections]

    def _play(self, script: list[Exchange], connections: tuple[int, ...], came: list[tuple[str, bytes]]) -> None:
        for exchange in script:
            if exchange.connection in connections:
                try:
                    identity, body = self._receive(exchange.request, [earlier for _, earlier in came])
                except zmq.Again:
                    return
                came.append((exchange.name, body))
                if exchange.reply is not None and exchange.lost != "reply" and exchange.later is None:
                    self._enter(exchange)
                    self._router.send_multipart([identity, exchange.reply])
            for waited in script:
                if waited.later == exchange.name and waited.connection in connections:
                    assert waited.reply is not None
                    self._enter(waited)
                    self._router.send_multipart([identity, waited.reply])

    def _enter(self, exchange: Exchange) -> None:
        """A session that HELLO is answered with is in the table, too: its client looks there whether it has ended."""
        session = exchange.reply_fields[3] if exchange.reply_fields and len(exchange.reply_fields) > 3 else None
        if isinstance(session, dict) and "row" in session:
            at = self._table.layout.session(session["row"]) + S_NUMBER
            self._table.word(at, session["session"])
            self._table.commit(self._table.layout.slots)

    def _receive(self, expected: bytes, earlier: list[bytes]) -> tuple[bytes, bytes]:
        """The next message. A client asks again after a while: that is passed over."""
        while True:
            identity, body = self._router.recv(), self._router.recv()
            if body == expected or body not in earlier:
                return identity, body

    def close(self) -> None:
        self._router.close(linger=0)
        self._context.term()
        self._watcher.close()


@pytest.fixture
def directory(runtime_dir: Path) -> RuntimeDir:
    return RuntimeDir.for_server(runtime_dir)


@pytest.fixture
def allocator(directory: RuntimeDir) -> Iterator[ScriptedAllocator]:
    allocator = ScriptedAllocator(directory)
    yield allocator
    allocator.close()


@pytest.fixture
def attach(directory: RuntimeDir, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attach]:
    """Makes a transport whose lease, which is random otherwise, is that of the golden HELLO."""
    attached: list[Transport] = []

    def make(hello: dict[str, Any]) -> Transport:
        monkeypatch.setattr(secrets, "token_bytes", lambda _size: hello["lease"])
        attached.append(Transport(directory, TIMEOUT_S, hello))
        return attached[-1]

    yield make
    for transport in attached:
        transport.abandon()


def test_a_session_from_hello_to_detach(allocator: ScriptedAllocator, attach: Attach) -> None:
    with allocator.plays(golden("session")):
        transport = attach(HELLO_MAP)
        assert (transport.number, transport.connection.epoch) == (1, EPOCH)

        assert transport.call(ALLOC, 1, None, False)[2:] == [OK, 1]
        assert transport.call(ALLOC, 3, None, False)[2:] == [OK, ids(2, 3, 4)]
        transport.post(FREE, 2, slots=1)
        transport.post(FREE, ids(4, 3), slots=2)
        carried = transport.posted.append(FREE, 1, slots=1)
        assert transport.call(ALLOC, 2, 1, False, frees=carried)[2:] == [OK, ids(5, 6)]

        assert transport.call(BEGIN, 4, None, False)[2:] == [OK, ids(7, 8, 9, 10)]
        transport.post(END, ids(8, 9, 10), slots=3)
        transport.call(BEGIN, 99, None, True)
        transport.post(END, None, slots=0)
        assert transport.call(ALLOC, 1, None, False)[2:] == [NONE]

        # The first transmission of this free is lost: the next request is answered GAP.
        transport.post(FREE, 5, slots=1)
        assert transport.call(ALLOC, 1, None, False)[2:] == [OK, 5]
        transport.post(CLEAR, None, slots=16)

        with pytest.raises(AllocatorUnavailable, match=f"no answer within {TIMEOUT_S:g} s"):
            transport.call(ALLOC, 2, None, False)
        assert transport.call(ALLOC, 1, None, False)[2:] == [OK, 3]

        transport.post(FREE, 9, slots=1)
        (refusal,) = wait_until(lambda: refusals_of(transport), "the refusal of a free")
        assert type(refusal) is DoubleFree
        assert refusal.slots == (9,)
        transport.detach(TIMEOUT_S)


def test_what_one_waits_for_and_offers(allocator: ScriptedAllocator, attach: Attach) -> None:
    with allocator.plays(golden("turns"), connections=(1,)), ThreadPoolExecutor() as others:
        transport = attach(HELLO_MAP)
        transport.call(ALLOC, 6, None, False)
        waiting = others.submit(transport.call_and_wait, ALLOC, 2, None, True, wait=TIMEOUT_S)
        wait_until(lambda: transport.connection.waiting, "another thread waits")
        assert transport.call(OFFER, ids(12, 11), 2)[2:] == [OK]
        assert transport.call(OFFER, 13, 2)[2:] == [OK]
        reply = waiting.result(TIMEOUT_S)
        assert reply is not None
        assert reply[2:] == [OK, ids(12, 11)]

        ping(transport)
        # Lost on the way, which the answer to a PING tells.
        transport.post(FREE, 14, slots=1)
        ping(transport)
        sent = transport.messages
        wait_until(lambda: messages_of(transport) > sent, "it is sent again")
        transport.detach(TIMEOUT_S)


def test_what_another_one_accepts(allocator: ScriptedAllocator, attach: Attach) -> None:
    with allocator.plays(golden("turns")[:-1], connections=(2,)):
        transport = attach(GUARANTEED_MAP)
        assert transport.session["granted"] == ids(*range(1, 11))
        assert transport.call(ACCEPT, False)[2:] == [OK, ids(11, 12)]
        reply = transport.call_and_wait(ACCEPT, True, wait=TIMEOUT_S, kept=True)
        assert reply is not None
        assert reply[2:] == [OK, 13]
        transport.post(FREE, ids(12, 11), slots=2)


def ping(transport: Transport) -> None:
    """As the background thread does when nothing was said for a while."""
    transport.tick()
    transport.quiet_since -= PING_S
    transport.tick()


def messages_of(transport: Transport) -> int:
    """How many were sent, by the background thread too."""
    transport.tick()
    return transport.messages


def refusals_of(transport: Transport) -> list[MambaPoolError]:
    """What has come of them, as the background thread would see it."""
    transport.tick()
    return transport.refusals


REFUSED = golden("refusals") + golden("lost")
REFUSALS = [exchange for exchange in REFUSED if exchange.request_fields[0] != protocol.HELLO]
REFUSED_HELLOS = [exchange for exchange in REFUSED if exchange.request_fields[0] == protocol.HELLO]


def expected_error(exchange: Exchange) -> MambaPoolError:
    return protocol.error_from(exchange.reply_fields[2:])


@pytest.mark.parametrize("exchange", REFUSED_HELLOS, ids=lambda exchange: exchange.name)
def test_a_hello_that_is_refused_raises_what_the_reply_says(
    allocator: ScriptedAllocator, attach: Attach, exchange: Exchange
) -> None:
    expected = expected_error(exchange)
    with allocator.plays([exchange]), pytest.raises(type(expected)) as caught:
        attach(exchange.request_fields[6])
    assert str(caught.value) == exchange.reply_fields[-1]


@pytest.mark.parametrize("exchange", REFUSALS, ids=lambda exchange: exchange.name)
def test_a_reply_that_refuses_is_the_exception_of_its_status(exchange: Exchange) -> None:
    error = expected_error(exchange)
    assert type(error) is protocol._ERROR_OF_STATUS[exchange.reply_fields[2]]
    assert str(error) == exchange.reply_fields[-1]
    if isinstance(error, InvalidSlots):
        assert error.slots == tuple(protocol.unpack_ids(exchange.reply_fields[3]))


def test_carried_frees_that_are_refused_raise_in_the_call(allocator: ScriptedAllocator, attach: Attach) -> None:
    (refused,) = [exchange for exchange in REFUSALS if exchange.name == "duplicate"]
    with allocator.plays([golden("session")[0], refused]):
        transport = attach(HELLO_MAP)
        carried = transport.posted.append(FREE, ids(1, 2, 1), slots=3)
        with pytest.raises(InvalidSlots, match="slots 1 are named more than once") as caught:
            transport.call(ALLOC, 1, ids(1, 2, 1), False, frees=carried)
    assert caught.value.slots == (1,)


def test_status_is_asked_for_without_a_session(allocator: ScriptedAllocator, directory: RuntimeDir) -> None:
    (exchange,) = golden("status")
    with allocator.plays([exchange]):
        assert ask_status(directory, TIMEOUT_S) == exchange.reply_fields[3]


def test_an_audit_is_asked_for_without_a_session(allocator: ScriptedAllocator, directory: RuntimeDir) -> None:
    (exchange,) = golden("audit")
    with allocator.plays([exchange], connections=(3,)):
        assert ask_audit(directory, TIMEOUT_S, "default") == exchange.reply_fields[3]


def test_the_tag_of_an_alloc_travels_with_it(allocator: ScriptedAllocator, attach: Attach) -> None:
    with allocator.plays([golden("session")[0], golden("tags")[0]]):
        assert SlotAllocator(attach(HELLO_MAP), "cpu").alloc(1, tag="request 17") == 5


def test_the_tag_of_a_window_travels_with_its_begin(allocator: ScriptedAllocator, attach: Attach) -> None:
    with allocator.plays([golden("session")[0], golden("tags")[1]]):
        SlotAllocator(attach(HELLO_MAP), "cpu").alloc_group_begin(2, tag="batch 3")


def test_an_eviction_is_asked_for_without_a_session(allocator: ScriptedAllocator, directory: RuntimeDir) -> None:
    refused, forced = (each for each in golden("turns") if each.request_fields[0] == protocol.EVICT)
    with allocator.plays([refused, forced], connections=(3,)):
        with pytest.raises(MambaPoolError) as caught:
            evict(directory, TIMEOUT_S, 2, force=False)
        assert str(caught.value) == refused.reply_fields[3]
        assert evict(directory, TIMEOUT_S, 2, force=True) == forced.reply_fields[3]
