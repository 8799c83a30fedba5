"""The allocator process's loop: one ROUTER socket, one thread, no waiting on anybody.

The loop is a blocking ``recv`` with RCVTIMEO as its housekeeping tick. No poller, no ``*_multipart``, no
asyncio: each of them costs a fifth of a round trip or more. Under load the tick never comes, so that
housekeeping also looks in every 64 messages.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import zmq
from zmq.backend import Socket as BackendSocket

from mambapool.pool import protocol
from mambapool.pool.errors import RuntimeDirError
from mambapool.pool.idle import Idle
from mambapool.pool.process_lock import ProcessLock
from mambapool.pool.runtime_dir import RuntimeDir, check_socket_path
from mambapool.pool.version import VERSION
from mambapool.service.build import build_registry, keeper_lock_name
from mambapool.service.config import AllocatorConfig
from mambapool.service.dispatcher import Dispatcher
from mambapool.service.door import Door, remove_stale_socket
from mambapool.service.keepers import wait_for_keepers
from mambapool.service.priority import raise_priority
from mambapool.service.watcher import Watcher

_log = logging.getLogger("mambapool.allocator")

#: How often housekeeping looks in when no message comes.
TICK_MS = 200
#: … and when messages keep coming.
MESSAGES_PER_LOOK = 64

# As plain ints: or-ing the enum's members costs a microsecond each time.
_FIRST_OF_TWO = int(zmq.SNDMORE | zmq.NOBLOCK)
_LAST = int(zmq.NOBLOCK)

#: Replies that wait for a client that does not read. Beyond, its replies are dropped, and it asks again.
SEND_HIGH_WATER_MARK = 1000
RECEIVE_HIGH_WATER_MARK = 1000

#: How often descriptors are counted; also with every new session and every connection.
COUNT_DESCRIPTORS_S = 0.1

#: SIGTERM: what is queued is answered for at most this long.
DRAIN_S = 0.5

# How the watcher's thread reaches the loop: the same socket, so that the loop waits for one thing only.
_CONTROL_ENDPOINT = "inproc://control"
_CONTROL_ID = b"watcher"

#: How long ``serve``'s allocator waits for the orphan of a ``serve`` that was killed.
ORPHAN_WAIT_S = 2.0


def run_allocator(config: AllocatorConfig, announce: Callable[[dict[str, Any]], None]) -> None:
    """Serve until SIGTERM, SIGINT or the parent's end. Returns when everything is closed.

    ``announce`` gets what ``ready`` says once the allocator answers. Has to run in the main thread of a
    process that ends afterwards: its lock is held until then.
    """
    started = time.monotonic()
    directory = RuntimeDir.for_server(config.dir)
    wait_s = ORPHAN_WAIT_S if config.parent_pid is not None else 0.0
    nice = raise_priority()  # before there are threads: each has its own
    ProcessLock(directory.allocator_lock, "allocator", wait_s=wait_s)
    directory.ready.unlink(missing_ok=True)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    def header() -> dict[str, Any]:
        return {"uptime_s": round(time.monotonic() - started, 3)}

    if config.wait_for is not None:
        wait_for_keepers(directory, config.wait_for, config.wait_s)
    server = Server(config.parent_pid, Idle(config.exit_idle_s))
    watcher = Watcher(directory, server.notify)
    try:
        registry, epoch = build_registry(config, directory, watcher)
        server.dispatcher = Dispatcher(epoch, registry, status_header=header)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, server.on_signal)
        server.bind(directory)
        watcher.watch_door(server.knocks, server.look_at_door)
        watcher.start()
        ready = {
            "pid": os.getpid(),
            "epoch": epoch,
            "endpoint": directory.endpoint,
            "version": VERSION,
            "pools": sorted(registry.pools),
        }
        directory.write_ready(ready)
        _log.info("ready: pid %d, nice %d, %s, pools %s", os.getpid(), nice, directory.endpoint, ready["pools"])
        announce(ready)
        # What is alive now stays: no collection needs to look at it again.
        gc.collect()
        gc.freeze()
        server.run()
    finally:
        directory.ready.unlink(missing_ok=True)
        watcher.close()
        server.close()
    _log.info("ended: %d messages, %d malformed", server.messages, server.dispatcher.malformed)


class Server:
    """Moves messages between the ROUTER socket and the dispatcher."""

    dispatcher: Dispatcher
    #: Readable while somebody connects.
    knocks: int

    def __init__(self, parent_pid: int | None, idle: Idle) -> None:
        self.messages = 0
        self.replies_dropped = 0
        self._parent_pid = parent_pid
        self._idle = idle
        self._bound = False
        self._stopping = False
        self._count_descriptors_at = 0.0
        self._sessions = 0
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        router = self._socket
        router.linger = 0
        router.rcvtimeo = TICK_MS
        router.sndhwm = SEND_HIGH_WATER_MARK
        router.rcvhwm = RECEIVE_HIGH_WATER_MARK
        # Without it a reply to a client whose pipe is full vanishes without a word.
        router.router_mandatory = True
        # Before anybody else can come: who has this routing id has it for good.
        router.bind(_CONTROL_ENDPOINT)
        self._control: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._control.linger = 0
        self._control.routing_id = _CONTROL_ID
        self._control.connect(_CONTROL_ENDPOINT)

    def notify(self, lock_name: bytes, how: str) -> None:
        """From the watcher's thread, and from no other: a lock that it watches was released."""
        self._control.send(protocol.pack((lock_name, how)))

    def look_at_door(self) -> None:
        """From the watcher's thread: somebody is at it."""
        self._door.look()

    def on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._stopping = True

    def bind(self, directory: RuntimeDir) -> None:
        """Take the directory's socket; a dead daemon's is replaced, anything else in its place refused."""
        path = directory.allocator_socket
        check_socket_path(path)
        remove_stale_socket(path)
        # libzmq cuts off whoever sends more than any pool here could need; less is looked at per message.
        largest = max(self.dispatcher.registry.max_body_bytes, protocol.max_body_bytes(protocol.MAX_CREATED_SLOTS))
        self._socket.maxmsgsize = largest
        self._door = Door(directory)
        listener = self._door.listen()
        self.knocks = os.dup(listener.fileno())
        self._bound = True
        self._socket.use_fd = listener.detach()  # libzmq's from now on
        try:
            self._socket.bind(directory.endpoint)
        except zmq.ZMQError as error:
            raise RuntimeDirError(f"cannot bind {path}: {error}") from error

    def run(self) -> None:
        """Answer until told to stop, then what is still queued."""
        while not self._stopping:
            self._serve(MESSAGES_PER_LOOK)
            now = time.monotonic()
            if now > self._count_descriptors_at:
                self._look_around()
                self.dispatcher.tidy()
                if self._idle.is_over(now):
                    _log.info("no session for %g s", self._idle.after_s)
                    break
            self.dispatcher.tick(now)
            self._send_outbox()
            if self._parent_pid is not None and os.getppid() != self._parent_pid:
                _log.warning("process %d, which started this allocator, is gone", self._parent_pid)
                break
        self.dispatcher.registry.ending = True
        self._socket.rcvtimeo = 0
        deadline = time.monotonic() + DRAIN_S
        while time.monotonic() < deadline and self._serve(1):
            pass

    def close(self) -> None:
        # Replies just sent are still with the I/O thread: give them the time that a reader may take.
        self._control.close(linger=0)
        self._socket.close(linger=100)
        self._context.term()
        if self._bound:  # else what lies there is somebody else's
            self._door.remove()
            os.close(self.knocks)

    def _serve(self, most: int) -> bool:
        """Receive and answer so many messages; False as soon as none comes within RCVTIMEO."""
        # All that most messages need is in this function: between two of them the processor's caches are cold.
        router = self._socket
        receive, send = BackendSocket.recv, BackendSocket.send
        plain = self.dispatcher.handle_plain
        outbox = self.dispatcher.outbox
        clock = time.monotonic
        for _ in range(most):
            try:
                identity = receive(router)
            except zmq.Again:
                return False
            # As a frame, for `more`: without that look one stray frame puts every later reply out of step.
            frame = receive(router, 0, False)
            self.messages += 1
            reply = None if frame.more or identity == _CONTROL_ID else plain(identity, frame.bytes, clock())
            if reply is None:
                reply = self._answer(identity, frame)
            if reply:
                try:
                    send(router, identity, _FIRST_OF_TWO)
                    send(router, reply, _LAST)
                except zmq.ZMQError as error:
                    self._drop(error)
            if outbox:
                self._send_outbox()
        return True

    def _answer(self, identity: bytes, frame: zmq.Frame) -> bytes | None:
        """The reply to any message."""
        if identity == _CONTROL_ID and _peer_address(frame) is None:
            self._lock_released(*protocol.unpack(frame.bytes, protocol.MAX_OVERHEAD_BYTES))
            return None
        if frame.more:
            return self._refuse_frames()
        registry = self.dispatcher.registry
        if len(frame) > registry.max_body_bytes:
            return self.dispatcher.answer_malformed(f"a message of {len(frame)} bytes is too long")
        reply = self.dispatcher.handle_any(identity, frame.bytes, lambda: _peer_address(frame), time.monotonic())
        if len(registry.sessions) > self._sessions:
            self._look_around()
        return reply

    def _look_around(self) -> None:
        """Note whether somebody is here, and whether there is room for more."""
        now = time.monotonic()
        before, self._sessions = self._sessions, len(self.dispatcher.registry.sessions)
        if before or self._sessions:
            self._idle.use(now)
        self._count_descriptors_at = now + COUNT_DESCRIPTORS_S
        self._door.look()

    def _lock_released(self, name: bytes, how: str) -> None:
        """What a death means: a client's slots come back, a keeper's pool is lost."""
        for pool in list(self.dispatcher.registry.pools.values()):
            for rank in range(len(pool.shards)):
                if name == keeper_lock_name(pool.name, rank):
                    self.dispatcher.registry.lose(pool.name, f"the {name.decode()} died ({how})")
                    return
        self.dispatcher.lease_released(name, how, time.monotonic())
        self._send_outbox()

    def _send_outbox(self) -> None:
        outbox = self.dispatcher.outbox
        if outbox:
            for identity, reply in outbox:
                self._send(identity, reply)
            outbox.clear()

    def _refuse_frames(self) -> bytes:
        frames = 1
        while self._socket.get(zmq.RCVMORE):
            BackendSocket.recv(self._socket)
            frames += 1
        return self.dispatcher.answer_malformed(f"a message has one frame, not {frames}")

    def _send(self, identity: bytes, reply: bytes) -> None:
        try:
            BackendSocket.send(self._socket, identity, _FIRST_OF_TWO)
            BackendSocket.send(self._socket, reply, _LAST)
        except zmq.ZMQError as error:
            self._drop(error)

    def _drop(self, error: zmq.ZMQError) -> None:
        """A reply could not be sent."""
        if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
            raise error
        # The client is gone, or does not read. Nothing is undone: it asks again, or its lease ends.
        self.replies_dropped += 1


def _peer_address(frame: zmq.Frame) -> str | None:
    try:
        address = frame.get("Peer-Address")
    except zmq.ZMQError:
        return None
    return address if isinstance(address, str) else None
