"""``python -m mambapool.service.allocator_process CONFIG [READY_FD]``: what ``serve`` starts.

Not the click command, so that the allocator imports nothing that it does not need to decide.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from mambapool.pool.errors import MambaPoolError
from mambapool.pool.exits import EXIT_DONE, EXIT_FAILED, exit_status
from mambapool.pool.started import tell
from mambapool.service.config import AllocatorConfig
from mambapool.service.server import run_allocator

LOG_FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"


def main(arguments: list[str]) -> int:
    """``READY_FD`` gets one JSON line: ``{"ready": true, …}`` when it answers, or ``{"error", "exit"}``.

    What is told there is not logged too: whoever asked says it.
    """
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    ready_fd = int(arguments[1]) if len(arguments) > 1 else None

    def announce(ready: dict[str, Any]) -> None:
        nonlocal ready_fd
        tell(ready_fd, ready=True, **ready)
        ready_fd = None  # closed, and its number may be somebody else's by now

    try:
        run_allocator(AllocatorConfig.from_json(arguments[0]), announce)
    except (MambaPoolError, OSError) as error:
        status = exit_status(error) if isinstance(error, MambaPoolError) else EXIT_FAILED
        if ready_fd is None:
            logging.getLogger("mambapool.allocator").error("%s", error)
        tell(ready_fd, error=str(error), exit=status)
        return status
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
