"""``connect``: what is asked of the allocator, checked before anything is sent, and the session that comes of it."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mambapool.client.arguments import check_name, check_number, check_optional_number, check_timeout
from mambapool.client.background import background
from mambapool.client.guarantee_wait import missing_slots
from mambapool.client.transport import Transport
from mambapool.client.worker import CLOSE_S, Worker
from mambapool.pool import protocol
from mambapool.pool.errors import AllocatorUnavailable, ConfigError, GeometryMismatch, GroupBroken
from mambapool.pool.group_page import MAX_WORLD_SIZE, check_group_name
from mambapool.pool.layout import MAX_SLOTS
from mambapool.pool.runtime_dir import RuntimeDir, candidates, check_pool_name, check_socket_path
from mambapool.pool.slot_table import owner_word

if TYPE_CHECKING:
    import torch

    from mambapool.client.group import Group

#: How often connect() looks whether a daemon has come up.
_LOOK_S = 0.02

# Of a script's name, in that of a session: the pid has to fit in, too.
_SCRIPT_BYTES = 100


def connect(
    dir: str | os.PathLike[str] | None = None,
    pool: str = "default",
    *,
    name: str | None = None,
    device: str | torch.device = "cpu",
    timeout: float = 5.0,
    rank: int = 0,
    world_size: int = 1,
    group: str | None = None,
    guarantee: int = 0,
    limit: int | None = None,
    create_slots: int | None = None,
    slots: int | None = None,
    expect: Mapping[str, tuple[str | torch.dtype, tuple[int, ...]]] | None = None,
) -> Worker:
    """Attach to a pool: one session, its allocator, and the mapped states of shard ``rank``.

    ``dir`` is the daemon's runtime directory; without it ``MAMBAPOOL_DIR`` and the usual places are looked
    at, and the first one with a ``ready`` file is taken. ``name`` is what ``status`` and logs call this session
    (default: the process's). ``device`` is where slot tensors live. ``timeout``, in seconds, bounds every wait
    for an answer, this call included.

    ``group`` attaches one of the ``world_size`` ranks of a tensor-parallel engine, each with its own shard, each in a
    process of its own. All of them make the same calls in the same order, and get the same answers; they hold slots
    as one. connect waits until all ranks are there; :class:`~mambapool.pool.errors.GroupBroken` names who is
    missing, or who has this rank already.

    ``guarantee=G`` grants G slots whole, which this session then lists locally: no call costs a message, and
    nobody else can have them. While free slots do not cover it yet, connect waits, up to ``timeout``;
    :class:`~mambapool.pool.errors.GuaranteeExceeded` when the pool's guarantees leave no room for it. ``limit``:
    the session never holds more slots than this.

    ``create_slots=N`` makes an allocator-only pool if there is none of that name; it ends with its last session.
    ``slots`` and ``expect={tensor: (dtype, shape without the slot dimension)}`` are compared with the pool before
    anything is mapped: :class:`~mambapool.pool.errors.GeometryMismatch` names what differs.

    Raises ``ImportError`` without torch, :class:`AllocatorUnavailable` when nobody answers,
    :class:`~mambapool.pool.errors.UnknownPool`, :class:`~mambapool.pool.errors.VersionMismatch`.
    """
    _require_torch()
    check_pool_name(pool)
    _check_device(device)
    check_timeout(timeout)
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout must be a number of seconds above 0, not {timeout!r}")
    rank, world_size = _check_rank(rank, world_size, group)
    hello: dict[str, Any] = {
        "versions": [protocol.OLDEST_VERSION, protocol.NEWEST_VERSION],
        "pool": pool,
        "name": check_name("name", name) if name is not None else _name_of_process(),
        "pid": os.getpid(),
        "rank": rank,
        "guarantee": check_number("guarantee", guarantee, 0, MAX_SLOTS),
        "limit": check_optional_number("limit", limit, 1, MAX_SLOTS),
        "create_slots": check_optional_number("create_slots", create_slots, 1, protocol.MAX_CREATED_SLOTS),
        "slots": check_optional_number("slots", slots, 0, MAX_SLOTS),
        "expect": _expectations(expect),
    }
    if group is not None:
        hello |= {"group": group, "world_size": world_size}
    _check_directory(dir)
    deadline = time.monotonic() + timeout
    directory = _find_daemon(dir, deadline, timeout)
    try:
        transport = Transport(directory, timeout, hello, deadline=deadline)
    except AllocatorUnavailable as error:
        if guarantee and (missing := missing_slots(directory, pool, guarantee, timeout)) is not None:
            raise missing from error
        raise
    # It says that it lives while the other ranks, or the states, are waited for, too.
    background().add(transport)
    try:
        member = None if group is None else _join(transport, directory, group, rank, deadline)
        return Worker(transport, directory, device, rank, deadline, member)
    except BaseException:
        background().remove(transport)
        transport.detach(CLOSE_S)
        raise


def _require_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ImportError("mambapool's client needs torch: pip install 'mambapool[worker]'") from error


def _check_device(device: str | torch.device) -> None:
    """Slot tensors can be made there; found out before the allocator hears of this session."""
    import torch

    try:
        if torch.device(device).type == "cuda":
            from mambapool.client import gpu

            return gpu.check_device(torch.device(device))
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"device {str(device)!a} cannot be used ({reason}): pass 'cpu', or one that can"
        ) from error


def _check_rank(rank: int, world_size: int, group: str | None) -> tuple[int, int]:
    if group is not None:
        check_group_name(group)
    world_size = check_number("world_size", world_size, 1, MAX_WORLD_SIZE)
    rank = check_number("rank", rank, 0, protocol.MAX_RANK)
    if group is None and world_size != 1:
        raise ConfigError(f"world_size={world_size} needs group=NAME, which its ranks have in common")
    if group is not None and rank >= world_size:
        raise ConfigError(f"rank {rank} is out of range: group {group} has ranks 0 to {world_size - 1}")
    return rank, world_size


def _name_of_process() -> str:
    """``script.py-4242``; whatever the script is called, it is a name that ``status`` can show."""
    script = Path(sys.argv[0]).name or "python"
    shown = "".join(character if character.isprintable() else "?" for character in script)
    return f"{shown.encode()[:_SCRIPT_BYTES].decode(errors='ignore')}-{os.getpid()}"


def _check_directory(named: str | os.PathLike[str] | None) -> None:
    """No daemon can be in one whose sockets have too long a path: that is not waited for."""
    if named == "":
        raise ConfigError("dir is empty: name the daemon's runtime directory, or leave it out")
    if named is not None:
        check_socket_path(RuntimeDir(Path(named).absolute()).allocator_socket)


def _find_daemon(named: str | os.PathLike[str] | None, deadline: float, timeout: float) -> RuntimeDir:
    while True:
        directory = RuntimeDir.for_client(named)
        if directory is not None and directory.has_ready():
            directory.check_owner()
            return directory
        if time.monotonic() >= deadline:
            places = [Path(named)] if named is not None else candidates()
            raise AllocatorUnavailable(
                f"no daemon is ready in {' or '.join(map(str, places))} after {timeout:g} s: start one with "
                "`mambapool serve`, or name its directory (dir=, MAMBAPOOL_DIR)"
            )
        time.sleep(_LOOK_S)


def _expectations(
    expect: Mapping[str, tuple[str | torch.dtype, tuple[int, ...]]] | None,
) -> list[list[Any]] | None:
    if expect is None:
        return None
    try:
        if not isinstance(expect, Mapping):
            raise TypeError(f"it is a {type(expect).__name__}")
        return [
            [
                check_name("a name", name),
                check_name("a dtype", str(dtype).removeprefix("torch.")),
                [check_number("a size", size, 0, protocol.MAX_NUMBER - 1) for size in shape],
            ]
            for name, (dtype, shape) in expect.items()
        ]
    except (TypeError, ValueError) as error:
        raise GeometryMismatch(f"expect must be {{name: (dtype, shape)}}: {error}") from error


def _join(transport: Transport, directory: RuntimeDir, name: str, rank: int, deadline: float) -> Group:
    """The group, complete."""
    from mambapool.client.group import Group

    session = transport.session
    group = Group(directory.path / session["group"], name, rank, transport.timeout)
    group.join(transport.number, transport.connection.end, deadline)
    if (guarantee := session["guarantee"]) and rank:
        # Rank 0 was told by HELLO; the table has the same slots in the same order.
        granted = transport.table.granted(owner_word(group.holder), protocol.FIRST_REQUEST)
        if len(granted) != guarantee:
            group.check_ends()
            raise GroupBroken(
                f"group {name}: its guarantee is {guarantee} slots, and rank 0, session {group.holder}, holds "
                f"{len(granted)} of them: start all its ranks again"
            )
        session["granted"] = granted.astype("<i4").tobytes()
    return group
