from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mambapool.pool.errors import NotEnoughMemory
from mambapool.pool.memory_limits import Available, available_memory, check_available

GIB = 2**30
V2_MOUNT = "31 24 0:27 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
OTHER_MOUNTS = "22 27 0:21 / /proc rw - proc proc rw\n32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"

Host = Callable[..., Path]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """Write a root with 8 GiB available, the cgroup lines and mounts given, and files."""

    def write(cgroup: str = "", mounts: str = "", files: dict[str, str] | None = None) -> Path:
        content = {
            "proc/meminfo": f"MemTotal: 9 kB\nMemAvailable:   {8 * GIB // 1024} kB\nHugePages_Free: 0\n",
            "proc/self/cgroup": cgroup,
            "proc/self/mountinfo": OTHER_MOUNTS + mounts + "\n" if mounts else OTHER_MOUNTS,
        }
        for name, text in (content | (files or {})).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def v2(directory: str, limit: int | str, usage: int, inactive_file: int = 0) -> dict[str, str]:
    place = f"sys/fs/cgroup{directory}"
    return {
        f"{place}/memory.max": f"{limit}\n",
        f"{place}/memory.current": f"{usage}\n",
        f"{place}/memory.stat": f"anon 1\nactive_file {GIB}\ninactive_file {inactive_file}\n",
    }


def v1(directory: str, limit: int, usage: int, inactive_file: int = 0) -> dict[str, str]:
    place = f"sys/fs/cgroup/memory{directory}"
    return {
        f"{place}/memory.limit_in_bytes": f"{limit}\n",
        f"{place}/memory.usage_in_bytes": f"{usage}\n",
        f"{place}/memory.stat": f"inactive_file 7\ntotal_inactive_file {inactive_file}\n",
    }


def test_without_cgroups_the_host_decides(host: Host) -> None:
    assert available_memory(host()) == Available(8 * GIB, "MemAvailable of /proc/meminfo")


def test_the_own_cgroup_decides_when_it_is_tighter(host: Host) -> None:
    root = host("0::/a/b\n", V2_MOUNT, v2("/a/b", 3 * GIB, GIB))
    assert available_memory(root) == Available(2 * GIB, "memory.max of /sys/fs/cgroup/a/b")


def test_a_limit_further_up_decides_when_it_is_tighter(host: Host) -> None:
    files = v2("/a/b", "max", GIB) | v2("/a", 4 * GIB, 3 * GIB) | v2("/other", GIB, GIB)
    root = host("0::/a/b\n", V2_MOUNT, files)
    assert available_memory(root) == Available(GIB, "memory.max of /sys/fs/cgroup/a")


def test_the_host_decides_when_every_cgroup_has_room(host: Host) -> None:
    root = host("0::/a\n", V2_MOUNT, v2("/a", 100 * GIB, GIB))
    assert available_memory(root) == Available(8 * GIB, "MemAvailable of /proc/meminfo")


def test_page_cache_that_can_be_reclaimed_is_not_counted_as_used(host: Host) -> None:
    root = host("0::/a\n", V2_MOUNT, v2("/a", 4 * GIB, 4 * GIB, inactive_file=3 * GIB))
    assert available_memory(root) == Available(3 * GIB, "memory.max of /sys/fs/cgroup/a")


def test_a_cgroup_above_its_limit_has_nothing(host: Host) -> None:
    root = host("0::/a\n", V2_MOUNT, v2("/a", GIB, 2 * GIB))
    assert available_memory(root) == Available(0, "memory.max of /sys/fs/cgroup/a")


def test_version_1_is_read_up_to_its_root(host: Host) -> None:
    files = v1("", 2**63 - 4096, 5 * GIB) | v1("/a", 4 * GIB, 3 * GIB, GIB) | v1("/a/b", 6 * GIB, GIB)
    root = host("4:memory:/a/b\n3:cpu,cpuacct:/x\n0::/\n", V1_MOUNT, files)
    assert available_memory(root) == Available(2 * GIB, "memory.limit_in_bytes of /sys/fs/cgroup/memory/a")


def test_memory_in_version_1_beside_other_controllers_in_version_2(host: Host) -> None:
    mounts = f"{V1_MOUNT}\n41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
    root = host("4:memory:/a\n0::/a\n", mounts, v1("/a", GIB, 0) | {"sys/fs/cgroup/unified/a/cgroup.procs": ""})
    assert available_memory(root) == Available(GIB, "memory.limit_in_bytes of /sys/fs/cgroup/memory/a")


def test_a_container_that_is_shown_the_paths_of_the_host_finds_its_own_limit(host: Host) -> None:
    mount = V1_MOUNT.replace("0:32 / ", "0:32 /docker/c0ffee ")
    files = v1("", 2 * GIB, GIB) | v1("/inner", 6 * GIB, GIB)
    root = host("4:memory:/docker/c0ffee/inner\n", mount, files)
    assert available_memory(root) == Available(GIB, "memory.limit_in_bytes of /sys/fs/cgroup/memory")


@pytest.mark.parametrize("path", ["/../moved", "/"])
def test_a_process_outside_of_what_is_mounted_takes_the_nearest(host: Host, path: str) -> None:
    mount = V2_MOUNT.replace("0:27 / ", "0:27 /inner ")
    root = host(f"0::{path}\n", mount, v2("", 2 * GIB, GIB))
    assert available_memory(root) == Available(GIB, "memory.max of /sys/fs/cgroup")


def test_a_mount_point_with_a_blank_is_found(host: Host) -> None:
    mount = V2_MOUNT.replace("/sys/fs/cgroup", r"/my\040cgroups")
    files = {"my cgroups/a/memory.max": f"{GIB}", "my cgroups/a/memory.current": "0"}
    assert available_memory(host("0::/a\n", mount, files)) == Available(GIB, "memory.max of /my cgroups/a")


def test_a_host_that_tells_nothing_limits_nothing(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None
    check_available(2**60, "the pool", tmp_path)


def test_what_is_available_can_be_had(host: Host) -> None:
    check_available(8 * GIB, "the pool", host())


def test_a_refusal_names_what_is_asked_available_and_the_limit(host: Host) -> None:
    root = host("0::/a\n", V2_MOUNT, v2("/a", 3 * GIB, GIB))
    with pytest.raises(NotEnoughMemory) as refused:
        check_available(2 * GIB + 1, "mambapool-default-0", root)
    assert str(refused.value) == (
        "mambapool-default-0 needs 2147483649 bytes (2.00 GiB), 2147483648 bytes (2.00 GiB) are available "
        "by memory.max of /sys/fs/cgroup/a: ask for fewer slots, free memory, or raise that limit"
    )


def test_this_host_has_memory_available() -> None:
    available = available_memory()
    assert available is not None
    assert 0 < available.size_bytes < 2**56
