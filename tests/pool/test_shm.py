from __future__ import annotations

import errno
import fcntl
import mmap
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mambapool.pool import shm
from mambapool.pool.errors import NotEnoughMemory, ProtocolError
from mambapool.pool.shm import SEALS, create_block, map_block

SIZE = 1 << 20

Python = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def block() -> Iterator[int]:
    fd = create_block("mambapool-test", SIZE)
    yield fd
    os.close(fd)


def test_a_block_is_zero_and_there_as_a_whole(block: int) -> None:
    info = os.fstat(block)

    assert info.st_size == SIZE
    assert info.st_blocks * 512 >= SIZE
    with map_block(block, SIZE) as mapped:
        assert mapped[:] == bytes(SIZE)


@pytest.mark.usefixtures("no_fd_leaked")
def test_a_block_is_allocated_in_pieces_between_which_signals_are_handled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pieces = []

    def stop_after_two(_fd: int, start: int, size: int) -> None:
        pieces.append((start, size))
        if len(pieces) == 2:
            os.kill(os.getpid(), signal.SIGUSR1)

    def leave(_number: int, _frame: object) -> None:
        raise SystemExit

    monkeypatch.setattr(shm, "_PIECE_BYTES", 4096)
    monkeypatch.setattr(os, "posix_fallocate", stop_after_two)
    handler = signal.signal(signal.SIGUSR1, leave)
    with pytest.raises(SystemExit):
        create_block("mambapool-test", SIZE)
    signal.signal(signal.SIGUSR1, handler)
    assert pieces == [(0, 4096), (4096, 4096)]


@pytest.mark.parametrize("size", [4096, 3 * 4096, 3 * 4096 + 256])
def test_a_block_of_several_pieces_is_there_as_a_whole(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "_PIECE_BYTES", 2 * 4096)
    fd = create_block("mambapool-test", size)
    info = os.fstat(fd)
    os.close(fd)
    assert info.st_size == size
    assert info.st_blocks * 512 >= size


@pytest.mark.parametrize("size", [0, SIZE - 4096, SIZE + 4096])
def test_a_block_cannot_shrink_or_grow(block: int, size: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(block, size)


def test_nobody_can_seal_a_block_against_writing(block: int) -> None:
    with pytest.raises(PermissionError):
        fcntl.fcntl(block, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_a_block_is_not_inherited_by_an_exec(block: int) -> None:
    assert not os.get_inheritable(block)


def test_a_block_has_no_file_in_dev_shm() -> None:
    before = set(os.listdir("/dev/shm"))
    fd = create_block("mambapool-test", SIZE)
    after = set(os.listdir("/dev/shm"))
    os.close(fd)

    assert not {name for name in after - before if "mambapool" in name}


@pytest.mark.usefixtures("no_fd_leaked")
def test_a_block_that_does_not_fit_is_refused_before_it_is_made() -> None:
    with pytest.raises(NotEnoughMemory, match=f"huge needs {2**50} bytes .* are available by"):
        create_block("huge", 2**50)


@pytest.mark.usefixtures("no_fd_leaked")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM])
def test_a_block_that_the_kernel_has_no_room_for_is_refused(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_fd: int, _offset: int, _size: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(NotEnoughMemory, match=f"{SIZE} bytes, the kernel refused them"):
        create_block("mambapool-test", SIZE)


def test_the_file_size_limit_of_the_process_is_an_error_and_not_a_signal(python: Python) -> None:
    limited = python("""
import resource
from mambapool.pool.errors import NotEnoughMemory
from mambapool.pool.shm import create_block
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    create_block("limited", 8192)
except NotEnoughMemory as error:
    print(error)
""")
    output, _ = limited.communicate()
    assert "limited needs 8192 bytes, the kernel refused them (File too large)" in output


def test_a_kernel_without_the_seal_against_executing_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    create = os.memfd_create

    def create_on_an_old_kernel(name: str, flags: int) -> int:
        if flags & 0x0008:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return create(name, flags)

    monkeypatch.setattr(os, "memfd_create", create_on_an_old_kernel)
    fd = create_block("mambapool-test", SIZE)
    map_block(fd, SIZE).close()
    os.close(fd)


@pytest.mark.parametrize("size", [SIZE - 4096, SIZE + 4096])
def test_a_block_of_another_size_is_not_mapped(block: int, size: int) -> None:
    with pytest.raises(ProtocolError, match=f"has {SIZE} bytes, its descriptor says {size}"):
        map_block(block, size)


@pytest.mark.parametrize("missing", [fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL])
def test_memory_that_lacks_a_seal_is_not_mapped(missing: int) -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS & ~missing)
    with pytest.raises(ProtocolError, match="seals"):
        map_block(fd, SIZE)
    os.close(fd)


