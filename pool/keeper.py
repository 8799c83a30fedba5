"""The keeper: one process per shard that allocates its memory once, holds it, and hands it out.

It decides nothing and runs no code of a client, so that it has no reason to end before it is told to. It
is started as ``python -m mambapool.pool.keeper CONFIG [--ready-fd N]``, or by ``mambapool keeper``, and
imports nothing heavier than msgpack, and cuda-bindings if its memory is a GPU's.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import logging
import os
import resource
import select
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from mambapool.pool.descriptor import UUID_BYTES, ShardDescriptor, check_rank
from mambapool.pool.errors import ConfigError, MambaPoolError, RuntimeDirError
from mambapool.pool.exits import EXIT_DONE, exit_status
from mambapool.pool.handover import send_block
from mambapool.pool.idle import Idle, has_allocator
from mambapool.pool.layout import DEVICES, Geometry, check_slots
from mambapool.pool.process_lock import ProcessLock
from mambapool.pool.runtime_dir import RuntimeDir, check_pool_name, check_socket_path
from mambapool.pool.shm import create_block
from mambapool.pool.started import tell

log = logging.getLogger("mambapool.keeper")

_LOG_FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

# Connections that wait to be accepted; those beyond ask again until their timeout.
_BACKLOG = 128

# How often a keeper looks whether it is still needed.
_LOOK_S = 1.0

# One whose parent was killed ends within one look: its successor under a new parent waits for that.
_ORPHAN_S = 2 * _LOOK_S

# How long a client waits while this process has no descriptor left to accept it with.
_EXHAUSTED_S = 0.1
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


@dataclass(frozen=True, slots=True)
class KeeperConfig:
    """What one keeper keeps, and where; ``device`` is ``cpu`` or ``cuda``.

    ``parent_pid`` is the process that the keeper ends with; None lets it outlive the one that started it.
    ``exit_idle_s``: it ends so many seconds after the allocator has ended; None: it stays.
    """

    dir: Path
    pool: str
    rank: int
    tp_size: int
    slots: int
    geometry: Geometry
    parent_pid: int | None = None
    device: str = "cpu"
    exit_idle_s: float | None = None

    def __post_init__(self) -> None:
        check_pool_name(self.pool)
        if self.device not in DEVICES:
            raise ConfigError(f"device {self.device!r} is not one of {', '.join(DEVICES)}")
        check_rank(self.rank, self.tp_size)
        check_slots(self.slots)
        if self.parent_pid is not None and type(self.parent_pid) is not int:
            raise ConfigError(f"parent_pid {self.parent_pid!r}: expected a process id or nothing")

    def to_json(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps(values | {"dir": str(self.dir), "geometry": self.geometry.to_wire()})

    @classmethod
    def from_json(cls, text: str) -> KeeperConfig:
        """The inverse of :meth:`to_json`; anything else is a :class:`ConfigError`."""
        try:
            values: dict[str, Any] = json.loads(text)
            place, geometry = Path(values.pop("dir")), Geometry.from_wire(values.pop("geometry"))
            return cls(dir=place, geometry=geometry, **values)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not the configuration of a keeper: {error}") from error


def run_keeper(config: KeeperConfig, announce: Callable[[], None]) -> int:
    """Keep the shard until SIGTERM, SIGINT or the parent's end; returns the exit status, errors are logged.

    ``announce`` is called once, when clients can connect. Has to run in the main thread of a process that
    ends afterwards: its lock is held until then.
    """
    try:
        keep(config, lambda _descriptor: announce())
    except MambaPoolError as error:
        log.error("%s", error)
        return exit_status(error)
    return EXIT_DONE


def keep(config: KeeperConfig, announce: Callable[[ShardDescriptor], None]) -> None:
    """:func:`run_keeper` that raises what is in the way and tells ``announce`` what it keeps.

    A stop before the shard is there raises ``SystemExit(0)``: allocating it can take a minute.
    """
    for number in _STOP_SIGNALS:
        signal.signal(number, _leave)
    directory = RuntimeDir.for_server(config.dir)
    path = directory.keeper_socket(config.pool, config.rank)
    check_socket_path(path)
    _take_lock(directory, config)
    _allow_many_clients()
    descriptor = _describe(config)
    descriptor.pack()  # refused before memory is had
    name = f"mambapool-{config.pool}-{config.rank}"
    block = None
    if config.device == "cuda":
        from mambapool.pool.cuda_block import CudaBlock

        on_gpu = CudaBlock(name, descriptor.size_bytes, config.rank)
        descriptor = replace(descriptor, cuda=on_gpu.export)
        log.info("on %s", on_gpu.device)
    else:
        block = create_block(name, descriptor.size_bytes)
    packed = descriptor.pack()
    with _StopFlag() as stop, _listening(path) as listener:
        shard = f"pool {config.pool} rank {config.rank}"
        log.info("keeping %s: %d bytes, pid %d", shard, descriptor.size_bytes, descriptor.pid)
        announce(descriptor)
        _serve(listener, stop, packed, block, _needs(directory, config))
        log.info("ended keeping %s, pid %d", shard, descriptor.pid)


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(EXIT_DONE)


def _take_lock(directory: RuntimeDir, config: KeeperConfig) -> None:
    """Before the socket is touched; held until the process ends."""
    path = directory.keeper_lock(config.pool, config.rank)
    role = f"keeper of {config.pool} rank {config.rank}"
    ProcessLock(path, role, wait_s=0.0 if config.parent_pid is None else _ORPHAN_S)


def _allow_many_clients() -> None:
    """The kernel lets a user have as many descriptors under way, sent and not received, as a process open.

    Clients that connect and never read would use up the usual 1,024 and keep the others from being served.
    """
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _describe(config: KeeperConfig) -> ShardDescriptor:
    return ShardDescriptor(
        pool=config.pool,
        uuid=os.urandom(UUID_BYTES),
        rank=config.rank,
        tp_size=config.tp_size,
        slots=config.slots,
        geometry=config.geometry,
        pid=os.getpid(),
    )


class _StopFlag:
    """Set by the first stop signal; ``fileno()`` is readable from then on, so that a wait ends at once."""

    def __init__(self) -> None:
        self.is_set = False
        self._wakeup, self._written = socket.socketpair()
        self._written.setblocking(False)

    def __enter__(self) -> _StopFlag:
        signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)
        for number in _STOP_SIGNALS:
            signal.signal(number, self._set)
        return self

    def _set(self, _number: int, _frame: FrameType | None) -> None:
        self.is_set = True

    def fileno(self) -> int:
        return self._wakeup.fileno()

    def __exit__(self, *_error: object) -> None:
        signal.set_wakeup_fd(-1)
        self._wakeup.close()
        self._written.close()


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    """A listening socket at ``path``, removed at the end if it is still this one."""
    _remove_left_over(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        umask = os.umask(0o077)
        try:
            listener.bind(str(path))
        except OSError as error:
            raise RuntimeDirError(f"cannot listen on {path}: {error.strerror}") from error
        finally:
            os.umask(umask)
        own = _identity(path)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        try:
            yield listener
        finally:
            if _identity(path) == own:
                path.unlink(missing_ok=True)


def _remove_left_over(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise RuntimeDirError(f"{path} is not a socket and was left as it is: move it, or name another --dir")
    path.unlink(missing_ok=True)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        info = path.lstat()
    except OSError:
        return None
    return info.st_dev, info.st_ino


def _needs(directory: RuntimeDir, config: KeeperConfig) -> Callable[[], bool]:
    """Whether there still is somebody to keep the shard for."""
    idle = Idle(config.exit_idle_s)

    def is_needed() -> bool:
        if config.parent_pid is not None and os.getppid() != config.parent_pid:
            return False
        now = time.monotonic()
        if config.exit_idle_s is not None and has_allocator(directory):
            idle.use(now)
        if idle.is_over(now):
            log.info("no allocator for %g s", config.exit_idle_s)
            return False
        return True

    return is_needed


def _serve(
    listener: socket.socket, stop: _StopFlag, descriptor: bytes, block: int | None, is_needed: Callable[[], bool]
) -> None:
    """One client per turn, so that no number of them keeps a stop or the parent's end from being seen."""
    while not stop.is_set and is_needed():
        if listener.fileno() not in _readable(_LOOK_S, listener.fileno(), stop.fileno()):
            continue
        try:
            client, _ = listener.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                log.warning("cannot accept a client: %s", error.strerror)
                _readable(_EXHAUSTED_S, stop.fileno())
            continue
        with client:
            _hand_over(client, descriptor, block)


