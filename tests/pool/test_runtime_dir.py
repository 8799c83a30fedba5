from __future__ import annotations

import json
import os
import socket
import stat
from pathlib import Path

import pytest

from mambapool.pool.errors import ConfigError, RuntimeDirError
from mambapool.pool.runtime_dir import (
    MAX_SOCKET_PATH_BYTES,
    RuntimeDir,
    candidates,
    check_pool_name,
    check_socket_path,
)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be another user")


@pytest.fixture
def directory(runtime_dir: Path) -> RuntimeDir:
    return RuntimeDir.for_server(runtime_dir)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAMBAPOOL_DIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# Where it is.


def test_the_usual_places_are_looked_at_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    system = [Path("/run/mambapool"), Path(f"/tmp/mambapool-{os.getuid()}")]
    assert candidates() == system
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    assert candidates() == [Path("/run/user/1000/mambapool"), *system]
    monkeypatch.setenv("MAMBAPOOL_DIR", "/somewhere")
    assert candidates() == [Path("/somewhere")]


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = candidates()
    monkeypatch.setenv("MAMBAPOOL_DIR", "")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    assert candidates() == expected


def test_a_client_takes_the_first_place_that_holds_ready(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (RuntimeDir.for_server(runtime_dir / name / "mambapool") for name in ("first", "second"))
    monkeypatch.setattr("mambapool.pool.runtime_dir.candidates", lambda: [first.path, second.path])
    assert RuntimeDir.for_client() is None
    second.write_ready({})
    assert RuntimeDir.for_client() == second
    first.write_ready({})
    assert RuntimeDir.for_client() == first


def test_a_named_directory_is_taken_whether_it_is_ready_or_not(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAMBAPOOL_DIR", str(runtime_dir / "other"))
    assert RuntimeDir.for_client(runtime_dir) == RuntimeDir(runtime_dir)
    assert RuntimeDir.for_server(runtime_dir) == RuntimeDir(runtime_dir)


def test_relative_paths_are_made_absolute(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runtime_dir.parent)
    assert RuntimeDir.for_client("run") == RuntimeDir(runtime_dir)
    assert RuntimeDir.for_server("run") == RuntimeDir(runtime_dir)


@pytest.mark.parametrize("variable", ["MAMBAPOOL_DIR", "XDG_RUNTIME_DIR"])
def test_a_server_serves_where_the_environment_says(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, str(runtime_dir))
    expected = runtime_dir / "mambapool" if variable == "XDG_RUNTIME_DIR" else runtime_dir
    assert RuntimeDir.for_server().path == expected
    assert mode(expected) == 0o700


def test_a_server_passes_over_a_place_in_the_system_that_it_cannot_write_to(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mambapool.pool.runtime_dir.candidates", lambda: [Path("/run/mambapool"), runtime_dir])
    # Not by its mode: the tests may run as root.
    monkeypatch.setattr(os, "access", lambda path, _mode: not str(path).startswith("/run"))
    assert RuntimeDir.for_server().path == runtime_dir


# Who may use it.


def test_a_new_directory_is_its_owners_alone(runtime_dir: Path) -> None:
    before = os.umask(0)
    try:
        RuntimeDir.for_server(runtime_dir)
    finally:
        os.umask(before)
    assert mode(runtime_dir) == mode(runtime_dir / "leases") == 0o700


def test_a_directory_that_others_may_read_is_taken_as_it_is(runtime_dir: Path) -> None:
    runtime_dir.mkdir(mode=0o755)
    RuntimeDir.for_server(runtime_dir)
    assert mode(runtime_dir) == 0o755


@pytest.mark.parametrize("bits", [0o777, 0o770, 0o702, 0o1777])
def test_a_directory_that_others_may_write_to_is_refused(runtime_dir: Path, bits: int) -> None:
    runtime_dir.mkdir()
    runtime_dir.chmod(bits)
    with pytest.raises(RuntimeDirError) as caught:
        RuntimeDir.for_server(runtime_dir)
    assert str(caught.value) == (
        f"{runtime_dir} can be written by others (mode {bits:04o}); run: chmod 700 {runtime_dir}"
    )
    assert list(runtime_dir.iterdir()) == []


@needs_root
def test_a_directory_of_another_user_is_refused(directory: RuntimeDir) -> None:
    os.chown(directory.path, 12345, -1)
    with pytest.raises(RuntimeDirError, match=r"belongs to uid 12345, this process is uid 0; name another"):
        directory.check_owner()


@needs_root
def test_a_client_that_may_not_look_into_a_directory_is_told_whose_it_is_if_it_asked_for_it(
    directory: RuntimeDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.write_ready({})
    directory.path.parent.chmod(0o755)
    os.seteuid(12345)
    try:
        monkeypatch.setattr("mambapool.pool.runtime_dir.candidates", lambda: [directory.path])
        assert RuntimeDir.for_client() is None, "somebody else's usual place"
        asked_for = RuntimeDir.for_client(directory.path)
        assert asked_for is not None
        with pytest.raises(RuntimeDirError, match="belongs to uid 0, this process is uid 12345"):
            asked_for.has_ready()
        monkeypatch.setenv("MAMBAPOOL_DIR", str(directory.path))
        with pytest.raises(RuntimeDirError, match="belongs to uid 0, this process is uid 12345"):
            RuntimeDir.for_client()
    finally:
        os.seteuid(0)


def test_a_directory_that_cannot_be_written_is_refused(
    directory: RuntimeDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(RuntimeDirError, match="cannot be written"):
        directory.check_owner()


def test_a_link_to_a_directory_of_ones_own_is_followed(directory: RuntimeDir) -> None:
    link = directory.path.with_name("link")
    link.symlink_to(directory.path)
    assert RuntimeDir.for_server(link).path == link


def test_a_link_to_a_directory_that_others_may_write_to_is_refused(directory: RuntimeDir) -> None:
    directory.path.chmod(0o777)
    link = directory.path.with_name("link")
    link.symlink_to(directory.path)
    with pytest.raises(RuntimeDirError, match="can be written by others"):
        RuntimeDir.for_server(link)


def test_a_file_in_its_place_is_refused(runtime_dir: Path) -> None:
    runtime_dir.write_text("")
    with pytest.raises(RuntimeDirError, match=f"cannot make the directory {runtime_dir}: File exists"):
        RuntimeDir.for_server(runtime_dir)
    with pytest.raises(RuntimeDirError, match="is not a directory"):
        RuntimeDir(runtime_dir).check_owner()


def test_a_directory_that_cannot_be_made_is_refused() -> None:
    with pytest.raises(RuntimeDirError, match=r"cannot make the directory /proc/mambapool: .*--dir"):
        RuntimeDir.for_server("/proc/mambapool")


# Sockets.


def test_every_file_lies_in_the_directory_under_its_name(directory: RuntimeDir) -> None:
    path = directory.path
    assert directory.endpoint == f"ipc://{path}/allocator.sock"
    assert directory.keeper_socket("a-b", 3) == path / "keeper-a-b-3.sock"
    assert directory.keeper_lock("a-b", 3) == path / "keeper-a-b-3.lock"
    assert directory.slot_table("a-b") == path / "a-b.table"
    assert directory.lease_socket == path / "lease.sock"
    assert directory.lease(bytes(range(16))) == path / "leases" / "000102030405060708090a0b0c0d0e0f"
    assert {directory.serve_lock, directory.allocator_lock} == {path / "serve.lock", path / "allocator.lock"}


@pytest.mark.parametrize("letter", ["x", "ä", "\U0001f40d"], ids=["1 byte", "2 bytes", "4 bytes"])
def test_a_socket_path_is_taken_up_to_what_the_kernel_takes_in_bytes(runtime_dir: Path, letter: str) -> None:
    runtime_dir.mkdir()
    room = MAX_SOCKET_PATH_BYTES - len(os.fsencode(runtime_dir / "y"))
    count, rest = divmod(room, len(letter.encode()))
    fits = runtime_dir / ("y" + letter * count + "z" * rest)
    assert len(os.fsencode(fits)) == 107
    assert check_socket_path(fits) == str(fits)
    too_long = fits.with_name(fits.name + letter)
    with pytest.raises(RuntimeDirError) as caught:
        check_socket_path(too_long)
    size = 107 + len(letter.encode())
    assert str(caught.value) == (
        f"the socket path {too_long} has {size} bytes, the kernel takes 107; "
        f"name a directory that is {size - 107} bytes shorter with --dir"
    )
    with socket.socket(socket.AF_UNIX) as sock:
        with pytest.raises(OSError, match="too long"):
            sock.bind(str(too_long))
        sock.bind(str(fits))


def test_a_directory_with_too_long_a_path_is_refused_before_it_is_made(runtime_dir: Path) -> None:
    long = runtime_dir / ("x" * 100)
    with pytest.raises(RuntimeDirError, match="bytes shorter with --dir"):
        RuntimeDir.for_server(long)
    assert not runtime_dir.exists()


# Ready.


def test_a_directory_with_a_nul_in_its_name_is_refused() -> None:
    """No shell can say that, a TOML file can."""
    with pytest.raises(RuntimeDirError, match="has a NUL in it"):
        RuntimeDir.for_server("/tmp/a\0b")


def test_what_ready_says_is_read_back(directory: RuntimeDir) -> None:
    content = {"pid": 4242, "epoch": 2**48 - 1, "endpoint": directory.endpoint, "pools": ["a", "b"]}
    directory.write_ready(content)
    assert directory.read_ready() == content
    assert json.loads(directory.ready.read_text()) == content
    assert {path.name for path in directory.path.iterdir()} == {"ready", "leases"}


def test_ready_is_replaced_whole(directory: RuntimeDir) -> None:
    directory.write_ready({"pid": 1, "pools": ["x" * 1000]})
    with directory.ready.open() as seen_before:
        directory.write_ready({"pid": 2})
        assert json.load(seen_before)["pid"] == 1
    assert directory.read_ready() == {"pid": 2}


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", "\udcff"])
def test_a_ready_that_cannot_be_read_is_none(directory: RuntimeDir, content: str) -> None:
    directory.ready.write_text(content, errors="surrogateescape")
    assert directory.read_ready() is None


def test_no_ready_is_none(directory: RuntimeDir) -> None:
    assert directory.read_ready() is None


# Names of pools.


@pytest.mark.parametrize("name", ["default", "a", "0", "a-b_c", "-", "x" * 32])
def test_pool_names_are_checked_and_given_back(name: str) -> None:
    assert check_pool_name(name) == name


@pytest.mark.parametrize("name", ["", "A", "a b", "a/b", "..", "a.b", "ä", "x" * 33, "a\n", "a\0", None, 5, b"a"])
def test_a_name_that_no_pool_can_have_is_refused_with_what_is_accepted(name: object) -> None:
    with pytest.raises(ConfigError, match="use 1 to 32 of a-z 0-9 _ -"):
        check_pool_name(name)
