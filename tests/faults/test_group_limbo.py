"""A slot that rank 0 has freed is nobody else's while another rank still writes to its shard of it.

``make groups`` and ``make test-heavy`` run the full size; ``make test`` a sample.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from daemons import Daemon
from groups import new_name
from processes import Child, Children

MUTATION_RUNS = 300
SLOTS = 10

DaemonFactory = Callable[..., Daemon]

# Rank 1 writes to all that it has, between its calls, and looks whether that is still its group's.
_RANK = """
    import json, random, sys, time
    import torch
    from mambapool.client import connect
    from mambapool.client.group import Group

    directory, options, without_limbo = json.loads(sys.argv[1])
    if without_limbo:
        Group.passed = lambda self: self.position  # the rule removed: whatever rank 0 freed leaves at once
    worker = connect(directory, timeout=30.0, **options)
    allocator, rank = worker.allocator, options["rank"]
    state = worker.states["temporal"]
    table = allocator._table
    own = random.Random(rank)
    print(worker.session, flush=True)
    for line in sys.stdin:
        holder, seed = map(int, line.split())
        chance = random.Random(seed)
        held, said, early = [], [], 0

        def write():
            global early
            for slot in held:
                state[:, slot] = 1.0
                early += table.holder_of(slot) != holder

        for _ in range(chance.randint(10, 30)):
            if rank:
                for _ in range(own.randint(0, 4)):
                    write()
                    time.sleep(own.choice([0, 0, 0.0002]))
            kind = chance.random()
            if kind < 0.45:
                slots = allocator.alloc(chance.choice([1, 1, 2, 3]))
                said.append(None if slots is None else slots.tolist())
                held += said[-1] or []
            elif kind < 0.8 and held:
                count = chance.randint(1, len(held))
                chance.shuffle(held)
                freed, held = held[:count], held[count:]
                allocator.free(torch.tensor(freed))
            elif kind < 0.9:
                allocator.alloc_group_begin(chance.randint(1, 3))
            else:
                allocator.alloc_group_end()
        if held:
            allocator.free(torch.tensor(held))
        allocator.alloc_group_end()
        print(json.dumps([early, said]), flush=True)
"""

# Another engine, on rank 1's shard: takes whatever it gets, and looks whether its states stay as they are.
_RIVAL = """
    import json, random, sys, threading
    from mambapool.client import connect

    worker = connect(sys.argv[1], rank=1, name="rival", timeout=30.0)
    allocator, state = worker.allocator, worker.states["temporal"]
    ends = threading.Event()
    chance = random.Random(3)
    print(worker.session, flush=True)
    threading.Thread(target=lambda: (sys.stdin.readline(), ends.set())).start()
    taken = overwritten = 0
    while not ends.wait(0.0001):
        slots = allocator.alloc(chance.choice([1, 1, 2, 5]))
        if slots is None:
            continue
        taken += len(slots)
        state[:, slots] = 2.0
        for _ in range(chance.randint(1, 20)):
            if bool((state[:, slots] != 2.0).any()):
                overwritten += 1
                break
        allocator.free(slots)
    print(json.dumps([taken, overwritten]), flush=True)
"""


class Scene:
    """Two ranks and a rival on one pool."""

    def __init__(self, children: Children, daemon: Daemon, *, without_limbo: bool) -> None:
        group = new_name()
        options = [{"group": group, "rank": rank, "world_size": 2, "name": f"rank-{rank}"} for rank in range(2)]
        self.ranks = [
            children.start(_RANK, json.dumps([str(daemon.dir), rank, without_limbo])) for rank in options
        ]
        self.rival: Child = children.start(_RIVAL, daemon.dir)
        self.holder = int(self.ranks[0].hear())
        for child in (self.ranks[1], self.rival):
            child.hear()

    def run(self, seed: int) -> int:
        """How often rank 1 wrote to a slot that was not its group's any more."""
        for rank in self.ranks:
            rank.say(f"{self.holder} {seed}")
        (_, answers), (early, same) = (json.loads(rank.hear()) for rank in self.ranks)
        assert answers == same
        return int(early)

    def end(self) -> tuple[int, int]:
        """What the rival took, and how often it was overwritten."""
        self.rival.say("end")
        taken, overwritten = json.loads(self.rival.hear())
        return taken, overwritten


@pytest.fixture
def pool_of_two_shards(daemon_factory: DaemonFactory) -> Daemon:
    return daemon_factory(slots=SLOTS, states=("temporal=float32:2x4x4",), options=("--tp-size", "2"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("runs", [40, pytest.param(300, marks=pytest.mark.heavy)])
def test_nobody_gets_a_slot_while_a_slow_rank_still_writes_to_it(
    children: Children, pool_of_two_shards: Daemon, runs: int
) -> None:
    scene = Scene(children, pool_of_two_shards, without_limbo=False)
    early = [scene.run(seed) for seed in range(runs)]
    taken, overwritten = scene.end()
    assert early == [0] * runs
    assert overwritten == 0
    assert taken > runs  # the rival did get what the ranks had freed


def test_without_the_rule_a_slow_rank_writes_to_a_slot_of_others(
    children: Children, pool_of_two_shards: Daemon
) -> None:
    scene = Scene(children, pool_of_two_shards, without_limbo=True)
    for seed in range(MUTATION_RUNS):
        if scene.run(seed):
            return
    pytest.fail("the mutation was not found: this test cannot fail")
