"""Work that may hang with its storage, on threads that nothing else of the daemon needs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

_T = TypeVar("_T")
# A call that hangs keeps its place: while all are taken, further calls wait.
_AT_ONCE = 8


class StorageHungError(OSError):
    """Storage did not answer in time."""


class StorageWait:
    """A wait for storage that begins now."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        # A moment and not a passed time: a report with it does not change while the wait goes on.
        self.since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self._began


class StorageWork:
    """Run calls that may hang, at most `at_once` at a time, each on a thread of its own."""

    def __init__(self, at_once: int = _AT_ONCE) -> None:
        self._places = threading.BoundedSemaphore(at_once)

    async def run(self, function: Callable[..., _T], *args: Any, within_s: float) -> _T:
        """Return what the function returns, or raise what it raises; StorageHungError after `within_s` seconds.

        A call that hangs keeps its thread. The daemon can end nevertheless."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_T] = loop.create_future()

        def settle(result: _T | None, error: BaseException | None) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]  # without an error there is a result

        def work() -> None:
            with self._places:
                result, error = None, None
                # Skipped where its caller has given up.
                if not done.done():
                    try:
                        result = function(*args)
                    except BaseException as caught:
                        error = caught
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, result, error)

        threading.Thread(target=work, daemon=True, name="storage").start()
        try:
            return await asyncio.wait_for(done, within_s)
        except TimeoutError:
            raise StorageHungError(f"storage has not answered within {within_s:g} s") from None
