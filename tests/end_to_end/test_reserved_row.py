"""Row 0 belongs to everybody and to nobody: what all write there harms no state, and no call hands it out."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from daemons import SMALL_STATE, Daemon
from fresh_pool import ids
from leased_clients import restart, values
from processes import Children

SLOTS = 16
WRITES = 3000

#: Holds four slots, which have its number in them; writes noise to row 0 all the time.
PADDING = """
    import json, sys
    import torch
    from mambapool.client import connect

    number, writes = int(sys.argv[2]), int(sys.argv[3])
    worker = connect(sys.argv[1])
    slots = worker.allocator.alloc(4)
    states = list(worker.states.values())
    for state in states:
        state[:, slots] = number
    for count in range(writes):
        for state in states:
            # As a padded batch does it: an index tensor of zeros.
            state.index_fill_(1, torch.zeros(3, dtype=torch.int64), float(number * 100 + count % 7))
    print(json.dumps(slots.tolist()), flush=True)
    sys.stdin.readline()
"""


def test_what_padding_writes_there_harms_no_state(
    daemon_factory: Callable[..., Daemon], children: Children
) -> None:
    daemon = daemon_factory(slots=SLOTS, states=SMALL_STATE)
    writers = [children.start(PADDING, daemon.dir, number, WRITES) for number in range(1, 5)]
    held = {number: json.loads(writer.hear()) for number, writer in enumerate(writers, 1)}
    assert sorted(slot for slots in held.values() for slot in slots) == list(range(1, SLOTS + 1))
    states = daemon.connect().states
    for state in states.values():
        assert state.shape[1] == SLOTS + 1
        for number, slots in held.items():
            assert values(state[:, torch.tensor(slots)]) == {number}
        assert min(values(state[:, 0])) >= 100, "what was written last"


def test_no_path_hands_it_out(daemon_factory: Callable[..., Daemon]) -> None:
    daemon = daemon_factory(slots=SLOTS)
    allocator = daemon.connect().allocator

    def by_window() -> list[int]:
        allocator.alloc_group_begin(SLOTS)
        slots = [int(slot) for slot in iter(lambda: allocator.alloc(1), None)]
        allocator.alloc_group_end()
        return slots

    def by_partial_window() -> list[int]:
        allocator.alloc_group_begin(SLOTS + 5, partial=True)
        slots = [int(slot) for slot in iter(lambda: allocator.alloc(1), None)]
        allocator.alloc_group_end()
        return slots

    everything = list(range(1, SLOTS + 1))

    def at_once() -> list[int]:
        return ids(allocator.alloc(SLOTS))

    for take in (at_once, by_window, by_partial_window):
        assert sorted(take()) == everything
        assert allocator.alloc(1) is None
        allocator.clear()
        assert ids(allocator.free_slots) == everything
    assert ids(allocator.alloc(SLOTS // 2)) == everything[: SLOTS // 2]
    restart(daemon)
    assert ids(allocator.alloc(SLOTS // 2)) == everything[SLOTS // 2 :]
    assert allocator.alloc(1) is None
    allocator.clear()
    assert ids(allocator.free_slots) == everything
