"""``mambapool evict``: the operator ends a session; a living one only by force, and is then told."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch
from daemons import mambapool, wait_until
from fresh_pool import FreshPool, FreshPoolFactory, drain, ids
from leased_clients import log_lines

from mambapool.client import Worker
from mambapool.client.operators import evict as evict_directly
from mambapool.pool.errors import AllocatorUnavailable, MambaPoolError
from mambapool.pool.exits import EXIT_DONE, EXIT_FAILED, EXIT_NOT_REACHABLE, EXIT_USAGE
from mambapool.pool.protocol import MAX_NUMBER


@pytest.fixture
def pool(new_pool: FreshPoolFactory) -> FreshPool:
    return new_pool(16)


def evict(pool: FreshPool, session: int, *options: str) -> subprocess.CompletedProcess[str]:
    return mambapool("evict", str(session), *options, "--dir", str(pool.daemon.dir))


def evict_by_force(pool: FreshPool, worker: Worker) -> None:
    """Without the seconds that a command takes to start."""
    assert evict_directly(pool.daemon.directory, 5.0, worker.session, force=True)["alive"] is True


def test_a_living_session_is_refused_and_goes_on(pool: FreshPool) -> None:
    worker = pool.connect(name="engine-0")
    slots = worker.allocator.alloc(3)
    assert slots is not None
    refused = evict(pool, worker.session)
    assert refused.returncode == EXIT_FAILED
    assert f"session {worker.session} (engine-0" in refused.stderr
    assert "is alive" in refused.stderr
    assert refused.stdout == ""
    worker.allocator.free(slots)
    assert ids(worker.allocator.alloc(1)) == [4]


def test_the_largest_number_that_the_wire_carries_is_asked_for(pool: FreshPool) -> None:
    refused = evict(pool, MAX_NUMBER - 1)
    assert refused.returncode == EXIT_FAILED
    assert f"there is no session {MAX_NUMBER - 1}" in refused.stderr
    beyond = evict(pool, MAX_NUMBER)
    assert beyond.returncode == EXIT_USAGE
    assert f"{MAX_NUMBER} is not in the range 1<=x<={MAX_NUMBER - 1}" in beyond.stderr


def test_force_ends_it_with_a_warning_and_says_what_came_free(pool: FreshPool) -> None:
    worker = pool.connect(name="engine-0")
    worker.allocator.alloc(3)
    worker.allocator.alloc_group_begin(2)
    evicted = evict(pool, worker.session, "--force", "--json")
    assert evicted.returncode == EXIT_DONE
    assert json.loads(evicted.stdout) == {"session": worker.session, "slots": 5, "alive": True}
    assert "warning" in evicted.stderr
    assert pool.available == 16
    (line,) = log_lines(pool.daemon, f"session {worker.session} (engine-0")[1:]
    assert "was evicted" in line
    assert line.endswith("5 slots freed: 1-5")
    # Once it has come free, somebody else may have it.
    assert sorted(drain(pool.owner.allocator)) == list(range(1, 17))


def test_a_session_that_there_is_not_is_refused(pool: FreshPool) -> None:
    refused = evict(pool, 10**6)
    assert refused.returncode == EXIT_FAILED
    assert "no session 1000000" in refused.stderr


def test_an_allocator_that_is_not_there_is_another_failure(pool: FreshPool) -> None:
    missing = mambapool("evict", "1", "--dir", str(pool.daemon.dir / "nowhere"))
    assert missing.returncode == EXIT_NOT_REACHABLE


CALLS = {
    "alloc": lambda worker: worker.allocator.alloc(1),
    "alloc of several": lambda worker: worker.allocator.alloc(2),
    "alloc that waits": lambda worker: worker.allocator.alloc(2, timeout=5.0),
    "begin": lambda worker: worker.allocator.alloc_group_begin(2),
    "transfer": lambda worker: worker.transfer(torch.tensor([1]), to=1),
    "accept": lambda worker: worker.accept(timeout=5.0),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_next_call_that_needs_the_allocator_says_so(pool: FreshPool, call: str) -> None:
    worker = pool.connect()
    worker.allocator.alloc(2)
    evict_by_force(pool, worker)
    for _ in range(2):
        with pytest.raises(AllocatorUnavailable, match=rf"session {worker.session} .*connect again"):
            CALLS[call](worker)
    worker.close()


@pytest.mark.parametrize("guarantee", [0, 8])
def test_calls_without_a_message_say_so_in_a_moment_too(pool: FreshPool, guarantee: int) -> None:
    """Else a client with a guarantee would hand out for ever what others have by now."""
    worker = pool.connect(guarantee=guarantee)
    allocator = worker.allocator
    slots = allocator.alloc(2)
    assert slots is not None
    allocator.alloc_group_begin(4)
    evict_by_force(pool, worker)
    assert len(ids(pool.owner.allocator.alloc(16))) == 16

    def refuses(call: object) -> bool:
        try:
            call()  # type: ignore[operator]
        except AllocatorUnavailable as error:
            return f"session {worker.session}" in str(error)
        except MambaPoolError:
            return False
        return False

    wait_until(lambda: refuses(allocator.available_size), "available_size refuses", timeout=1.0)
    for call in (
        lambda: allocator.alloc(1),
        lambda: allocator.free(slots),
        lambda: allocator.alloc_group_end(),
        lambda: allocator.clear(),
        lambda: allocator.free_slots,
    ):
        assert refuses(call)
    assert len(pool.held_by(pool.owner)) == 16, "and nothing of it reached the slots of others"
    pool.owner.allocator.clear()


def test_another_session_of_the_same_process_goes_on(pool: FreshPool) -> None:
    evicted, other = pool.connect(), pool.connect()
    assert ids(other.allocator.alloc(2)) == [1, 2]
    evict_by_force(pool, evicted)
    assert ids(other.allocator.alloc(1)) == [3]
    again = pool.connect()
    assert ids(again.allocator.alloc(1)) == [4]
