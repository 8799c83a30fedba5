from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dispatching import EPOCH, Client, Connection, everything, hello_map, make_registry, own_peer

from mambapool.pool import protocol
from mambapool.pool.errors import ProtocolError, VersionMismatch
from mambapool.pool.protocol import (
    GEOMETRY_MISMATCH,
    HELLO,
    MALFORMED,
    MAX_CREATED_SLOTS,
    OK,
    REFUSED,
    UNKNOWN_POOL,
    WRONG_VERSION,
)
from mambapool.service.attach import AttachRequest
from mambapool.service.dispatcher import Dispatcher


def test_hello_tells_of_the_session_and_its_pool(connection: Connection) -> None:
    assert connection.hello() == [
        1,
        EPOCH,
        OK,
        {
            "version": 1,
            "pid": os.getpid(),
            "session": 1,
            "row": 0,
            "applied": 0,
            "slots": 16,
            "limit": 16,
            "guarantee": 0,
            "uuid": bytes(range(16)),
            "geometry": None,
            "table": "default.table",
            "shards": [],
        },
    ]


def test_hello_needs_neither_epoch_nor_session(connection: Connection) -> None:
    assert connection.ask(HELLO, 99, 7, EPOCH + 1, 3, 9, hello_map())[:3] == [7, EPOCH, OK]


def test_hello_again_gives_the_same_session(client: Client) -> None:
    client.alloc(3)
    client.post(protocol.FREE, 2)
    before = everything(client.connection.dispatcher)
    again = client.connection.hello(client.lease)[3]
    assert (again["session"], again["applied"]) == (client.number, 1)
    assert everything(client.connection.dispatcher) == before


def test_a_lease_that_says_hello_over_another_connection_takes_its_session_along(client: Client) -> None:
    client.alloc(3)
    old, new = client.connection, Connection(client.connection.dispatcher, b"zmq-new")
    assert new.hello(client.lease, resume=client.number)[3]["session"] == client.number
    assert client.alloc(1)[2] == protocol.UNKNOWN_SESSION
    client.connection = new
    assert client.alloc(1)[2:] == [OK, 4]
    assert old.hello(client.lease)[3]["session"] == client.number
    assert client.alloc(1)[2] == protocol.UNKNOWN_SESSION


def test_another_lease_gets_another_session(client: Client, join: Callable[[str], Client]) -> None:
    assert join("other").number == client.number + 1


def test_a_session_that_this_allocator_does_not_know_is_not_resumed(connection: Connection) -> None:
    reply = connection.hello(resume=5)
    assert reply[:3] == [1, EPOCH, REFUSED]
    assert "session 5 is not known here: the allocator was restarted" in reply[3]
    assert not connection.dispatcher.registry.sessions


@pytest.mark.parametrize("versions", [[1, 1], [1, 999], [0, 1], [-5, 2**63]])
def test_the_highest_version_that_both_sides_speak_is_taken(connection: Connection, versions: list[int]) -> None:
    assert connection.hello(versions=versions)[3]["version"] == 1


@pytest.mark.parametrize("versions", [[2, 999], [999, 999], [0, 0], [-2, -1], [1, 0]])
def test_a_client_of_other_versions_is_told_which_ones_there_are(
    connection: Connection, versions: list[int]
) -> None:
    reply = connection.hello(versions=versions)
    assert reply[:3] == [1, EPOCH, WRONG_VERSION]
    assert f"the client speaks {versions[0]} to {versions[1]}, the allocator 1 to 1" in reply[3]


#: Values that no field takes.
NEVER: tuple[Any, ...] = (True, 1.5, float("nan"), [], {}, [1, 2, 3], {"a": 1}, b"", b"\xff" * 16)

BAD_TENSORS: tuple[Any, ...] = (
    ["conv", "bfloat16"],
    ["conv", "bfloat16", 4],
    ["conv", "bfloat16", ["4"]],
    ["conv", "bfloat16", [True]],
    [1, "bfloat16", [4]],
    ["conv", None, [4]],
)

MALFORMED_FIELDS: dict[str, tuple[Any, ...]] = {
    "versions": (*NEVER, None, 1, "1", [1], [1, 2.0], [True, 1], [None, 1], ["1", "1"]),
    "lease": (*NEVER[:-1], None, 5, "L" * 16, bytes(15), bytes(17)),
    "pool": (*NEVER, None, 5, "", "Default", "a b", "a/b", "../x", "a" * 33, "ä", "a\n", "a\0"),
    "name": (*NEVER, None, 5, "", "a\n", "a\0b", "x" * 129, "ä" * 65, "\u202e"),
    "pid": (*NEVER, None, -1, 2**32 + 1, 2**64 - 1, "4310"),
    "rank": (*NEVER, None, -1, 2**16 + 1, 2**64 - 1, "0"),
    "resume": (*NEVER, 0, -1, 2**63, 2**64 - 1, "1"),
    "guarantee": (*NEVER, None, -1, 2**31 - 1, 2**64 - 1, "0"),
    "limit": (*NEVER, 0, -1, 2**31 - 1, 2**64 - 1, "16"),
    "create_slots": (*NEVER, 0, -1, MAX_CREATED_SLOTS + 1, 2**64 - 1, "16"),
    "slots": (*NEVER, -1, 2**31, 2**64 - 1, "16"),
    "expect": (True, 1, "abc", ["abc"], {"conv": 1}, *([bad] for bad in BAD_TENSORS)),
}


