"""Which scheduler gets which request."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

from mambapool.client.replay.request import Request
from mambapool.pool.errors import ConfigError

ROUTES = ("rr", "prefix")

#: Prompts of a chat service start with a block that nearly all share (the system prompt): the second
#: block is the first that tells conversations apart.
PREFIX_BLOCKS = 2


def route(request: Request, schedulers: int, by: str) -> int:
    """The number, from 0, of the scheduler that serves the request.

    ``rr`` deals the requests out in turn. ``prefix`` sends requests whose first :data:`PREFIX_BLOCKS`
    blocks are equal to the same scheduler, where their prefix would be cached; a request without block
    ids shares no prefix with anybody and is dealt out as ``rr`` does. The same trace is always routed in
    the same way.
    """
    if by not in ROUTES:
        raise ConfigError(f"route {by!r} is not one of {', '.join(ROUTES)}")
    prefix = request.hash_ids[:PREFIX_BLOCKS]
    if by == "rr" or not prefix:
        return request.index % schedulers
    digest = hashlib.blake2b(struct.pack(f"<{len(prefix)}q", *prefix), digest_size=8).digest()
    return int.from_bytes(digest, "little") % schedulers


def share(requests: Iterable[Request], scheduler: int, schedulers: int, by: str) -> list[Request]:
    """The requests that one scheduler serves, in their order."""
    return [request for request in requests if route(request, schedulers, by) == scheduler]
