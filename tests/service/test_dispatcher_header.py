"""What is understood before it is known what is asked for: types, counts, epoch, session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from dispatching import EPOCH, NOT_MESSAGES, Client, Connection, everything, hello_map

from mambapool.pool import protocol
from mambapool.service.dispatcher import Dispatcher

#: A valid message of each kind after its header.
BODIES = {
    protocol.HELLO: (hello_map(),),
    protocol.DETACH: (),
    protocol.ALLOC: (1, None, False),
    protocol.BEGIN: (2, None, False),
    protocol.STATUS: (),
    protocol.FREE: (1,),
    protocol.END: (None,),
    protocol.CLEAR: (None,),
    protocol.CANCEL: (2,),
    protocol.OFFER: (1, 2),
    protocol.ACCEPT: (False,),
    protocol.PING: (),
    protocol.EVICT: (1, False),
    protocol.AUDIT: ("default",),
    protocol.CLOSE: ([2],),
}
#: What needs no session.
FOR_ANYBODY = (protocol.HELLO, protocol.STATUS, protocol.EVICT, protocol.AUDIT)
HEADER = ("op", "session", "id", "epoch", "posted", "oldest open")

every_op = pytest.mark.parametrize("op", list(BODIES), ids=list(protocol.OP_NAMES.values()))


def message(kind: int, **changes: Any) -> tuple[Any, ...]:
    """The next message of the first session; ``changes`` replace header fields."""
    number = 1 if kind in protocol.POSTED_OPS else 0
    header = {"op": kind, "session": 1, "id": 2, "epoch": EPOCH, "posted": number, "oldest open": 0}
    return (*(header | changes).values(), *BODIES[kind])


@every_op
@pytest.mark.parametrize("field", HEADER)
def test_a_header_field_that_is_no_whole_number_is_malformed(client: Client, op: int, field: str) -> None:
    before = everything(client.connection.dispatcher)
    for value in (True, 1.0, float("nan"), "1", None, b"\1", [1], {"a": 1}):
        reply = client.connection.ask(*message(op, **{field: value}))
        assert reply[:3] == [0 if field == "id" else 2, EPOCH, protocol.MALFORMED], value
        assert "whole numbers" in reply[3]
    assert everything(client.connection.dispatcher) == before


@every_op
@pytest.mark.parametrize("field", ["id", "posted", "oldest open"])
def test_a_number_outside_of_0_to_2_63_is_malformed(client: Client, op: int, field: str) -> None:
    before = everything(client.connection.dispatcher)
    for value in (-1, -(2**63), 2**63, 2**64 - 1):
        reply = client.connection.ask(*message(op, **{field: value}))
        assert reply[:3] == [0 if field == "id" else 2, EPOCH, protocol.MALFORMED], value
    assert everything(client.connection.dispatcher) == before


@every_op
def test_every_count_of_fields_but_the_right_one_is_malformed(client: Client, op: int) -> None:
    dispatcher = client.connection.dispatcher
    before = everything(dispatcher)
    right = message(op)
    for fields in (*(right[:count] for count in range(len(right))), (*right, None), (*right, 1, 2, 3)):
        reply = client.connection.ask(*fields)
        assert reply[2] == protocol.MALFORMED, fields
        # One more may be the tag of what is granted.
        assert "fields" in reply[3] or (fields[-1] is None and "tag" in reply[3])
        assert everything(dispatcher) == before
    assert dispatcher.malformed == len(right) + 2


def test_an_unknown_operation_is_malformed(client: Client) -> None:
    before = everything(client.connection.dispatcher)
    for op in (0, -1, max(protocol.OP_NAMES) + 1, 127, 2**63, 2**64 - 1, -(2**63)):
        reply = client.connection.ask(op, 1, 2, EPOCH, 0, 0, 1, None, False)
        assert reply == [2, EPOCH, protocol.MALFORMED, f"unknown operation {op}"]
    assert everything(client.connection.dispatcher) == before


@pytest.mark.parametrize("body", NOT_MESSAGES.values(), ids=NOT_MESSAGES.keys())
def test_what_is_no_message_is_answered_and_changes_nothing(client: Client, body: bytes) -> None:
    before = everything(client.connection.dispatcher)
    reply = client.connection.send_body(body)
    assert reply is not None
    known, epoch, status, text = protocol.unpack(reply, len(reply))
    assert (epoch, status) == (EPOCH, protocol.MALFORMED)
    assert known in (0, 1)
    assert len(text) <= 300
    assert everything(client.connection.dispatcher) == before
    assert client.alloc(1)[2:] == [protocol.OK, 1]


@pytest.mark.parametrize("depth", [100, 900, 1000, 1015])
@every_op
def test_a_field_that_is_nested_deeply_is_malformed(client: Client, op: int, depth: int) -> None:
    before = everything(client.connection.dispatcher)
    deep = b"\x91" * depth + b"\xc0"
    for place in range(6, len(message(op))):
        fields = [deep if at == place else msgpack.packb(value) for at, value in enumerate(message(op))]
        reply = client.connection.send_body(bytes([0x90 + len(fields)]) + b"".join(fields))
        assert reply is not None
        assert protocol.unpack(reply, 0)[2] == protocol.MALFORMED
    if op == protocol.HELLO:
        for key in hello_map():
            fields = [*map(msgpack.packb, message(op)[:6]), b"\x81" + msgpack.packb(key) + deep]
            reply = client.connection.send_body(b"\x97" + b"".join(fields))
            assert reply is not None
            assert protocol.unpack(reply, 0)[2] == protocol.MALFORMED
    assert everything(client.connection.dispatcher) == before


def test_messages_that_are_not_understood_are_counted(dispatcher: Dispatcher) -> None:
    reply = dispatcher.answer_malformed("a message has one frame, not 3")
    assert protocol.unpack(reply, 0) == [0, EPOCH, protocol.MALFORMED, "a message has one frame, not 3"]
    dispatcher.handle(b"x", b"", lambda: None, now=0.0)
    assert dispatcher.malformed == 2


NEEDS_SESSION = [op for op in BODIES if op not in FOR_ANYBODY]

every_op_of_a_session = pytest.mark.parametrize(
    "op", NEEDS_SESSION, ids=[protocol.OP_NAMES[op] for op in NEEDS_SESSION]
)


@every_op_of_a_session
def test_another_epoch_is_told_which_one_this_is(client: Client, op: int) -> None:
    before = everything(client.connection.dispatcher)
    for epoch in (0, EPOCH - 1, EPOCH + 1, 2**64 - 1, -1):
        reply = client.connection.ask(*message(op, epoch=epoch))
        assert reply == [2, EPOCH, protocol.WRONG_EPOCH, f"this is epoch {EPOCH}, not {epoch}: say HELLO again"]
    assert everything(client.connection.dispatcher) == before


@every_op_of_a_session
def test_an_unknown_session_is_refused(client: Client, op: int) -> None:
    before = everything(client.connection.dispatcher)
    for session in (0, 2, -1, 2**63, 2**64 - 1):
        reply = client.connection.ask(*message(op, session=session))
        assert reply[:3] == [2, EPOCH, protocol.UNKNOWN_SESSION]
        assert reply[3] == f"no session {session} on this connection: say HELLO"
    assert everything(client.connection.dispatcher) == before


@every_op_of_a_session
def test_a_session_of_another_connection_is_refused(
    client: Client, join: Callable[[str], Client], op: int
) -> None:
    other = join("other")
    before = everything(client.connection.dispatcher)
    assert other.connection.ask(*message(op))[2] == protocol.UNKNOWN_SESSION
    assert everything(client.connection.dispatcher) == before


@every_op_of_a_session
def test_a_session_that_has_left_is_unknown(client: Client, op: int) -> None:
    assert client.request(protocol.DETACH)[2] == protocol.OK
    assert client.connection.ask(*message(op))[2] == protocol.UNKNOWN_SESSION


def test_a_wrong_epoch_is_told_before_an_unknown_session(connection: Connection) -> None:
    assert connection.ask(protocol.ALLOC, 1, 2, EPOCH + 1, 0, 0, 1, None, False)[2] == protocol.WRONG_EPOCH
    assert connection.ask(protocol.ALLOC, 1, 2, EPOCH, 0, 0, 1, None, False)[2] == protocol.UNKNOWN_SESSION
