"""Four ranks that make thousands of equal calls while allocators die: four equal sequences of answers, or it is said.

``make groups`` and ``make test-heavy`` run the full size; ``make test`` a sample.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable

import pytest
from daemons import Daemon, wait_until
from groups import new_name
from leased_clients import successor_of
from processes import Child, Children

RANKS = 4
SLOTS = 64

DaemonFactory = Callable[..., Daemon]

_RANK = """
    import json, random, sys, time, zlib
    import torch
    from mambapool.client import connect
    from mambapool.pool import errors

    directory, options, calls, pieces, seed = json.loads(sys.argv[1])
    worker = connect(directory, timeout=30.0, **options)
    allocator = worker.allocator
    chance, own = random.Random(seed), random.Random(options["rank"])
    held, said = [], []

    def call():
        kind = chance.random()
        if kind < 0.4:
            slots = allocator.alloc(chance.choice([1, 1, 2, 3, 9]))
            said.append(None if slots is None else slots.tolist())
            held.extend(said[-1] or ())
        elif kind < 0.7:
            if held:
                chance.shuffle(held)
                count = chance.randint(1, min(len(held), 6))
                allocator.free(torch.tensor(held[:count]))
                del held[:count]
        elif kind < 0.8:
            allocator.alloc_group_begin(chance.randint(1, 8), partial=chance.random() < 0.3)
        elif kind < 0.9:
            allocator.alloc_group_end()
        elif kind < 0.995:
            said.append(allocator.available_size())
        else:
            allocator.clear()
            held.clear()

    print("attached", flush=True)
    for number in range(1, calls + 1):
        if own.random() < 0.02:
            time.sleep(own.uniform(0, 0.002))  # ranks run at different times
        call()
        if number % (calls // pieces) == 0:
            print(number, flush=True)
    print(len(said), zlib.crc32(json.dumps(said).encode()), flush=True)
    for line in sys.stdin:
        try:
            # With a guarantee nobody waits: it is found when rank 0 has come as far.
            end = time.monotonic() + 10
            while time.monotonic() < end:
                allocator.alloc(int(line))
                time.sleep(0.02)
            print("nothing", flush=True)
        except errors.MambaPoolError as error:
            print(type(error).__name__, error, flush=True)
"""


@pytest.fixture
def ranks_of(children: Children, daemon_factory: DaemonFactory) -> tuple[Daemon, Children]:
    daemon = daemon_factory(slots=SLOTS, states=("temporal=float32:1x2x2",), options=("--tp-size", str(RANKS)))
    return daemon, children


@pytest.mark.timeout(600)
@pytest.mark.parametrize("guarantee", [0, 40])
@pytest.mark.parametrize(("calls", "kills"), [(1_500, 2), pytest.param(10_000, 5, marks=pytest.mark.heavy)])
def test_equal_calls_get_equal_answers_whatever_allocators_die(
    ranks_of: tuple[Daemon, Children], guarantee: int, calls: int, kills: int
) -> None:
    daemon, children = ranks_of
    group = new_name()
    pieces = kills + 1

    def start(rank: int) -> Child:
        options = {
            "group": group,
            "rank": rank,
            "world_size": RANKS,
            "guarantee": guarantee,
            "name": f"rank-{rank}",
        }
        return children.start(_RANK, json.dumps([str(daemon.dir), options, calls, pieces, 11]))

    ranks = [start(rank) for rank in range(RANKS)]
    assert {rank.hear() for rank in ranks} == {"attached"}
    for piece in range(1, pieces + 1):
        assert ranks[0].hear(120.0) == str(calls // pieces * piece)
        if piece <= kills:
            pid = daemon.allocator_pid
            os.kill(pid, signal.SIGKILL)
            successor_of(daemon, pid)
    for rank in ranks[1:]:
        for piece in range(1, pieces + 1):
            assert rank.hear(120.0) == str(calls // pieces * piece)
    sequences = [rank.hear(120.0) for rank in ranks]
    assert len(set(sequences)) == 1
    assert int(sequences[0].split()[0]) > calls / 3
    # One rank makes one different call.
    for number, rank in enumerate(ranks):
        rank.say("2" if number == 2 else "1")
    said = [rank.hear() for rank in ranks]
    assert said[2].startswith("RankDiverged")
    assert "rank 2 called alloc(2), rank 0 called alloc(1)" in said[2]
    # The others find out at their next calls.
    for number in (0, 1, 3):
        ranks[number].say("1")
        text = ranks[number].hear()
        assert text.startswith("GroupBroken"), text
        assert "rank 2 made another call than rank 0" in text
    for rank in ranks:
        rank.say_no_more()
        assert rank.wait() == 0, rank.stderr
    wait_until(lambda: daemon.pool()["free"] == SLOTS, "the group has ended")
