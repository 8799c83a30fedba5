"""Four ranks that make thousands of equal calls, and give to and take from another session, while allocators die:
four equal sequences of answers, or it is said.

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

    directory, options, calls, pieces, peer, seed = json.loads(sys.argv[1])
    worker = connect(directory, timeout=30.0, **options)
    allocator = worker.allocator
    chance, own = random.Random(seed), random.Random(options["rank"])
    held, offered, said = [], [], []

    def got(slots):
        # What a call handed out.
        said.append(None if slots is None else slots.tolist())
        for slot in said[-1] or ():
            held.append(slot)
            if slot in offered:
                offered.remove(slot)  # it was accepted, and came back

    def some(slots, most):
        # A few of them, which are not there any more.
        chance.shuffle(slots)
        count = chance.randint(1, min(len(slots), most))
        taken = slots[:count]
        del slots[:count]
        return taken

    def tried(call, slots, made, refused):
        # A call that may be refused, for the same slots on every rank; to which list they belong then.
        try:
            call(slots)
        except errors.InvalidSlots as error:
            said.append(list(error.slots))
            refused += slots
        else:
            said.append("made")
            made += slots

    def call():
        kind = chance.random()
        if kind < 0.35:
            got(allocator.alloc(chance.choice([1, 1, 2, 3, 9])))
        elif kind < 0.37:
            got(allocator.alloc(chance.choice([1, 4]), timeout=0.005))
        elif kind < 0.6:
            if held:
                allocator.free(torch.tensor(some(held, 6)))
        elif kind < 0.66:
            foreign = [slot for slot in held if slot not in guaranteed]
            if foreign or held:
                slots = some(foreign or held, 3)  # those of the guarantee are refused
                held[:] = [slot for slot in held if slot not in slots]
                tried(lambda slots: worker.transfer(torch.tensor(slots), to=peer), slots, offered, held)
        elif kind < 0.69:
            if offered:  # its offer stands, or it was accepted
                tried(lambda slots: allocator.free(torch.tensor(slots)), some(offered, 2), [], offered)
        elif kind < 0.75:
            got(worker.accept(timeout=chance.choice([0.0, 0.005])))
        elif kind < 0.83:
            allocator.alloc_group_begin(chance.randint(1, 8), partial=chance.random() < 0.3)
        elif kind < 0.91:
            allocator.alloc_group_end()
        elif kind < 0.995:
            said.append(allocator.available_size())
        else:
            allocator.clear()
            held.clear()

    guaranteed = allocator.free_slots.tolist() if options["guarantee"] else []
    print(worker.session, flush=True)
    for number in range(1, calls + 1):
        if own.random() < 0.02:
            time.sleep(own.uniform(0, 0.002))  # ranks run at different times
        call()
        if number % (calls // pieces) == 0:
            print(number, flush=True)
    print(len(said), zlib.crc32(json.dumps(said).encode()), flush=True)
    sys.stdin.readline()
    allocator.clear()
    print("cleared", flush=True)
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

#: Gives to the group and takes from it, until it is told to end.
_PEER = """
    import random, select, sys, time
    from mambapool.client import connect

    worker = connect(sys.argv[1], timeout=30.0, name="peer")
    allocator = worker.allocator
    chance = random.Random(5)
    print(worker.session, flush=True)
    group = int(sys.stdin.readline())
    for _ in range(4):
        worker.transfer(allocator.alloc(2), to=group)
    given, taken = 4, 0
    while not select.select([sys.stdin], [], [], chance.uniform(0, 0.003))[0]:
        slots = worker.accept(timeout=chance.choice([0.0, 0.002]))
        taken += slots is not None
        if slots is None and allocator.available_size() > 12:
            slots = allocator.alloc(chance.randint(1, 2))
        if slots is None:
            continue
        if chance.random() < 0.5:
            allocator.free(slots)
        else:
            worker.transfer(slots, to=group)
            given += 1
    sys.stdin.readline()
    while worker.accept() is not None:
        taken += 1
    allocator.clear()
    print(given, taken, flush=True)
    sys.stdin.readline()
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
        return children.start(_RANK, json.dumps([str(daemon.dir), options, calls, pieces, int(session), 11]))

    peer = children.start(_PEER, daemon.dir)
    session = peer.hear()
    ranks = [start(rank) for rank in range(RANKS)]
    sessions = [rank.hear() for rank in ranks]
    peer.say(sessions[0])
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
    # Every slot is accounted for: none is lost between those that gave and took, whatever died meanwhile.
    peer.say("end")
    given, taken = map(int, peer.hear().split())
    assert given >= 4
    assert taken > 0
    for rank in ranks:
        rank.say("clear")
    assert {rank.hear() for rank in ranks} == {"cleared"}
    wait_until(lambda: daemon.pool()["free"] == SLOTS - guarantee, "all but the guarantee is free")
    daemon.audit("default")
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
    peer.say_no_more()
    assert peer.wait() == 0, peer.stderr
