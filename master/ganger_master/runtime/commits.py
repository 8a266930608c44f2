"""Commits of the writer: batches of callers and their changes, the pace at which they begin, and the thread that makes
them durable."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeAlias, TypeVar

from ganger.wire.errors import ApiError

from ganger_master.core.events import Effects
from ganger_master.core.queue import GrantedLease
from ganger_master.runtime.publication import Publication

_T = TypeVar("_T")
# Time after which a busy event loop must yield the interpreter to this thread. A commit needs it a few times; Python's
# default of 5 ms is longer than the commit itself.
_SWITCH_S: Final = 0.000_5


class StoreThread:
    """Runs tasks one after another in a daemon thread, so that a hung disk does not block the end of the process."""

    def __init__(self, name: str) -> None:
        # The switch interval applies to the whole process; Python has none per thread.
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._repeated: Callable[[], None] | None = None
        self._interval_s = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, work: Callable[..., None], *arguments: Any) -> None:
        """Submit a task without waiting. It must not raise."""
        self._work.put(lambda: work(*arguments))

    def repeat(self, work: Callable[[], None] | None, interval_s: float = 0.0) -> None:
        """Run `work` from now on whenever no task has begun for so long; None: no more. It must not raise."""

        def begin() -> None:
            self._repeated, self._interval_s = work, interval_s

        self._work.put(begin)

    async def call(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Return what the work returns, or raise what it raises."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()

        def settle_with(settle: Callable[[Any], None], found: object) -> None:
            if not future.done():
                settle(found)

        def carry_out() -> None:
            try:
                settle = partial(settle_with, future.set_result, work(*arguments))
            except BaseException as error:
                settle = partial(settle_with, future.set_exception, error)
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
        began = time.monotonic()
        while True:
            wait_s = None if self._repeated is None else max(0.0, began + self._interval_s - time.monotonic())
            try:
                work = self._work.get(timeout=wait_s)
            except Empty:
                work = self._repeated
            if work is None:
                return
            began = time.monotonic()
            work()


_SHORTEST_S: Final = 0.003
_LONGEST_S: Final = 0.010
# Batches below this many callers say that the pause buys nothing.
_FEW: Final = 2


@dataclass(slots=True)
class CommitPace:
    """Adapts one number: the seconds between the starts of two commits."""

    pause_s: float = 0.0
    _last_begin: float = float("-inf")

    def wait_s(self, now: float) -> float:
        """How long to continue collecting before the next commit begins; zero for now."""
        return max(0.0, self._last_begin + self.pause_s - now)

    def began(self, now: float) -> None:
        self._last_begin = now

    def ended(self, callers: int, seconds: float) -> None:
        """`callers` waited for the commit that took `seconds`: many callers or a slow disk lengthen the pause."""
        if callers < _FEW:
            self.pause_s = 0.0
        else:
            self.pause_s = min(_LONGEST_S, max(_SHORTEST_S, 2 * seconds))


_MOVE_COMMITTED: Final = frozenset({"move_committed", "resize_committed"})
# A caller's future, and its answer.
Caller: TypeAlias = tuple[asyncio.Future[Any], object]


@dataclass(slots=True)
class CommandBatch:
    """Callers that wait for the commands since the last batch was sealed."""

    callers: list[Caller] = field(default_factory=list)
    is_touched: bool = False


@dataclass(frozen=True, slots=True)
class SealedBatch:
    """A batch on its way to the store; immutable."""

    # Makes the changes durable, in the store's thread.
    commit: Callable[[], None]
    effects: Effects
    publication: Publication
    turns: Sequence[GrantedLease]
    callers: Sequence[Caller]

    @property
    def commits_a_move(self) -> bool:
        return any(entry.kind in _MOVE_COMMITTED for entry in self.effects.history)


def refuse(callers: Sequence[Caller], error: ApiError) -> None:
    for future, _ in callers:
        if not future.done():
            future.set_exception(error)
