"""Workers in containers that are killed, paused, of another user or another version; nobody else notices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from compose_project import Project, Run, docker, inspect
from daemons import wait_until

from mambapool.pool import protocol

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]

Ask = Callable[..., list[Run]]


def holder(project: Project, name: str) -> dict[str, object] | None:
    """What `status` says of that session."""
    found = [held for held in project.pool()["holders"] if held["name"] == name]
    return found[0] if found else None


def test_a_killed_worker_s_slots_come_back_by_its_lease_and_the_others_never_notice(
    project: Project, ask: Ask
) -> None:
    doomed, other = ask("doomed", "other")
    told = [json.loads(run.attached) for run in (doomed, other)]
    assert [one["pid"] for one in told] == [1, 1], "no shared PID namespace"
    assert told[0]["session"] != told[1]["session"]
    assert doomed.ask("alloc 20") == str(list(range(1, 21)))
    mine = json.loads(other.ask("alloc 3"))
    other.ask("write 7")
    other.say("work 4")
    began = time.monotonic()
    docker("kill", "-s", "KILL", doomed.name)
    wait_until(lambda: holder(project, "doomed") is None, "its session is gone", timeout=5.0)
    assert time.monotonic() - began < 4.0
    worked = json.loads(other.hear())
    assert worked["steps"] > 100
    assert worked["slowest_s"] < 1.0
    assert other.ask("read " + " ".join(map(str, mine))) == "[7.0]"
    pool = project.pool()
    assert (pool["held"], pool["free"]) == (3, 61), "only its own: both had pid 1"
    log = project.logs("allocator")
    assert "(doomed, pid 1)" in log
    assert "20 slots" in log


def test_workers_see_each_others_states_without_a_shared_namespace(project: Project, ask: Ask) -> None:
    """Case 49: not a copy of one's own, which the last of three would show."""
    one, two, three = ask("one", "two", "three")
    ids = [inspect(run.name)["State"]["Pid"] for run in (one, two, three)]
    for kind in ("pid", "ipc", "net", "mnt"):
        assert len({os.readlink(f"/proc/{pid}/ns/{kind}") for pid in (*ids, os.getpid())}) == 4, kind
    (slot,) = json.loads(one.ask("alloc 1"))
    one.ask("write 5")
    assert two.ask(f"read {slot}") == "[5.0]"
    two.ask(f"write 6 {slot}")
    assert (one.ask(f"read {slot}"), three.ask(f"read {slot}")) == ("[6.0]", "[6.0]")


def test_a_paused_worker_keeps_its_slots_is_suspect_and_goes_on(project: Project, ask: Ask) -> None:
    paused, other = ask("paused", "other")
    mine = json.loads(paused.ask("alloc 4"))
    paused.ask("write 3")
    docker("pause", paused.name)
    wait_until(lambda: (holder(project, "paused") or {})["state"] == "suspect", "it is suspect", timeout=15.0)
    assert json.loads(other.ask("work 1"))["steps"] > 0
    assert (holder(project, "paused") or {})["held"] == 4
    docker("unpause", paused.name)
    wait_until(lambda: (holder(project, "paused") or {})["state"] == "live", "it is live", timeout=15.0)
    assert paused.ask("read " + " ".join(map(str, mine))) == "[3.0]"
    assert paused.ask("free") == "64"


def test_a_worker_that_leaves_gives_back_what_it_held(project: Project, ask: Ask) -> None:
    (run,) = ask("leaving")
    run.ask("alloc 5")
    run.say("leave")
    assert run.wait() == 0
    project.wait_until_free()
    assert "(leaving, pid 1) left: 5 slots freed: 1-5" in project.logs("allocator")


@pytest.mark.parametrize("service", ["worker-1", "replay"])
def test_a_signal_reaches_process_1_also_while_it_waits(project: Project, service: str) -> None:
    """Nobody replays and nobody joins: both wait. Process 1 has no default action."""
    project.compose("up", "-d", "--no-deps", service)
    container = project.container(service)
    pid = inspect(container)["State"]["Pid"]
    wait_until(lambda: handles_sigterm(pid), "it has come so far as to handle SIGTERM")
    began = time.monotonic()
    docker("stop", "-t", "20", container)
    assert time.monotonic() - began < 10.0
    assert inspect(container)["State"]["ExitCode"] == 128 + signal.SIGTERM
    docker("rm", container)


