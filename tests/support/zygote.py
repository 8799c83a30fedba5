"""The process that has imported torch, which takes seconds, and that scripts are forked from.

It has done nothing else: no thread, no zmq context, no session. A script runs in ``__main__`` and ends as every
interpreter does: atexit, module teardown, exit status. With :data:`NO_TEARDOWN` in its environment it ends after
atexit: the teardown of torch's modules takes ten times as long as all else that a small script does.
:mod:`processes` is what tests use.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from dataclasses import dataclass
from typing import IO, Any, NoReturn

END_S = 30.0

#: A variable: not empty, scripts are not torn down.
NO_TEARDOWN = "ZYGOTE_NO_TEARDOWN"

_MAX_REQUEST_BYTES = 128 * 1024


@dataclass(frozen=True)
class Pipes:
    """The tests' ends of a script: descriptors, and the file that its stderr goes to."""

    input: int
    output: int
    status: int  # a line with its pid, then one with its exit status
    stderr: IO[str]


class Zygote:
    """Starts scripts. Ends when it is closed, or when the process that made it ends."""

    def __init__(self, *modules: str, environment: dict[str, str] | None = None) -> None:
        """``modules``: what it imports besides torch and the client. ``environment``, on top of this process's, is
        that of all scripts."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), *modules]
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(environment or {})},
            )

    def start(self, source: str, arguments: tuple[object, ...], environment: dict[str, str]) -> Pipes:
        """Run ``source`` with ``sys.argv[1:]`` = ``arguments`` and ``environment`` on top of this one's."""
        request = {
            "source": textwrap.dedent(source),
            "arguments": [str(argument) for argument in arguments],
            "environment": environment,
        }
        stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the script
        stdin, put = os.pipe()
        output, stdout = os.pipe()
        status, told = os.pipe()
        socket.send_fds(self._control, [json.dumps(request).encode()], [stdin, stdout, stderr.fileno(), told])
        for fd in (stdin, stdout, told):
            os.close(fd)
        return Pipes(put, output, status, stderr)

    def close(self) -> None:
        self._control.close()
        self._process.wait(END_S)


def _serve(control: socket.socket) -> str:
    """Fork for every request. Returns in the forked only: the script that is to run."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        data, fds, _, _ = socket.recv_fds(control, _MAX_REQUEST_BYTES, 4)
        if not data:
            os._exit(0)
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _become(json.loads(data), fds)
        for fd in fds:
            os.close(fd)


def _end(status: int) -> NoReturn:
    """As an interpreter does, up to its atexit functions."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _become(request: dict[str, Any], fds: list[int]) -> str:
    """Fork once more: the parent tells the script's pid and status, the child takes the descriptors over."""
    *standard, told = fds
    pid = os.fork()
    if pid:
        for fd in standard:
            os.close(fd)
        os.write(told, f"{pid}\n".encode())
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(told, f"{status}\n".encode())
        os._exit(0)
    os.close(told)
    for number, fd in enumerate(standard):
        os.dup2(fd, number)
        os.close(fd)
    sys.argv = ["script", *request["arguments"]]
    os.environ.update(request["environment"])
    source: str = request["source"]
    return source


if __name__ == "__main__":
    # Before anything is forked.
    for module in ("mambapool.client.allocator", *sys.argv[2:]):
        importlib.import_module(module)
    # Keeps the collector of every script away from what is here already: it would copy all of it.
    gc.freeze()
    # As the main module's own code: what a script leaves in its globals is torn down as a script's is.
    try:
        exec(compile(_serve(socket.socket(fileno=int(sys.argv[1]))), "script", "exec"))
    except SystemExit as ended:
        if not os.environ.get(NO_TEARDOWN) or isinstance(ended.code, str):
            raise
        _end(int(ended.code or 0))
    if os.environ.get(NO_TEARDOWN):
        _end(0)
