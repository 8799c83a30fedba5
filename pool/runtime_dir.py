"""The runtime directory: where it is, what lies in it, and who may use it.

Everything that processes of one mambapool share by name lies in one directory of mode 0700: sockets,
lock files, slot tables, ``ready``. Its owner's uid is the boundary; nothing in it is trusted further.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mambapool.pool.errors import ConfigError, RuntimeDirError
from mambapool.pool.regular_files import read_regular

#: ``sockaddr_un.sun_path`` holds 108 bytes, the last of them zero: unix(7).
MAX_SOCKET_PATH_BYTES = 107

# It lists pools, of which an allocator has a few.
_MOST_READY_BYTES = 2**20

POOL_NAME = re.compile(r"[a-z0-9_-]{1,32}")


def check_pool_name(name: object) -> str:
    if not isinstance(name, str) or not POOL_NAME.fullmatch(name):
        raise ConfigError(f"pool name {name!r}: use 1 to 32 of a-z 0-9 _ -")
    return name


def candidates() -> list[Path]:
    """Where a runtime directory is looked for when none is named, in order."""
    named = os.environ.get("MAMBAPOOL_DIR")
    if named:
        return [Path(named)]
    found = []
    session = os.environ.get("XDG_RUNTIME_DIR")
    if session:
        found.append(Path(session, "mambapool"))
    return [*found, Path("/run/mambapool"), Path(f"/tmp/mambapool-{os.getuid()}")]


def server_path(named: str | os.PathLike[str] | None) -> Path:
    """The directory that a server takes; not looked at yet."""
    if named is not None:
        return Path(named).absolute()
    # /run/mambapool counts only "if it can be written": root's, or made for us by an init system.
    options = [path for path in candidates() if path != Path("/run/mambapool") or _can_make(path)]
    return options[0].absolute()


@dataclass(frozen=True, slots=True)
class RuntimeDir:
    """The paths in one runtime directory."""

    path: Path

    @classmethod
    def for_server(cls, named: str | os.PathLike[str] | None = None) -> RuntimeDir:
        """The directory to serve in, made if it is not there, checked if it is.

        Raises :class:`RuntimeDirError` when it cannot be made or others may write to it.
        """
        directory = cls(server_path(named))
        check_socket_path(directory.allocator_socket)
        try:
            directory.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise RuntimeDirError(
                f"cannot make the directory {directory.path}: {error.strerror}; name another with --dir"
            ) from error
        directory.check_owner()
        directory.leases.mkdir(mode=0o700, exist_ok=True)
        return directory

    @classmethod
    def for_client(cls, named: str | os.PathLike[str] | None = None) -> RuntimeDir | None:
        """The named directory, or the first of :func:`candidates` that holds ``ready``, or None."""
        if named is not None:
            return cls(Path(named).absolute())
        for path in candidates():
            directory = cls(path.absolute())
            try:
                if directory.has_ready():
                    return directory
            except (PermissionError, RuntimeDirError):
                # Another user's is passed over, unless it was asked for.
                if os.environ.get("MAMBAPOOL_DIR"):
                    raise
        return None

    def has_ready(self) -> bool:
        """Whether a daemon says there that it answers; :class:`RuntimeDirError` when this user may not look."""
        try:
            return self.ready.exists()
        except PermissionError:
            self.check_owner()
            raise
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                check_socket_path(self.allocator_socket)
            raise

    def check_owner(self) -> None:
        """Refuse a directory that is not ours alone: who may write here could stand in for a daemon."""
        info = os.lstat(self.path)
        if not stat.S_ISDIR(info.st_mode) and not (stat.S_ISLNK(info.st_mode) and self.path.is_dir()):
            raise RuntimeDirError(f"{self.path} is not a directory; name another with --dir")
        info = os.stat(self.path)
        if info.st_uid != os.geteuid():
            raise RuntimeDirError(
                f"{self.path} belongs to uid {info.st_uid}, this process is uid {os.geteuid()}; "
                "name another directory with --dir, or run as its owner"
            )
        if info.st_mode & 0o022:
            raise RuntimeDirError(
                f"{self.path} can be written by others (mode {stat.S_IMODE(info.st_mode):04o}); "
                f"run: chmod 700 {self.path}"
            )
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise RuntimeDirError(f"{self.path} cannot be written; name another directory with --dir")

    @property
    def ready(self) -> Path:
        return self.path / "ready"

    @property
    def allocator_socket(self) -> Path:
        return self.path / "allocator.sock"

    @property
    def endpoint(self) -> str:
        return f"ipc://{self.allocator_socket}"

    @property
    def serve_lock(self) -> Path:
        return self.path / "serve.lock"

    @property
    def allocator_lock(self) -> Path:
        return self.path / "allocator.lock"

    @property
    def leases(self) -> Path:
        return self.path / "leases"

    def lease(self, name: bytes) -> Path:
        return self.leases / name.hex()

    @property
    def lease_socket(self) -> Path:
        return self.path / "lease.sock"

    def keeper_lock(self, pool: str, rank: int) -> Path:
        return self.path / f"keeper-{pool}-{rank}.lock"

    def keeper_socket(self, pool: str, rank: int) -> Path:
        return self.path / f"keeper-{pool}-{rank}.sock"

    def slot_table(self, pool: str) -> Path:
        return self.path / f"{pool}.table"

    def write_ready(self, content: dict[str, Any]) -> None:
        """Say that the daemon answers: by rename, so that a reader never sees half of it."""
        draft = self.path / f".ready.{os.getpid()}"
        draft.unlink(missing_ok=True)
        with draft.open("x") as stream:  # which opens nothing that is there
            stream.write(json.dumps(content) + "\n")
        draft.rename(self.ready)

    def read_ready(self) -> dict[str, Any] | None:
        """What ``ready`` says, or None when there is none."""
        try:
            content = json.loads(read_regular(self.ready, _MOST_READY_BYTES, follow=False))
        except (OSError, ValueError):
            return None
        return content if isinstance(content, dict) else None


def check_socket_path(path: Path) -> str:
    """The path as text, or :class:`RuntimeDirError` when no unix socket can have it: bytes count."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise RuntimeDirError(f"{str(path)!a} is not UTF-8; name another directory with --dir") from None
    if "\0" in str(path):
        raise RuntimeDirError(f"{str(path)!r} has a NUL in it; name another directory with --dir")
    size = len(os.fsencode(path))
    if size > MAX_SOCKET_PATH_BYTES:
        raise RuntimeDirError(
            f"the socket path {path} has {size} bytes, the kernel takes {MAX_SOCKET_PATH_BYTES}; "
            f"name a directory that is {size - MAX_SOCKET_PATH_BYTES} bytes shorter with --dir"
        )
    return str(path)


def _can_make(path: Path) -> bool:
    if path.exists():
        return os.access(path, os.W_OK | os.X_OK)
    return os.access(path.parent, os.W_OK | os.X_OK)
