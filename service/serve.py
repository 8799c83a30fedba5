"""``mambapool serve``: a light parent of keepers and allocator, in the foreground."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from mambapool.pool.errors import ConfigError, MambaPoolError, PoolLost
from mambapool.pool.keeper import KeeperConfig
from mambapool.pool.memory_limits import check_available
from mambapool.pool.polling import readable
from mambapool.pool.process_lock import ProcessLock
from mambapool.pool.regular_files import read_regular
from mambapool.pool.runtime_dir import RuntimeDir, check_socket_path
from mambapool.service.children import Child, end_all
from mambapool.service.config import AllocatorConfig, PoolConfig

_log = logging.getLogger("mambapool.serve")

#: An allocator that ended so soon after its start, so often in a row, is not brought back again. The first two
#: times it is brought back at once, then after ever longer waits.
SHORT_LIFE_S = 1.0
MOST_SHORT_LIVES = 8

#: What the allocator has to tell every client that a keeper died, before it is ended, too.
LOST_IS_TOLD_S = 0.5

# The first word of mambapool.pool.slot_table, which would bring numpy into this light parent.
_TABLE_MAGIC = b"MAMBPOOL"


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """What ``serve`` runs: pools, and where."""

    dir: str | os.PathLike[str] | None = None
    pools: tuple[PoolConfig, ...] = ()
    max_sessions: int = 1024
    max_waiters: int = 1024
    quarantine_s: float = 1.0


class _Stop:
    """Set by SIGTERM or SIGINT; its descriptor becomes readable then, and when a child ends."""

    def __init__(self) -> None:
        self.asked = False
        self.wake, self._written = socket.socketpair()
        self.wake.setblocking(False)
        self._written.setblocking(False)

    def install(self) -> None:
        signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)

    def _ask(self, _number: int, _frame: FrameType | None) -> None:
        self.asked = True

    def wait(self) -> None:
        """Until the next signal."""
        readable(self.wake.fileno())
        self.drain()

    def pause(self, seconds: float) -> None:
        """So many seconds, or until a stop is asked for: a child's end, which wakes too, cuts it no shorter."""
        deadline = time.monotonic() + seconds
        while not self.asked and (left := deadline - time.monotonic()) > 0:
            readable(self.wake.fileno(), timeout=left)
            self.drain()

    def drain(self) -> None:
        try:
            while self.wake.recv(1024):
                pass
        except BlockingIOError:
            pass


def serve(config: ServeConfig, announce: Callable[[RuntimeDir, dict[str, Any]], None]) -> None:
    """Run keepers and allocator until SIGTERM or SIGINT; ``announce`` is called when they first answer.

    An allocator that crashes is brought back: the states stay in the keepers, the slots with their holders.
    Raises :class:`PoolLost` when a keeper ends by itself, for the states in it are gone, and
    :class:`MambaPoolError` when the allocator keeps crashing; the others are ended then. Has to run in
    the main thread.
    """
    stop = _Stop()
    stop.install()
    directory = RuntimeDir.for_server(config.dir)
    _check_paths(directory, config.pools)
    ProcessLock(directory.serve_lock, "mambapool serve")
    _check_memory(config.pools)
    keepers: list[Child] = []
    allocators: list[Child] = []

    def announce_first(ready: dict[str, Any]) -> None:
        if len(allocators) == 1:
            announce(directory, ready)

    try:
        for pool in config.pools:
            for rank in range(pool.shards):
                keepers.append(_start_keeper(directory.path, pool, rank))
        for keeper in keepers:
            if _until_ready(keeper, stop) is None:
                return
        crashes = Crashes()
        while not stop.asked:
            first = not allocators
            allocator = _start_allocator(directory.path, config, fresh=first)
            allocators.append(allocator)
            lived_s, how = _until_ended(allocator, keepers, stop, announce_first, first=first)
            if stop.asked:
                break
            pause = crashes.another(lived_s, how)
            _log.error("the allocator %s; it is brought back in %.1f s", how, pause)
            stop.pause(pause)
    finally:
        # The allocator first: nobody shall be told of memory that is on its way out.
        for children in (allocators, keepers):
            for child in children:
                child.end()
            end_all(children)
        _remove_left_over(directory, config.pools)


class Crashes:
    """How long to wait before a crashed allocator is started again, and when not to."""

    def __init__(self) -> None:
        self._short_lives = 0

    def another(self, lived_s: float, how: str) -> float:
        """Seconds to wait after one that answered for so long; :class:`MambaPoolError` when it is hopeless."""
        self._short_lives = self._short_lives + 1 if lived_s < SHORT_LIFE_S else 0
        if self._short_lives >= MOST_SHORT_LIVES:
            raise MambaPoolError(
                f"the allocator {how}, {self._short_lives} times in a row within {SHORT_LIFE_S:g} s of its start: "
                "it is not brought back again; see its log above"
            )
        return 0.0 if self._short_lives < 2 else min(0.05 * 2**self._short_lives, 2.0)


