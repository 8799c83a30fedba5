"""States of a real Mamba-2 model, handed from process to process: prefill and decode, a fork, a crash.

    pip install 'mambapool[worker,peers]'
    python examples/mamba2.py

Four processes with the same tiny random model share one pool. Each story's tokens are compared with those that
one process alone gives.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

PROMPT = [17, 3, 201, 44, 44, 96, 5, 130, 77, 8, 61]
TOKENS = 24

#: After the common prompt, one for each process.
TURNS = [[9, 12, 250], [33], [71, 70, 69, 68, 67]]


class Ask(Protocol):
    """A process that :func:`mamba2_slots.obey` runs in: call a method of its engine."""

    def __call__(self, method: str, *arguments: Any) -> Any: ...


def hand_over(prefill: Ask, decode: Ask, between: Callable[[], None] = lambda: None) -> tuple[Any, Any]:
    """One process reads the prompt, another one continues: its tokens, and what one process gives."""
    slot, first = prefill("prefill", PROMPT)
    between()
    prefill("give", slot, decode("session"))
    slot = decode("take")
    tokens = [first, *decode("decode", slot, [first], TOKENS - 1)]
    decode("free", slot)
    return tokens, decode("alone", [PROMPT], TOKENS)


def fork(parent: Ask, children: Sequence[Ask]) -> tuple[Any, Any]:
    """One process reads the prompt, the others continue it in their own ways from copies of its state."""
    slot, _ = parent("prefill", PROMPT)
    copies = parent("fork", slot, len(children))
    tokens, alone = [], []
    for copy, child, turn in zip(copies, children, TURNS, strict=True):
        parent("give", copy, child("session"))
        mine = child("take")
        tokens.append(child("decode", mine, turn, TOKENS))
        child("free", mine)
        alone.append(child("alone", [PROMPT, turn], TOKENS))
    parent("free", slot)
    return tokens, alone


def main() -> int:
    if importlib.util.find_spec("transformers") is None:
        print("this example needs transformers: pip install 'mambapool[worker,peers]'", file=sys.stderr)
        return 2
    from mamba2_slots import state_flags, tiny_model

    with tempfile.TemporaryDirectory(prefix="mambapool-mamba2-") as directory:
        serve = [sys.executable, "-m", "mambapool.service", "serve", "--dir", directory, "--slots", "16"]
        for flag in state_flags(tiny_model().config):
            serve += ["--state", flag]
        with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as daemon:
            try:
                assert daemon.stdout is not None
                print(daemon.stdout.readline(), end="", flush=True)
                return tell(directory)
            finally:
                daemon.terminate()


def tell(directory: str) -> int:
    """Run the stories; the exit status."""

    def crash() -> None:
        os.kill(json.loads(Path(directory, "ready").read_text())["pid"], signal.SIGKILL)

    processes = [Process(directory) for _ in range(4)]
    a, b, c, d = (process.ask for process in processes)
    stories: Iterable[tuple[str, Callable[[], tuple[Any, Any]]]] = [
        ("prefill in one process, decode in another", lambda: hand_over(a, b)),
        ("the same, the allocator killed in between", lambda: hand_over(a, b, crash)),
        ("three processes continue copies of one state", lambda: fork(a, [b, c, d])),
    ]
    status = 0
    try:
        for title, story in stories:
            tokens, alone = story()
            same = tokens == alone
            status |= not same
            print(
                f"{title:<46}", "same tokens as one process" if same else f"{tokens}\nexpected {alone}", flush=True
            )
    finally:
        for process in processes:
            process.close()
    return status


class Process:
    """An engine in a process of its own."""

    def __init__(self, directory: str) -> None:
        self._child = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("mamba2_slots.py")), directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
        )

    def ask(self, method: str, *arguments: Any) -> Any:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        print(json.dumps([method, *arguments]), file=self._child.stdin, flush=True)
        answer = self._child.stdout.readline()
        if not answer:
            raise SystemExit(f"{method}: the process has ended, status {self._child.wait()}")
        return json.loads(answer)

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()


if __name__ == "__main__":
    sys.exit(main())
