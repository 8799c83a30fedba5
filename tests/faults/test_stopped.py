"""An allocator that is stopped and continued: calls wait, and are answered once. A stopped client: ``test_suspect``."""

from __future__ import annotations

import threading
from typing import Any

from daemons import Daemon, wait_until
from fresh_pool import FreshPoolFactory, granted
from processes import paused


def test_calls_wait_for_a_stopped_allocator_and_are_answered_once(
    lasting_daemon: Daemon, new_pool: FreshPoolFactory
) -> None:
    pool = new_pool(8)
    worker = pool.connect(timeout=30.0)
    got: list[Any] = []
    sent = worker.messages
    with paused(lasting_daemon):
        calling = threading.Thread(target=lambda: got.append(worker.allocator.alloc(3)), daemon=True)
        calling.start()
        # The second time it asks is the first repeat.
        wait_until(lambda: worker.messages >= sent + 2, "it has asked again")
        assert not got
    calling.join(20.0)
    assert pool.held_by(worker) == set(granted(got[0]).tolist())
