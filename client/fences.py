"""How far the GPU is: fences over every stream of this process that may write to the pool.

A fence is a number. When :attr:`Fences.passed` has reached it, all work that was queued before it was issued has
finished. Nothing here waits but :meth:`Fences.wait`. The numbers only grow, so that other processes can be told
by one of them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mambapool.pool import cuda_tensors
from mambapool.pool.cuda import (
    CONTEXT_EVENTS_VERSION,
    PrimaryContext,
    bindings,
    call,
    disturbing_no_capture,
    driver_version,
    status_of,
)
from mambapool.pool.cuda_events import Events
from mambapool.pool.errors import ConfigError, CudaError

NOT_READY = 600
_NOT_CAPTURING = 0
# What the driver says of a graph that is being captured, by whomever: it passes.
_OF_A_CAPTURE = range(900, 909)

# The null stream, the legacy and the per-thread default one: of whatever context is current.
_DEFAULT_STREAMS = range(3)

_POLL_S = 0.0005


@dataclass(slots=True)
class _Recorded:
    """The events of one fence; ``left`` are those that have not been seen over."""

    number: int
    left: list[Any]


class Fences:
    """The fences of one session, on one device. Safe in several threads."""

    def __init__(self, context: PrimaryContext) -> None:
        self.context = context
        #: Every fence up to this number has passed.
        self.passed = 0
        #: Why no fence will ever pass any more.
        self.failed: CudaError | None = None
        self._issued = 0
        self._recorded = 0
        self._in_flight: deque[_Recorded] = deque()
        self._events = Events(context)
        #: Handles of the registered streams, and what the caller passed, which keeps them.
        self._streams: list[Any] = []
        self._kept: list[Any] = []
        self._lock = threading.RLock()
        self._has_context_events = driver_version() >= CONTEXT_EVENTS_VERSION

    def register(self, streams: Iterable[Any]) -> None:
        """From now on a fence covers these streams, instead of the whole context, and no others.

        :class:`ConfigError` if one is not of this device's primary context.
        """
        kept = list(streams)
        handles = [bindings().CUstream(handle_of(stream, "cuda_stream")) for stream in kept]
        for stream, handle in zip(kept, handles, strict=True):
            self._check_context(stream, handle)
        with self._lock:
            self._kept, self._streams = kept, handles

    @property
    def is_busy(self) -> bool:
        """Whether a fence is on its way."""
        return self.passed != self._issued and self.failed is None

    def check(self) -> None:
        """:class:`CudaError` when this driver can fence registered streams only, and there are none."""
        if not self._streams and not self._has_context_events:
            raise CudaError(
                "this driver has no events on a whole context (cuCtxRecordEvent, CUDA 12.5): name the streams that "
                "write to the pool with worker.fence_streams([...]), or update the driver",
                call="cuCtxRecordEvent",
            )

    def issue(self) -> int:
        """A fence for all that is queued now; no wait. One that cannot be recorded does not pass."""
        with self._lock:
            self._issued += 1
            number = self._issued
            self._record()
        return number

    def retry(self) -> None:
        """Record what could not be recorded while a graph was captured; from a thread that makes calls."""
        if self._recorded != self._issued:
            with self._lock:
                self._record()

    def poll(self) -> None:
        """See which fences have passed. From any thread: no capture is disturbed."""
        with self._lock:
            if self.passed == self._issued or self.failed is not None:
                return
            if not self._in_flight and not self._streams:
                return  # only a thread that makes calls knows whether it captures
            try:
                with disturbing_no_capture(), self.context.current():
                    if self._recorded != self._issued and self._streams:
                        self._record()
                    while self._in_flight and self._is_over(self._in_flight[0]):
                        self.passed = self._in_flight.popleft().number
            except CudaError as error:  # any call tells what an earlier kernel has done
                self._fail(error)

    def is_event_over(self, event: Any) -> bool:
        """Whether what the caller's event stands for has finished."""
        with self._lock:
            try:
                with disturbing_no_capture(), self.context.current():
                    return self._query(event) == 0
            except CudaError as error:
                self._fail(error)
                return False

    def wait(self, number: int, deadline: float) -> bool:
        """Until that fence has passed, or the deadline; whether it has."""
        while True:
            self.poll()
            if self.passed >= number:
                return True
            if self.failed is not None or time.monotonic() >= deadline:
                return False
            self.retry()
            time.sleep(_POLL_S)

    def _check_context(self, stream: Any, handle: Any) -> None:
        if int(handle) in _DEFAULT_STREAMS:
            return
        try:
            with disturbing_no_capture(), self.context.current():
                context = call("cuStreamGetCtx", handle)
        except CudaError as error:
            raise ConfigError(f"{stream!r} is no stream that can be fenced ({error})") from error
        if int(context) != int(self.context.handle):
            raise ConfigError(
                f"{stream!r} is of another GPU or context than this session's, {self.context.device}: pass streams "
                f"that were made there, as under torch.cuda.device({self.context.device.ordinal})"
            )

    def _record(self) -> None:
        # Torch knows whether this thread captures; the driver is asked of streams only, which it allows.
        if cuda_tensors.is_capturing():
            return
        try:
            with self.context.current():
                if self._streams:
                    self._record_on_streams()
                elif self._has_context_events:
                    self._record_on_context()
        except CudaError as error:
            if error.code not in _OF_A_CAPTURE:
                self._fail(error)

    def _record_on_streams(self) -> None:
        if self._is_capturing():
            return
        events = [self._events.take() for _ in self._streams]
        for event, stream in zip(events, self._streams, strict=True):
            call("cuEventRecord", event, stream)
        if self._is_capturing():
            # It began meanwhile, in another thread: an event that is part of a graph may not be looked at.
            return
        self._now_in_flight(events)

    def _record_on_context(self) -> None:
        event = self._events.take()
        call("cuCtxRecordEvent", self.context.handle, event)
        self._now_in_flight([event])

    def _now_in_flight(self, events: list[Any]) -> None:
        self._recorded = self._issued
        self._in_flight.append(_Recorded(self._issued, events))

    def _is_capturing(self) -> bool:
        return any(call("cuStreamIsCapturing", stream) != _NOT_CAPTURING for stream in self._streams)

    def _is_over(self, recorded: _Recorded) -> bool:
        while recorded.left:
            status = self._query(recorded.left[-1])
            if status:
                return False
            self._events.give_back(recorded.left.pop())
        return True

    def _query(self, event: Any) -> int:
        """0 when it is over; what is wrong beyond repair goes to :attr:`failed`."""
        status = status_of("cuEventQuery", event)
        if status not in (0, NOT_READY) and status not in _OF_A_CAPTURE:
            self._fail(CudaError(f"cuEventQuery returned {status}", call="cuEventQuery", code=status))
        return status

    def _fail(self, error: CudaError) -> None:
        self.failed = CudaError(
            f"the GPU failed ({error}): what this process has freed stays its own until it ends; end it",
            call=error.call,
            code=error.code,
        )


class Event:
    """A caller's event: it may record it again, which only makes the wait longer.

    A ``ValueError`` for one of torch's that was not recorded: it stands for nothing, and is no event of the driver yet.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        handle = handle_of(value, "cuda_event")
        if not handle:
            raise ValueError(f"{value!r} was never recorded: record it behind the work that has to be over")
        self.handle = bindings().CUevent(handle)


def handle_of(value: Any, attribute: str) -> int:
    """The driver's handle of a stream or event: torch's, cuda-bindings', one with ``__cuda_stream__``, or a number."""
    if attribute == "cuda_stream" and hasattr(value, "__cuda_stream__"):
        return int(value.__cuda_stream__()[1])
    try:
        return int(getattr(value, attribute, value))
    except TypeError as error:
        what = attribute.removeprefix("cuda_")
        raise TypeError(
            f"{value!r} is no CUDA {what}: pass torch.cuda.{what.capitalize()}s, or handles"
        ) from error
