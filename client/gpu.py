"""Which GPU a session is on: the one of its shard, or the one that its caller named."""

from __future__ import annotations

import torch

from mambapool.pool import cuda, cuda_tensors
from mambapool.pool.cuda_states import CudaStatePool
from mambapool.pool.errors import ConfigError, CudaError
from mambapool.pool.state_pool import StatePool


def check_device(device: torch.device) -> None:
    """:class:`ConfigError` when no GPU of that name can be used here."""
    try:
        devices = cuda.visible_devices()
    except CudaError as error:
        raise ConfigError(
            f"device {str(device)!r} cannot be used ({error}): pass 'cpu', or one that can"
        ) from error
    if device.index is not None and device.index >= len(devices):
        raise ConfigError(f"device {str(device)!r} is not there. {cuda.visible_text(devices)}")


def context_of(device: torch.device, pool: StatePool | None) -> cuda.PrimaryContext | None:
    """Where slot tensors go, and what has to be fenced; None for a session without a GPU.

    :class:`ConfigError` when ``device`` names another GPU than the one that the shard is on.
    """
    if isinstance(pool, CudaStatePool):
        if device.type == "cuda" and device.index not in (None, pool.ordinal):
            devices = cuda.visible_devices()
            raise ConfigError(
                f"device {str(device)!r} is {devices[device.index]}, and the shard is on {devices[pool.ordinal]}: "
                f"pass 'cuda:{pool.ordinal}', or 'cuda'"
            )
        ordinal = pool.ordinal
    elif device.type == "cuda":
        ordinal = cuda_tensors.current_device() if device.index is None else device.index
    else:
        return None
    return cuda.primary_context(cuda.visible_devices()[ordinal])