def _readable(timeout_s: float, *fds: int) -> list[int]:
    """Those of ``fds`` that can be read, after at most ``timeout_s``."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _event in poll.poll(timeout_s * 1000)]


def _hand_over(client: socket.socket, descriptor: bytes, block: int | None) -> None:
    client.setblocking(False)
    try:
        send_block(client, descriptor, block)
    except MambaPoolError as error:
        log.warning("%s", error)
    except OSError as error:
        # A client can cause it at will, so that it must not fill somebody's log, or a pipe that nobody reads.
        log.debug("a client went without the block: %s", error)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mambapool.pool.keeper")
    parser.add_argument("config", help="KeeperConfig as JSON")
    parser.add_argument(
        "--ready-fd",
        type=int,
        metavar="N",
        help='write one JSON line to this file descriptor: {"ready": true, "pid", "uuid"} when clients '
        'can connect, or {"error", "exit"}',
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=_LOG_FORMAT)
    try:
        config = KeeperConfig.from_json(options.config)
        keep(config, lambda shard: tell(options.ready_fd, ready=True, pid=shard.pid, uuid=shard.uuid.hex()))
    except MambaPoolError as error:
        if options.ready_fd is None:
            log.error("%s", error)  # else whoever asked says it
        tell(options.ready_fd, error=str(error), exit=exit_status(error))
        return exit_status(error)
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
