"""``os.fork``: the child cannot use its parent's client, cannot harm it, and can connect by itself."""

from __future__ import annotations

import pytest
from fresh_pool import FreshPool, FreshPoolFactory
from processes import TORN_DOWN, Child, Children

PARENT = """
    import os, signal, sys, threading
    from mambapool.client import connect, errors

    worker = connect(sys.argv[1], pool=sys.argv[2], timeout=2.0)
    allocator = worker.allocator
    slots = allocator.alloc(3)


    def in_child(body):
        "Run body in a forked child; how the child ended."
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            # A child that hangs would be waited for: SIGALRM ends it.
            signal.alarm(5)
            body()
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

"""

#: Every call raises in the child, and says what to do.
REFUSED = """
    def refused():
        calls = {
            "alloc": lambda: allocator.alloc(1),
            "alloc of several": lambda: allocator.alloc(2),
            "begin": lambda: allocator.alloc_group_begin(2),
            "end": lambda: allocator.alloc_group_end(),
            "free": lambda: allocator.free(slots),
            "clear": lambda: allocator.clear(),
            "available_size": lambda: allocator.available_size(),
            "schedulable_available_size": lambda: allocator.schedulable_available_size(),
            "free_slots": lambda: allocator.free_slots,
        }
        for name, call in calls.items():
            try:
                print(name, "gave", call(), flush=True)
            except errors.ForkedClient as error:
                assert isinstance(error, RuntimeError) and "created before fork" in str(error), error
        worker.close()
"""

ENDING = """
    print(worker.session, flush=True)
    sys.stdin.readline()
    print(len(allocator.alloc(1)), flush=True)
    worker.close()
    os._exit(0)
"""


@pytest.fixture
def pool(fresh_pool: FreshPoolFactory) -> FreshPool:
    return fresh_pool(16)


def undisturbed(pool: FreshPool, parent: Child, held: int = 3) -> None:
    """The parent of the ended children still holds what it held, and its client works."""
    session = int(parent.hear())
    assert pool.held_by(session) == set(range(1, held + 1))
    assert pool.available == 16 - held
    parent.say("go on")
    assert parent.hear() == "1"
    assert parent.rest() == []
    assert pool.available == 16


def start(children: Children, pool: FreshPool, *parts: str) -> Child:
    return children.start(PARENT + "".join(parts), pool.daemon.dir, pool.name, **TORN_DOWN)


def test_every_call_of_an_inherited_client_raises(pool: FreshPool, children: Children) -> None:
    parent = start(children, pool, REFUSED, "    print(in_child(refused))\n", ENDING)
    assert parent.hear() == "0"
    undisturbed(pool, parent)


def test_a_window_that_was_open_at_the_fork_gives_the_child_nothing(pool: FreshPool, children: Children) -> None:
    window = """
    allocator.alloc_group_begin(4)
    print(in_child(refused))
    """
    parent = start(children, pool, REFUSED, window, ENDING)
    assert parent.hear() == "0"
    undisturbed(pool, parent, held=7)


def test_a_fork_while_another_thread_waits_leaves_no_lock_behind(pool: FreshPool, children: Children) -> None:
    """The other thread, which does not exist in the child, is in the middle of a call at the fork."""
    waiting = """
    import pathlib
    import time

    allocator_pid = int(sys.argv[3])
    os.kill(allocator_pid, signal.SIGSTOP)
    before = worker.messages
    thread = threading.Thread(target=lambda: allocator.alloc(1))
    thread.start()
    while worker.messages == before:
        time.sleep(0.001)
    print(in_child(refused))
    os.kill(allocator_pid, signal.SIGCONT)
    thread.join()
    allocator.clear()
    worker.close()
    """
    parent = children.start(PARENT + REFUSED + waiting, pool.daemon.dir, pool.name, pool.daemon.allocator_pid)
    assert parent.rest() == ["0"]
    assert pool.available == 16


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("sys.exit(7)", "7"),
        ("worker.close(); sys.exit()", "0"),
        ("raise ValueError('a child that fails')", "1"),
        ("os._exit(3)", "3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "-9"),
        ("del globals()['worker'], globals()['allocator']; import gc; gc.collect(); sys.exit()", "0"),
    ],
)
def test_however_a_child_ends_the_parents_session_stays(
    pool: FreshPool, children: Children, end: str, status: str
) -> None:
    body = f"""
    def end():
        {end}

    print(in_child(end))
    """
    parent = start(children, pool, body, ENDING)
    assert parent.hear() == status
    undisturbed(pool, parent)
    assert "mambapool" not in parent.stderr, "a traceback of the client's"


def test_a_child_that_connects_has_a_session_of_its_own(pool: FreshPool, children: Children) -> None:
    body = """
    def connect_again():
        with connect(sys.argv[1], pool=sys.argv[2]) as mine:
            mine.allocator.alloc_group_begin(2)
            got = [mine.allocator.alloc(1).item() for _ in range(2)]
            print(mine.session != worker.session, got, mine.allocator.available_size(), flush=True)
            mine.allocator.free(mine.allocator.alloc(1))

    print(in_child(connect_again))
    """
    parent = start(children, pool, body, ENDING)
    assert (parent.hear(), parent.hear()) == ("True [4, 5] 11", "0")
    undisturbed(pool, parent)


MULTIPROCESSING = """
    import multiprocessing
    import signal
    import sys
    import time
    from mambapool.client import connect, errors

    worker = connect(sys.argv[1], pool=sys.argv[2])  # at import, as engines do
    slots = worker.allocator.alloc(3)


    def child(queue):
        global mine  # not closed: the end of the process does
        signal.alarm(20)
        try:
            worker.allocator.alloc(1)
        except RuntimeError as error:
            queue.put(type(error).__name__)
        mine = connect(sys.argv[1], pool=sys.argv[2], name="child")
        queue.put(mine.allocator.alloc(2).tolist())


    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(queue.get(), queue.get())
    process.join()
    deadline = time.monotonic() + 10
    while worker.allocator.available_size() < 13 and time.monotonic() < deadline:
        time.sleep(0.005)
    print(process.exitcode, worker.allocator.available_size(), flush=True)
    worker.allocator.free(slots)
    worker.close()
"""


def test_a_child_of_multiprocessing_connects_and_its_end_gives_its_slots_back(
    pool: FreshPool, children: Children
) -> None:
    lines = children.run(MULTIPROCESSING, pool.daemon.dir, pool.name, **TORN_DOWN)
    assert lines == ["ForkedClient [4, 5]", "0 13"]
    assert pool.available == 16


@pytest.mark.parametrize("guarantee", [0, 8])
def test_a_rank_refuses_every_call_in_the_child_and_goes_on_in_the_parent(
    children: Children, fresh_pool: FreshPoolFactory, guarantee: int
) -> None:
    pool = fresh_pool(16)
    group = f"group='g', rank=int(sys.argv[3]), world_size=2, guarantee={guarantee}"
    parent = PARENT.replace("timeout=2.0", f"timeout=2.0, {group}")
    script = parent + REFUSED + "    print(in_child(refused), len(allocator.alloc(2)), flush=True)\n"
    ranks = [children.start(script, pool.daemon.dir, pool.name, rank) for rank in range(2)]
    assert [rank.rest() for rank in ranks] == [["0 2"], ["0 2"]]
