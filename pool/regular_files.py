"""Files by name, of which nobody knows what they are: a FIFO is waited for without an end, a device has none."""

from __future__ import annotations

import errno
import os
import stat

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: str | os.PathLike[str], flags: int, *, follow: bool = False, mode: int = 0o600) -> int:
    """Open a regular file without ever waiting; :class:`OSError`, whose ``strerror`` says what else it is.

    What a file of the runtime directory is called is ours to say: no link is followed there. What a user names may
    be one: ``follow``.
    """
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path) and not follow:
            raise _not_regular(path, "a symbolic link") from error
        if error.errno == errno.ENXIO:  # what the kernel says of a socket: open(2)
            raise _not_regular(path, "a socket, or has nobody at its other end") from error
        raise
    found = os.fstat(fd).st_mode
    if not stat.S_ISREG(found):
        os.close(fd)
        if stat.S_ISDIR(found):  # as open(2) says where it is opened for writing
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        raise _not_regular(path, _KINDS.get(stat.S_IFMT(found), "something else"))
    return fd


def read_regular(path: str | os.PathLike[str], most_bytes: int, *, follow: bool = True) -> bytes:
    """The content of a regular file, cut off behind ``most_bytes + 1``: so it can be seen that there is more."""
    with os.fdopen(open_regular(path, os.O_RDONLY, follow=follow), "rb") as stream:
        return stream.read(most_bytes + 1)


def _not_regular(path: str | os.PathLike[str], kind: str) -> OSError:
    return OSError(errno.EINVAL, f"it is {kind}, not a regular file", os.fspath(path))
