"""How a replay fails, other than by finding mismatches."""

from __future__ import annotations

from mambapool.client.replay.messages import Failed
from mambapool.pool.errors import (
    AllocatorUnavailable,
    ClientClosed,
    ConfigError,
    GeometryMismatch,
    GroupBroken,
    GuaranteeExceeded,
    MambaPoolError,
    NotEnoughMemory,
    PoolLost,
    ProtocolError,
    RankDiverged,
    RuntimeDirError,
    TraceError,
    UnknownPool,
    VersionMismatch,
)


class ReplayFailed(MambaPoolError):
    """Raised when a scheduler of a replay died, or none of them can go on; says which and why."""


#: Errors that a scheduler reports by name and that are raised again as what they are.
_ERRORS: dict[str, type[MambaPoolError]] = {
    error.__name__: error
    for error in (
        AllocatorUnavailable,
        ClientClosed,
        ConfigError,
        GeometryMismatch,
        GroupBroken,
        GuaranteeExceeded,
        NotEnoughMemory,
        PoolLost,
        ProtocolError,
        RankDiverged,
        RuntimeDirError,
        TraceError,
        UnknownPool,
        VersionMismatch,
    )
}


def raised_by(scheduler: str, report: Failed) -> MambaPoolError:
    """The error that a scheduler reported, with the scheduler named in its message."""
    return _ERRORS.get(report.error, ReplayFailed)(f"{scheduler}: {report.text}")
