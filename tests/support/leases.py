"""Leases without processes: record locks do not conflict within one process, so that tests say who lives."""

from __future__ import annotations

import errno

from mambapool.pool.errors import ProtocolError
from mambapool.service.leases import Lock


class NamedLease:
    """The lease of a client that lives until a test says otherwise."""

    def __init__(self, name: bytes, leases: TestLeases) -> None:
        self.name = name
        self._leases = leases
        self.closed = False

    def is_held(self) -> bool:
        if self.closed:
            raise OSError(errno.EBADF, "the lease was forgotten, its file is closed")
        return self.name not in self._leases.dead

    def close(self) -> None:
        pass

    def remove(self) -> None:
        pass


class TestLeases:
    """Every lease is held, but for those in :attr:`dead`; of some of these the process has not ended yet."""

    __test__ = False

    def __init__(self) -> None:
        self.dead: set[bytes] = set()
        #: Lease → whether its process has ended, None where nobody knows.
        self.ended: dict[bytes, bool | None] = {}
        self.open_names: set[bytes] = set()

    def copy(self) -> TestLeases:
        """The same processes, before another allocator."""
        copied = TestLeases()
        copied.dead, copied.ended, copied.open_names = set(self.dead), dict(self.ended), set(self.open_names)
        return copied

    def open(self, name: bytes) -> Lock:
        if name in self.dead:
            raise ProtocolError(f"nobody holds the lease {name.hex()}")
        self.open_names.add(name)
        return NamedLease(name, self)

    def has_ended(self, name: bytes) -> bool | None:
        return self.ended.get(name, True)

    def forget(self, lease: Lock, *, dead: bool) -> None:
        self.open_names.discard(lease.name)
        if isinstance(lease, NamedLease):
            lease.closed = True
