"""The client of mambapool: what schedulers, workers and ranks use.

``from mambapool.client import connect, errors``. Importing this needs no torch; ``connect`` does.
"""

from __future__ import annotations

from mambapool.client.worker import Worker, connect
from mambapool.pool import errors

__all__ = ["Worker", "connect", "errors"]
