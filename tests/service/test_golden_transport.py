"""The bytes of every message, on the client's side: over a real socket, to an allocator that is a script."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from daemons import wait_until
from dispatching import EPOCH, Exchange, golden, ids

from mambapool.client.transport import Transport, ask_status
from mambapool.pool import protocol
from mambapool.pool.errors import AllocatorUnavailable, DoubleFree, InvalidSlots, MambaPoolError
from mambapool.pool.protocol import ALLOC, BEGIN, CLEAR, END, FREE, NONE, OK
from mambapool.pool.runtime_dir import RuntimeDir

#: Bounds every wait here, and is waited for once, by the call whose reply is lost.
TIMEOUT_S = 2.0

HELLO_MAP: dict[str, Any] = golden("session")[0].request_fields[6]


class ScriptedAllocator:
    """A ROUTER socket in the allocator's place: expects the golden requests in turn, answers as they say."""

    def __init__(self, directory: RuntimeDir) -> None:
        self._context = zmq.Context()
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._router.rcvtimeo = int(5 * TIMEOUT_S * 1000)
        self._router.bind(directory.endpoint)

    @contextlib.contextmanager
    def plays(self, script: list[Exchange]) -> Iterator[None]:
        """Play ``script`` in another thread; at the end every request must have come as it is written."""
        came: list[bytes] = []
        player = threading.Thread(target=self._play, args=(script, came))
        player.start()
        try:
            yield
        finally:
            player.join()
        names = [exchange.name for exchange in script]
        assert dict(zip(names, came, strict=False)) == {exchange.name: exchange.request for exchange in script}

    def _play(self, script: list[Exchange], came: list[bytes]) -> None:
        for exchange in script:
            try:
                identity, body = self._router.recv(), self._router.recv()
            except zmq.Again:
                return
            came.append(body)
            if exchange.reply is not None and exchange.lost != "reply":
                self._router.send_multipart([identity, exchange.reply])

    def close(self) -> None:
        self._router.close(linger=0)
        self._context.term()


@pytest.fixture
def directory(runtime_dir: Path) -> RuntimeDir:
    return RuntimeDir.for_server(runtime_dir)


@pytest.fixture
def allocator(directory: RuntimeDir) -> Iterator[ScriptedAllocator]:
    allocator = ScriptedAllocator(directory)
    yield allocator
    allocator.close()


def test_a_session_from_hello_to_detach(allocator: ScriptedAllocator, directory: RuntimeDir) -> None:
    with allocator.plays(golden("session")):
        transport = Transport(directory, TIMEOUT_S, HELLO_MAP)
        assert (transport.number, transport.epoch) == (1, EPOCH)

        assert transport.call(ALLOC, 1, None)[2:] == [OK, 1]
        assert transport.call(ALLOC, 3, None)[2:] == [OK, ids(2, 3, 4)]
        transport.post(FREE, 2, slots=1)
        transport.post(FREE, ids(4, 3), slots=2)
        carried = transport.posted.append(FREE, 1, slots=1)
        assert transport.call(ALLOC, 2, 1, frees=carried)[2:] == [OK, ids(5, 6)]

        assert transport.call(BEGIN, 4, None, False)[2:] == [OK, ids(7, 8, 9, 10)]
        transport.post(END, ids(8, 9, 10), slots=3)
        transport.call(BEGIN, 99, None, True)
        transport.post(END, None, slots=0)
        assert transport.call(ALLOC, 1, None)[2:] == [NONE]

        # The first transmission of this free is lost: the next request is answered GAP.
        transport.post(FREE, 5, slots=1)
        assert transport.call(ALLOC, 1, None)[2:] == [OK, 5]
        transport.post(CLEAR, None, slots=16)

        with pytest.raises(AllocatorUnavailable, match=f"no answer within {TIMEOUT_S:g} s"):
            transport.call(ALLOC, 2, None)
        assert transport.call(ALLOC, 1, None)[2:] == [OK, 3]

        transport.post(FREE, 9, slots=1)
        (refusal,) = wait_until(lambda: refusals_of(transport), "the refusal of a free")
        assert type(refusal) is DoubleFree
        assert refusal.slots == (9,)
        transport.detach(TIMEOUT_S)


def refusals_of(transport: Transport) -> list[MambaPoolError]:
    """What has come of them, as the background thread would see it."""
    transport.tick()
    return transport.refusals


REFUSALS = [exchange for exchange in golden("refusals") if exchange.request_fields[0] != protocol.HELLO]
REFUSED_HELLOS = [exchange for exchange in golden("refusals") if exchange.request_fields[0] == protocol.HELLO]


def expected_error(exchange: Exchange) -> MambaPoolError:
    return protocol.error_from(exchange.reply_fields[2:])


@pytest.mark.parametrize("exchange", REFUSED_HELLOS, ids=lambda exchange: exchange.name)
def test_a_hello_that_is_refused_raises_what_the_reply_says(
    allocator: ScriptedAllocator, directory: RuntimeDir, exchange: Exchange
) -> None:
    expected = expected_error(exchange)
    with allocator.plays([exchange]), pytest.raises(type(expected)) as caught:
        Transport(directory, TIMEOUT_S, exchange.request_fields[6])
    assert str(caught.value) == exchange.reply_fields[-1]


@pytest.mark.parametrize("exchange", REFUSALS, ids=lambda exchange: exchange.name)
def test_a_reply_that_refuses_is_the_exception_of_its_status(exchange: Exchange) -> None:
    error = expected_error(exchange)
    assert type(error) is protocol._ERROR_OF_STATUS[exchange.reply_fields[2]]
    assert str(error) == exchange.reply_fields[-1]
    if isinstance(error, InvalidSlots):
        assert error.slots == tuple(protocol.unpack_ids(exchange.reply_fields[3]))


def test_carried_frees_that_are_refused_raise_in_the_call(
    allocator: ScriptedAllocator, directory: RuntimeDir
) -> None:
    (refused,) = [exchange for exchange in REFUSALS if exchange.name == "duplicate"]
    with allocator.plays([golden("session")[0], refused]):
        transport = Transport(directory, TIMEOUT_S, HELLO_MAP)
        carried = transport.posted.append(FREE, ids(1, 2, 1), slots=3)
        with pytest.raises(InvalidSlots, match="slots 1 are named more than once") as caught:
            transport.call(ALLOC, 1, ids(1, 2, 1), frees=carried)
    assert caught.value.slots == (1,)
    transport.abandon()


def test_status_is_asked_for_without_a_session(allocator: ScriptedAllocator, directory: RuntimeDir) -> None:
    (exchange,) = golden("status")
    with allocator.plays([exchange]):
        assert ask_status(directory, TIMEOUT_S) == exchange.reply_fields[3]
