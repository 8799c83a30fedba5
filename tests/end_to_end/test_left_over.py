"""However clients and daemons end: the memory is there as long as its daemon, and nothing piles up afterwards."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemons import SMALL_STATE, Daemon, start_daemon, wait_until
from fresh_pool import granted, ids
from leased_clients import values
from processes import TORN_DOWN, Children

DaemonFactory = Callable[..., Daemon]

READER = """
    import os, signal, sys
    from mambapool.client import connect

    worker = connect(sys.argv[1])
    print(worker.states["temporal"][:, 3].unique().tolist(), flush=True)
    ending = sys.argv[2]
    if ending == "exception":
        raise ValueError("on purpose")
    if ending == "close":
        worker.close()
    if ending in ("SIGTERM", "SIGKILL"):
        os.kill(os.getpid(), getattr(signal, ending))
        signal.pause()
"""

ENDINGS = {"close": 0, "return": 0, "exception": 1, "SIGTERM": -signal.SIGTERM, "SIGKILL": -signal.SIGKILL}


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """/dev/shm with a file of somebody else's; nothing may come or go there."""
    foreign = Path("/dev/shm/psm_test")
    foreign.write_text("precious")
    before = set(os.listdir("/dev/shm"))
    yield foreign
    assert set(os.listdir("/dev/shm")) >= before
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "mambapool" in name]
    assert foreign.read_text() == "precious"
    foreign.unlink()


def test_a_reader_that_leaves_in_any_way_takes_no_memory_along(
    daemon_factory: DaemonFactory, children: Children, shared_memory: Path
) -> None:
    daemon = daemon_factory(slots=8, states=SMALL_STATE)
    daemon.connect().states["temporal"][:, 3] = 7
    for ending, status in ENDINGS.items():
        reader = children.start(READER, daemon.dir, ending, **TORN_DOWN)
        assert reader.hear() == "[7.0]", ending
        assert reader.wait() == status
        assert "tracker" not in reader.stderr
        assert "leak" not in reader.stderr
    fresh = children.start(READER, daemon.dir, "return")
    assert fresh.hear() == "[7.0]"
    fresh.rest()
    wait_until(lambda: len(daemon.pool()["holders"]) == 1, "the readers' sessions have ended")


HOLDER = """
    import sys
    from mambapool.client import connect

    worker = connect(sys.argv[1])
    print(worker.allocator.alloc(5).tolist(), flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("rounds", [3, pytest.param(20, marks=pytest.mark.heavy)])
def test_daemons_and_clients_that_are_killed_over_and_over_leave_nothing_behind(
    rounds: int, runtime_dir: Path, daemon_factory: DaemonFactory, children: Children, shared_memory: Path
) -> None:
    neighbour = daemon_factory(runtime_dir.with_name("neighbour"), slots=8, states=SMALL_STATE)
    worker = neighbour.connect()
    worker.states["temporal"][:, 3] = 5
    seen = []
    for _ in range(rounds):
        daemon = start_daemon(runtime_dir, slots=8, states=SMALL_STATE)
        client = children.start(HOLDER, daemon.dir)
        assert client.hear() == "[1, 2, 3, 4, 5]", "what a dead daemon's clients held is nobody's"
        seen.append({path.name for path in runtime_dir.rglob("*") if path.parent.name != "leases"})
        for pid in (client.pid, daemon.process.pid, daemon.allocator_pid):
            os.kill(pid, signal.SIGKILL)
        daemon.process.wait()
        daemon.close()
    assert all(names == seen[0] for names in seen)
    last = daemon_factory(runtime_dir, slots=8, states=SMALL_STATE)
    assert ids(last.connect().allocator.alloc(8)) == list(range(1, 9))
    wait_until(lambda: len(os.listdir(last.directory.leases)) == 1, "leases of the dead are removed")
    # Another daemon's memory and clients were none of its business.
    assert values(worker.states["temporal"][:, 3]) == {5}
    worker.allocator.free(granted(worker.allocator.alloc(8)))
    assert neighbour.process.poll() is None


@pytest.mark.parametrize("letter", ["x", "ü"])
def test_a_daemon_whose_socket_has_the_longest_path_that_there_can_be_serves(
    runtime_dir: Path, daemon_factory: DaemonFactory, letter: str
) -> None:
    """Bytes count, not letters; a longer path is refused (``pool/test_runtime_dir.py``)."""
    size = 107 - len(os.fsencode(runtime_dir.with_name("allocator.sock"))) - 1
    name = letter * (size // len(letter.encode())) + "x" * (size % len(letter.encode()))
    daemon = daemon_factory(runtime_dir.with_name(name), slots=4)
    assert len(os.fsencode(daemon.directory.allocator_socket)) == 107
    assert ids(daemon.connect().allocator.alloc(4)) == [1, 2, 3, 4]
