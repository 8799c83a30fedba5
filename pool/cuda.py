"""CUDA's driver API, for keepers and workers: calls that raise, contexts, devices by UUID. Never torch.

Needs ``cuda-bindings`` (the extra ``[cuda]``) and NVIDIA's driver; both are looked for when first used.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from mambapool.pool.errors import CudaError

UUID_BYTES = 16

#: What ``mambapool doctor`` and error messages tell to install.
INSTALL = "pip install 'mambapool[cuda]'"

#: The first driver that has ``cuCtxRecordEvent``: CUDA 12.5.
CONTEXT_EVENTS_VERSION = 12050

OUT_OF_MEMORY = 2


@functools.cache
def bindings() -> ModuleType:
    """``cuda.bindings.driver``; :class:`CudaError` when it is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise CudaError(f"a pool on a GPU needs cuda-bindings ({error}): {INSTALL}") from error
    module: ModuleType = driver
    return module


def call(name: str, *arguments: Any) -> Any:
    """Call the driver: its one result, a tuple of several, or None; :class:`CudaError` when it fails."""
    try:
        status, *results = getattr(bindings(), name)(*arguments)
    except RuntimeError as error:  # no driver on this machine, or one that has no such function
        raise CudaError(f"{name} is not to be had: {error}", call=name) from error
    if int(status):
        raise _failed(name, status)
    return results[0] if len(results) == 1 else tuple(results) or None


def status_of(name: str, *arguments: Any) -> int:
    """Call the driver where other results than success are expected, too."""
    return int(getattr(bindings(), name)(*arguments)[0])


def _failed(name: str, status: Any) -> CudaError:
    _, text = bindings().cuGetErrorString(status)
    said = text.decode() if text else "unknown error"
    return CudaError(f"{name} failed: {said} ({status.name}, {int(status)})", call=name, code=int(status))


@functools.cache
def _initialized(pid: int) -> None:
    call("cuInit", 0)


def initialize() -> None:
    """Make the driver ready in this process; :class:`CudaError` that says what is missing."""
    try:
        _initialized(os.getpid())
    except CudaError as error:
        if error.code == 3:  # CUDA_ERROR_NOT_INITIALIZED
            raise CudaError(
                "CUDA does not survive a fork: this process was forked from one that had used it; start it by "
                "spawn instead",
                call="cuInit",
                code=3,
            ) from error
        raise CudaError(
            f"no GPU can be used here: {error}; {_visibility()}", call="cuInit", code=error.code
        ) from error


def driver_version() -> int:
    """Of the CUDA that the driver supports: 12050 is 12.5."""
    version: int = call("cuDriverGetVersion")
    return version


@contextlib.contextmanager
def disturbing_no_capture() -> Iterator[None]:
    """What this thread calls inside ends no capture of another thread; the mode is a thread's own."""
    exchange = "cuThreadExchangeStreamCaptureMode"
    before = call(exchange, bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        yield
    finally:
        call(exchange, before)


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or a MIG instance of one, that this process can see. Ordinals mean nothing in another process."""

    ordinal: int
    uuid: bytes
    name: str

    @property
    def is_mig(self) -> bool:
        """The driver appends "MIG" and the profile to the device's name."""
        return " MIG " in self.name

    def __str__(self) -> str:
        return f"{uuid_text(self.uuid, mig=self.is_mig)} ({self.name})"


def uuid_text(uuid: bytes, *, mig: bool = False) -> str:
    """As ``nvidia-smi -L`` shows it, and CUDA_VISIBLE_DEVICES takes it."""
    text = uuid.hex()
    parts = (text[:8], text[8:12], text[12:16], text[16:20], text[20:])
    return f"{'MIG' if mig else 'GPU'}-{'-'.join(parts)}"


def visible_devices() -> list[Device]:
    """All that CUDA_VISIBLE_DEVICES lets this process see, in its order. :class:`CudaError` if there is none."""
    initialize()
    devices = []
    for ordinal in range(call("cuDeviceGetCount")):
        handle = call("cuDeviceGet", ordinal)
        name = call("cuDeviceGetName", 128, handle).split(b"\0")[0].decode()
        devices.append(Device(ordinal, bytes(call("cuDeviceGetUuid", handle).bytes), name))
    return devices


def device_with(uuid: bytes, what: str) -> Device:
    """The device with that UUID; :class:`CudaError` that says of ``what`` it is, and what is visible instead."""
    devices = visible_devices()
    for device in devices:
        if device.uuid == uuid:
            return device
    raise CudaError(
        f"{what} is on {uuid_text(uuid)}, which this process does not see. {visible_text(devices)}: "
        "let it see that device"
    )


def visible_text(devices: list[Device]) -> str:
    listed = ", ".join(map(str, devices)) or "none"
    return f"Visible here: {listed}; {_visibility()}"


def _visibility() -> str:
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "CUDA_VISIBLE_DEVICES is not set" if listed is None else f"CUDA_VISIBLE_DEVICES={listed}"


class PrimaryContext:
    """A device's primary context, the one that torch uses too; retained for as long as the process lives."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.handle = call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", device.ordinal))

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """It is this thread's current context inside, and what was so before is again afterwards."""
        call("cuCtxPushCurrent", self.handle)
        try:
            yield
        finally:
            call("cuCtxPopCurrent")


@functools.cache
def _primary_context(_pid: int, device: Device) -> PrimaryContext:
    return PrimaryContext(device)


def primary_context(device: Device) -> PrimaryContext:
    return _primary_context(os.getpid(), device)
