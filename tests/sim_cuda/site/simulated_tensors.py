"""``mambapool.pool.cuda_tensors`` over the simulated driver: device memory is host memory, and so are its tensors."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.simDeviceOf.argtypes = [ctypes.c_uint64]
    return driver


def wrap(address: int, size_bytes: int, ordinal: int, owner: object) -> torch.Tensor:
    kind: Any = type("_Block", (ctypes.c_uint8 * size_bytes,), {})
    block = kind.from_address(address)
    block.owner = owner  # for as long as there is a tensor over it
    return torch.frombuffer(block, dtype=torch.uint8)


def is_on_device(tensor: torch.Tensor, ordinal: int | None = None) -> bool:
    if not tensor.numel():
        return False
    device = _driver().simDeviceOf(tensor.data_ptr())
    return device >= 0 and ordinal in (None, device)


def current_stream(ordinal: int) -> int:
    return 0


def is_capturing() -> bool:
    return bool(_driver().simIsCapturing())


def current_device() -> int:
    return 0