def handles_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    (caught,) = [line.split()[1] for line in status if line.startswith("SigCgt:")]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("user", ["12345", "0"])
def test_a_container_of_another_user_is_refused_and_cannot_use_the_sockets(
    project: Project, ask: Ask, user: str
) -> None:
    (refused,) = ask("other-user", options=("--user", user), timeout=1.0)
    (error,) = json.loads(refused.attached).items()
    assert error[0] == "RuntimeDirError"
    assert f"belongs to uid 10001, this process is uid {user}" in error[1]
    assert refused.wait() == 1
    connect_all = """
        import os, socket
        for name in ("allocator.sock", "lease.sock", "keeper-default-0.sock"):
            kind = socket.SOCK_STREAM if name == "allocator.sock" else socket.SOCK_SEQPACKET
            print(os.strerror(socket.socket(socket.AF_UNIX, kind).connect_ex("/run/mambapool/" + name)))
    """
    tried = project.run(connect_all, "--user", user)
    assert [tried.hear() for _ in range(3)] == ["Permission denied"] * 3


def test_also_where_somebody_has_opened_the_directory(project: Project, ask: Ask) -> None:
    """Then the kernel lets it connect, and the allocator and the keeper refuse by its uid."""
    allocator = project.container("allocator")
    files = "/run/mambapool /run/mambapool/*.sock /run/mambapool/leases /run/mambapool/ready"
    docker("exec", allocator, "sh", "-c", f"chmod a+rwx {files}")
    try:
        (refused,) = ask("other-user", options=("--user", "12345:12345"), timeout=1.0)
        assert "RuntimeDirError" in refused.attached
        assert "uid 10001" in refused.attached
        raw = """
            import pathlib, socket, zmq, msgpack
            from mambapool.pool import protocol
            from mambapool.pool.handover import receive_block
            try:
                receive_block(pathlib.Path("/run/mambapool/keeper-default-0.sock"), 2.0)
            except Exception as error:
                print(type(error).__name__, error, flush=True)
            dealer = zmq.Context().socket(zmq.DEALER)
            dealer.connect("ipc:///run/mambapool/allocator.sock")
            dealer.send(msgpack.packb([protocol.STATUS, 0, 1, 0, 0, 0]))
            print(msgpack.unpackb(dealer.recv()) if dealer.poll(5000) else "nothing", flush=True)
        """
        tried = project.run(raw, "--user", "12345:12345")
        keeper_says, allocator_says = tried.hear(), tried.hear()
        assert keeper_says.startswith("RuntimeDirError"), keeper_says
        assert "uid 10001" in keeper_says
        assert "12345" in allocator_says, allocator_says
        assert "pools" not in allocator_says
    finally:
        docker("exec", allocator, "sh", "-c", f"chmod go-rwx {files}")


@pytest.fixture(scope="module")
def later_worker() -> str:
    """An image whose client speaks only a version of the protocol that is not there yet."""
    dockerfile = r"""
FROM mambapool/worker
USER root
RUN file=$(python3 -c 'import mambapool.pool.protocol as module; print(module.__file__)') \
 && sed -i -E 's/^(OLDEST|NEWEST)_VERSION(.*)= .*/\1_VERSION\2= 99/' $file
USER 10001:10001
"""
    tag = "mambapool/worker:later"
    subprocess.run(
        ["docker", "build", "--network", "none", "-t", tag, "-"],
        input=dockerfile.encode(),
        check=True,
        capture_output=True,
        timeout=100,
    )
    return tag


def test_a_worker_of_another_protocol_version_is_refused_with_the_reason(
    project: Project, later_worker: str
) -> None:
    (worker,) = project.ask("later", tag=later_worker.partition(":")[2])
    (error,) = json.loads(worker.attached).items()
    assert error[0] == "VersionMismatch"
    assert "99" in error[1]
    assert f"{protocol.OLDEST_VERSION}" in error[1]
    assert worker.wait() == 1
    assert project.pool()["holders"] == []
