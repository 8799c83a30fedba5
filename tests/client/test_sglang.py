"""The class that SGLang makes, without SGLang: what it asks the daemon for, and what its callers may do with it.

With SGLang's own callers: ``make peers``.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from daemons import Daemon, wait_until
from fresh_pool import granted, ids
from processes import Child, Children

from mambapool.client.sglang import MambaSlotAllocator, plugin
from mambapool.client.sglang.allocator import close_left
from mambapool.client.sglang.engine import Engine
from mambapool.pool.errors import (
    ClientClosed,
    ConfigError,
    DoubleFree,
    SlotOutOfRange,
)


@pytest.fixture(autouse=True)
def _this_daemon(shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MAMBAPOOL_DIR", str(shared_daemon.dir))
    yield
    gc.collect()
    close_left()


def make(size: int = 8) -> MambaSlotAllocator:
    return MambaSlotAllocator(size=size, device="cpu")


def pool_of(daemon: Daemon, allocator: MambaSlotAllocator) -> dict[str, Any]:
    """The pool in ``status`` whose holder the allocator is."""
    session = allocator._worker.session
    (pool,) = [
        pool for pool in daemon.status()["pools"] if session in [holder["session"] for holder in pool["holders"]]
    ]
    found: dict[str, Any] = pool
    return found


def test_each_has_a_pool_of_its_own_granted_whole(shared_daemon: Daemon) -> None:
    first, second = make(5), make(7)
    for allocator, size in ((first, 5), (second, 7)):
        pool = pool_of(shared_daemon, allocator)
        (holder,) = pool["holders"]
        assert (pool["slots"], pool["held"], holder["guarantee"], pool["shards"]) == (size, size, size, 0)
        assert ids(allocator.alloc(size)) == list(range(1, size + 1))
        assert allocator.alloc(1) is None


def test_pools_are_numbered_in_the_order_in_which_a_process_makes_them(
    shared_daemon: Daemon, children: Children
) -> None:
    """So that the ranks of an engine, which make them in the same order, name the same pools."""
    script = """
        from mambapool.client.sglang import MambaSlotAllocator
        made = [MambaSlotAllocator(size=size, device="cpu") for size in (3, 4)]
        print(flush=True)
        input()
    """
    where = {"MAMBAPOOL_DIR": str(shared_daemon.dir)}
    named = children.start(script, **where, MAMBAPOOL_GROUP="engine-a")
    nameless = [children.start(script, **where) for _ in range(2)]
    for child in (named, *nameless):
        child.hear()
    sizes = {pool["name"]: pool["slots"] for pool in shared_daemon.status()["pools"]}
    assert (sizes["engine-a-0"], sizes["engine-a-1"]) == (3, 4)
    own = {name.rpartition("-")[0] for name in sizes if name.startswith("sglang-")}
    assert len(own) >= 2, "two processes without a name share their pools"


#: One rank of an engine, which tries for a time; its warnings are lines, too.
ENGINE_THAT_TRIES = """
    import logging, sys
    logging.basicConfig(stream=sys.stdout, level=logging.WARNING)
    from mambapool.client.sglang import MambaSlotAllocator, engine
    from mambapool.pool.errors import GuaranteeExceeded
    engine.TIMEOUT_S = float(sys.argv[1])
    try:
        made = MambaSlotAllocator(size=3, device="cpu")
        print("made", flush=True)
        input()
    except GuaranteeExceeded as error:
        print("refused", error, flush=True)
