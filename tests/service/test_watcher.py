"""The watcher over real processes: what it takes for a hint, what for the proof, and whom it tells when."""

from __future__ import annotations

import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import is_running
from daemons import wait_until

from mambapool.pool.errors import ProtocolError, RuntimeDirError
from mambapool.pool.runtime_dir import RuntimeDir
from mambapool.service import watcher as watcher_module
from mambapool.service.leases import WatchedLock
from mambapool.service.watcher import Watcher

# A client without a client: holds a lease, connects to the watcher, and does what its lines say.
CLIENT = """
import os, signal, socket, sys
from mambapool.pool import record_lock

fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
assert record_lock.take(fd)
connection = None
print("held", flush=True)
for line in sys.stdin:
    match line.split():
        case ["connect", path, name]:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.connect(path)
            connection.send(bytes.fromhex(name))
        case ["disconnect"]:
            connection.close()
        case ["release"]:
            os.close(fd)
        case ["fork"]:
            if os.fork() == 0:
                signal.pause()
        case ["connected?"]:
            connection.setblocking(False)
            try:
                print("no" if connection.recv(1) == b"" else "?", flush=True)
            except BlockingIOError:
                print("yes", flush=True)
            continue
    print("done", flush=True)
"""


class Client:
    """One such process; its own process group, so that what it forks is ended with it."""

    def __init__(self, directory: RuntimeDir) -> None:
        self.name = secrets.token_bytes(16)
        self._directory = directory
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT, str(directory.lease(self.name))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        assert self._hear() == "held"

    def do(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._hear()

    def connect(self) -> None:
        self.do(f"connect {self._directory.lease_socket} {self.name.hex()}")

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def _hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")


class Watched:
    """A watcher whose words are kept, and clients for it."""

    def __init__(self, directory: RuntimeDir) -> None:
        self.directory = directory
        self.told: queue.Queue[tuple[bytes, str]] = queue.Queue()
        self.watcher = Watcher(directory, self._tell)
        self.clients: list[Client] = []

    def _tell(self, name: bytes, how: str) -> None:
        self.told.put((name, how))

    def client(self, *, connected: bool = True) -> Client:
        client = Client(self.directory)
        self.clients.append(client)
        if connected:
            client.connect()
        return client

    def hears(self, client: Client) -> str:
        """The next word, which has to be of that client; how its death was noticed."""
        name, how = self.told.get(timeout=5.0)
        assert name == client.name
        return how

    def hears_of_nobody_else(self, client: Client) -> None:
        """All that was told by now is of that client: a death may be told more than once."""
        while not self.told.empty():
            assert self.told.get()[0] == client.name


@pytest.fixture
def directory() -> Iterator[RuntimeDir]:
    with tempfile.TemporaryDirectory(prefix="mambapool-") as path:
        yield RuntimeDir.for_server(path)


@pytest.fixture
def watched(directory: RuntimeDir) -> Iterator[Watched]:
    before = len(os.listdir("/proc/self/fd"))
    watched = Watched(directory)
    watched.watcher.start()
    yield watched
    for client in watched.clients:
        client.close()
    watched.watcher.close()
    for lease in list(watched.watcher._leases.values()):
        lease.close()
    assert not directory.lease_socket.exists()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.fixture
def no_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told was hinted at."""
    monkeypatch.setattr(watcher_module, "SWEEP_S", 3600.0)


@pytest.fixture
def quick_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher_module, "SWEEP_S", 0.02)


def test_a_killed_client_is_told_of_within_milliseconds(no_sweep: None, watched: Watched) -> None:
    client = watched.client()
    lease = watched.watcher.open(client.name)
    began = time.monotonic()
    client.kill()
    assert watched.hears(client) in ("its process ended", "its connection closed")
    assert time.monotonic() - began < 0.5
    assert not lease.is_held()


def test_a_zombie_is_dead(no_sweep: None, watched: Watched) -> None:
    client = watched.client()
    watched.watcher.open(client.name)
    client.kill()
    watched.hears(client)
    assert client.process.returncode is None, "nobody has waited for it"


def test_a_stopped_client_is_not_told_of(quick_sweep: None, watched: Watched) -> None:
    stopped, killed = watched.client(), watched.client()
    for client in (stopped, killed):
        watched.watcher.open(client.name)
    os.kill(stopped.process.pid, signal.SIGSTOP)
    killed.kill()
    watched.hears(killed)
    for _ in range(3):
        # Told again at every sweep until it is forgotten: so that sweeps have been over both.
        watched.hears(killed)


def test_the_end_of_a_connection_is_a_hint_only(quick_sweep: None, watched: Watched) -> None:
    client, other = watched.client(), watched.client()
    for one in (client, other):
        watched.watcher.open(one.name)
    client.do("disconnect")
    # Somebody else's death is told meanwhile, so that a look was taken at both.
    other.kill()
    watched.hears(other)
    watched.hears_of_nobody_else(other)
    watched.watcher.forget(watched.watcher._leases[other.name], dead=True)
    client.do("release")
    watched.hears(client)


def test_a_client_without_a_connection_is_found_by_the_sweep(quick_sweep: None, watched: Watched) -> None:
    client = watched.client(connected=False)
    watched.watcher.open(client.name)
    client.kill()
    assert watched.hears(client) == "the sweep found its lock released"


def test_a_child_that_keeps_the_connection_open_hides_nothing(no_sweep: None, watched: Watched) -> None:
    client = watched.client()
    watched.watcher.open(client.name)
    client.do("fork")
    client.kill()
    assert watched.hears(client) == "its process ended"


def test_a_strangers_word_about_a_lease_is_no_proof(no_sweep: None, watched: Watched) -> None:
    client = watched.client()
    watched.watcher.open(client.name)
    for words in (client.name, client.name + b"x", b"", b"\xff" * 60_000):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(str(watched.directory.lease_socket))
            stranger.send(words)
    client.kill()
    watched.hears(client)
    watched.hears_of_nobody_else(client)


def test_a_forgotten_lease_is_not_told_of_and_a_dead_ones_file_is_removed(
    quick_sweep: None, watched: Watched
) -> None:
    left, dead = watched.client(), watched.client()
    leases = [watched.watcher.open(client.name) for client in (left, dead)]
    watched.watcher.forget(leases[0], dead=False)
    left.kill()
    dead.kill()
    watched.hears(dead)
    watched.watcher.forget(leases[1], dead=True)
    assert watched.directory.lease(left.name).exists(), "its own process removes it when it closes"
    assert not watched.directory.lease(dead.name).exists()
    watched.hears_of_nobody_else(dead)


def test_a_lease_that_nobody_holds_is_not_looked_after(watched: Watched) -> None:
    client = watched.client()
    client.do("release")
    with pytest.raises(ProtocolError, match="nobody holds"):
        watched.watcher.open(client.name)
    with pytest.raises(ProtocolError, match="no lease"):
        watched.watcher.open(secrets.token_bytes(16))


def test_the_lock_of_a_keeper_is_looked_after_too(no_sweep: None, directory: RuntimeDir) -> None:
    watched = Watched(directory)
    client = watched.client(connected=False)
    lock = WatchedLock(b"keeper of pool default, rank 0", directory.lease(client.name))
    watched.watcher.watch_process(lock, client.process.pid)
    watched.watcher.start()
    client.kill()
    assert watched.told.get(timeout=5.0) == (lock.name, "its process ended")
    client.close()
    watched.watcher.close()
    lock.close()


def test_a_descriptor_that_is_used_again_at_once_is_not_taken_for_the_one_before(
    no_sweep: None, watched: Watched
) -> None:
    """In one turn of the loop: a connection ends, a client connects and gets its descriptor, the process ends."""
    first, second, blocker = watched.client(), watched.client(connected=False), watched.client()
    for client in (first, second, blocker):
        watched.watcher.open(client.name)
    with watched.watcher._lock:
        # The thread now waits in the middle of a turn, and finds all that follows in its next one, in this order.
        blocker.kill()
        wait_until(lambda: len(set(watched.watcher._by_fd.values())) == 1, "the thread handles that death")
        first.do("disconnect")
        second.connect()
        first.kill()
        wait_until(lambda: not is_running(first.process.pid), "the process has ended")
    assert {watched.told.get(timeout=5.0)[0] for _ in range(2)} == {blocker.name, first.name}
    assert second.do("connected?") == "yes"
    second.kill()
    watched.hears(second)


def test_a_left_over_socket_is_replaced_and_anything_else_is_refused(directory: RuntimeDir) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left_over:
        left_over.bind(str(directory.lease_socket))
    watched = Watched(directory)
    watched.watcher.start()
    client = watched.client()
    watched.watcher.open(client.name)
    client.close()
    watched.hears(client)
    watched.watcher.forget(watched.watcher._leases[client.name], dead=True)
    watched.watcher.close()
    Path(directory.lease_socket).write_text("somebody's")
    with pytest.raises(RuntimeDirError, match="is no socket"):
        Watched(directory)
    assert directory.lease_socket.read_text() == "somebody's"
