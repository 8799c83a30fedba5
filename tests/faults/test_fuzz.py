"""A short run of the fuzz, and that it can fail. ``make fuzz`` runs it for as long as you like."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from commands import children_of
from daemons import wait_until
from fuzzing_files import fuzz_files
from soaking import allocator_processes

FUZZ = Path(__file__).with_name("fuzz.py")


def run(*arguments: str) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run([sys.executable, str(FUZZ), *arguments], capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


def test_a_daemon_that_gets_everything_but_what_it_expects_serves_on() -> None:
    status, summary, said = run("--seconds", "1s", "--messages", "6000", "--seed", "3")
    assert status == 0, said
    assert summary["messages"] >= 6000
    assert summary["serving"]
    assert summary["clean"]
    assert summary["growth_bytes"] < 5_000_000
    assert "the daemon serves" in said


def test_an_allocator_that_does_not_survive_is_noticed() -> None:
    command = [sys.executable, str(FUZZ), "--seconds", "60", "--seed", "3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        serve = wait_until(lambda: serving(process.pid), "the fuzz is under way", timeout=90.0)
        os.kill(allocator_processes(serve)[0], signal.SIGKILL)
        assert process.wait(60) == 1
        assert process.stdout is not None
        summary = json.loads(process.stdout.read().splitlines()[-1])
    assert not summary["serving"]


def serving(pid: int) -> int:
    """The ``serve`` that a fuzz has started, once messages are sent."""
    for child in children_of(pid):
        words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        if b"--dir" in words and Path(os.fsdecode(words[words.index(b"--dir") + 1]), "neighbour.table").exists():
            return child
    return 0


def test_spoiled_files_are_read_or_refused(tmp_path: Path) -> None:
    assert fuzz_files(tmp_path, random.Random(76), at_least=800) == 800
