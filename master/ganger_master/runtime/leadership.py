"""Whether this master may answer: its ownership of the store, and the lease by which one of several masters leads."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import suppress

from ganger.wire.errors import ApiError, NotLeader, NotReady

from ganger_master.core.availability import covers
from ganger_master.core.leader_lease import LeaderLease, is_held, renewal_interval_s
from ganger_master.core.settings import CoreSettings
from ganger_master.runtime.commits import StoreThread
from ganger_master.store.tables import Problem, Store, StoreError

log = logging.getLogger(__name__)


class Ownership:
    """Ownership of a store, for one event loop. `clock` counts seconds, is never set, and runs on while the machine
    sleeps. `on_fenced` is called when another master has taken the store over.

    With a lease, each check renews it, and the master answers nothing while it may have expired. Checks have a thread
    of their own, so that they do not wait behind commits, nor commits behind them. That thread renews the lease by
    itself, also while the event loop is busy, as when it reads a large database."""

    def __init__(
        self, store: Store, settings: CoreSettings, clock: Callable[[], float], on_fenced: Callable[[StoreError], None]
    ) -> None:
        self.now = clock
        self._store = store
        self._settings = settings
        self._on_fenced = on_fenced
        self._thread = StoreThread("ownership")
        self._is_closed = False
        # When the last good check began. Set by the thread, once it renews a lease.
        self._verified_at = -math.inf
        self._check: asyncio.Task[StoreError | None] | None = None
        # Seconds of the lease; None without one.
        self._lease_s: float | None = None
        # Why this master does not lead, and the address of the one that does; empty if it leads, or needs no lease.
        self._away = self._leader = ""

    def stand_by(self, leader: LeaderLease | None) -> None:
        """Answer nothing: this master does not lead. `leader`: the lease of the one that does, if it is known."""
        self._leader = ""
        if leader is None:
            self._away = "this master does not lead yet: try again"
        elif leader.left_s > 0.0 and leader.address:
            self._leader = leader.address
            self._away = f"this master stands by; the one at {leader.address} leads"
        else:
            self._away = "this master stands by, and the lease of the one that led has expired: try again"

    def hold(self, lease_s: float, taken_at: float, loop: asyncio.AbstractEventLoop) -> None:
        """Renew a lease from now on. `taken_at`: when it was requested, by the clock of this object; `loop`: its event
        loop. Any thread may call this."""

        def renew() -> None:
            error = self._verify()
            # The loop may have ended.
            if error is not None:
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._failed, error)

        self._verified_at, self._lease_s = taken_at, lease_s
        self._thread.repeat(renew, renewal_interval_s(lease_s))

    def drop(self) -> None:
        """Let the lease expire. Any thread may call this."""
        self._thread.repeat(None)

    def lead(self) -> None:
        """Answer calls from now on, while the lease lasts."""
        self._away = self._leader = ""

    def lose(self) -> None:
        """Answer nothing any more: another master has taken the store over."""
        if self._lease_s is not None:
            self._away = "this master led until another one took its lease: ask that one"

    def refusal(self) -> ApiError | None:
        """Return why this master may answer no call now; None if it may."""
        if self._away:
            return NotLeader(self._away, leader=self._leader) if self._leader else NotLeader(self._away)
        if self._lease_s is None or is_held(self._verified_at, self.now(), self._lease_s):
            return None
        return NotLeader("this master could not renew its lease: another one may lead")

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
            self._check = asyncio.get_running_loop().create_task(self._checked())
        return self._check

    def close(self) -> None:
        """End without waiting for a check that hangs."""
        self._is_closed = True
        if self._check is not None:
            self._check.cancel()
        self._thread.end()

    async def _checked(self) -> StoreError | None:
        try:
            error = await self._thread.call(self._verify)
        finally:
            self._check = None
        if error is not None:
            self._failed(error)
        return error

    def _verify(self) -> StoreError | None:
        """In the thread: check the store, which renews the lease."""
        began_at = self.now()
        try:
            self._store.check_owner()
        except StoreError as error:
            return error
        self._verified_at = began_at
        return None

    def _failed(self, error: StoreError) -> None:
        if self._is_closed:
            return
        if error.problem is Problem.FENCED:
            self.lose()
            self._on_fenced(error)
        else:
            log.warning("ownership of the store not verified", extra={"error": str(error)})
