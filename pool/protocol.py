"""The words of the wire, and how bodies become values: one msgpack array per message.

A request is ``[op, session, request_id, epoch, posted, oldest_open, …]``, a reply is
``[request_id, epoch, status, …]``. ``docs/protocol.md`` has every message with its rules and the golden
bytes that the tests of both sides read. Decoding is bounded before and while it happens; no maps, but in
HELLO and STATUS, and no code ever crosses the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgpack
import numpy as np
import numpy.typing as npt

from mambapool.pool import errors
from mambapool.pool.errors import ProtocolError

#: The versions that this code speaks; HELLO agrees on the highest that both sides have.
OLDEST_VERSION: Final = 1
NEWEST_VERSION: Final = 1

# Requests that are answered. ALLOC and BEGIN may have one field more, a tag.
HELLO: Final = 1  # [.., {attach map}]               → {session map}
DETACH: Final = 2  # [..]                            → nothing
ALLOC: Final = 3  # [.., count, frees, wait]         → ids
BEGIN: Final = 4  # [.., count, frees, partial]      → ids
STATUS: Final = 5  # [..]                            → {status map}; needs no session
# Posted messages: numbered per session, applied in order, answered only when refused.
FREE: Final = 6  # [.., frees]
END: Final = 7  # [.., frees]
CLEAR: Final = 8  # [.., nil]
CANCEL: Final = 9  # [.., request id]
CLOSE: Final = 15  # [.., [request id, …]]
# Transfers, and what is asked now and then.
OFFER: Final = 10  # [.., ids, receiver]              → nothing
ACCEPT: Final = 11  # [.., wait]                      → ids
PING: Final = 12  # [..]                             no answer, but GAP
EVICT: Final = 13  # [.., holder, force]               → {what was freed}; needs no session
AUDIT: Final = 14  # [.., pool]                        → {all of one pool, of one moment}; needs no session

POSTED_OPS: Final = frozenset((FREE, END, CLEAR, CANCEL, CLOSE))
#: Requests that a CANCEL takes back when nobody waits for their reply any more.
CANCELLED_OPS: Final = frozenset((ALLOC, BEGIN, OFFER))
OP_NAMES: Final = {
    HELLO: "HELLO",
    DETACH: "DETACH",
    ALLOC: "ALLOC",
    BEGIN: "BEGIN",
    STATUS: "STATUS",
    FREE: "FREE",
    END: "END",
    CLEAR: "CLEAR",
    CANCEL: "CANCEL",
    OFFER: "OFFER",
    ACCEPT: "ACCEPT",
    PING: "PING",
    EVICT: "EVICT",
    AUDIT: "AUDIT",
    CLOSE: "CLOSE",
}

# Status of a reply.
OK: Final = 0
NONE: Final = 1  # not so many free; nothing was changed
GAP: Final = 2  # posted messages are missing: [applied]
DOUBLE_FREE: Final = 10
NOT_HOLDER: Final = 11
RESERVED_SLOT: Final = 12
SLOT_OUT_OF_RANGE: Final = 13
DUPLICATE_SLOT: Final = 14
INVALID_SLOTS: Final = 15
MALFORMED: Final = 20
WRONG_VERSION: Final = 21
UNKNOWN_POOL: Final = 22
UNKNOWN_SESSION: Final = 23
WRONG_EPOCH: Final = 24
GEOMETRY_MISMATCH: Final = 25
REFUSED: Final = 26
NOT_OPEN: Final = 27  # the request was cancelled, or its reply was acknowledged
GUARANTEE_EXCEEDED: Final = 28
POOL_LOST: Final = 29
GROUP_BROKEN: Final = 30

_ERROR_OF_STATUS: Final[dict[int, type[errors.MambaPoolError]]] = {
    DOUBLE_FREE: errors.DoubleFree,
    NOT_HOLDER: errors.NotHolder,
    RESERVED_SLOT: errors.ReservedSlot,
    SLOT_OUT_OF_RANGE: errors.SlotOutOfRange,
    DUPLICATE_SLOT: errors.DuplicateSlot,
    INVALID_SLOTS: errors.InvalidSlots,
    MALFORMED: errors.ProtocolError,
    WRONG_VERSION: errors.VersionMismatch,
    UNKNOWN_POOL: errors.UnknownPool,
    UNKNOWN_SESSION: errors.AllocatorUnavailable,
    WRONG_EPOCH: errors.AllocatorUnavailable,
    GEOMETRY_MISMATCH: errors.GeometryMismatch,
    REFUSED: errors.AllocatorUnavailable,
    NOT_OPEN: errors.ProtocolError,
    GUARANTEE_EXCEEDED: errors.GuaranteeExceeded,
    POOL_LOST: errors.PoolLost,
    GROUP_BROKEN: errors.GroupBroken,
}
_STATUS_OF_ERROR: Final = {
    errors.DoubleFree: DOUBLE_FREE,
    errors.NotHolder: NOT_HOLDER,
    errors.ReservedSlot: RESERVED_SLOT,
    errors.SlotOutOfRange: SLOT_OUT_OF_RANGE,
    errors.DuplicateSlot: DUPLICATE_SLOT,
    errors.InvalidSlots: INVALID_SLOTS,
    errors.ProtocolError: MALFORMED,
    errors.VersionMismatch: WRONG_VERSION,
    errors.UnknownPool: UNKNOWN_POOL,
    errors.GeometryMismatch: GEOMETRY_MISMATCH,
    errors.AllocatorUnavailable: REFUSED,
    errors.GuaranteeExceeded: GUARANTEE_EXCEEDED,
    errors.PoolLost: POOL_LOST,
    errors.GroupBroken: GROUP_BROKEN,
}

#: A client's first request is HELLO; a guarantee is granted by it.
FIRST_REQUEST: Final = 1

#: Every number on the wire is below this, so that it is an int64 wherever it is kept.
MAX_NUMBER: Final = 2**63

#: A request or reply besides its ids: header, names, error texts.
MAX_OVERHEAD_BYTES: Final = 64 * 1024

#: The longest list in any message is a geometry's tensors or the shards of a pool.
_MAX_ITEMS: Final = 1024
_MAX_TEXT_BYTES: Final = 16 * 1024

#: STATUS lists every session of every pool, AUDIT every tag.
MAX_STATUS_ITEMS: Final = 1 << 20

#: What a session is called.
MAX_NAME_BYTES: Final = 128

#: The largest rank that HELLO takes; how many a pool has shards for is another matter.
MAX_RANK: Final = 2**16

#: A client may make an allocator-only pool of at most so many slots: its table takes 56 bytes a slot.
MAX_CREATED_SLOTS: Final = 2**20

#: A tag says what slots are held for, to people who read `mambapool audit`.
MAX_TAG_BYTES: Final = 128

Ids = npt.NDArray[np.int32]


def max_body_bytes(slots: int) -> int:
    """The longest body that names every slot of a pool once."""
    return 4 * slots + MAX_OVERHEAD_BYTES


def packer() -> Callable[[Sequence[Any]], bytes]:
    """Makes bodies of messages: ints, strings, bytes, bools, None, and lists and maps of them.

    A packer that is kept saves three quarters of the cost of :func:`pack`. One thread at a time may use it.
    """
    pack: Callable[[Sequence[Any]], bytes] = msgpack.Packer(autoreset=True).pack
    return pack


def pack(message: Sequence[Any]) -> bytes:
    """The body of one message, in any thread."""
    return packer()(message)


def unpack(body: bytes, max_bin_bytes: int, max_items: int = _MAX_ITEMS) -> list[Any]:
    """The array in ``body``; anything else, and anything over the limits, is a :class:`ProtocolError`."""
    try:
        message = msgpack.unpackb(
            body,
            max_str_len=_MAX_TEXT_BYTES,
            max_bin_len=max_bin_bytes,
            max_array_len=max_items,
            max_map_len=_MAX_ITEMS,
            max_ext_len=0,
        )
    # msgpack raises ValueError and its subclasses, also for bad UTF-8, depth and left-over bytes, and
    # TypeError for a map with an unhashable key.
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"not a message: {type(error).__name__}: {error}"[:300]) from error
    if type(message) is not list:
        raise ProtocolError(f"a message is an array, not {type(message).__name__}")
    return message


def pack_ids(ids: Ids) -> int | bytes:
    """Ids as they travel: one as an int, several as a ``bin`` of little-endian int32."""
    if len(ids) == 1:
        return int(ids[0])
    return ids.astype("<i4", copy=False).tobytes()


def unpack_ids(value: object) -> Ids:
    """The inverse of :func:`pack_ids`; the array may be read-only."""
    if type(value) is int:
        if not -(2**31) <= value < 2**31:
            raise ProtocolError(f"{value} is not a slot id")
        return np.array([value], np.int32)
    if type(value) is not bytes:
        raise ProtocolError(f"slot ids travel as an int or a bin, not as {type(value).__name__}")
    if len(value) % 4:
        raise ProtocolError(f"{len(value)} bytes are no whole number of int32 slot ids")
    return np.frombuffer(value, "<i4")


def check_tag(tag: object) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless it is 1 to 128 bytes of printable text: terminals show it."""
    if not isinstance(tag, str):
        raise TypeError(f"tag must be a str, not {type(tag).__name__}")
    # In this order: what cannot be encoded is not printable.
    if not tag or not tag.isprintable() or len(tag.encode()) > MAX_TAG_BYTES:
        shown = repr(tag[:32]) + ("…" if len(tag) > 32 else "")
        raise ValueError(f"tag {shown}: expected 1 to {MAX_TAG_BYTES} bytes of printable text")


