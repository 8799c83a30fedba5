"""A process that never calls ``close()``: ends in time, with its own status, and leaves no slot behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
from daemons import Daemon, wait_until
from fresh_pool import FreshPool, FreshPoolFactory, drain
from processes import TORN_DOWN, Child, Children, paused
from zygote import Zygote

#: From a script's last line to the end of its process, besides the interpreter's own end.
END_S = 2.0

SCRIPT = """
    import gc, sys, time
    from mambapool.client import connect, errors

    class Engine:
        pass

    worker = connect(sys.argv[1], pool=sys.argv[2], timeout=float(sys.argv[3]))
    slots = worker.allocator.alloc(4)
    worker.allocator.alloc_group_begin(4)
    slot = worker.allocator.alloc(1)
    worker.allocator.free(slot)
    print("ready", flush=True)
    sys.stdin.readline()

    def last_line():
        print(time.monotonic(), flush=True)

"""

#: What comes then, and the status with which the process has to end.
ENDINGS = {
    "with the worker in a global": ("last_line()", 0),
    "with the worker in a reference cycle": (
        "engine = Engine(); engine.worker, engine.itself = worker, engine; del worker, engine;"
        "gc.collect(); last_line()",
        0,
    ),
    "with no reference to the worker": ("del worker; gc.collect(); last_line()", 0),
    "with the worker in a daemon thread": (
        "import threading; e = threading.Event();"
        "threading.Thread(target=lambda w: e.wait(), args=(worker,), daemon=True).start(); last_line()",
        0,
    ),
    "by sys.exit": ("last_line(); sys.exit(7)", 7),
    "by an exception": ("last_line(); raise ValueError('the script fails')", 1),
    "after an atexit function that uses the worker": (
        "import atexit; atexit.register(lambda: (worker.allocator.free(slots), last_line()))",
        0,
    ),
}

#: Where nobody answers any more.
UNANSWERED = {
    name: ENDINGS[name]
    for name in ("with the worker in a global", "with the worker in a reference cycle", "by an exception")
} | {
    "by a call that failed": ("last_line(); worker.allocator.alloc(5)", 1),
    "after frees and a close": ("worker.allocator.free(slots); last_line(); worker.close(); worker.close()", 0),
}


def start(children: Children, daemon: Daemon, pool: str, ending: str, timeout: float = 5.0) -> Child:
    source = SCRIPT + "".join(f"    {line}\n" for line in ending.splitlines())
    child = children.start(source, daemon.dir, pool, timeout, **TORN_DOWN)
    assert child.hear() == "ready"
    return child


@pytest.fixture(scope="module")
def end_s(zygote: Zygote) -> float:
    """What a process may take. An interpreter with torch in it needs a while for itself, more on a busy machine."""
    children = Children(zygote)
    child = children.start("import time; print(time.monotonic(), flush=True)", **TORN_DOWN)
    last_line = float(child.hear())
    child.wait()
    own = time.monotonic() - last_line
    children.close()
    return END_S + 3 * own


def ends_as_it_should(child: Child, status: int, end_s: float) -> None:
    """In time, with that status, and with no traceback but that of a script that fails."""
    last_line = float(child.hear())
    assert child.wait() == status
    assert time.monotonic() - last_line < end_s
    assert child.stderr.count("Traceback") == (status == 1), child.stderr
    assert "Exception ignored" not in child.stderr, child.stderr


@pytest.mark.parametrize("ending", ENDINGS)
def test_its_slots_and_its_window_come_back(
    fresh_pool: FreshPoolFactory, children: Children, end_s: float, ending: str
) -> None:
    pool: FreshPool = fresh_pool(16)
    source, status = ENDINGS[ending]
    child = start(children, pool.daemon, pool.name, source)
    assert pool.available == 8
    child.say("end")
    ends_as_it_should(child, status, end_s)
    wait_until(lambda: pool.available == 16, "the slots of the ended process are free", timeout=1.0)
    assert len(pool.status()["holders"]) == 1
    assert sorted(drain(pool.owner.allocator)) == list(range(1, 17))


def test_it_ends_as_well_when_the_daemon_was_killed_before(
    daemon_factory: Callable[..., Daemon], children: Children, end_s: float
) -> None:
    daemon = daemon_factory(slots=64)
    ending = [
        (start(children, daemon, "default", source, timeout=0.5), status) for source, status in UNANSWERED.values()
    ]
    # Serve first: it would bring its allocator back.
    for pid in (daemon.process.pid, daemon.allocator_pid):
        os.kill(pid, signal.SIGKILL)
    daemon.process.wait()
    for child, status in ending:
        child.say("end")
        ends_as_it_should(child, status, end_s)


def test_ctrl_c_in_a_call_that_waits_ends_it_and_its_slots_come_back(
    fresh_pool: FreshPoolFactory, children: Children, end_s: float
) -> None:
    pool = fresh_pool(16)
    # Longer than any test: it is the interrupt that ends this call.
    waits = """
import signal
from mambapool.client import connect as again
# Where the tests themselves run in a shell's background, SIGINT is ignored, and that is inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)
worker.close()
worker = again(sys.argv[1], pool=sys.argv[2], timeout=600)
print(worker.session, flush=True)
sys.stdin.readline()
print("asks", flush=True)
worker.allocator.alloc(5)
"""
    child = start(children, pool.daemon, pool.name, waits)
    child.say("connect")
    session = int(child.hear())
    with paused(pool.daemon):
        child.say("ask")
        assert child.hear() == "asks"
        # Whether it waits already or is about to: the interrupt ends it all the same.
        interrupted = time.monotonic()
        os.kill(child.pid, signal.SIGINT)
        assert child.wait() == -signal.SIGINT
        assert time.monotonic() - interrupted < end_s
    assert "KeyboardInterrupt" in child.stderr
    wait_until(lambda: len(pool.status()["holders"]) == 1, "the session ends")
    assert (pool.available, pool.held_by(session)) == (16, set())
