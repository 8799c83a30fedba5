"""Eight schedulers at random work on one pool: no state is overwritten, and every slot is accounted for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from daemons import SMALL_STATE, Daemon
from fresh_pool import drain
from processes import Child, Children

from mambapool.pool import slot_table as st

SLOTS = 40
CLIENTS = 8
ROUNDS = 400
STATES = ("free", "held", "windows", "offered", "quarantined")

STAMPING_WORKER = Path(__file__).with_name("stamping_worker.py").read_text()


def look_until_all_are_done(daemon: Daemon, children: list[Child]) -> int:
    """Hold ``status`` to its law as long as the children work; how often it was looked at."""
    looks = 0
    waiting = set(children)
    while waiting:
        pool = daemon.pool()
        looks += 1
        assert sum(pool[state] for state in STATES) == SLOTS, pool
        for state in ("held", "windows"):
            assert sum(holder[state] for holder in pool["holders"]) == pool[state], pool
        waiting -= {child for child in waiting if child.has_said_something()}
    return looks


def holders_in_the_table(daemon: Daemon) -> dict[int, list[int]]:
    """Session number → the slots that the table says it holds."""
    table = st.SlotTableReader(daemon.directory.slot_table("default"))
    owners = table.words[table.layout.field(st.OWNER) :][: SLOTS + 1] >> np.uint64(8)
    return {int(owner): np.flatnonzero(owners == owner).tolist() for owner in set(owners.tolist()) - {0}}


def test_no_state_is_overwritten_and_every_slot_is_accounted_for(
    daemon_factory: Callable[..., Daemon], children: Children
) -> None:
    daemon = daemon_factory(slots=SLOTS, states=SMALL_STATE)
    workers = [children.start(STAMPING_WORKER, daemon.dir, number, ROUNDS) for number in range(1, CLIENTS + 1)]
    assert look_until_all_are_done(daemon, workers) > 20
    ends = [json.loads(worker.hear()) for worker in workers]
    assert sum(end["exhausted"] for end in ends) > 100, "the pool was never full: this shows nothing"
    assert all(end["grants"] > ROUNDS for end in ends)
    daemon.check()
    assert holders_in_the_table(daemon) == {end["session"]: end["held"] for end in ends if end["held"]}
    for worker in workers:
        worker.say("close")
        worker.rest()
    allocator = daemon.connect().allocator
    assert allocator.available_size() == SLOTS
    assert sorted(drain(allocator)) == list(range(1, SLOTS + 1))
