"""The client for asyncio: the same names and meanings, with ``await``.

Made by :func:`connect_async`. Safe with any number of tasks of the loop in which it was made, and for that loop
only: in another loop or thread every call is a ``RuntimeError``. A process may have several, in one loop or in many.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self

from mambapool.client.arguments import check_session, check_timeout
from mambapool.client.connecting import connect
from mambapool.client.connection import CLOSED
from mambapool.client.in_thread import in_thread
from mambapool.client.worker import Worker
from mambapool.pool.errors import ClientClosed

if TYPE_CHECKING:
    import torch

    from mambapool.client.aio_allocator import AsyncSlotAllocator
    from mambapool.pool.state_pool import StatePool

Parameters = ParamSpec("Parameters")


def _as_connect(
    _connect: Callable[Parameters, Worker],
) -> Callable[[Callable[..., Awaitable[AsyncWorker]]], Callable[Parameters, Awaitable[AsyncWorker]]]:
    """A function has the parameters of :func:`connect`."""

    def decorate(function: Callable[..., Awaitable[AsyncWorker]]) -> Callable[Parameters, Awaitable[AsyncWorker]]:
        # What inspect.signature() and help() show; the function's own name and docstring stay.
        return functools.update_wrapper(function, _connect, assigned=("__annotations__",))

    return decorate


@_as_connect(connect)
async def connect_async(*arguments: object, **options: object) -> AsyncWorker:
    """:func:`connect` without making the loop wait: the same parameters and errors, but for ``group``.

    A group is refused (``ValueError``): its ranks make the same calls in the same order, and wait for each other
    in them; tasks of a loop take turns as they like.

    When it is cancelled the session, if there is one by then, is ended.
    """
    if options.get("group") is not None:
        raise ValueError(
            "group: tasks of a loop make their calls in no fixed order, and ranks have to: use connect(group=…) in a "
            "thread, or connect_async without a group"
        )
    attach = functools.partial(connect, *arguments, **options)  # type: ignore[arg-type]
    return AsyncWorker(await in_thread(attach, undo=Worker.close))


class AsyncWorker:
    """One session, for the tasks of one event loop. Use it with ``async with``, or await :meth:`close`.

    A process's end closes it too. After a fork the child's copy raises
    :class:`~mambapool.pool.errors.ForkedClient`.
    """

    def __init__(self, worker: Worker) -> None:
        from mambapool.client.aio_allocator import async_allocator
        from mambapool.client.aio_transfers import AsyncTransfers
        from mambapool.client.loop_calls import LoopCalls
        from mambapool.client.transfers import Transfers

        assert isinstance(worker._transfers, Transfers)  # of a group it would be another
        self._worker = worker
        self._calls = LoopCalls(worker._transport, asyncio.get_running_loop(), worker.allocator._check_usable)
        #: The session's number, as ``status`` shows it.
        self.session: int = worker.session
        self.allocator: AsyncSlotAllocator = async_allocator(worker.allocator, self._calls)
        self._transfers = AsyncTransfers(worker._transfers, self._calls)
        self._closed = False

    def __repr__(self) -> str:
        return f"Async{self._worker!r}"

    @property
    def states(self) -> Mapping[str, torch.Tensor]:
        """As :attr:`Worker.states`."""
        return self._worker.states

    @property
    def pool(self) -> StatePool:
        """As :attr:`Worker.pool`."""
        return self._worker.pool

    @property
    def messages(self) -> int:
        """Messages that this session has sent so far, requests and unawaited ones."""
        return self._worker.messages

    def fence_streams(self, streams: Iterable[Any]) -> None:
        """As :meth:`Worker.fence_streams`; waits for nothing."""
        self._worker.fence_streams(streams)

    async def transfer(self, slots: torch.Tensor, to: int) -> None:
        """As :meth:`Worker.transfer`. Cancelled, the offer is taken back, unless it was accepted before."""
        await self._transfers.offer(slots, check_session(to))

    async def accept(self, timeout: float = 0.0) -> torch.Tensor | None:
        """As :meth:`Worker.accept`. What a cancelled one was given, the next one returns."""
        check_timeout(timeout)
        return await self._transfers.accept(timeout)

    async def close(self) -> None:
        """End the session: what it holds becomes free, and tasks that wait get ``ClientClosed``.

        Returns within a second or so; twice does nothing. Cancelled, it goes on without the caller.
        """
        if self._closed:
            return
        self._calls.check_loop()
        self._closed = True
        self._calls.close(ClientClosed(CLOSED))
        await in_thread(self._worker.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
