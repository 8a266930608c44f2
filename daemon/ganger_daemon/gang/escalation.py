"""Enforcement of orders on the local ranks of one gang: the escalation ladder, from a stack dump to SIGKILL, and the
freezing of jobs without boundaries, which cannot stop themselves for a PAUSE or at the end of their lease."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum

from ganger.injob.page import now_ns
from ganger.injob.process_identity import stands_still
from ganger.protocol.gang_orders import DesiredOrder, OrderIntent
from ganger.protocol.stop_rules import expired
from ganger.v1 import job_pb2
from ganger.wire.times import seconds

from ganger_daemon.cgroups.controllers import signal_all
from ganger_daemon.core import gang_judgement
from ganger_daemon.core.part_facts import GangPart
from ganger_daemon.gang.exit_watcher import ExitWatcher
from ganger_daemon.gang.gang_context import GangContext, OfGang
from ganger_daemon.node.process_identity import send_signal

log = logging.getLogger(__name__)

# Time that the remaining ranks have to exit after one of them failed.
_FAILURE_GRACE_S = 5.0
_STOP_GRACE_S = 60.0
# Evaluation or compilation extends a deadline by at most this: an endless evaluation cannot hold a device.
EXTENSION_S = 600.0


class Rung(IntEnum):
    NONE = 0
    DUMP = 1
    TERMINATE = 2
    KILL = 3
    GIVE_UP = 4  # Instead of TERMINATE: the order is reported as one that cannot be carried out


@dataclass(slots=True)
class Ladder:
    """Escalation of one order that a job does not obey: after `patience` the agent prints the stacks of its threads; at
    the deadline SIGTERM; after the grace the kill. A move ends no job: at its deadline the gang reports that it did not
    stop, and continues. Times are seconds."""

    since: float  # Time of the order, later of SIGTERM
    grace: float
    patience: float = 0.0
    deadline: float = 0.0
    rung: Rung = Rung.TERMINATE  # With which a STOP begins
    ends: bool = True  # Whether processes may be ended for this order
    extended: float = 0.0  # Time spent in phases without boundaries, which moves the clock

    def extend(self, seconds: float) -> None:
        """Add time in a phase without boundaries, within the bound."""
        self.extended = min(EXTENSION_S, self.extended + max(0.0, seconds))

    def climb(self, now: float) -> bool:
        """Go one rung higher if that rung is due at `now`; return whether it was."""
        waited = now - self.since - self.extended
        if self.rung is Rung.NONE and waited >= self.patience:
            self.rung = Rung.DUMP
        elif self.rung is Rung.DUMP and waited >= self.deadline:
            self.rung, self.since = (Rung.TERMINATE, now) if self.ends else (Rung.GIVE_UP, self.since)
        elif self.rung is Rung.TERMINATE and now - self.since >= self.grace:
            self.rung = Rung.KILL
        else:
            return False
        return True


def stop_grace_s(spec: job_pb2.JobSpec) -> float:
    return seconds(spec.stop_grace) if spec.HasField("stop_grace") else _STOP_GRACE_S


def begin(now: float, iteration_s: float, grace: float, deadline: float, patience: float, *, ends: bool) -> Ladder:
    """Return the ladder of an order to stop at a boundary; a long iteration has time for two of itself."""
    patient = max(min(patience, deadline), 2.0 * iteration_s)
    return Ladder(now, grace, patient, max(deadline, 2.0 * patient), Rung.NONE, ends)


class Escalation(OfGang):
    """The escalation ladder of one gang's newest order."""

    def __init__(self, context: GangContext, exits: ExitWatcher) -> None:
        super().__init__(context)
        self._exits = exits
        self._ladder: Ladder | None = None
        self._pressed_at = time.monotonic()
        self._steps: tuple[int, ...] = ()
        self.escalated = False  # Killed because it ignored an order
        self.stop_signalled = False  # SIGTERM was sent; it cannot be withdrawn
        self.asked_to_save_s = 0.0  # Unix seconds when the script was asked to save itself; zero before
        self.given_up = ""  # Why the present order was abandoned although nothing failed

    def begin(self, wanted: DesiredOrder, now: float, iteration_s: float) -> None:
        """Start the ladder of a new order. Orders to stop have a deadline; an order to run has none."""
        if (self.stop_signalled or self.asked_to_save_s) and not wanted.ends_at_once:
            return
        self._ladder = None
        self.given_up = ""
        is_move = wanted.intent is OrderIntent.HAND_OVER
        stops = is_move or wanted.intent is OrderIntent.PARK
        if wanted.asks_to_leave:
            return
        if stops or (wanted.intent is OrderIntent.STOP and wanted.checkpoint_first):
            deadline, patience = self._host.order_deadline_s, self._host.order_patience_s
            self._ladder = begin(now, iteration_s, wanted.grace_s, deadline, patience, ends=not is_move)

    def ask_to_save(self, spec: job_pb2.JobSpec, now: float) -> None:
        """Send the main processes the signal at which the script saves itself; the group is killed after the grace."""
        self.asked_to_save_s = time.time()
        self._ladder = Ladder(now, stop_grace_s(spec))
        self._signal(signal.Signals[f"SIG{spec.stop_signal}"])
        log.info("stop signal sent", extra={"gang": self._paths.group, "signal": spec.stop_signal})

    def recall(self, asked_to_save_s: float, spec: job_pb2.JobSpec) -> None:
        """Take over from a former daemon that asked the script to save itself; zero: it did not."""
        if asked_to_save_s:
            self.asked_to_save_s = asked_to_save_s
            passed = max(0.0, time.time() - asked_to_save_s)
            self._ladder = Ladder(time.monotonic(), max(0.0, stop_grace_s(spec) - passed))

    def terminate(self, wanted: DesiredOrder, now: float) -> None:
        """Send SIGTERM to the main processes now; the group is killed after the grace."""
        grace = wanted.grace_s if wanted.intent is OrderIntent.STOP else _FAILURE_GRACE_S
        self.stop_signalled = True
        self._ladder = Ladder(now, grace)
        self._signal(signal.SIGTERM)

    async def end(self) -> None:
        """Send SIGKILL to all of a stale gang: no SIGTERM, no grace, and no thaw before."""
        self.stop_signalled = True
        self._ladder = None
        await self._kill()

    async def abandon(self, why: str) -> None:
        """Kill a gang whose pages can no longer be trusted. `why`: for the log."""
        if self._exits.live():
            log.error("gang killed", extra={"gang": self._paths.group, "cause": why})
        await self._kill()

    async def escalate(self, facts: GangPart, now: float) -> None:
        """Take the rung that is due, if the gang does not obey."""
        passed, self._pressed_at = now - self._pressed_at, now
        is_leaving = self.stop_signalled or bool(self.asked_to_save_s)
        if (
            self._ladder is None
            or not self._exits.live()
            or (not is_leaving and not gang_judgement.is_disobedient(facts))
        ):
            return
        if gang_judgement.is_busy(facts):
            self._ladder.extend(passed)
        steps = tuple(rank.step for rank in facts.ranks)
        if facts.wanted.waits_for_epoch and steps != self._steps and not is_leaving:
            # It obeys as long as it steps: the end of its epoch may be hours away.
            self._steps, self._ladder = steps, replace(self._ladder, since=now, rung=Rung.NONE)
            return
        if not self._ladder.climb(now):
            return
        log.warning("escalation", extra={"gang": self._paths.group, "rung": self._ladder.rung.name})
        match self._ladder.rung:
            case Rung.DUMP:
                self._pages.request_stacks()
            case Rung.TERMINATE:
                self.escalated = facts.wanted.intent is not OrderIntent.STOP
                self.stop_signalled = True
                self._signal(signal.SIGTERM)
            case Rung.GIVE_UP:
                waited = now - self._ladder.since
                self.given_up = f"it came to no boundary for {waited:.0f} s, so it is not moved now"
            case Rung.KILL:
                await self._kill()

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to main processes only: loader workers that die first would spoil a last checkpoint."""
        for process in self._exits.live():
            send_signal(process, number)

    async def _kill(self) -> None:
        """Send SIGKILL to everything in the group, and to the main processes, which may be in no group."""
        live = self._exits.live()
        await asyncio.to_thread(self._host.cgroups.kill, self._group)
        for process in live:
            send_signal(process, signal.SIGKILL)


class Freezer(OfGang):
    """The lease of one gang's local ranks, and their freezing where no agent obeys it. `hold_still`: returns whether
    they are stopped for another reason."""

    def __init__(self, context: GangContext, hold_still: Callable[[], bool]) -> None:
        super().__init__(context)
        self._hold_still = hold_still
        self.frozen = False
        self._doubtful = False
        self._extended_to_ns = -1

    def extend_lease(self) -> None:
        """Write the end of this node's lease into the pages, if it has changed."""
        until = self._host.lease_until_ns
        if until is not None and until != self._extended_to_ns:
            self._extended_to_ns = until
            # If the lease had ended, the launcher may have frozen the gang itself: the state is read again.
            self._doubtful = self._doubtful or self._pages.lease_is_over(now_ns())
            self._pages.extend_lease(until)

    def is_stale(self, wanted: DesiredOrder) -> bool:
        """Return whether the lease of a launched gang has ended, so that its job may have been started elsewhere. An
        order is applied before the answer that brought it extends the lease."""
        is_over = self._lease_is_over
        if is_over is None and self._pages.readable:
            is_over = self._pages.lease_is_over(now_ns())
        return gang_judgement.has_outlived_lease(wanted, self.frozen, is_over)

    def recall(self) -> None:
        """Read from the process group whether it is frozen; by its launcher's signals, where that may not freeze it."""
        self.frozen = self._host.cgroups.frozen(self._group)
        if self._paths.account is not None and not self.frozen and not self._hold_still():
            pids = self._host.cgroups.pids(self._group)
            self.frozen = bool(pids) and all(map(stands_still, pids))

    def _thaw(self, group: str) -> bool:
        done = self._host.cgroups.thaw(group)
        if self._paths.account is not None and not self._hold_still():
            signal_all(self._host.cgroups.pids(group), signal.SIGCONT)
        return done

    @property
    def _lease_is_over(self) -> bool | None:
        """Whether this node's lease has ended; None before the master has answered this daemon."""
        until = self._host.lease_until_ns
        return None if until is None else expired(until, now_ns())

    async def follow(self, facts: GangPart, now: float) -> None:
        """Freeze or thaw, if that is due."""
        if facts.ends_at_once:
            return  # SIGKILL reaches frozen processes, and thawed ones would run beside their successor
        if self._doubtful:
            await asyncio.to_thread(self.recall)
        due = gang_judgement.should_freeze(replace(facts, frozen=self.frozen), now, self._lease_is_over)
        if due == self.frozen and not self._doubtful:
            return
        act = self._host.cgroups.freeze if due else self._thaw
        if await asyncio.to_thread(act, self._group):
            self.frozen, self._doubtful = due, False
            log.info("gang frozen" if due else "gang thawed", extra={"gang": self._group})
