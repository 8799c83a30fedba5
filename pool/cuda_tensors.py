"""What mambapool asks torch about CUDA: all of it is in this file, which tests on a simulated driver replace.

The state tensors are torch's views of memory that torch did not allocate (``__cuda_array_interface__``, whose
typestr ``|u1`` stands for bytes: bfloat16 has none).
"""

from __future__ import annotations

import torch


class _Block:
    """Bytes of device memory as torch imports them; torch keeps this object for as long as a tensor lives."""

    def __init__(self, address: int, size_bytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def wrap(address: int, size_bytes: int, ordinal: int, owner: object) -> torch.Tensor:
    """Device memory as a uint8 tensor, without a copy; ``owner`` lives as long as any tensor over it."""
    return torch.as_tensor(_Block(address, size_bytes, owner), device=torch.device("cuda", ordinal))


def is_on_device(tensor: torch.Tensor, ordinal: int | None = None) -> bool:
    """Whether its values can be read only by waiting for a GPU: for that one, if it is named."""
    return tensor.is_cuda and ordinal in (None, tensor.device.index)


def current_device() -> int:
    """The ordinal that plain ``cuda`` means in this thread."""
    return torch.cuda.current_device()


def current_stream(ordinal: int) -> int:
    """The ``CUstream`` on which this thread's work on a device is queued."""
    return torch.cuda.current_stream(ordinal).cuda_stream


def is_capturing() -> bool:
    """Whether this thread's current stream captures a graph."""
    return torch.cuda.is_current_stream_capturing()
