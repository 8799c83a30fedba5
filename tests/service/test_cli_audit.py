"""``mambapool audit`` as people and scripts see it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from daemons import Daemon, mambapool, wait_until
from fresh_pool import granted
from leased_clients import successor_of

from mambapool.client.operators import ask_audit
from mambapool.pool.errors import AllocatorUnavailable, UnknownPool
from mambapool.pool.exits import EXIT_DONE, EXIT_FAILED, EXIT_NOT_REACHABLE

DaemonFactory = Callable[..., Daemon]


def audit(daemon: Daemon, *options: str) -> subprocess.CompletedProcess[str]:
    return mambapool("audit", "--dir", str(daemon.dir), *options)


def audit_json(daemon: Daemon, *options: str) -> dict[str, Any]:
    """Of a sound daemon."""
    done = audit(daemon, "--json", *options)
    assert (done.returncode, done.stderr) == (EXIT_DONE, "")
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["ok"] is True
    return found


def test_who_holds_what_since_when_and_what_for(daemon: Daemon) -> None:
    first = daemon.connect(name="[/b] engine 0")
    slots = granted(first.allocator.alloc(3, tag="request 17"))
    first.allocator.alloc_group_begin(2, tag="batch 3")
    guaranteed = daemon.connect(name="engine-1", guarantee=10)
    guaranteed.allocator.alloc(4, tag="stays here")
    first.transfer(slots[2:], to=guaranteed.session)
    made = daemon.connect(pool="made", create_slots=3)

    report = audit_json(daemon)
    assert report["pid"] == daemon.allocator_pid
    pools = {pool["name"]: pool for pool in report["pools"]}
    assert sorted(pools) == ["default", "made"]
    assert (pools["made"]["free"], pools["made"]["holdings"], made.session) == (3, [], 3)
    pool = pools["default"]
    counts = {key: pool[key] for key in ("slots", "free", "held", "windows", "offered", "quarantined")}
    assert counts == {"slots": 64, "free": 49, "held": 12, "windows": 2, "offered": 1, "quarantined": 0}
    assert (pool["ok"], pool["violations"]) == (True, [])
    holdings = {holding.pop("slot"): holding for holding in pool["holdings"]}
    assert sorted(holdings) == list(range(1, 16))
    assert all(0 <= holding.pop("age_s") < 60 for holding in holdings.values())
    requests = {holding.pop("request") for holding in holdings.values()}
    assert len(requests) == 3
    common = {"pid": os.getpid(), "state": "live", "generation": 1, "at_least": False}
    mine = {**common, "session": first.session, "name": "[/b] engine 0"}
    held = {**mine, "kind": "held", "offered_to": None, "tag": "request 17"}
    assert holdings[1] == holdings[2] == held
    assert holdings[3] == {**held, "kind": "offered", "offered_to": guaranteed.session}
    assert holdings[4] == {**mine, "kind": "window", "offered_to": None, "tag": "batch 3"}
    theirs = {"session": guaranteed.session, "name": "engine-1", "kind": "guarantee"}
    assert holdings[6] == {**common, **theirs, "offered_to": None, "tag": None}

    table = audit(daemon)
    assert (table.returncode, table.stderr) == (EXIT_DONE, "")
    assert (
        "pool default, 64 slots (49 free, 12 held, 2 windows, 1 offered): every slot is in exactly" in table.stdout
    )
    lines = [" ".join(re.sub(r"[0-9.]+ s ", "AGE ", line).split()) for line in table.stdout.splitlines()]
    pid = os.getpid()
    assert f"default {first.session} [/b] engine 0 {pid} live held 2 AGE 1 request 17 1-2" in lines
    assert f"default {guaranteed.session} engine-1 {pid} live guarantee 10 AGE 1 6-15" in lines


def test_only_what_is_held_for_longer_is_listed(daemon: Daemon) -> None:
    worker = daemon.connect()
    worker.allocator.alloc(2, tag="old")

    def old_enough() -> bool:
        return all((holding.age_s or 0.0) > 0.3 for holding in daemon.audit("default").holdings())

    wait_until(old_enough, "0.3 s have passed")
    worker.allocator.alloc(3, tag="new")
    (pool,) = audit_json(daemon, "--older-than", "300ms")["pools"]
    tags = {holding["tag"] for holding in pool["holdings"]}
    assert "old" in tags
    (pool,) = audit_json(daemon, "--older-than", "1h")["pools"]
    assert (pool["holdings"], pool["held"]) == ([], 5)
    assert "old" not in audit(daemon, "--older-than", "1h").stdout


def test_ages_and_tags_end_with_the_allocator(daemon: Daemon) -> None:
    worker = daemon.connect()
    worker.allocator.alloc(2, tag="request 17")
    pid = daemon.allocator_pid
    os.kill(pid, signal.SIGKILL)
    successor_of(daemon, pid)
    (pool,) = audit_json(daemon)["pools"]
    assert [(h["slot"], h["tag"], h["at_least"]) for h in pool["holdings"]] == [(1, None, True), (2, None, True)]
    assert all(0 <= holding["age_s"] < 60 for holding in pool["holdings"])
    assert "≥" in audit(daemon).stdout
    assert worker.allocator.alloc(1, tag="after") is not None
    (pool,) = audit_json(daemon)["pools"]
    assert (3, "after", False) in {(h["slot"], h["tag"], h["at_least"]) for h in pool["holdings"]}


FAULTS = {
    "lose-slot": (6, "held, and free in the slot table"),
    "list-twice": (5, "on the free list, and held"),
    "stray-owner": (5, "held by a session that there is not"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_in_the_allocator_is_status_1_and_the_slots_are_named(
    daemon_factory: DaemonFactory, fault: str
) -> None:
    daemon = daemon_factory(slots=16, environment={"MAMBAPOOL_FAULT": f"{fault}:2"})
    worker = daemon.connect(name="engine-0")
    assert worker.allocator.alloc(4) is not None
    assert audit_json(daemon)["ok"] is True, "before"
    worker.allocator.free([1, 2, 3])  # type: ignore[arg-type]
    assert worker.allocator.available_size() == 15
    assert audit_json(daemon)["ok"] is True, "still"
    worker.allocator.alloc_group_begin(1)
    slot, says = FAULTS[fault]

    done = audit(daemon, "--json", "--older-than", "1h")
    assert (done.returncode, done.stderr) == (EXIT_FAILED, "")
    report = json.loads(done.stdout)
    (pool,) = report["pools"]
    assert (report["ok"], pool["ok"]) == (False, False)
    assert {"what": says, "slots": [slot]} in pool["violations"]
    table = audit(daemon)
    assert table.returncode == EXIT_FAILED
    assert "not as it has to be:" in table.stdout
    assert f"✗ slots {slot}: {says}" in table.stdout
    daemon.close()  # before it is checked, which it would not pass


def test_the_daemon_serves_while_it_is_audited(daemon: Daemon) -> None:
    allocator = daemon.connect().allocator
    for _ in range(200):
        slots = granted(allocator.alloc(2))
        assert daemon.audit("default").counts()["held"] == 2
        allocator.free(slots)


def test_nobody_to_ask_is_another_failure(daemon: Daemon, runtime_dir: Any) -> None:
    missing = mambapool("audit", "--dir", str(runtime_dir / "nowhere"))
    assert (missing.returncode, missing.stdout) == (EXIT_NOT_REACHABLE, "")
    with pytest.raises(UnknownPool, match="there is no pool 'other'"):
        ask_audit(daemon.directory, 5.0, "other")
    with daemon.stopped(), pytest.raises(AllocatorUnavailable, match=r"did not answer within 0\.1 s"):
        ask_audit(daemon.directory, 0.1, "default")
