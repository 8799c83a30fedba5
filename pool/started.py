"""How a child process tells its parent that it is ready, or why it is not: one JSON line over a pipe.

So that nobody has to sleep, or to look for files, to know that a process has started.
"""

from __future__ import annotations

import contextlib
import json
import os


def tell(fd: int | None, **message: object) -> None:
    """Write ``message`` to ``fd`` and close it: ``ready=True`` with what is known, or ``error`` and ``exit``.

    Does nothing when nobody asked (None), or nobody listens any more.
    """
    if fd is None:
        return
    with contextlib.suppress(OSError), os.fdopen(fd, "w") as stream:
        stream.write(json.dumps(message) + "\n")
