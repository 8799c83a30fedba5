"""What operators ask, without a session: status, audit, evict."""

from __future__ import annotations

from typing import Any

from mambapool.client.dealer import Dealer
from mambapool.client.replies import parse_reply
from mambapool.pool import protocol
from mambapool.pool.errors import AllocatorUnavailable, MambaPoolError
from mambapool.pool.runtime_dir import RuntimeDir


def ask_status(directory: RuntimeDir, timeout: float) -> dict[str, Any]:
    """The allocator's ``status --json``. Raises :class:`AllocatorUnavailable`."""
    return _ask(directory, timeout, protocol.STATUS)


def ask_audit(directory: RuntimeDir, timeout: float, pool: str) -> dict[str, Any]:
    """All that the allocator knows of one pool, of one moment: ``service/audit.py``.

    Raises :class:`~mambapool.pool.errors.UnknownPool` and :class:`AllocatorUnavailable`.
    """
    return _ask(directory, timeout, protocol.AUDIT, pool)


def evict(directory: RuntimeDir, timeout: float, session: int, *, force: bool) -> dict[str, Any]:
    """End another process's session: ``{"slots": how many came free, "alive": whether it lives}``.

    Refused for a living one unless ``force``: :class:`MambaPoolError`. Raises :class:`AllocatorUnavailable` when
    nobody answers.
    """
    return _ask(directory, timeout, protocol.EVICT, session, force)


def _ask(directory: RuntimeDir, timeout: float, op: int, *arguments: Any) -> dict[str, Any]:
    dealer = Dealer(directory, int(timeout * 1000))
    try:
        dealer.send(protocol.pack((op, 0, 1, 0, 0, 0, *arguments)))
        body = dealer.receive()
    finally:
        dealer.close()
    if body is None:
        raise AllocatorUnavailable(
            f"the allocator of {directory.path} did not answer within {timeout:g} s: is it running?"
        )
    reply = parse_reply(body, protocol.MAX_STATUS_ITEMS)
    if reply[2] == protocol.REFUSED:
        raise MambaPoolError(str(reply[-1]))  # it is available, and says no
    if len(reply) < 4 or reply[2] != protocol.OK or not isinstance(reply[3], dict):
        raise protocol.error_from(reply[2:])
    answer: dict[str, Any] = reply[3]
    return answer
