"""A slot table that outlived the memory it speaks of, as on a volume: it stands in nobody's way, once nobody lives."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from commands import running
from daemons import SMALL_STATE, mambapool
from processes import Children

from mambapool.client.operators import ask_status
from mambapool.pool.runtime_dir import RuntimeDir

HOLDER = """
    import sys
    from mambapool.client import connect
    worker = connect(sys.argv[1], timeout=20.0)
    print(worker.allocator.alloc(3).tolist(), flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("slots", [8, 12])
def test_the_next_keepers_are_served_when_no_session_of_it_lives(
    runtime_dir: Path, children: Children, slots: int
) -> None:
    keeper = ("keeper", "--dir", runtime_dir, "--state", SMALL_STATE[0], "--slots")
    table = runtime_dir / "default.table"
    with running(*keeper, "8") as kept, running("allocator", "--dir", runtime_dir) as allocator:
        holder = children.start(HOLDER, runtime_dir)
        assert holder.hear() == "[1, 2, 3]"
        for command in (allocator, kept):
            command.end(signal.SIGKILL)
    with running(*keeper, str(slots)):
        before = table.read_bytes()
        refused = mambapool("allocator", "--dir", str(runtime_dir))
        assert refused.returncode == 1, "its session still maps the memory before"
        assert str(table) in refused.stderr
        assert table.read_bytes() == before
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        assert len(list((runtime_dir / "leases").iterdir())) == 1
        with running("allocator", "--dir", runtime_dir) as allocator:
            (pool,) = ask_status(RuntimeDir(runtime_dir), 5.0)["pools"]
            assert (pool["slots"], pool["free"], pool["holders"]) == (slots, slots, [])
            assert "the memory of the slot table that was left here is gone" in allocator.stderr
            assert list((runtime_dir / "leases").iterdir()) == []


def test_a_table_of_the_same_memory_is_taken_over_and_not_forgotten(runtime_dir: Path, children: Children) -> None:
    with running("keeper", "--dir", runtime_dir, "--state", SMALL_STATE[0], "--slots", "8"):
        with running("allocator", "--dir", runtime_dir) as allocator:
            holder = children.start(HOLDER, runtime_dir)
            assert holder.hear() == "[1, 2, 3]"
            allocator.end(signal.SIGKILL)
        with running("allocator", "--dir", runtime_dir):
            (pool,) = ask_status(RuntimeDir(runtime_dir), 5.0)["pools"]
            assert (pool["free"], pool["held"]) == (5, 3)
            holder.say("done")
            assert holder.wait() == 0
