from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mambapool.pool.errors import ConfigError, PoolLost
from mambapool.pool.handover import receive_block
from mambapool.pool.keeper import KeeperConfig
from mambapool.pool.layout import Geometry, TensorSpec
from mambapool.pool.runtime_dir import RuntimeDir
from mambapool.pool.shm import map_block

Process = subprocess.Popen[str]
StartKeeper = Callable[..., Process]
Python = Callable[..., Process]
Eventually = Callable[[Callable[[], bool]], None]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be another user or to mount")


@pytest.fixture
def path(config: KeeperConfig) -> Path:
    return RuntimeDir(config.dir).keeper_socket(config.pool, config.rank)


def ended(process: Process, signal_number: int = signal.SIGTERM) -> tuple[int, str]:
    """Exit status and log of a keeper that was told to end."""
    process.send_signal(signal_number)
    _, log = process.communicate(timeout=10)
    return process.returncode, log


def failed(process: Process) -> tuple[int, dict[str, Any], str]:
    """Exit status, what the parent was told, and log of a keeper that could not start."""
    output, log = process.communicate(timeout=20)
    return process.returncode, json.loads(output), log


@pytest.mark.parametrize("parent_pid", [None, 4242])
def test_a_configuration_survives_as_json(config: KeeperConfig, parent_pid: int | None) -> None:
    config = dataclasses.replace(config, parent_pid=parent_pid)
    assert KeeperConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    "changes",
    [
        {"pool": "Not A Pool"},
        {"rank": 1},
        {"tp_size": 0},
        {"slots": 0},
        {"slots": "8"},
        {"geometry": []},
        {"geometry": None},
        {"parent_pid": "1"},
        {"dir": None},
        {"more": 1},
    ],
)
def test_a_configuration_that_cannot_be_is_refused(config: KeeperConfig, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="not the configuration of a keeper"):
        KeeperConfig.from_json(json.dumps(json.loads(config.to_json()) | changes))


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", '{"dir": "/tmp"'])
def test_text_that_is_no_configuration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not the configuration of a keeper"):
        KeeperConfig.from_json(text)


def test_a_client_gets_the_shard_that_was_configured(
    start_keeper: StartKeeper, config: KeeperConfig, path: Path
) -> None:
    config = dataclasses.replace(config, rank=1, tp_size=4)
    process = start_keeper(config)

    shard, fd = receive_block(path.with_name("keeper-default-1.sock"), timeout=5)
    map_block(fd, shard.size_bytes)
    os.close(fd)

    assert (shard.pool, shard.rank, shard.tp_size, shard.slots) == ("default", 1, 4, 8)
    assert shard.geometry == config.geometry
    assert shard.pid == process.pid


def test_a_start_is_told_to_the_parent_and_logged(
    launch_keeper: StartKeeper, config: KeeperConfig, path: Path
) -> None:
    process = launch_keeper(config)
    assert process.stdout is not None
    ready = json.loads(process.stdout.read())
    shard, fd = receive_block(path, timeout=5)
    os.close(fd)

    assert ready == {"ready": True, "pid": process.pid, "uuid": shard.uuid.hex()}
    _, log = ended(process)
    first, last = log.splitlines()
    assert f"keeping pool default rank 0: {shard.size_bytes} bytes, pid {process.pid}" in first
    assert f"ended keeping pool default rank 0, pid {process.pid}" in last


def test_only_the_owner_can_connect(start_keeper: StartKeeper, config: KeeperConfig, path: Path) -> None:
    start_keeper(config)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_every_keeper_has_a_uuid_of_its_own(start_keeper: StartKeeper, config: KeeperConfig, path: Path) -> None:
    uuids = set()
    for _ in range(2):
        process = start_keeper(config)
        shard, fd = receive_block(path, timeout=5)
        os.close(fd)
        uuids.add(shard.uuid)
        ended(process)
    assert len(uuids) == 2