@pytest.mark.parametrize("field", MALFORMED_FIELDS)
def test_a_field_of_a_wrong_kind_is_malformed_and_named(connection: Connection, field: str) -> None:
    before = everything(connection.dispatcher)
    for value in MALFORMED_FIELDS[field]:
        reply = connection.hello(**{field: value})
        assert reply[:3] == [1, EPOCH, MALFORMED], (field, value)
        assert field in reply[3]
    assert everything(connection.dispatcher) == before


@pytest.mark.parametrize("field", ["versions", "lease", "pool", "name", "pid", "rank", "guarantee"])
def test_a_field_that_is_missing_is_malformed_and_named(field: str) -> None:
    hello = hello_map()
    del hello[field]
    with pytest.raises(ProtocolError, match=field):
        AttachRequest.from_wire(hello)


def test_fields_that_may_be_missing_are_nil_then() -> None:
    hello = hello_map()
    for field in ("resume", "limit", "create_slots", "slots", "expect"):
        hello.pop(field, None)
    request = AttachRequest.from_wire(hello)
    assert (request.resume, request.limit, request.create_slots, request.slots) == (None, None, None, None)
    assert request.expect == ()


def test_fields_of_later_versions_are_passed_over(connection: Connection) -> None:
    assert connection.hello(later={"a": [1, None]})[2] == OK


@pytest.mark.parametrize("value", [None, [], "x", 1, b"x"])
def test_hello_takes_a_map(connection: Connection, value: object) -> None:
    reply = connection.ask(HELLO, 0, 1, 0, 0, 0, value)
    assert reply[:3] == [1, EPOCH, MALFORMED]
    assert "HELLO takes a map" in reply[3]


def test_a_wrong_version_is_told_before_anything_else_is_looked_at() -> None:
    with pytest.raises(VersionMismatch):
        AttachRequest.from_wire({"versions": [7, 9]})


def test_an_unknown_pool_is_told_with_those_that_there_are(connection: Connection) -> None:
    reply = connection.hello(pool="other")
    assert reply == [1, EPOCH, UNKNOWN_POOL, "there is no pool 'other'; pools here: default"]


def test_another_geometry_is_told_with_both_values(connection: Connection) -> None:
    reply = connection.hello(slots=17)
    assert reply == [1, EPOCH, GEOMETRY_MISMATCH, "slots: expected 17, pool 'default' has 16 slots"]
    assert not connection.dispatcher.registry.sessions


def test_a_pool_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    connection = Connection(Dispatcher(EPOCH, make_registry(tmp_path / "missing")))
    reply = connection.hello(create_slots=4)
    assert reply[:3] == [1, EPOCH, REFUSED]
    assert "cannot make the slot table" in reply[3]


def test_nobody_new_is_taken_while_the_allocator_ends(client: Client) -> None:
    dispatcher = client.connection.dispatcher
    dispatcher.registry.ending = True
    assert Connection(dispatcher, b"zmq-2").hello(b"M" * 16)[2] == REFUSED
    assert client.alloc(1)[2] == OK


def foreign_peer() -> str:
    return f"localhost:{os.geteuid() + 1}:100:4242"


@pytest.mark.parametrize("op", [HELLO, protocol.STATUS, protocol.EVICT, protocol.AUDIT])
@pytest.mark.parametrize(
    ("peer", "says"),
    [
        (foreign_peer, f"this daemon serves uid {os.geteuid()}, not uid {os.geteuid() + 1}"),
        (lambda: None, "no uid came with this connection (None)"),
        (lambda: "", "no uid came with this connection ('')"),
        (lambda: "127.0.0.1", "no uid came with this connection ('127.0.0.1')"),
        (lambda: "localhost:root:0:1", "no uid came with this connection ('localhost:root:0:1')"),
    ],
    ids=["another uid", "none", "empty", "tcp", "a name"],
)
def test_who_is_not_this_user_is_refused(
    client: Client, op: int, peer: Callable[[], str | None], says: str
) -> None:
    before = everything(client.connection.dispatcher)
    stranger = Connection(client.connection.dispatcher, b"zmq-2", peer)
    more = {
        HELLO: (hello_map(client.lease),),
        protocol.EVICT: (client.number, True),
        protocol.AUDIT: ("default",),
    }.get(op, ())
    assert stranger.ask(op, 0, 3, 0, 0, 0, *more) == [3, EPOCH, REFUSED, says]
    assert everything(client.connection.dispatcher) == before


def test_root_is_served_too(dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    assert Connection(dispatcher, peer=lambda: "localhost:0:0:1").hello()[2] == OK
    assert Connection(dispatcher, peer=own_peer).hello()[2] == OK