def test_memory_that_cannot_be_written_is_not_mapped() -> None:
    fd = os.memfd_create("read only", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_WRITE)
    with pytest.raises(ProtocolError, match="cannot be mapped"):
        map_block(fd, SIZE)
    os.close(fd)


def test_a_file_is_not_mapped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(SIZE))
    with path.open("r+b") as file, pytest.raises(ProtocolError, match="is not a shared block"):
        map_block(file.fileno(), SIZE)


def test_a_process_without_addresses_left_is_told_so(python: Python, block: int) -> None:
    limited = python(
        """
import resource, sys
from mambapool.pool.errors import NotEnoughMemory
from mambapool.pool.shm import map_block
resource.setrlimit(resource.RLIMIT_AS, (1 << 16, 1 << 16))
try:
    map_block(int(sys.argv[1]), 1 << 20)
except NotEnoughMemory as error:
    print(error)
""",
        str(block),
        pass_fds=(block,),
    )
    output, _ = limited.communicate()
    assert f"cannot map {SIZE} bytes" in output


MAP = """
import os, sys
from mambapool.pool.shm import map_block
block = map_block(int(sys.argv[1]), 1 << 20)
"""


def test_two_processes_see_what_the_other_writes(python: Python, block: int) -> None:
    program = MAP + "block[:5] = block[5:10].upper(); print('written', flush=True); input(); print(block[:5])"
    with map_block(block, SIZE) as mapped:
        mapped[5:10] = b"there"
        other = python(program, str(block), pass_fds=(block,))
        assert other.stdout is not None
        assert other.stdout.readline() == "written\n"
        assert mapped[:5] == b"THERE"
        mapped[:5] = b"again"
        output, _ = other.communicate("\n")
    assert output == "b'again'\n"


def test_a_forked_child_dies_when_it_touches_the_mapping_and_the_parent_goes_on(
    python: Python, block: int
) -> None:
    program = """
child = os.fork()
if child == 0:
    block[0]
    os._exit(0)
_, status = os.waitpid(child, 0)
block[0] = 7
print(os.WTERMSIG(status), block[0])
"""
    output, _ = python(MAP + program, str(block), pass_fds=(block,)).communicate()
    assert output == f"{signal.SIGSEGV.value} 7\n"


def test_a_forked_child_that_lets_go_of_the_mapping_unmaps_nothing_of_its_own(python: Python, block: int) -> None:
    program = """
import gc, mmap
child = os.fork()
if child == 0:
    # The kernel fills the hole that the mapping left with what is mapped next.
    own = mmap.mmap(-1, 1 << 20)
    del block
    gc.collect()
    own[:] = bytes([7]) * (1 << 20)
    sys.exit(own[0])
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
"""
    output, _ = python(MAP + program, str(block), pass_fds=(block,)).communicate()
    assert output == "7\n"


def test_the_mapping_is_left_out_of_a_fork(block: int) -> None:
    with map_block(block, SIZE) as mapped:
        flags = _flags_of_mapping("memfd:mambapool-test")
        assert isinstance(mapped, mmap.mmap)
    assert "dc" in flags
    assert "sh" in flags


def _flags_of_mapping(name: str) -> list[str]:
    """VmFlags of a mapping, from /proc/self/smaps: proc(5)."""
    entry = Path("/proc/self/smaps").read_text().partition(name)[2]
    line = next(line for line in entry.splitlines() if line.startswith("VmFlags:"))
    return line.split()[1:]