def _until_ended(
    allocator: Child,
    keepers: list[Child],
    stop: _Stop,
    announce: Callable[[dict[str, Any]], None],
    *,
    first: bool,
) -> tuple[float, str]:
    """Until the allocator ended by itself, or a stop was asked for; how long it answered, how it ended, in words.

    One that is brought back and does not come up is one more crash; what the first one fails with is raised.
    """
    try:
        ready = _until_ready(allocator, stop)
    except MambaPoolError as error:
        if first:
            raise
        _check_keepers(keepers, allocator)
        return 0.0, f"did not come up: {error}"
    since = time.monotonic()
    if ready is not None:
        announce(ready)
    while not stop.asked and not allocator.ended:
        _check_keepers(keepers, allocator)
        stop.wait()
    lived_s = time.monotonic() - since
    if stop.asked:
        return lived_s, ""
    _check_keepers(keepers, allocator)
    return lived_s, allocator.how_it_ended()


def _start_allocator(directory: Path, config: ServeConfig, *, fresh: bool) -> Child:
    allocator = AllocatorConfig(
        dir=directory,
        pools=config.pools,
        max_sessions=config.max_sessions,
        max_waiters=config.max_waiters,
        quarantine_s=config.quarantine_s,
        parent_pid=os.getpid(),
        fresh=fresh,
    )
    return Child.start("allocator", "mambapool.service.allocator_process", allocator.to_json())


def _check_paths(directory: RuntimeDir, pools: tuple[PoolConfig, ...]) -> None:
    for pool in pools:
        for rank in range(pool.shards):
            check_socket_path(directory.keeper_socket(pool.name, rank))


def _check_memory(pools: tuple[PoolConfig, ...]) -> None:
    """All shards together, before the first is made: each keeper alone might still find room."""
    needed = sum(
        pool.geometry.place(pool.slots).size_bytes * pool.shards
        for pool in pools
        if pool.geometry and pool.device == "cpu"
    )
    if needed:
        check_available(needed, "keeping all shards")


def _remove_left_over(directory: RuntimeDir, pools: tuple[PoolConfig, ...]) -> None:
    """What daemons leave that were killed, and the slot tables, which end with the states.

    Each under the lock that goes with it: whoever holds it lives, is none of ours, and is left alone.
    """
    for pool in pools:
        for rank in range(pool.shards):
            if _has_ended(directory.keeper_lock(pool.name, rank)):
                _remove_if(directory.keeper_socket(pool.name, rank), _is_dead_socket)
    if not _has_ended(directory.allocator_lock):
        return
    _remove_if(directory.ready, Path.is_file)
    _remove_if(directory.allocator_socket, _is_dead_socket)
    _remove_if(directory.lease_socket, _is_dead_socket)
    for table in directory.path.glob("*.table"):
        _remove_if(table, _is_slot_table)


def _is_dead_socket(path: Path) -> bool:
    """Nobody listens to it any more."""
    if not path.is_socket():
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) == errno.ECONNREFUSED


def _is_slot_table(path: Path) -> bool:
    return read_regular(path, len(_TABLE_MAGIC), follow=False).startswith(_TABLE_MAGIC)


def _has_ended(lock: Path) -> bool:
    """Nobody holds that lock; then it is this process's until it ends."""
    try:
        ProcessLock(lock, "process")
    except MambaPoolError:
        return False
    return True


def _remove_if(path: Path, is_ours: Callable[[Path], bool]) -> None:
    with contextlib.suppress(OSError):
        if not path.is_symlink() and is_ours(path):
            path.unlink()


def _start_keeper(directory: Path, pool: PoolConfig, rank: int) -> Child:
    if pool.geometry is None:
        raise ConfigError(f"pool {pool.name} has no shards to keep")
    config = KeeperConfig(
        dir=directory,
        pool=pool.name,
        rank=rank,
        tp_size=pool.tp_size,
        slots=pool.slots,
        geometry=pool.geometry,
        parent_pid=os.getpid(),
        device=pool.device,
    )
    return Child.start(
        f"keeper of pool {pool.name} rank {rank}",
        "mambapool.pool.keeper",
        config.to_json(),
        ready_option="--ready-fd",
    )


def _until_ready(child: Child, stop: _Stop) -> dict[str, Any] | None:
    """None when a stop was asked for first."""
    while not stop.asked:
        ready = child.wait_until_ready(stop.wake.fileno())
        if ready is not None:
            return ready
        stop.drain()
    return None


def _check_keepers(keepers: list[Child], allocator: Child) -> None:
    for keeper in keepers:
        if keeper.ended:
            # The allocator has noticed, or is about to: every client shall hear it from there.
            time.sleep(LOST_IS_TOLD_S if not allocator.ended else 0)
            raise PoolLost(f"the {keeper.name} {keeper.how_it_ended()}: its states are gone")
