"""The thread that looks after every session of a process."""

from __future__ import annotations

import pytest
from daemons import wait_until

from mambapool.client.background import background


class Failing:
    """What a session does whose tick raises."""

    def __init__(self) -> None:
        self.count = 0

    def tick(self) -> None:
        self.count += 1
        raise RuntimeError(f"tick {self.count} of a session")


class Counting:
    count = 0

    def tick(self) -> None:
        self.count += 1


def test_an_error_of_one_session_is_said_once_and_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    failing, counting = Failing(), Counting()
    background().add(failing)
    background().add(counting)
    try:
        wait_until(lambda: failing.count > 3 and counting.count > 3, "both are looked after")
    finally:
        background().remove(failing)
        background().remove(counting)
    said = [record.exc_text or "" for record in caplog.records if record.name == "mambapool.client"]
    assert len(said) == 1
    assert "tick 1 of a session" in said[0]