def test_a_second_keeper_is_refused_and_the_first_goes_on(
    start_keeper: StartKeeper, launch_keeper: StartKeeper, config: KeeperConfig, path: Path
) -> None:
    first = start_keeper(config)
    shard, fd = receive_block(path, timeout=5)
    os.close(fd)

    status, told, log = failed(launch_keeper(config))

    assert status == told["exit"] == 3
    assert f"another keeper of default rank 0 (pid {first.pid})" in told["error"]
    assert log == "", "whoever asked says it"
    again, fd = receive_block(path, timeout=5)
    os.close(fd)
    assert again.uuid == shard.uuid


def test_a_keeper_waits_for_the_orphan_of_a_parent_that_was_killed(
    start_keeper: StartKeeper, config: KeeperConfig, path: Path, python: Python
) -> None:
    parent, orphan = parent_with_keeper(python, config)
    parent.kill()
    parent.wait()

    successor = start_keeper(dataclasses.replace(config, parent_pid=os.getpid()))

    assert not Path(f"/proc/{orphan}").exists() or state_of(orphan) == "Z"
    shard, fd = receive_block(path, timeout=5)
    os.close(fd)
    assert shard.pid == successor.pid


def test_the_socket_of_a_keeper_that_was_killed_is_replaced(
    start_keeper: StartKeeper, config: KeeperConfig, path: Path
) -> None:
    killed = start_keeper(config)
    killed.kill()
    killed.wait()
    assert path.is_socket()
    with pytest.raises(PoolLost, match="keeper of pool default rank 0"):
        receive_block(path, timeout=5)

    successor = start_keeper(config)

    shard, fd = receive_block(path, timeout=5)
    os.close(fd)
    assert shard.pid == successor.pid


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_what_is_no_socket_is_left_as_it_is(
    kind: str, launch_keeper: StartKeeper, config: KeeperConfig, path: Path
) -> None:
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("elsewhere.sock")
    before = path.lstat()

    status, told, _ = failed(launch_keeper(config))

    assert status == told["exit"] == 1
    assert f"{path} is not a socket and was left as it is" in told["error"]
    assert path.lstat() == before


def test_a_directory_that_is_too_long_for_a_socket_is_refused(
    launch_keeper: StartKeeper, config: KeeperConfig
) -> None:
    long = dataclasses.replace(config, dir=config.dir / ("x" * 100))
    status, told, _ = failed(launch_keeper(long))
    assert status == told["exit"] == 1
    assert "the kernel takes 107" in told["error"]


def test_a_pool_that_does_not_fit_is_refused(launch_keeper: StartKeeper, config: KeeperConfig, path: Path) -> None:
    huge = dataclasses.replace(config, slots=2**31 - 2)
    size = huge.geometry.place(huge.slots).size_bytes

    status, told, _ = failed(launch_keeper(huge))

    assert status == told["exit"] == 1
    assert f"mambapool-default-0 needs {size} bytes" in told["error"]
    assert "are available by" in told["error"]
    assert not path.exists()


def test_a_configuration_that_is_none_ends_with_usage(spawn: StartKeeper) -> None:
    process = spawn(sys.executable, "-m", "mambapool.pool.keeper", "{}", "--ready-fd", "1")
    status, told, _ = failed(process)
    assert status == told["exit"] == 2


def test_a_keeper_imports_neither_torch_nor_numpy(
    start_keeper: StartKeeper, config: KeeperConfig, python: Python
) -> None:
    process = start_keeper(config)
    program = "import sys, mambapool.pool.keeper; print(*sys.modules)"
    modules = python(program).communicate()[0].split()

    assert "mambapool.pool.keeper" in modules
    assert not {"torch", "numpy", "zmq", "click", "rich"} & set(modules)
    libraries = Path(f"/proc/{process.pid}/maps").read_text()
    assert "msgpack" in libraries
    assert "torch" not in libraries
    assert "numpy" not in libraries


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_ends_it_within_a_second_and_removes_the_socket(
    number: int, start_keeper: StartKeeper, config: KeeperConfig, path: Path
) -> None:
    process = start_keeper(config)
    started = time.monotonic()

    status, _ = ended(process, number)

    assert status == 0
    assert time.monotonic() - started < 1
    assert not path.exists()


