"""The bytes of every message, on the allocator's side."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from dispatching import EPOCH, GOLDEN_PID, Connection, Exchange, golden, hello_map, make_pool, make_registry

from mambapool.pool import protocol
from mambapool.pool.layout import Geometry, TensorSpec
from mambapool.pool.protocol import pack, unpack
from mambapool.service.dispatcher import Dispatcher
from mambapool.service.pools import Shard

PARTS = ("session", "turns", "groups", "refusals", "notices", "tags", "status", "audit", "lost")
STATUSES = {protocol.OK, protocol.NONE, protocol.GAP, *protocol._ERROR_OF_STATUS}
DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"


def exchanges(*parts: str) -> list[Any]:
    """Of those parts, one parameter each."""
    return [pytest.param(exchange, id=exchange.name) for part in parts for exchange in golden(part)]


every_exchange = pytest.mark.parametrize("exchange", exchanges(*PARTS))


@pytest.fixture
def dispatcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dispatcher:
    """The allocator of the golden messages: everything that is random or of this process is fixed."""
    geometry = Geometry((TensorSpec.parse("conv=bfloat16:2x6x3"), TensorSpec.parse("temporal=float32:2x2x4x4")))
    shards = [Shard("keeper-default-0.sock", bytes(range(16, 32)))]
    pool = make_pool(tmp_path, geometry=geometry, shards=shards)
    monkeypatch.setattr(os, "getpid", lambda: GOLDEN_PID)
    return Dispatcher(EPOCH, make_registry(tmp_path, pool), status_header=lambda: {"uptime_s": 12.5})


def over(dispatcher: Dispatcher, connection: int) -> Connection:
    return Connection(dispatcher, b"zmq-%d" % connection)


@pytest.fixture
def two_sessions(dispatcher: Dispatcher) -> Dispatcher:
    """Session 1 holds 1 and 2, session 2 has 3 and 4 in a window."""
    first, second = over(dispatcher, 1), over(dispatcher, 2)
    first.send_body(golden("session")[0].request)
    first.send(protocol.ALLOC, 1, 9000, EPOCH, 0, 0, 2, None, False)
    second.hello(bytes(16), name="engine-1", pid=4311)
    second.send(protocol.BEGIN, 2, 2, EPOCH, 0, 2, 2, None, False)
    return dispatcher


@pytest.mark.parametrize("part", ["session", "turns", "groups"])
def test_messages_that_follow_each_other_from_hello_to_detach(dispatcher: Dispatcher, part: str) -> None:
    exchanges = golden(part)
    for exchange in exchanges:
        if exchange.lost != "request":
            reply = over(dispatcher, exchange.connection).send_body(exchange.request)
            assert reply == (None if exchange.later else exchange.reply), exchange.name
        for waited in [waited for waited in exchanges if waited.later == exchange.name]:
            assert over(dispatcher, waited.connection).late_bodies() == [waited.reply]
        assert dispatcher.outbox == [], exchange.name
    dispatcher.registry.check()
    assert not dispatcher.registry.sessions


@pytest.mark.parametrize("exchange", exchanges("refusals", "notices", "tags", "status", "audit"))
def test_a_message_to_an_allocator_with_two_sessions(two_sessions: Dispatcher, exchange: Exchange) -> None:
    assert over(two_sessions, exchange.connection).send_body(exchange.request) == exchange.reply
    two_sessions.registry.check()


@pytest.mark.parametrize("exchange", exchanges("lost"))
def test_a_message_to_a_pool_whose_keeper_died(two_sessions: Dispatcher, exchange: Exchange) -> None:
    two_sessions.registry.lose("default", "the keeper of pool default, rank 0 died (its process ended)")
    assert over(two_sessions, exchange.connection).send_body(exchange.request) == exchange.reply


@every_exchange
def test_the_fields_are_those_of_the_bytes(exchange: Exchange) -> None:
    assert unpack(exchange.request, len(exchange.request)) == exchange.request_fields
    assert pack(exchange.request_fields) == exchange.request
    if exchange.reply is not None:
        assert unpack(exchange.reply, len(exchange.reply)) == exchange.reply_fields
        assert pack(exchange.reply_fields) == exchange.reply


@every_exchange
def test_the_document_shows_the_bytes(exchange: Exchange) -> None:
    shown = "".join(DOCUMENT.read_text().split())
    assert exchange.request.hex() in shown
    assert exchange.reply is None or exchange.reply.hex() in shown


def test_every_operation_and_every_status_is_among_them() -> None:
    every = [exchange for part in PARTS for exchange in golden(part)]
    assert {exchange.request_fields[0] for exchange in every} >= set(protocol.OP_NAMES)
    assert {exchange.reply_fields[2] for exchange in every if exchange.reply} == STATUSES


def test_the_document_has_every_status_with_its_number_and_exception() -> None:
    table = DOCUMENT.read_text().split("## Statuses")[1].split("\n\n")[1]
    documented = set()
    for row in table.splitlines()[2:]:
        number, name, _, exception = (cell.strip(" `") for cell in row.split("|")[1:5])
        status = int(number)
        assert getattr(protocol, name) == status
        if status in protocol._ERROR_OF_STATUS:
            assert protocol._ERROR_OF_STATUS[status].__name__ == exception
        documented.add(status)
    assert documented == STATUSES


def test_the_attach_map_in_the_document_has_every_field() -> None:
    request = DOCUMENT.read_text().split("| in the request's map |")[1].split("\n\n")[0]
    assert all(f"| `{field}` |" in request for field in {**hello_map(), "resume": 1, "group": 1, "world_size": 1})
    reply = DOCUMENT.read_text().split("| in the reply's map |")[1].split("\n\n")[0]
    assert all(f"| `{field}` |" in reply for field in golden("groups")[0].reply_fields[3])


def test_the_audit_map_in_the_document_has_every_field() -> None:
    reply = DOCUMENT.read_text().split("| in the reply's map |")[2].split("\n\n")[0]
    (audit,) = golden("audit")
    assert all(f"`{field}`" in reply for field in audit.reply_fields[3])
