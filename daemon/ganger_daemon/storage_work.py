"""Work that may hang with its storage, on threads that nothing else of the daemon needs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

_T = TypeVar("_T")
# A call that hangs keeps its place: with all of them taken, further ones wait for it.
_AT_ONCE = 8


class StorageHungError(OSError):
    """Storage did not answer within the time that was given."""


class StorageWork:
    """Run calls that may hang, at most `at_once` at a time, each on a thread of its own."""

    def __init__(self, at_once: int = _AT_ONCE) -> None:
        self._places = threading.BoundedSemaphore(at_once)

    async def run(self, function: Callable[..., _T], *args: Any, within_s: float) -> _T:
        """Return what the function returns, or raise what it raises; StorageHungError after `within_s` seconds.

        The thread of a call that hangs stays. It does not keep the daemon from ending."""
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
                # Its caller waits no more.
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
        except TimeoutError as error:
            if isinstance(error, StorageHungError):
                raise
            raise StorageHungError(f"storage has not answered within {within_s:g} s") from None


def how_long(seconds: float) -> str:
    """Return a passed time in words and coarse steps, so that a report with it does not change every second."""
    passed = [step for step in (1, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200) if step <= seconds]
    return f"more than {passed[-1]} s" if passed else "less than 1 s"
