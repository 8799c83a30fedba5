"""Something that waits, run so that an event loop does not."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[[], T], undo: Callable[[T], object] = lambda _: None) -> T:
    """What ``function`` returns or raises, called in a thread of its own.

    When the task that waits is cancelled, the function runs on, and ``undo`` gets what it returned, in a thread, too.
    Not the loop's executor: its threads keep a process from ending.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:
            tell(functools.partial(done.set_exception, error), lambda: None)
        else:
            tell(functools.partial(done.set_result, result), functools.partial(undo, result))

    def tell(finish: Callable[[], None], give_back: Callable[[], object]) -> None:
        def in_loop() -> None:
            if done.cancelled():
                _start(give_back)
            else:
                finish()

        try:
            loop.call_soon_threadsafe(in_loop)
        except RuntimeError:  # the loop is closed: nobody waits any more
            give_back()

    _start(run)
    try:
        return await done
    except asyncio.CancelledError:
        if done.done() and not done.cancelled() and done.exception() is None:
            _start(functools.partial(undo, done.result()))
        raise


def _start(function: Callable[[], object]) -> None:
    threading.Thread(target=function, name="mambapool-wait", daemon=True).start()
