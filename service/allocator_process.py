"""``python -m mambapool.service.allocator_process CONFIG [READY_FD]``: what ``serve`` starts.

Not the click command, so that the allocator imports nothing that it does not need to decide.
"""

from __future__ import annotations

import logging
import sys

from mambapool.pool.errors import MambaPoolError
from mambapool.pool.exits import EXIT_DONE, exit_status
from mambapool.pool.started import tell
from mambapool.service.config import AllocatorConfig
from mambapool.service.server import run_allocator

LOG_FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"


def main(arguments: list[str]) -> int:
    """``READY_FD`` gets one JSON line: ``{"ready": true, …}`` when it answers, or ``{"error", "exit"}``."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    ready_fd = int(arguments[1]) if len(arguments) > 1 else None
    try:
        config = AllocatorConfig.from_json(arguments[0])
        run_allocator(config, lambda ready: tell(ready_fd, ready=True, **ready))
    except MambaPoolError as error:
        logging.getLogger("mambapool.allocator").error("%s", error)
        tell(ready_fd, error=str(error), exit=exit_status(error))
        return exit_status(error)
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
