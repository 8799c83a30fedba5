"""A second daemon in a directory that is served: it ends, and clients of the first do not notice."""

from __future__ import annotations

import time

from daemons import Daemon, mambapool
from fresh_pool import drain, ids

from mambapool.client import connect


def test_clients_old_and_new_go_on_with_the_first(daemon: Daemon) -> None:
    old = daemon.connect()
    assert ids(old.allocator.alloc(40)) == list(range(1, 41))
    began = time.monotonic()
    second = mambapool("serve", "--dir", str(daemon.dir), "--slots", "64")
    assert time.monotonic() - began < 2
    assert (second.returncode, second.stdout) == (3, "")
    assert f"pid {daemon.process.pid}" in second.stderr
    with connect(daemon.dir) as new:
        assert new.allocator.available_size() == 24
        assert sorted(drain(new.allocator)) == list(range(41, 65))
    assert old.allocator.alloc(1) is not None
    assert daemon.pool()["held"] == 41
