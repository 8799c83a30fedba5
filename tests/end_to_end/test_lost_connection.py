"""A connection is not a session: it may be dropped at any moment, and the session with its slots goes on."""

from __future__ import annotations

import threading

from daemons import Daemon, wait_until
from socket_proxy import SocketProxy


def test_a_dropped_connection_keeps_the_session_and_its_slots(daemon: Daemon) -> None:
    with SocketProxy(daemon.directory.allocator_socket) as proxy:
        first = daemon.connect(name="first")
        second = daemon.connect(name="second")
        first.allocator.alloc(4)
        mine = second.allocator.alloc(4)
        first.close()
        wait_until(lambda: daemon.pool()["free"] == 60, "the first one's slots are free")
        session = second.session
        assert mine is not None
        for number in range(1, 5):
            assert proxy.cut() >= 1
            more = second.allocator.alloc(2)
            assert more is not None
            second.allocator.free(more)
            assert second.session == session
            assert proxy.accepted > number
        (holder,) = daemon.pool()["holders"]
        assert holder["session"] == session
        wait_until(lambda: daemon.pool()["free"] == 60, "what was freed over dropped connections is free")
        assert daemon.pool()["holders"][0]["held"] == 4
        second.allocator.free(mine)
        wait_until(lambda: daemon.pool()["free"] == 64, "everything is free")
        second.close()


def test_calls_under_way_are_answered_once_while_connections_drop(daemon: Daemon) -> None:
    """Cut at random moments of a busy client: every call has its answer, no slot is lost or doubled."""
    with SocketProxy(daemon.directory.allocator_socket) as proxy:
        worker = daemon.connect(name="busy")
        done = threading.Event()
        cuts = 0

        def cut_often() -> None:
            nonlocal cuts
            while not done.wait(0.05):
                cuts += proxy.cut()

        cutter = threading.Thread(target=cut_often)
        cutter.start()
        try:
            held: list[int] = []
            calls = 0
            while cuts < 8 or calls < 8:
                calls += 1
                got = worker.allocator.alloc(3)
                assert got is not None
                ids = got.tolist()
                assert not set(ids) & set(held)
                held += ids
                if len(held) > 40:
                    worker.allocator.free(got.new_tensor(held[:30]))
                    del held[:30]
        finally:
            done.set()
            cutter.join()
        wait_until(lambda: daemon.pool()["free"] == 64 - len(held), "what was freed is free")
        assert sorted(worker.allocator.free_slots.tolist()) == sorted(set(range(1, 65)) - set(held))
        worker.close()
