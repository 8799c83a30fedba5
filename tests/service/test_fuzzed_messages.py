"""Whatever comes in: it is answered as the protocol says or passed over, what is malformed changes nothing, and every
slot stays in exactly one state."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from dispatching import EPOCH, Client, Connection
from fuzzing import STRANGE, MessageFuzzer, Target, check_reply
from hypothesis import given, settings
from hypothesis import strategies as st

from mambapool.pool import protocol
from mambapool.pool.protocol import pack
from mambapool.service.dispatcher import Dispatcher

#: 10 minutes of `make fuzz` send millions; this is what every run of the tests can afford.
MESSAGES = 20_000

Join = Callable[[str], Client]


def target(client: Client, other: int) -> Target:
    sessions = client.connection.dispatcher.registry.sessions

    def applied() -> int:
        session = sessions.get(client.number)
        return session.applied if session is not None else 0

    return Target(client.number, EPOCH, 16, client.lease, applied, other)


def tables(dispatcher: Dispatcher) -> dict[str, bytes]:
    return {name: pool.table.path.read_bytes() for name, pool in dispatcher.registry.pools.items()}


@pytest.mark.parametrize("seed", [1, 2])
def test_random_messages_leave_the_books_right(dispatcher: Dispatcher, join: Join, seed: int) -> None:
    chance = random.Random(seed)
    fuzzer = MessageFuzzer(chance)
    clients = [join("one"), join("two")]
    targets = [target(clients[0], clients[1].number), target(clients[1], clients[0].number)]
    statuses: set[int] = set()
    for number in range(MESSAGES // 2):
        which = chance.randrange(2)
        before = tables(dispatcher) if number % 10 == 0 else None
        reply = clients[which].connection.send_body(fuzzer.body(targets[which] if number % 5 else None))
        fields = check_reply(reply) if reply is not None else None
        if fields is not None:
            statuses.add(fields[2])
            if fields[2] == protocol.MALFORMED and before is not None:
                assert tables(dispatcher) == before, fields
        for _identity, late in dispatcher.outbox:
            check_reply(late)
        dispatcher.outbox.clear()
        if number % 100 == 0:
            dispatcher.registry.check()
        for client, at in zip(clients, targets, strict=True):
            if client.number not in dispatcher.registry.sessions:  # it said DETACH, or was evicted
                client.number = at.session = client.connection.hello(client.lease)[3]["session"]
    # It went as deep as it should: grants, refusals of every kind of slot, gaps.
    expected = {protocol.OK, protocol.NONE, protocol.GAP, protocol.MALFORMED, protocol.NOT_OPEN}
    expected |= {protocol.DOUBLE_FREE, protocol.NOT_HOLDER, protocol.SLOT_OUT_OF_RANGE, protocol.DUPLICATE_SLOT}
    assert statuses >= expected


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=40)
    | st.sampled_from([value for value in STRANGE if not isinstance(value, (float, list, dict))]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Client:
    """One session for all examples: none of them may spoil it for the next."""
    from dispatching import make_pool, make_registry

    directory = tmp_path_factory.mktemp("fuzz")
    return Client(Connection(Dispatcher(EPOCH, make_registry(directory, make_pool(directory)))))


@settings(max_examples=150, deadline=None)
@given(op=st.sampled_from(sorted(protocol.OP_NAMES)) | st.integers(), tail=st.lists(VALUES, max_size=5))
def test_every_operation_takes_any_values(shared: Client, op: int, tail: list[Any]) -> None:
    dispatcher = shared.connection.dispatcher
    if shared.number not in dispatcher.registry.sessions:
        shared.number = shared.connection.hello(shared.lease)[3]["session"]
    session = shared.session
    posted = session.applied + (op in protocol.POSTED_OPS or (len(tail) > 1 and tail[1] is not None))
    shared.request_id += 1
    try:
        body = pack((op, shared.number, shared.request_id, EPOCH, posted, 0, *tail))
    except (ValueError, OverflowError):
        return  # no msgpack: a number of more than 64 bits
    reply = shared.connection.send_body(body)
    if reply is not None:
        assert check_reply(reply)[0] in (0, shared.request_id)
    dispatcher.outbox.clear()
    dispatcher.registry.check()
