"""Real daemons for tests: started as a user starts them, waited for, looked at, ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from table_check import check_table, check_until_settled

from mambapool.client import Worker, connect
from mambapool.client.operators import ask_audit, ask_status
from mambapool.pool.polling import readable
from mambapool.pool.runtime_dir import RuntimeDir
from mambapool.service.audit_checks import violations
from mambapool.service.audited import AuditedPool

START_S = 30.0

#: Two small tensors, as a state of one rank.
SMALL_STATE = ("conv=bfloat16:2x6x3", "temporal=float32:2x2x4x4")


def wait_until(condition: Callable[[], Any], what: str, timeout: float = 10.0) -> Any:
    """Poll until ``condition()`` is true, and return it; fails naming ``what`` after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        result = condition()
        if result:
            return result
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
        time.sleep(0.005)


def mambapool(*arguments: str, timeout: float = 60.0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, as a user's shell does."""
    return subprocess.run(
        [sys.executable, "-m", "mambapool.service", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
        check=False,
    )


@dataclass
class Daemon:
    """A running ``mambapool serve``."""

    dir: Path
    process: subprocess.Popen[str]
    ready_line: str
    log_path: Path
    workers: list[Worker] = field(default_factory=list)

    @property
    def directory(self) -> RuntimeDir:
        return RuntimeDir(self.dir)

    @property
    def allocator_pid(self) -> int:
        """The process that decides: a child of ``serve``."""
        pid: int = json.loads((self.dir / "ready").read_text())["pid"]
        return pid

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def connect(self, **options: Any) -> Worker:
        """A session of this process, closed with the daemon at the latest."""
        worker = connect(self.dir, **options)
        self.workers.append(worker)
        return worker

    def status(self, timeout: float = 5.0) -> dict[str, Any]:
        return ask_status(self.directory, timeout)

    def pool(self, name: str = "default") -> dict[str, Any]:
        """One pool of :meth:`status`."""
        (pool,) = [pool for pool in self.status()["pools"] if pool["name"] == name]
        found: dict[str, Any] = pool
        return found

    def check(self) -> None:
        """Every slot of every pool is in exactly one state, in the table and in ``status``."""
        check_until_settled(self._check)

    def audit(self, pool: str) -> AuditedPool:
        """A snapshot of one pool, which has to be sound."""
        found = AuditedPool(ask_audit(self.directory, 5.0, pool))
        assert violations(found) == []
        return found

    def _check(self) -> None:
        for pool in self.status()["pools"]:
            self.audit(pool["name"])
            counted = sum(pool[key] for key in ("free", "held", "windows", "offered", "quarantined"))
            assert counted == pool["slots"], pool
            check_table(self.directory.slot_table(pool["name"]), pool)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """The allocator is SIGSTOPped inside."""
        pid = self.allocator_pid
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def stop(self, timeout: float = 10.0) -> int:
        """SIGTERM, as an operator ends it; the exit status."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(timeout)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.workers.clear()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def start_daemon(
    directory: Path,
    *,
    slots: int | None = 64,
    states: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
) -> Daemon:
    """``mambapool serve`` in ``directory``, waited for until it says that it is ready."""
    command = [sys.executable, "-m", "mambapool.service", "serve", "--dir", str(directory), *options]
    if slots is not None:
        command += ["--slots", str(slots)]
    for state in states:
        command += ["--state", state]
    log_path = directory.with_name(directory.name + ".log")
    with log_path.open("a") as log:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **(environment or {})},
        )
    assert process.stdout is not None
    line = process.stdout.readline() if readable(process.stdout.fileno(), timeout=START_S) else ""
    if not line.startswith("mambapool ready"):
        process.kill()
        raise AssertionError(f"serve said {line!r}, status {process.wait()}:\n{log_path.read_text()}")
    return Daemon(directory, process, line, log_path)