def test_the_socket_of_another_is_not_removed(start_keeper: StartKeeper, config: KeeperConfig, path: Path) -> None:
    process = start_keeper(config)
    path.rename(path.with_suffix(".moved"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind(str(path))
        assert ended(process)[0] == 0
    assert path.is_socket()


def test_a_keeper_ends_with_its_parent(
    python: Python, config: KeeperConfig, path: Path, eventually: Eventually
) -> None:
    parent, keeper = parent_with_keeper(python, config)
    os.close(receive_block(path, timeout=5)[1])

    parent.kill()
    parent.wait()

    eventually(lambda: not path.exists())
    eventually(lambda: not Path(f"/proc/{keeper}").exists() or state_of(keeper) == "Z")


def parent_with_keeper(python: Python, config: KeeperConfig) -> tuple[Process, int]:
    """A process that started a keeper bound to itself, and the keeper's pid."""
    program = """
import dataclasses, os, subprocess, sys
from mambapool.pool.keeper import KeeperConfig
config = dataclasses.replace(KeeperConfig.from_json(sys.argv[1]), parent_pid=os.getpid())
command = [sys.executable, "-m", "mambapool.pool.keeper", config.to_json(), "--ready-fd", "1"]
keeper = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
assert "ready" in keeper.stdout.readline()
print(keeper.pid, flush=True)
keeper.wait()
"""
    parent = python(program, config.to_json())
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


def state_of(pid: int) -> str:
    """R, S, Z and so on: proc(5). Z has ended and waits for its parent to ask."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


MAP = """
import os, signal, sys
from pathlib import Path
from mambapool.pool.handover import receive_block
from mambapool.pool.shm import map_block

def map_shard():
    shard, fd = receive_block(Path(sys.argv[1]), timeout=10)
    return map_block(fd, shard.size_bytes)
"""

# Each client is a fork of one process, which saves starting Python for it.
TEN_CLIENTS = """
for count in range(10):
    client = os.fork()
    if client == 0:
        block = map_shard()
        assert block[0] == count
        block[0] += 1
        end()
    os.waitpid(client, 0)
"""

WAYS_TO_END = {
    "return": "sys.exit(0)",
    "exception": "{}['missing']",
    "sigterm": "os.kill(os.getpid(), signal.SIGTERM)",
    "sigkill": "os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("way", WAYS_TO_END)
def test_what_ten_clients_wrote_is_there_however_they_ended(
    way: str, start_keeper: StartKeeper, python: Python, config: KeeperConfig, path: Path
) -> None:
    keeper = start_keeper(config)
    _, errors = python(f"{MAP}\ndef end(): {WAYS_TO_END[way]}\n{TEN_CLIENTS}", path).communicate()
    assert "AssertionError" not in errors

    shard, fd = receive_block(path, timeout=5)
    with map_block(fd, shard.size_bytes) as block:
        assert block[0] == 10
    os.close(fd)
    assert keeper.poll() is None


def test_a_client_that_is_killed_leaves_nothing(
    start_keeper: StartKeeper, python: Python, config: KeeperConfig, path: Path
) -> None:
    keeper = start_keeper(config)
    in_shm, in_dir = os.listdir("/dev/shm"), os.listdir(config.dir)
    fds = os.listdir(f"/proc/{keeper.pid}/fd")
    client = python(f"{MAP}\nblock = map_shard(); print('mapped', flush=True); input()", path)
    assert client.stdout is not None
    assert client.stdout.readline() == "mapped\n"
    assert not [name for name in set(os.listdir("/dev/shm")) - set(in_shm) if "mambapool" in name]

    client.kill()
    client.wait()

    assert os.listdir(config.dir) == in_dir
    assert os.listdir(f"/proc/{keeper.pid}/fd") == fds
    os.close(receive_block(path, timeout=5)[1])


def test_the_memory_outlives_the_keeper_for_those_that_have_it(
    start_keeper: StartKeeper, config: KeeperConfig, path: Path
) -> None:
    keeper = start_keeper(config)
    shard, fd = receive_block(path, timeout=5)
    with map_block(fd, shard.size_bytes) as block:
        os.close(fd)
        block[0] = 7
        keeper.kill()
        keeper.wait()
        assert block[0] == 7


def connected(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(10)
    while True:
        try:
            sock.connect(str(path))
            return sock
        except BlockingIOError:  # the keeper's queue is full at this moment
            time.sleep(0.001)


def test_a_thousand_clients_that_never_read_keep_nobody_from_being_served(
    start_keeper: StartKeeper, python: Python, config: KeeperConfig, path: Path
) -> None:
    keeper = start_keeper(config)
    with contextlib.ExitStack() as silent, enough_descriptors():
        for _ in range(1000):
            silent.enter_context(connected(path))
        os.close(receive_block(path, timeout=5)[1])
    assert ended(keeper)[0] == 0


@contextlib.contextmanager
def enough_descriptors() -> Iterator[None]:
    """For a thousand sockets in this process: the usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_keeper_may_have_as_many_descriptors_under_way_as_the_host_allows(
    start_keeper: StartKeeper, config: KeeperConfig
) -> None:
    keeper = start_keeper(config, ("sh", "-c", 'ulimit -S -n 64 && exec "$@"', "sh"))
    soft, hard = resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE)
    assert soft == hard > 64


def test_a_thousand_clients_that_leave_at_once_disturb_nobody(
    start_keeper: StartKeeper, config: KeeperConfig, path: Path
) -> None:
    keeper = start_keeper(config)
    for _ in range(1000):
        connected(path).close()
    os.close(receive_block(path, timeout=5)[1])
    status, log = ended(keeper)
    assert status == 0
    assert len(log.splitlines()) == 2, "clients cannot fill the log"


def test_a_client_that_sends_something_is_served_all_the_same(
    start_keeper: StartKeeper, config: KeeperConfig, path: Path
) -> None:
    keeper = start_keeper(config)
    with connected(path) as chatty:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            chatty.send(b"hello")
        os.close(receive_block(path, timeout=5)[1])
    assert ended(keeper)[0] == 0


@needs_root
def test_a_client_of_another_user_is_refused_and_the_next_is_served(
    start_keeper: StartKeeper, python: Python, config: KeeperConfig, path: Path
) -> None:
    keeper = start_keeper(config)
    os.chmod(config.dir, 0o711)
    os.chmod(path, 0o777)
    program = """
import os, sys
from pathlib import Path
from mambapool.pool.errors import MambaPoolError
from mambapool.pool.handover import receive_block
os.setuid(65534)
try:
    receive_block(Path(sys.argv[1]), timeout=10)
except MambaPoolError as error:
    print(error)
"""
    output, _ = python(program, path).communicate()

    assert "refused: the keeper runs as uid 0, this process is uid 65534" in output
    os.close(receive_block(path, timeout=5)[1])
    _, log = ended(keeper)
    assert "refused a client of uid 65534" in log


def test_a_keeper_without_file_descriptors_waits_until_it_has_some(
    start_keeper: StartKeeper, config: KeeperConfig, path: Path
) -> None:
    keeper = start_keeper(config)
    used = {int(name) for name in os.listdir(f"/proc/{keeper.pid}/fd")}
    lowest_free = min(set(range(len(used) + 1)) - used)
    soft, hard = resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE, (lowest_free, hard))
    started = time.monotonic()
    with pytest.raises(PoolLost, match="did not answer"):
        receive_block(path, timeout=0.3)

    resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE, (soft, hard))

    os.close(receive_block(path, timeout=5)[1])
    seconds = time.monotonic() - started
    status, log = ended(keeper)
    assert status == 0
    turns = log.count("cannot accept a client: Too many open files")
    assert 1 <= turns <= seconds / 0.1 + 1, "it does not spin"


@needs_root
def test_a_block_can_be_larger_than_dev_shm(start_keeper: StartKeeper, config: KeeperConfig, path: Path) -> None:
    mount = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    big = dataclasses.replace(config, geometry=Geometry((TensorSpec.parse("conv=float32:1x1024x1024"),)))
    start_keeper(big, ("unshare", "--mount", "sh", "-c", mount, "sh"))

    shard, fd = receive_block(path, timeout=5)

    assert shard.size_bytes == 9 * 4 * 1024 * 1024
    with map_block(fd, shard.size_bytes) as block:
        block[-1] = 7
    os.close(fd)