def error_payload(error: errors.MambaPoolError) -> list[Any]:
    """``[status, …]`` of a refusal: for slots their ids and a text, else the text."""
    status = _STATUS_OF_ERROR.get(type(error), REFUSED)
    if isinstance(error, errors.InvalidSlots):
        # An id that no int32 can hold is named in the text only.
        slots = [slot for slot in error.slots if -(2**31) <= slot < 2**31]
        return [status, np.array(slots, "<i4").tobytes(), str(error)]
    return [status, str(error)]


def is_refusal(payload: Sequence[Any]) -> bool:
    """Whether ``[status, …]`` is one that :func:`error_payload` makes."""
    return payload[0] in _ERROR_OF_STATUS and isinstance(payload[-1], str)


def error_from(payload: Sequence[Any]) -> errors.MambaPoolError:
    """The exception that ``[status, …]`` of a reply stands for; never raises on a malformed one."""
    status = payload[0] if payload else None
    kind = _ERROR_OF_STATUS.get(status) if type(status) is int else None
    if kind is None or not isinstance(payload[-1], str):
        shown = status if type(status) is int else type(status).__name__
        return ProtocolError(f"the allocator answered something unknown: status {shown}, {len(payload)} fields")
    text = payload[-1]
    if not issubclass(kind, errors.InvalidSlots):
        return kind(text)
    try:
        return kind(text, unpack_ids(payload[1]).tolist())
    except ProtocolError as error:
        return error
