"""What ``mambapool doctor`` looks at on every host, with a GPU or without."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mambapool.pool import record_lock
from mambapool.pool.errors import MambaPoolError
from mambapool.pool.memory_limits import available_memory
from mambapool.pool.runtime_dir import RuntimeDir
from mambapool.pool.version import VERSION
from mambapool.service.findings import Finding, bad, good, note
from mambapool.service.watcher import SO_PEERPIDFD

#: What a session, its connections and its files take, and what the daemon has besides.
_ENOUGH_DESCRIPTORS = 4096

_PROBE_S = 10.0


def look_at_host(directory: str | None) -> Iterator[Finding]:
    yield _versions()
    place = None
    try:
        place = RuntimeDir.for_server(directory)
        yield good("runtime directory", str(place.path), "sockets, locks and slot tables go there")
    except MambaPoolError as error:
        yield bad("runtime directory", str(error), "no daemon can be started there", "name another with --dir")
    if place is not None:
        yield _locks(place.path)
    yield _peer_pidfd()
    yield _descriptors()
    yield _memory()
    yield _namespaces()


def _versions() -> Finding:
    found = [f"mambapool {VERSION}", f"Python {platform.python_version()}", f"Linux {platform.release()}"]
    missing = []
    for package in ("pyzmq", "msgpack", "numpy", "torch", "cuda-bindings"):
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    text = ", ".join(found)
    if "torch" in missing:
        return note("versions", text, "workers need torch; the daemon does not", "pip install 'mambapool[worker]'")
    return good("versions", text, "what this process would use")


def _locks(directory: Path) -> Finding:
    """A lock of this process is seen by another one, and gone with its end."""
    what = "record locks"
    script = "import os, sys\nfrom mambapool.pool import record_lock\n"
    script += "print(record_lock.holder(os.open(sys.argv[1], os.O_RDWR)) is not None)"
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".doctor-") as file:
        try:
            record_lock.take(file.fileno())
            seen = subprocess.run(
                [sys.executable, "-c", script, file.name],
                capture_output=True,
                text=True,
                timeout=_PROBE_S,
                check=True,
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError) as error:
            return bad(what, str(error), "leases do not work on this file system", "put --dir on a local one")
    if seen != "True":
        return bad(
            what, "not seen by another process", "no death could be noticed", "put --dir on a local file system"
        )
    return good(what, f"work in {directory}", "the kernel tells when a client's process has died")


def _peer_pidfd() -> Finding:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            os.close(ours.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD))
        except OSError:
            return note(
                "SO_PEERPIDFD",
                f"not in Linux {platform.release()}",
                "the end of a process in another PID namespace is not seen: its slots on a GPU come back after 30 s",
                "use Linux 6.5 or newer, or run all containers in one PID namespace",
            )
    return good("SO_PEERPIDFD", "there", "the end of a client's process is seen, in any PID namespace")


def _descriptors() -> Finding:
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < _ENOUGH_DESCRIPTORS:
        return note(
            "file descriptors",
            f"at most {hard}",
            "a session takes about five",
            "raise the limit: ulimit -Hn 65536",
        )
    return good("file descriptors", f"at most {hard}", "enough for hundreds of sessions")


def _memory() -> Finding:
    available = available_memory()
    found = "unknown" if available is None else f"{available.size_bytes >> 20} MiB ({available.limit})"
    means = "what --device cpu can keep, limits of cgroups included; the size of /dev/shm does not matter"
    return good("host memory", found, means)


def _namespaces() -> Finding:
    found = {}
    for kind in ("pid", "ipc"):
        with contextlib.suppress(OSError):
            found[kind] = os.readlink(f"/proc/self/ns/{kind}")
    return note(
        "namespaces",
        ", ".join(found.values()),
        "states on a GPU are shared only between processes whose two lines are the same; in host memory, between all",
        "for containers that share a GPU's states: --pid=host --ipc=host, or --pid=container:NAME --ipc=container:NAME",
    )
