"""Access to the store: the thread that may block on the disk, the check that this master owns its database, the pause
between commits, and the failpoints around them.

The thread is cheaper than an executor, whose every task costs a future, a lock and a condition: a busy master submits
hundreds of tasks per second.

The pause is none for a single caller and a few milliseconds under load. The cost of a commit per change depends mostly
on the batch size (an order of magnitude between 1 and 32 changes). A fixed pause would slow a single caller down, so
the pause follows the size of the last batch.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from ganger.wire.errors import NotReady

from ganger_master.core.availability import covers
from ganger_master.core.settings import CoreSettings
from ganger_master.store.tables import Problem, Store, StoreError

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
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, work: Callable[..., None], *arguments: Any) -> None:
        """Submit a task without waiting. It must not raise."""
        self._work.put(lambda: work(*arguments))

    async def ask(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """What the work returns, or raises."""
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
        while (work := self._work.get()) is not None:
            work()


log = logging.getLogger(__name__)


class Ownership:
    """Ownership of a store, for one event loop. `clock` counts seconds, is never set, and runs on while the machine
    sleeps. `on_fenced` is called when another master has taken the store over.

    Checks have a thread of their own, so that they do not wait behind commits, nor commits behind them."""

    def __init__(
        self, store: Store, settings: CoreSettings, clock: Callable[[], float], on_fenced: Callable[[StoreError], None]
    ) -> None:
        self.now = clock
        self._store = store
        self._settings = settings
        self._on_fenced = on_fenced
        self._thread = StoreThread("ownership")
        self._verified_at = -math.inf
        self._check: asyncio.Task[StoreError | None] | None = None

    async def confirm(self, received_at: float) -> None:
        """Return once a call received then (`now`) may be answered. Raises NotReady if the store is another master's,
        or cannot be read."""
        while not covers(self._settings, self._verified_at, received_at):
            problem = await asyncio.shield(self.check())
            if problem is not None:
                raise NotReady(f"not answered: {problem}") from problem

    def check(self) -> asyncio.Task[StoreError | None]:
        """Return the check that is under way, or a new one. Its result is the error; None if this master owns the
        store."""
        if self._check is None:
            self._check = asyncio.get_running_loop().create_task(self._verify())
        return self._check

    def close(self) -> None:
        """End without waiting for a check that hangs."""
        if self._check is not None:
            self._check.cancel()
        self._thread.end()

    async def _verify(self) -> StoreError | None:
        began_at = self.now()
        try:
            await self._thread.ask(self._store.check_owner)
        except StoreError as error:
            if error.problem is Problem.FENCED:
                self._on_fenced(error)
            else:
                log.warning("ownership of the store not verified", extra={"error": str(error)})
            return error
        finally:
            self._check = None
        self._verified_at = began_at
        return None


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


# Where a test may have the master killed; see ganger.failpoints.
BEFORE_COMMIT: Final = "before-commit"
AFTER_COMMIT: Final = "after-commit"
COMMIT_BEFORE_REPLY: Final = "commit-before-reply"
BEFORE_MOVE_COMMIT: Final = "before-move-commit"
AFTER_MOVE_COMMIT: Final = "after-move-commit"
MID_LOAD: Final = "mid-load"

FAILPOINTS: Final = frozenset(
    {BEFORE_COMMIT, AFTER_COMMIT, COMMIT_BEFORE_REPLY, BEFORE_MOVE_COMMIT, AFTER_MOVE_COMMIT, MID_LOAD}
)
