"""The client of mambapool: what schedulers, workers and ranks use.

``from mambapool.client import connect, errors``. Importing this needs no torch; ``connect`` does.
"""

from __future__ import annotations

from mambapool.client.aio import AsyncWorker, connect_async
from mambapool.client.connecting import connect
from mambapool.client.worker import Worker
from mambapool.pool import errors

__all__ = ["AsyncWorker", "Worker", "connect", "connect_async", "errors"]
