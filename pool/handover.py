"""Handing a shard's block from its keeper to a client: one message over a SEQPACKET unix socket.

The keeper sends the packed descriptor with the block's file descriptor (SCM_RIGHTS) and closes. Memory of a
GPU has none: the descriptor says how to open it. A keeper that refuses sends the map ``{"version": 1,
"error": TEXT}`` without a file descriptor instead. A client sends nothing. Both sides ask the kernel for the
other's uid (SO_PEERCRED): it must be their own, or root's, who can reach into either process anyway. See
unix(7).
"""

from __future__ import annotations

import array
import contextlib
import os
import re
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import msgpack

from mambapool.pool.descriptor import CUDA_IPC, MAX_DESCRIPTOR_BYTES, ShardDescriptor, unpack, unpack_map
from mambapool.pool.errors import PoolLost, ProtocolError, RuntimeDirError
from mambapool.pool.runtime_dir import check_socket_path

# struct ucred: pid, uid, gid.
_UCRED = struct.Struct("3i")

# Room to receive, and so to close, what a peer should not have sent; the kernel drops more by itself.
_FDS_RECEIVED_AT_MOST = 16

# A connect that finds the queue of the listening socket full is told so at once and has to ask again.
_RETRY_S = 0.005

_REFUSAL_VERSION = 1


def peer_uid(sock: socket.socket) -> int:
    """The effective uid of the process at the other end when it connected, or when it listened."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _pid, uid, _gid = _UCRED.unpack(credentials)
    return int(uid)


def send_block(sock: socket.socket, descriptor: bytes, fd: int | None) -> None:
    """Send the packed descriptor and the block over a fresh connection; never waits if ``sock`` does not.

    ``fd`` is None for memory of a GPU.

    :class:`RuntimeDirError` when the peer is of another user: it has been told. :class:`OSError` when it
    has gone, or when the kernel has too many descriptors of this user under way (ETOOMANYREFS).
    """
    uid = peer_uid(sock)
    if uid not in (os.geteuid(), 0):
        text = f"the keeper runs as uid {os.geteuid()}, this process is uid {uid}: run both as one user"
        _send_refusal(sock, text)
        raise RuntimeDirError(f"refused a client of uid {uid}: the keeper runs as uid {os.geteuid()}")
    try:
        socket.send_fds(sock, [descriptor], [] if fd is None else [fd])
    except OSError as error:
        _send_refusal(sock, f"the block could not be sent ({error.strerror}): try again")
        raise


def _send_refusal(sock: socket.socket, text: str) -> None:
    # The peer may have gone; the refusal stands all the same.
    with contextlib.suppress(OSError):
        sock.send(msgpack.packb({"version": _REFUSAL_VERSION, "error": text}))


def receive_block(path: Path, timeout: float) -> tuple[ShardDescriptor, int]:
    """:func:`receive_shard` of one in host memory; :class:`ProtocolError` if it is on a GPU."""
    descriptor, fd = receive_shard(path, timeout)
    if fd is None:
        raise ProtocolError(f"{_name(path)} keeps memory of a GPU, not of the host")
    return descriptor, fd


def receive_shard(path: Path, timeout: float) -> tuple[ShardDescriptor, int | None]:
    """Ask the keeper that listens on ``path`` for its shard; the file descriptor is the caller's to close.

    There is none for memory of a GPU. ``timeout`` in seconds bounds the whole call. :class:`PoolLost` when
    no keeper is there or it does not answer in time, :class:`RuntimeDirError` when one of both refuses the
    other's user, :class:`ProtocolError` and :class:`~mambapool.pool.errors.VersionMismatch` when what comes
    is not one descriptor with one file descriptor. No error leaves a file descriptor open.
    """
    deadline = time.monotonic() + timeout
    keeper = _name(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        try:
            _connect(sock, path, deadline)
            _check_keeper(sock, keeper)
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            data, fds, flags = _receive(sock)
        except TimeoutError as error:
            raise PoolLost(f"{keeper} did not answer within {timeout:g} s") from error
        except OSError as error:
            raise PoolLost(f"{keeper} is not there: {error.strerror}") from error
    with _closed_on_error(fds):
        return _check_message(keeper, data, fds, flags), fds[0] if fds else None


def _name(path: Path) -> str:
    match = re.fullmatch(r"keeper-(?P<pool>.+)-(?P<rank>[0-9]+)\.sock", path.name)
    return f"keeper of pool {match['pool']} rank {match['rank']} ({path})" if match else f"keeper ({path})"


def _connect(sock: socket.socket, path: Path, deadline: float) -> None:
    address = check_socket_path(path)
    sock.setblocking(False)
    while True:
        try:
            return sock.connect(address)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError from None
            time.sleep(_RETRY_S)


def _check_keeper(sock: socket.socket, keeper: str) -> None:
    uid = peer_uid(sock)
    if uid not in (os.geteuid(), 0):
        raise RuntimeDirError(
            f"{keeper} runs as uid {uid}, this process is uid {os.geteuid()}: nothing was taken from it"
        )


def _receive(sock: socket.socket) -> tuple[bytes, list[int], int]:
    """One message, the file descriptors that came with it (not inherited by an exec), and its flags."""
    fds = array.array("i")
    data, ancillary, flags, _ = sock.recvmsg(
        MAX_DESCRIPTOR_BYTES, socket.CMSG_SPACE(_FDS_RECEIVED_AT_MOST * fds.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            # A cut-off message may end within a number; the kernel installed only the whole ones.
            fds.frombytes(content[: len(content) // fds.itemsize * fds.itemsize])
    return data, fds.tolist(), flags


def _check_message(keeper: str, data: bytes, fds: list[int], flags: int) -> ShardDescriptor:
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise ProtocolError(f"{keeper} sent more than a descriptor and one file descriptor: cut off")
    if not data and not fds:
        raise PoolLost(f"{keeper} closed the connection without an answer")
    if not fds:
        return _check_without_fd(keeper, data)
    if len(fds) != 1:
        raise ProtocolError(f"{keeper} sent {len(fds)} file descriptors, expected one")
    descriptor = unpack(data)
    if descriptor.cuda is not None:
        raise ProtocolError(f"{keeper} sent a file descriptor for memory of a GPU, which has none")
    return descriptor


def _check_without_fd(keeper: str, data: bytes) -> ShardDescriptor:
    """Memory of a GPU, or a refusal, which is raised."""
    message = unpack_map(data)
    text = message.get("error")
    if message.get("version") == _REFUSAL_VERSION and isinstance(text, str):
        raise RuntimeDirError(f"{keeper} refused: {text}")
    if message.get("backend") != CUDA_IPC:
        raise ProtocolError(f"{keeper} sent a descriptor without the file descriptor of its block")
    return unpack(data)


@contextlib.contextmanager
def _closed_on_error(fds: list[int]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
