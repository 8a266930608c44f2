"""The one thread that may wait for the disk. Cheaper than an executor, whose every job is a future, a lock and a
condition: a busy master hands it hundreds of jobs a second."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, TypeVar

_T = TypeVar("_T")

# For so long a busy loop may keep the interpreter from this thread, which a commit needs for a moment a few times over.
# By default it is 5 ms, more than the commit itself takes.
_SWITCH_SECONDS: Final = 0.000_5


class StoreThread:
    """Runs what it is given, one after the other, in the order given. A daemon thread: a hung disk holds up nobody's
    end."""

    def __init__(self, name: str) -> None:
        # Of the whole process: there is no other way to be let in.
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, work: Callable[..., None], *arguments: Any) -> None:
        """Without waiting; the work must not raise."""
        self._work.put(lambda: work(*arguments))

    async def ask(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """What the work returns, or raises."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()

        def carry_out() -> None:
            settle: Callable[[], None]
            try:
                settle = partial(_succeed, future, work(*arguments))
            except BaseException as error:
                settle = partial(_fail, future, error)
            # A loop that has ended meanwhile has no caller that waits.
            if not loop.is_closed():
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(settle)

        self._work.put(carry_out)
        return await future

    def close(self) -> None:
        """Ends once what was given is done."""
        self.end()
        self._thread.join()

    def end(self) -> None:
        """The same, without waiting for it."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


def _succeed(future: asyncio.Future[_T], found: _T) -> None:
    if not future.done():
        future.set_result(found)


def _fail(future: asyncio.Future[_T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