"""


def start_engine(children: Children, daemon: Daemon, name: str, world_size: int, timeout: float) -> list[Child]:
    """Its ranks."""
    settings = {"MAMBAPOOL_DIR": str(daemon.dir), "MAMBAPOOL_GROUP": name, "MAMBAPOOL_WORLD_SIZE": str(world_size)}
    return [
        children.start(ENGINE_THAT_TRIES, timeout, **settings, MAMBAPOOL_RANK=str(rank))
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_engine_that_starts_while_the_one_before_is_ending_gets_what_that_has(
    shared_daemon: Daemon, children: Children, world_size: int
) -> None:
    name = f"engine-h{world_size}"
    before = start_engine(children, shared_daemon, name, world_size, 30.0)
    assert {rank.hear() for rank in before} == {"made"}
    after = start_engine(children, shared_daemon, name, world_size, 30.0)
    for rank in after:
        warning = rank.hear()
        assert warning.startswith("WARNING:mambapool.client:"), warning
        assert name in warning
    for rank in before:
        os.kill(rank.pid, signal.SIGKILL)
    assert {rank.hear() for rank in after} == {"made"}


def test_a_second_engine_of_the_same_name_is_refused_in_the_end_and_told_of_the_first(
    shared_daemon: Daemon, children: Children
) -> None:
    (first,) = start_engine(children, shared_daemon, "engine-b", 1, 30.0)
    assert first.hear() == "made"
    (second,) = start_engine(children, shared_daemon, "engine-b", 1, 0.3)
    assert second.hear().startswith("WARNING")
    refused = second.hear()
    assert refused.startswith("refused"), refused
    assert "engine-b" in refused
    assert "3" in refused


@pytest.mark.parametrize("size", [0, -1])
def test_no_slots_are_no_guarantee(size: int) -> None:
    with pytest.raises(ConfigError, match=f"size={size}"):
        make(size)


def test_what_nobody_holds_any_more_ends_with_the_next_one(shared_daemon: Daemon) -> None:
    allocator = make(4)
    name = pool_of(shared_daemon, allocator)["name"]
    del allocator
    gc.collect()
    make(4)
    wait_until(
        lambda: name not in [pool["name"] for pool in shared_daemon.status()["pools"]], "its pool has ended"
    )


def test_no_call_costs_a_message() -> None:
    allocator = make(8)
    before = allocator._worker.messages
    for _ in range(3):
        allocator.alloc_group_begin(4)
        slots = [granted(allocator.alloc(1)) for _ in range(5)]
        allocator.free(slots[0][0].unsqueeze(0))
        allocator.alloc_group_end()
        assert allocator.available_size() == allocator.schedulable_available_size() == 4
        assert allocator.alloc(5) is None
        allocator.free(torch.cat(slots[1:]))
        assert sorted(allocator.free_slots.tolist()) == list(range(1, 9))
        allocator.clear()
    assert allocator._worker.messages == before


def test_clear_makes_the_list_what_it_was_at_first() -> None:
    allocator = make(4)
    allocator.free(granted(allocator.alloc(3)).flip(0))
    allocator.alloc_group_begin(1)
    allocator.clear()
    assert (allocator.available_size(), allocator.free_slots.tolist()) == (4, [1, 2, 3, 4])


def test_what_was_handed_out_before_a_clear_may_come_back_once(caplog: pytest.LogCaptureFixture) -> None:
    """SGLang flushes while requests wait that have slots; it frees them later."""
    allocator = make(6)
    before = granted(allocator.alloc(3))
    allocator.clear()
    again = granted(
        allocator.alloc(1)
    )  # slot 1: of the two references to it, nobody can tell which one comes back
    with caplog.at_level(logging.WARNING, logger="mambapool.sglang"):
        allocator.free(torch.cat((before[1:], again)))
    assert "[2, 3]" in caplog.text
    assert allocator.free_slots.tolist() == [2, 3, 4, 5, 6, 1]
    with pytest.raises(DoubleFree) as caught:
        allocator.free(before[1:])
    assert caught.value.slots == (2, 3)
    assert sorted(ids(allocator.alloc(6))) == [1, 2, 3, 4, 5, 6]


def test_other_wrong_frees_raise_after_a_clear_too() -> None:
    allocator = make(6)
    before = granted(allocator.alloc(2))
    allocator.clear()
    for wrong, error in (([1, 5], DoubleFree), ([7], SlotOutOfRange), ([1, 7], SlotOutOfRange)):
        with pytest.raises(error):
            allocator.free(torch.tensor(wrong))
    assert allocator.available_size() == 6
    allocator.free(before)  # refused calls have changed nothing: still dead, still once


def test_bound_methods_outlive_nothing_but_work(shared_daemon: Daemon) -> None:
    """HiCache captures ``alloc`` and ``free``: they keep the allocator, and it its session."""
    allocator = make(2)
    session = allocator._worker.session
    alloc, free = allocator.alloc, allocator.free
    del allocator
    gc.collect()
    make(1)
    free(granted(alloc(2)))
    assert session in [holder["session"] for pool in shared_daemon.status()["pools"] for holder in pool["holders"]]


def test_a_lost_session_raises_in_the_next_call() -> None:
    allocator = make(2)
    allocator._worker.close()
    with pytest.raises(ClientClosed):
        allocator.alloc(1)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"MAMBAPOOL_RANK": "2", "MAMBAPOOL_WORLD_SIZE": "2", "MAMBAPOOL_GROUP": "e"}, "MAMBAPOOL_RANK=2"),
        ({"MAMBAPOOL_WORLD_SIZE": "2"}, "MAMBAPOOL_GROUP"),
        ({"MAMBAPOOL_WORLD_SIZE": "two"}, "MAMBAPOOL_WORLD_SIZE='two'"),
        ({"MAMBAPOOL_RANK": "-1"}, "MAMBAPOOL_RANK='-1'"),
        ({"MAMBAPOOL_GROUP": "Engine A"}, "MAMBAPOOL_GROUP='Engine A'"),
        ({"MAMBAPOOL_GROUP": "e" * 31}, "1 to 32"),
    ],
)
def test_settings_that_cannot_be_are_named(
    settings: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        make()
    assert named in str(caught.value)


class _Unset:
    """As SGLang's: a rank that is not set in this process raises."""

    def __init__(self, **places: int | None) -> None:
        self._places = places

    def __getattr__(self, name: str) -> int | None:
        try:
            return self._places[name]
        except KeyError:
            raise RuntimeError(f"parallel name {name!r} has not been written in this process") from None


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ({}, ("e", 0, 1)),
        ({"attn_tp_size": 4, "attn_tp_rank": 3, "dp_rank": None}, ("e", 3, 4)),
        ({"attn_tp_size": 2, "attn_cp_size": 2, "attn_tp_rank": 1, "attn_cp_rank": 1}, ("e", 3, 4)),
        ({"attn_tp_size": 2, "attn_tp_rank": 1, "dp_rank": 3, "pp_rank": 1}, ("e-dp3-pp1", 1, 2)),
        ({"attn_tp_size": 1, "attn_dp_rank": 2}, ("e-adp2", 0, 1)),
    ],
)
def test_ranks_of_a_server_which_have_one_environment_are_sglangs(
    places: dict[str, int | None], expected: tuple[str, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ModuleType("sglang.srt.runtime_context")
    monkeypatch.setattr(context, "get_parallel", lambda: _Unset(**places), raising=False)
    monkeypatch.setitem(sys.modules, context.__name__, context)
    monkeypatch.setenv("MAMBAPOOL_GROUP", "e")
    engine = Engine.of_process()
    assert (engine.name, engine.rank, engine.world_size) == expected
    monkeypatch.setenv("MAMBAPOOL_RANK", "5")
    monkeypatch.setenv("MAMBAPOOL_WORLD_SIZE", "8")
    engine = Engine.of_process()
    assert (engine.name, engine.rank, engine.world_size) == ("e", 5, 8)


#: One rank of an engine: it makes its pools, then a seeded mixture of calls each time it is told to.
RANK_OF_AN_ENGINE = """
    import json, random, sys
    import torch
    from mambapool.client.sglang import MambaSlotAllocator
    from mambapool.pool.errors import MambaPoolError

    running, tracks = (MambaSlotAllocator(size=size, device="cpu") for size in (12, 6))
    draw, held, answers = random.Random(8), [], []

    def step(allocator):
        allocator.alloc_group_begin(draw.randrange(4))
        for count in draw.choices((1, 2), k=3):
            slots = allocator.alloc(count)
            answers.append(slots if slots is None else slots.tolist())
            if slots is not None:
                held.append((allocator, slots))
        allocator.alloc_group_end()
        while held and draw.random() < 0.6:
            owner, slots = held.pop(draw.randrange(len(held)))
            owner.free(slots)
        answers.append(allocator.available_size())

    for line in sys.stdin:
        before = running._worker.messages + tracks._worker.messages
        try:
            if line == "other\\n":
                answers.append(running.alloc(1) is None)
            for _ in range(100):
                step(running), step(tracks)
            error = ""
        except MambaPoolError as caught:
            error = f"{type(caught).__name__}: {caught}"
        messages = running._worker.messages + tracks._worker.messages - before
        print(json.dumps([messages, error, answers]), flush=True)
"""


def an_engine(children: Children, daemon: Daemon, name: str) -> list[Child]:
    """Its two ranks."""
    settings = {"MAMBAPOOL_DIR": str(daemon.dir), "MAMBAPOOL_GROUP": name, "MAMBAPOOL_WORLD_SIZE": "2"}
    return [children.start(RANK_OF_AN_ENGINE, **settings, MAMBAPOOL_RANK=str(rank)) for rank in range(2)]


def ask_both(ranks: list[Child], *lines: str) -> list[list[Any]]:
    for rank, line in zip(ranks, lines, strict=True):
        rank.say(line)
    return [json.loads(rank.hear()) for rank in ranks]


def test_ranks_that_make_equal_calls_get_equal_slots_and_send_nothing(
    shared_daemon: Daemon, children: Children
) -> None:
    first, second = ask_both(an_engine(children, shared_daemon, "engine-c"), "go", "go")
    assert first == second
    assert (first[0], first[1], len(first[2])) == (0, "", 800)
    pools = {pool["name"]: pool for pool in shared_daemon.status()["pools"]}
    assert [pools[f"engine-c-{number}"]["held"] for number in range(2)] == [12, 6]


def test_a_rank_that_makes_another_call_is_told_so(shared_daemon: Daemon, children: Children) -> None:
    ranks = an_engine(children, shared_daemon, "engine-d")
    ask_both(ranks, "go", "go")
    ask_both(ranks, "go", "other")
    # Whoever was ahead meanwhile could not know yet.
    (_, error, _), (_, other, _) = ask_both(ranks, "go", "go")
    assert other.startswith("RankDiverged: group engine-d-0, call "), other
    assert "rank 1 called alloc(1), rank 0 called alloc_group_begin(" in other
    assert error.startswith("GroupBroken: group engine-d-0: rank 1 made another call than rank 0 at call "), error


def test_a_rank_whose_peer_was_killed_is_told_so_and_the_slots_come_back_with_the_last(
    shared_daemon: Daemon, children: Children
) -> None:
    ranks = an_engine(children, shared_daemon, "engine-e")
    ask_both(ranks, "go", "go")
    os.kill(ranks[1].pid, signal.SIGKILL)
    assert ranks[1].wait() == -signal.SIGKILL
    names = {"engine-e-0", "engine-e-1"}

    def told() -> bool:
        ranks[0].say("go")
        error: str = json.loads(ranks[0].hear())[1]
        return error.startswith("GroupBroken: group engine-e-") and f"pid {ranks[1].pid}" in error

    wait_until(told, "rank 0 is told of the death of rank 1")
    assert names <= {pool["name"] for pool in shared_daemon.status()["pools"]}
    ranks[0].say_no_more()
    ranks[0].wait()
    wait_until(
        lambda: not names & {pool["name"] for pool in shared_daemon.status()["pools"]}, "the engine's pools ended"
    )


def test_the_plugin_does_nothing_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    plugin()
    assert "sglang" not in sys.modules


def test_a_plugin_that_was_asked_for_and_cannot_install_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang catches every Exception of a plugin, and would go on with its own allocator."""
    monkeypatch.setenv("MAMBAPOOL_SGLANG", "slot")
    with pytest.raises(SystemExit, match="MAMBAPOOL_SGLANG='slot': use slots or states"):
        plugin()
    monkeypatch.setenv("MAMBAPOOL_SGLANG", "slots")
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(SystemExit, match="sglang"):
        plugin()


def test_importing_it_imports_neither_sglang_nor_torch() -> None:
    code = "import sys, mambapool.client.sglang; print([n for n in ('sglang', 'torch') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
