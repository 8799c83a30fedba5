"""Bodies of replies, all of one epoch."""

from __future__ import annotations

from mambapool.pool import protocol
from mambapool.pool.errors import MambaPoolError
from mambapool.pool.protocol import NONE, OK, pack_ids
from mambapool.service.ledger import Ids
from mambapool.service.sessions import Answer


class Replies:
    """Makes replies of one allocator; one packer, which is reused."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.pack = protocol.packer()

    def granted(self, request_id: int, granted: int | Ids | None, *, kept: bool = False) -> Answer:
        """What a request was granted; None: nothing. ``kept``: no CANCEL gives it back."""
        if granted is None:
            return Answer(self.pack((request_id, self.epoch, NONE)))
        ids = granted if isinstance(granted, int) else pack_ids(granted)
        return Answer(self.pack((request_id, self.epoch, OK, ids)), granted, kept)

    def done(self, request_id: int) -> Answer:
        return Answer(self.pack((request_id, self.epoch, OK)))

    def refusal(self, request_id: int, error: MambaPoolError) -> bytes:
        return self.pack((request_id, self.epoch, *protocol.error_payload(error)))

    def error(self, request_id: int, status: int, text: str) -> bytes:
        return self.pack((request_id, self.epoch, status, text))

    def gap(self, request_id: int, applied: int) -> bytes:
        """Posted messages are missing after number ``applied``."""
        return self.pack((request_id, self.epoch, protocol.GAP, applied))
