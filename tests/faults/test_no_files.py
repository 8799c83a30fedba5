"""Something lies in the runtime directory under the name of a file of ours, and is none: nobody waits for it, whoever
needs it ends at once with its path and what it is, and it stays as it is."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Command
from daemons import mambapool

from mambapool.pool.errors import MambaPoolError
from mambapool.pool.group_page import GroupPage
from mambapool.pool.process_lock import ProcessLock
from mambapool.pool.runtime_dir import RuntimeDir
from mambapool.pool.slot_table import SlotTableReader
from mambapool.service.leases import WatchedLock

#: A command that is not stuck has ended by then.
ENDS_S = 20.0

STATE = ("--state", "c=float32:1x2")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


#: What it is → how it is made, and what is said of it.
KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "FIFO": (os.mkfifo, "it is a FIFO, not a regular file"),
    "socket": (_socket, "it is a socket"),
    "link": (lambda path: path.symlink_to("/dev/zero"), "it is a symbolic link, not a regular file"),
    "directory": (Path.mkdir, "s a directory"),
}

#: Who opens a file of that name first.
COMMANDS = {
    "serve.lock": ("serve", "--slots", "4"),
    "allocator.lock": ("allocator", "--slots", "4"),
    "keeper-default-0.lock": ("keeper", "--slots", "4", *STATE),
    "default.table": ("serve", "--slots", "4"),
}


@pytest.fixture
def directory(runtime_dir: Path) -> RuntimeDir:
    runtime_dir.mkdir(mode=0o700)
    return RuntimeDir(runtime_dir)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_command_ends_with_its_path_and_what_it_is(directory: RuntimeDir, kind: str, name: str) -> None:
    make, said = KINDS[kind]
    path = directory.path / name
    make(path)
    before = os.lstat(path)
    done = mambapool(*COMMANDS[name], "--dir", str(directory.path), timeout=ENDS_S)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("mambapool: ")]
    assert str(path) in line
    assert said.lower() in line.lower()
    after = os.lstat(path)
    assert (stat.S_IFMT(after.st_mode), after.st_ino) == (stat.S_IFMT(before.st_mode), before.st_ino)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "open_it",
    [
        SlotTableReader,
        GroupPage,
        lambda path: ProcessLock(path, "allocator"),
        lambda path: WatchedLock(b"name", path),
    ],
    ids=["slot table", "group page", "lock", "watched lock"],
)
def test_whoever_opens_it_is_told_what_it_is(
    directory: RuntimeDir, kind: str, open_it: Callable[[Path], object]
) -> None:
    make, said = KINDS[kind]
    path = directory.path / "it"
    make(path)
    with pytest.raises((MambaPoolError, OSError)) as raised:
        open_it(path)
    assert str(path) in str(raised.value)
    assert said.lower() in str(raised.value).lower()


@pytest.mark.parametrize("kind", KINDS)
def test_a_ready_that_is_none_says_nothing(directory: RuntimeDir, kind: str) -> None:
    KINDS[kind][0](directory.ready)
    assert directory.read_ready() is None


@pytest.mark.parametrize("kind", ["FIFO", "socket", "link"])
def test_a_ready_is_written_whatever_lies_where_its_draft_goes(directory: RuntimeDir, kind: str) -> None:
    KINDS[kind][0](directory.path / f".ready.{os.getpid()}")
    directory.write_ready({"pid": 1})
    assert directory.read_ready() == {"pid": 1}


def test_serve_starts_and_ends_with_what_is_no_table_of_another_pool(directory: RuntimeDir) -> None:
    other = directory.path / "other.table"
    os.mkfifo(other)
    with Command("serve", "--dir", directory.path, "--slots", "4") as serve:
        serve.ready_line()
        assert serve.end() == 0
    assert stat.S_ISFIFO(os.lstat(other).st_mode)
