"""Every exception that mambapool raises, by the family of who has to act.

``None`` from ``alloc`` means "no free slot", because SGLang's callers test for it; nothing else is
signalled by a special value.
"""

from __future__ import annotations

from collections.abc import Iterable


class MambaPoolError(Exception):
    """Base of every exception that mambapool raises on purpose."""


# The caller's: the call was wrong. Nothing was changed, and the client stays usable.


class InvalidSlots(MambaPoolError, ValueError):
    """Raised when slots that were passed in cannot be used so. Nothing was changed.

    ``slots`` holds the ids at fault, in the order in which they were passed.
    """

    def __init__(self, message: str, slots: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.slots: tuple[int, ...] = tuple(int(slot) for slot in slots)


class DoubleFree(InvalidSlots):
    """Raised when a slot is freed that is free already."""


class NotHolder(InvalidSlots):
    """Raised when a slot is freed by somebody who does not hold it."""


class ReservedSlot(InvalidSlots):
    """Raised when slot 0 is passed: it is the row that padded batch entries write to."""


class SlotOutOfRange(InvalidSlots):
    """Raised when an id is below 0 or above the number of slots of the pool."""


class DuplicateSlot(InvalidSlots):
    """Raised when one call names the same slot twice."""


class BadIndexTensor(InvalidSlots, TypeError):
    """Raised when what was passed as slots is no tensor of integers of one dimension or none."""


class GuaranteeExceeded(MambaPoolError):
    """Raised when a guarantee is asked for that the pool cannot keep; lists who has what."""


class GeometryMismatch(MambaPoolError):
    """Raised when a client expects another pool than there is. Nothing was mapped."""


class UnknownPool(MambaPoolError):
    """Raised when the allocator serves no pool of that name."""


class ForkedClient(MambaPoolError, RuntimeError):
    """Raised when a client that was made before a fork is used in the child."""


class ClientClosed(MambaPoolError):
    """Raised when a client is used after ``close()``."""


# A group's: its ranks do not go on together. Each client of the group raises it at every call from then on.


class RankDiverged(MambaPoolError):
    """Raised when a rank makes another call than rank 0; names both calls and their number."""


class GroupBroken(MambaPoolError):
    """Raised when a group cannot go on, or cannot be joined; names the rank that is missing, late, gone or there."""


# The operator's: what was typed, or a file, cannot be used.


class ConfigError(MambaPoolError, ValueError):
    """Raised when a flag, a file or a name cannot be used; says which, and what is accepted."""


class ModelConfigError(ConfigError):
    """Raised when a model's ``config.json`` does not describe a state; names the key."""


class TraceError(ConfigError):
    """Raised when a request trace cannot be read; names file, line and what was expected."""


class NotEnoughMemory(MambaPoolError):
    """Raised when a shard's memory cannot be had; names the bytes needed and available."""


class RuntimeDirError(MambaPoolError):
    """Raised when the runtime directory or a file in it cannot be used; says why and what to do."""


# The environment's: a process is not there, or is another one than expected.


class AllocatorUnavailable(MambaPoolError):
    """Raised when the allocator did not answer in time; names the directory and the wait."""


class PoolLost(MambaPoolError):
    """Raised when the memory of a pool is gone."""


class CudaError(MambaPoolError):
    """Raised when CUDA refuses something, or is not there; says what to do.

    ``call`` is the driver's function and ``code`` what it returned, 0 when it was not reached.
    """

    def __init__(self, message: str, *, call: str = "", code: int = 0) -> None:
        super().__init__(message)
        self.call = call
        self.code = code


class AllocatorAlreadyRunning(MambaPoolError):
    """Raised when another process serves the runtime directory; names its pid."""


class VersionMismatch(MambaPoolError):
    """Raised when two processes speak no common version; names both."""


class ProtocolError(MambaPoolError):
    """Raised when a message cannot be understood."""
