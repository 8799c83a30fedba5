"""How much memory this process can still get, before the kernel kills somebody for it.

The least of ``MemAvailable`` and what is left in every memory cgroup from this process's own up to the
root of what it can see; a limit holds for everything below it. Formats: proc(5), cgroups(7), and
``admin-guide/cgroup-v1/memory.rst`` and ``cgroup-v2.rst`` in the kernel's documentation.

Everything here reads below a root path, which is ``/`` outside tests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mambapool.pool.errors import NotEnoughMemory


@dataclass(frozen=True, slots=True)
class Available:
    """``size_bytes`` can still be had, and ``limit`` says what allows no more."""

    size_bytes: int
    limit: str


@dataclass(frozen=True, slots=True)
class _Version:
    """The files of one cgroup version; ``cache`` is the line of ``memory.stat`` for the whole subtree."""

    limit: str
    usage: str
    cache: str


_V1 = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Version("memory.max", "memory.current", "inactive_file")


def check_available(size_bytes: int, what: str, root: Path = Path("/")) -> None:
    """:class:`NotEnoughMemory` unless ``size_bytes`` more can be had for ``what``."""
    available = available_memory(root)
    if available is not None and size_bytes > available.size_bytes:
        raise NotEnoughMemory(
            f"{what} needs {size_bytes} bytes ({_gib(size_bytes)}), {available.size_bytes} bytes "
            f"({_gib(available.size_bytes)}) are available by {available.limit}: "
            "ask for fewer slots, free memory, or raise that limit"
        )


def available_memory(root: Path = Path("/")) -> Available | None:
    """What the tightest limit leaves; None when the kernel tells of none."""
    limits = [*_host(root), *_cgroups(root)]
    return min(limits, key=lambda available: available.size_bytes, default=None)


def _host(root: Path) -> Iterator[Available]:
    fields = _fields(root / "proc/meminfo")
    if "MemAvailable" in fields:
        yield Available(fields["MemAvailable"] * 1024, "MemAvailable of /proc/meminfo")


def _cgroups(root: Path) -> Iterator[Available]:
    paths = _own_paths(root)
    for version, mount_root, mount_point in _mounts(root):
        if version not in paths:
            continue
        own = paths[version]
        # A container without a cgroup namespace is shown the host's path, of which only the end is mounted;
        # one that was moved out of its namespace's root is shown "/..". The mount point is then the nearest.
        inside = own.is_relative_to(mount_root) and ".." not in own.parts
        directory = mount_point / own.relative_to(mount_root) if inside else mount_point
        while True:
            yield from _cgroup(root, directory, version)
            if directory == mount_point:
                break
            directory = directory.parent


def _cgroup(root: Path, directory: PurePosixPath, version: _Version) -> Iterator[Available]:
    place = root / directory.relative_to("/")
    limit, usage = _number(place / version.limit), _number(place / version.usage)
    if limit is None or usage is None:
        return
    # Page cache that nobody used lately is given up before anybody is killed; counted as in the kubelet's
    # "working set". Without it a group that has read large files would seem full for ever.
    cache = _fields(place / "memory.stat").get(version.cache, 0)
    yield Available(max(0, limit - max(0, usage - cache)), f"{version.limit} of {directory}")


def _own_paths(root: Path) -> dict[_Version, PurePosixPath]:
    """This process's cgroup in each hierarchy, from lines ``ID:CONTROLLER,…:PATH``."""
    paths = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            paths[_V1] = PurePosixPath(path)
        elif number == "0" and not controllers:
            paths[_V2] = PurePosixPath(path)
    return paths


def _mounts(root: Path) -> Iterator[tuple[_Version, PurePosixPath, PurePosixPath]]:
    """Version, root within the hierarchy, and mount point of each mounted memory hierarchy."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        mount, _, filesystem = line.partition(" - ")
        kind, _source, options = filesystem.split(" ", 2)
        if kind == "cgroup2":
            version = _V2
        elif kind == "cgroup" and "memory" in options.split(","):
            version = _V1
        else:
            continue
        _id, _parent, _device, mount_root, mount_point, *_rest = mount.split(" ")
        yield version, _unescaped(mount_root), _unescaped(mount_point)


def _unescaped(path: str) -> PurePosixPath:
    """Blanks and backslashes are octal escapes in mountinfo."""
    return PurePosixPath(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path))


def _fields(path: Path) -> dict[str, int]:
    """Lines ``name: number kB`` or ``name number``, as meminfo and memory.stat have them."""
    lines = (line.replace(":", " ").split() for line in _text(path).splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdecimal()}


def _number(path: Path) -> int | None:
    """The number in a file; None for ``max``, and for a file that is not there (the root has no limit)."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "surrogateescape")
    except OSError:
        return ""


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
