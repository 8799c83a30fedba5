"""An allocator that crashes before any chosen store to its slot table, and is started again over the same file.

The code that runs is the real one. A trace function counts the lines of the table's writers that are about to
run, each of which stores at most one word outside the redo record, and raises :class:`Crashed` in place of the
chosen one: what was stored before stays in the file, all else is gone, as in a process that was killed there.
Batches are stored word by word: the vectorised path is switched off, since numpy's stores have no lines.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from leases import TestLeases

from mambapool.pool import protocol
from mambapool.pool import slot_table as st
from mambapool.service import batch_commits, one_slot_commits, table_writer
from mambapool.service.dispatcher import Dispatcher
from mambapool.service.pools import Pool
from mambapool.service.recovery import recover_table, restore
from mambapool.service.registry import Registry
from mambapool.service.table_writer import SlotTableWriter

SLOTS = 12
MAX_SESSIONS = 4
FIRST_EPOCH = 1000
_TRACED = {table_writer.__file__, one_slot_commits.__file__, batch_commits.__file__}


class Crashed(BaseException):
    """The allocator died here. No handler of the code catches it."""


@contextmanager
def crash_before(line: int | None) -> Iterator[list[int]]:
    """Crash before the ``line``-th line of the table's writers (None: count only); yields ``[lines run]``."""
    ran = [0]

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        if frame.f_code.co_filename not in _TRACED:
            return None
        if event == "line":
            if line is not None and ran[0] == line:
                raise Crashed
            ran[0] += 1
        return trace

    before = sys.gettrace()
    small = vars(table_writer)["SMALL_BATCH"]
    vars(table_writer)["SMALL_BATCH"] = 10**9
    sys.settrace(trace)
    try:
        yield ran
    finally:
        sys.settrace(before)
        vars(table_writer)["SMALL_BATCH"] = small


@dataclass
class Allocator:
    """One incarnation: what would be a process, without its socket."""

    dispatcher: Dispatcher
    pool: Pool

    def send(self, identity: bytes, fields: tuple[Any, ...]) -> list[Any] | None:
        """One message from a client; what comes back, or None."""
        body = self.dispatcher.handle(
            identity, protocol.pack(fields), lambda: f"localhost:{os.geteuid()}:0:0", now=0.0
        )
        return None if body is None else protocol.unpack(body, len(body))


def start(path: Path, leases: TestLeases) -> Allocator:
    """A new allocator over the file, made if it is not there, taken over if it is."""
    if path.exists():
        table = recover_table(path, SLOTS, bytes(16), None)
        pool = Pool("default", table, table.uuid, None, (), ends_with_last_session=False)
        restore(pool, leases, now=0.0)
        table.epoch = table.epoch + 1
    else:
        layout = st.TableLayout(SLOTS, MAX_SESSIONS)
        table = SlotTableWriter.create(path, layout, uuid=b"u" * 16, digest=bytes(16), epoch=FIRST_EPOCH)
        pool = Pool("default", table, table.uuid, None, (), ends_with_last_session=False)

    def no_more(_name: str, _slots: int) -> Pool:
        raise AssertionError("no client makes a pool here")

    return Allocator(Dispatcher(table.epoch, Registry([pool], no_more, leases)), pool)


def durable(path: Path) -> dict[str, Any]:
    """What the file says to whoever reads it, without what every restart changes."""
    table = SlotTableWriter.recover(path)
    generations = table.generations.tolist()
    return {
        "owners": table.owners.tolist(),
        "requests": [r if o else 0 for r, o in zip(table.requests.tolist(), table.owners.tolist(), strict=True)],
        "generations": generations,
        "offers": table.offers.tolist(),
        "free": table.free_list().tolist(),
        "sessions": [(s.number, s.lease, s.applied, s.window, s.guarantee) for s in table.sessions()],
    }


def every_line(run: Callable[[], Any]) -> int:
    """How many lines of the table's writer ``run`` takes."""
    with crash_before(None) as ran:
        run()
    return ran[0]
