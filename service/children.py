"""Child processes of ``serve``: started, waited for until they say that they are ready, ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any, Self

from mambapool.pool import errors
from mambapool.pool.errors import MambaPoolError
from mambapool.pool.exits import EXIT_ALREADY_RUNNING, EXIT_USAGE
from mambapool.pool.polling import readable

#: A child that was told to end and has not by then is killed.
END_S = 1.0


@dataclass(eq=False)
class Child:
    """One process, and the pipe over which it says one JSON line (:mod:`mambapool.pool.started`)."""

    name: str
    process: subprocess.Popen[bytes]
    _ready: int

    @classmethod
    def start(cls, name: str, module: str, config: str, *, ready_option: str | None = None) -> Self:
        """Run ``python -m module config [ready_option] FD``."""
        ready, told = os.pipe()
        command = [sys.executable, "-m", module, config, *([ready_option] if ready_option else []), str(told)]
        try:
            # Not in our process group: Ctrl-C is ours to handle, and to pass on in the right order.
            process = subprocess.Popen(command, pass_fds=[told], stdin=subprocess.DEVNULL, process_group=0)
        except OSError as error:
            os.close(ready)
            raise MambaPoolError(f"cannot start the {name}: {error.strerror}") from error
        finally:
            os.close(told)
        return cls(name, process, ready)

    def wait_until_ready(self, wake: int) -> dict[str, Any] | None:
        """What the child says once it is ready; raises what it failed with.

        There is no timeout: clearing a large pool takes as long as it takes. Returns None when ``wake``, a
        file descriptor, becomes readable first.
        """
        said = b""
        while not said.endswith(b"\n"):
            if wake in readable(self._ready, wake):
                return None
            piece = os.read(self._ready, 65536)
            if not piece:
                break
            said += piece
        os.close(self._ready)
        try:
            message: dict[str, Any] = json.loads(said)
        except ValueError:
            raise MambaPoolError(f"the {self.name} {self.how_it_ended()} before it was ready") from None
        if "error" in message:
            self.process.wait()
            raise _error(message)
        return message

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def how_it_ended(self) -> str:
        """Waits for its end, and says it in words."""
        status = self.process.wait()
        if status >= 0:
            return f"ended with status {status}"
        return f"was killed by {signal.Signals(-status).name}"

    def end(self) -> None:
        """Ask it to end, without waiting."""
        if not self.ended:
            self.process.terminate()


def end_all(children: list[Child]) -> None:
    """Wait until all have ended; who does not in time is killed."""
    deadline = time.monotonic() + END_S
    for child in children:
        try:
            child.process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()


def _error(message: dict[str, Any]) -> MambaPoolError:
    """The child's error, of a kind that has its exit status."""
    kinds = {EXIT_ALREADY_RUNNING: errors.AllocatorAlreadyRunning, EXIT_USAGE: errors.ConfigError}
    return kinds.get(message.get("exit", 1), MambaPoolError)(str(message["error"]))
