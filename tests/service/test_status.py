from __future__ import annotations

import os
from collections.abc import Callable

from dispatching import EPOCH, Client, Connection

from mambapool.pool import protocol
from mambapool.pool.protocol import OK, STATUS
from mambapool.service.dispatcher import Dispatcher
from mambapool.service.registry import Registry


def test_status_needs_no_session_and_no_epoch(connection: Connection) -> None:
    reply = connection.ask(STATUS, 0, 9, 0, 0, 0)
    assert reply[:3] == [9, EPOCH, OK]
    assert (reply[3]["epoch"], reply[3]["pid"]) == (EPOCH, os.getpid())
    assert [pool["name"] for pool in reply[3]["pools"]] == ["default"]


def test_status_has_what_the_process_adds(registry: Registry) -> None:
    dispatcher = Dispatcher(EPOCH, registry, status_header=lambda: {"uptime_s": 12.5})
    assert Connection(dispatcher).ask(STATUS, 0, 1, 0, 0, 0)[3]["uptime_s"] == 12.5


def test_status_names_every_holder_with_what_it_has(client: Client, join: Callable[[str], Client]) -> None:
    other = join("other")
    client.alloc(3)
    client.begin(4)
    client.post(protocol.FREE, 5)
    other.begin(2)
    (pool,) = client.connection.ask(STATUS, 0, 1, 0, 0, 0)[3]["pools"]
    counts = {key: pool[key] for key in ("slots", "free", "held", "windows", "offered", "quarantined")}
    assert counts == {"slots": 16, "free": 8, "held": 3, "windows": 5, "offered": 0, "quarantined": 0}
    holders = [(h["session"], h["name"], h["pid"], h["held"], h["windows"]) for h in pool["holders"]]
    assert holders == [(client.number, "engine-0", 4310, 3, 3), (other.number, "other", 4310, 0, 2)]


def test_status_shows_pools_that_clients_made_as_long_as_they_live(client: Client) -> None:
    dispatcher = client.connection.dispatcher
    maker = Client(Connection(dispatcher, b"zmq-2"), b"M" * 16, {"pool": "mine", "create_slots": 3})

    def names() -> list[str]:
        return [pool["name"] for pool in client.connection.ask(STATUS, 0, 1, 0, 0, 0)[3]["pools"]]

    assert names() == ["default", "mine"]
    maker.request(protocol.DETACH)
    assert names() == ["default"]
