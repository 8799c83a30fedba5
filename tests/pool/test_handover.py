from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import pytest

from mambapool.pool import handover
from mambapool.pool.descriptor import MAX_DESCRIPTOR_BYTES, ShardDescriptor
from mambapool.pool.errors import MambaPoolError, PoolLost, ProtocolError, RuntimeDirError, VersionMismatch
from mambapool.pool.handover import receive_block, send_block
from mambapool.pool.runtime_dir import RuntimeDir

FakeKeeper = Callable[[Callable[[socket.socket], object]], Path]

pytestmark = pytest.mark.usefixtures("no_fd_leaked")


@pytest.fixture
def path(runtime: RuntimeDir) -> Path:
    return runtime.keeper_socket("default", 3)


@pytest.fixture
def listener(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(path))
        sock.listen()
        yield sock


@pytest.fixture
def file() -> Iterator[int]:
    """Something that has a file descriptor."""
    fd = os.open("/dev/zero", os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.fixture
def fake_keeper(listener: socket.socket, path: Path, file: int) -> Iterator[FakeKeeper]:
    """A keeper that does to its first client what it is told, then closes.

    It ends before ``file`` is closed: a client that refuses does not wait for what it would be sent.
    """
    with contextlib.ExitStack() as stack:

        def start(act: Callable[[socket.socket], object]) -> Path:
            def serve() -> None:
                client, _ = listener.accept()
                # A client that refuses may have gone before it is sent anything.
                with client, contextlib.suppress(ConnectionError):
                    act(client)

            thread = threading.Thread(target=serve)
            thread.start()
            stack.callback(thread.join)
            return path

        yield start


def send(data: bytes, fds: list[int]) -> Callable[[socket.socket], object]:
    return lambda client: socket.send_fds(client, [data], fds)


def test_the_descriptor_and_the_block_arrive(
    fake_keeper: FakeKeeper, descriptor: ShardDescriptor, file: int
) -> None:
    path = fake_keeper(lambda client: send_block(client, descriptor.pack(), file))

    received, fd = receive_block(path, timeout=5)

    assert received == descriptor
    assert os.path.sameopenfile(fd, file)
    assert not os.get_inheritable(fd)
    os.close(fd)


def refuse_all(path: Path, error: type[MambaPoolError], says: str, timeout: float = 5) -> None:
    with pytest.raises(error) as refused:
        receive_block(path, timeout)
    assert says in str(refused.value)
    assert f"keeper of pool default rank 3 ({path})" in str(refused.value)


def test_a_keeper_that_was_never_there_is_named(path: Path) -> None:
    refuse_all(path, PoolLost, "is not there: No such file or directory")


def test_the_socket_of_a_keeper_that_was_killed_is_named(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left_over:
        left_over.bind(str(path))
    refuse_all(path, PoolLost, "is not there: Connection refused")


@pytest.mark.usefixtures("listener")
def test_a_keeper_that_does_not_answer_is_waited_for_no_longer_than_asked(path: Path) -> None:
    started = time.monotonic()
    refuse_all(path, PoolLost, "did not answer within 0.1 s", timeout=0.1)
    assert 0.1 <= time.monotonic() - started < 5


def test_a_keeper_that_accepts_nobody_is_waited_for_no_longer_than_asked(
    listener: socket.socket, path: Path
) -> None:
    listener.listen(0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as first:
        first.connect(str(path))
        refuse_all(path, PoolLost, "did not answer within 0.1 s", timeout=0.1)


def test_a_client_that_found_the_queue_full_is_served_when_there_is_room(
    listener: socket.socket, path: Path, descriptor: ShardDescriptor, file: int
) -> None:
    listener.listen(0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as first:
        first.connect(str(path))

        def serve() -> None:
            listener.accept()[0].close()
            client, _ = listener.accept()
            with client:
                send_block(client, descriptor.pack(), file)

        thread = threading.Timer(0.05, serve)
        thread.start()
        _, fd = receive_block(path, timeout=5)
        thread.join()
    os.close(fd)


def test_a_keeper_that_closes_without_an_answer_is_lost(fake_keeper: FakeKeeper) -> None:
    refuse_all(fake_keeper(lambda _client: None), PoolLost, "closed the connection without an answer")


def test_a_path_that_no_socket_can_have_is_refused() -> None:
    with pytest.raises(RuntimeDirError, match="the kernel takes 107"):
        receive_block(Path("/tmp", "x" * 108), timeout=1)


def test_a_message_that_is_cut_off_is_refused(fake_keeper: FakeKeeper, file: int) -> None:
    too_long = bytes(MAX_DESCRIPTOR_BYTES + 1)
    refuse_all(fake_keeper(send(too_long, [file])), ProtocolError, "cut off")


@pytest.mark.parametrize("count", [2, 16])
def test_several_file_descriptors_are_refused_and_closed(
    count: int, fake_keeper: FakeKeeper, descriptor: ShardDescriptor, file: int
) -> None:
    path = fake_keeper(send(descriptor.pack(), [file] * count))
    refuse_all(path, ProtocolError, f"sent {count} file descriptors, expected one")


def test_more_file_descriptors_than_there_is_room_for_are_refused_and_closed(
    fake_keeper: FakeKeeper, descriptor: ShardDescriptor, file: int
) -> None:
    path = fake_keeper(send(descriptor.pack(), [file] * 100))
    refuse_all(path, ProtocolError, "cut off")


def test_a_descriptor_without_its_block_is_refused(fake_keeper: FakeKeeper, descriptor: ShardDescriptor) -> None:
    path = fake_keeper(send(descriptor.pack(), []))
    refuse_all(path, ProtocolError, "without the file descriptor of its block")


@pytest.mark.parametrize(
    ("data", "error"),
    [(b"\xc1", ProtocolError), (b"", ProtocolError), (msgpack.packb({"version": 9}), VersionMismatch)],
)
def test_the_block_of_a_descriptor_that_cannot_be_read_is_closed(
    data: bytes, error: type[MambaPoolError], fake_keeper: FakeKeeper, file: int
) -> None:
    path = fake_keeper(send(data, [file]))
    with pytest.raises(error):
        receive_block(path, timeout=5)


def test_a_client_takes_nothing_from_a_keeper_of_another_user(
    fake_keeper: FakeKeeper, descriptor: ShardDescriptor, file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fake_keeper(send(descriptor.pack(), [file]))
    monkeypatch.setattr(handover, "peer_uid", lambda _sock: os.geteuid() + 1)
    refuse_all(path, RuntimeDirError, f"runs as uid {os.geteuid() + 1}")


def test_a_keeper_sends_nothing_to_a_client_of_another_user_and_tells_it_why(
    descriptor: ShardDescriptor, file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = os.geteuid(), os.geteuid() + 1
    monkeypatch.setattr(handover, "peer_uid", lambda _sock: other)
    keeper, client = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with keeper, client:
        with pytest.raises(RuntimeDirError, match=f"refused a client of uid {other}: .* as uid {own}"):
            send_block(keeper, descriptor.pack(), file)
        data, fds, _, _ = socket.recv_fds(client, MAX_DESCRIPTOR_BYTES, 1)

    assert fds == []
    refusal = msgpack.unpackb(data)
    assert refusal["version"] == 1
    assert refusal["error"].startswith(f"the keeper runs as uid {own}, this process is uid {other}")


def test_a_client_is_told_why_it_was_refused(fake_keeper: FakeKeeper) -> None:
    refusal = msgpack.packb({"version": 1, "error": "not today"})
    refuse_all(fake_keeper(send(refusal, [])), RuntimeDirError, "refused: not today")


@pytest.mark.parametrize("uid", [0, None])
def test_root_and_the_own_user_are_served(
    uid: int | None,
    fake_keeper: FakeKeeper,
    descriptor: ShardDescriptor,
    file: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = fake_keeper(lambda client: send_block(client, descriptor.pack(), file))
    monkeypatch.setattr(handover, "peer_uid", lambda _sock: os.geteuid() if uid is None else uid)
    os.close(receive_block(path, timeout=5)[1])


def test_a_client_that_has_gone_is_an_os_error(descriptor: ShardDescriptor, file: int) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    with ours, pytest.raises(BrokenPipeError):
        send_block(ours, descriptor.pack(), file)


def test_the_kernel_says_who_is_at_the_other_end(
    python: Callable[..., subprocess.Popen[str]], listener: socket.socket, path: Path
) -> None:
    other_uid = 65534 if os.geteuid() == 0 else os.geteuid()
    os.chmod(path.parent, 0o711)
    os.chmod(path, 0o777)
    program = """
import os, socket, sys
if os.geteuid() == 0:
    os.setuid(65534)
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(sys.argv[1])
input()
sock.close()
"""
    process = python(program, path)
    client, _ = listener.accept()
    with client:
        assert handover.peer_uid(client) == other_uid
    process.communicate("\n")
