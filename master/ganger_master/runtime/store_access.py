"""Checks whether this master still owns its database. One check serves all calls that wait for it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from ganger.wire.errors import NotReady

from ganger_master.core.heartbeats import covers
from ganger_master.core.settings import CoreSettings
from ganger_master.runtime.store_thread import StoreThread
from ganger_master.store.contract import Problem, Store, StoreError

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
