from __future__ import annotations

import inspect

import pytest

from mambapool.pool import errors
from mambapool.pool.errors import MambaPoolError
from mambapool.pool.exits import (
    EXIT_ALREADY_RUNNING,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_NOT_REACHABLE,
    EXIT_USAGE,
    exit_status,
)

ERRORS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, MambaPoolError) and kind.__module__ == errors.__name__
]
SPECIAL = {
    errors.ConfigError: EXIT_USAGE,
    errors.ModelConfigError: EXIT_USAGE,
    errors.TraceError: EXIT_USAGE,
    errors.AllocatorAlreadyRunning: EXIT_ALREADY_RUNNING,
    errors.AllocatorUnavailable: EXIT_NOT_REACHABLE,
}


def test_the_numbers_are_those_that_scripts_rely_on() -> None:
    assert (EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_ALREADY_RUNNING, EXIT_NOT_REACHABLE) == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_ends_a_process_with_the_status_of_its_family(kind: type[MambaPoolError]) -> None:
    assert exit_status(kind("why")) == SPECIAL.get(kind, EXIT_FAILED)
