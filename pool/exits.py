"""The exit statuses of every command, by the family of the error."""

from __future__ import annotations

from typing import Final

from mambapool.pool.errors import (
    AllocatorAlreadyRunning,
    AllocatorUnavailable,
    ConfigError,
    MambaPoolError,
)

EXIT_DONE: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_ALREADY_RUNNING: Final = 3
EXIT_NOT_REACHABLE: Final = 4


def exit_status(error: MambaPoolError) -> int:
    """What a process ends with when ``error`` ended it."""
    if isinstance(error, AllocatorAlreadyRunning):
        return EXIT_ALREADY_RUNNING
    if isinstance(error, AllocatorUnavailable):
        return EXIT_NOT_REACHABLE
    if isinstance(error, ConfigError):
        return EXIT_USAGE
    return EXIT_FAILED
