"""Silence takes nothing away: who is stopped, idle or asleep keeps its slots, and is shown as what it is."""

from __future__ import annotations

import signal
import time

from daemons import wait_until
from fresh_pool import FreshPoolFactory, drain, ids
from groups import new_name
from leased_clients import RemoteClient
from processes import Children

from mambapool.service.sessions import SUSPECT_AFTER_S


def test_a_stopped_client_keeps_its_slots_and_works_on_while_who_is_idle_or_joins_a_group_is_never_suspect(
    new_pool: FreshPoolFactory, children: Children
) -> None:
    pool = new_pool(8)
    stopped, asleep = RemoteClient(children, pool), RemoteClient(children, pool)
    assert stopped.ask("allocator.alloc(3)") == [1, 2, 3]
    stopped.ask("allocator.alloc_group_begin(2)")
    assert stopped.ask("allocator.alloc(1)") == [4]
    assert asleep.ask("allocator.alloc(2)") == [6, 7]
    # Its main thread is not there to say anything; that of this process makes no call.
    asleep.run("signal.signal(signal.SIGUSR1, lambda *_: None); signal.pause()")
    idle = pool.connect()
    assert ids(idle.allocator.alloc(1)) == [8]
    early = RemoteClient(children, pool, group=new_name(), rank=0, world_size=2, timeout=30.0)
    wait_until(lambda: len(pool.status()["holders"]) == 5, "rank 0 waits for rank 1")
    joined = time.monotonic()
    stopped.kill(signal.SIGSTOP)
    began = time.monotonic()
    seen: set[str] = set()

    def is_suspect() -> bool:
        states = {holder["session"]: holder["state"] for holder in pool.status()["holders"]}
        seen.update(state for session, state in states.items() if session != stopped.session)
        assert pool.owner.allocator.alloc(1) is None
        # Had rank 0 said nothing since it came, it would be suspect, too.
        return bool(states[stopped.session] == "suspect") and time.monotonic() > joined + SUSPECT_AFTER_S

    try:
        wait_until(is_suspect, "the stopped one is suspect", timeout=3 * SUSPECT_AFTER_S)
        assert time.monotonic() - began > SUSPECT_AFTER_S - 1.1, "not sooner than it can miss a word"
        assert pool.held_by(stopped.session) == {1, 2, 3, 4, 5}
        assert pool.holder(pool.owner)["state"] == "live"
    finally:
        stopped.kill(signal.SIGCONT)
    assert seen == {"live"}
    early.kill()  # its group never was complete
    assert stopped.ask("allocator.free([1, 2])") is None
    assert stopped.ask("allocator.alloc_group_end()") is None
    assert stopped.ask("allocator.alloc(1)") == [1]
    wait_until(
        lambda: all(holder["state"] == "live" for holder in pool.status()["holders"]), "nobody is suspect any more"
    )
    asleep.kill(signal.SIGUSR1)
    assert asleep.ask("allocator.alloc(1)") == [2]
    idle.allocator.free([8])  # type: ignore[arg-type]
    stopped.ask("allocator.clear()")
    asleep.ask("allocator.clear()")
    wait_until(lambda: pool.available == 8, "all are free")
    assert len(drain(pool.owner.allocator)) == 8
