from __future__ import annotations

import json
import os

import pytest

from mambapool.pool.started import tell


def test_a_message_is_one_json_line_and_the_pipe_is_closed_after_it() -> None:
    reading, writing = os.pipe()
    tell(writing, ready=True, pid=4242, pools=["a"])
    with os.fdopen(reading) as stream:
        # To the end of the file, which comes only when the writing side is closed.
        assert [json.loads(line) for line in stream] == [{"ready": True, "pid": 4242, "pools": ["a"]}]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(writing)


def test_a_text_of_several_lines_stays_one_line() -> None:
    reading, writing = os.pipe()
    tell(writing, error="first\nsecond", exit=1)
    with os.fdopen(reading) as stream:
        (line,) = stream
    assert json.loads(line)["error"] == "first\nsecond"


def test_nobody_is_told_when_nobody_asked(capfd: pytest.CaptureFixture[str]) -> None:
    tell(None, ready=True)
    assert capfd.readouterr() == ("", "")


def test_a_parent_that_does_not_listen_any_more_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    tell(writing, ready=True)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(writing)


def test_a_descriptor_that_is_not_open_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    os.close(writing)
    tell(writing, ready=True)
