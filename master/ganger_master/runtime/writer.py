"""The one writer: commands in, durable answers out.

A command is decided and applied at once, in the order of arrival; what it changed joins the open batch. A batch is
committed in one transaction by one worker thread, and only then its answers and effects go out. The next batch fills
meanwhile. A failed commit refuses every caller of its batch and of the one behind it, and starts over from the store.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from operator import itemgetter
from typing import Any, Final, TypeVar

from ganger.failpoints import Failpoints
from ganger.tracing import tracer
from ganger.wire.errors import AlreadyRecording, ApiError, Internal, NotReady

from ganger_master.core import machine
from ganger_master.core.answers import Answer
from ganger_master.core.availability import ClockReading, noticed
from ganger_master.core.commands import Command, OpenStore, Tick
from ganger_master.core.leader_lease import LeaderLease, LeaseCandidate
from ganger_master.core.queue import GrantedLease
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state import State
from ganger_master.core.state_image import restored
from ganger_master.decision_log.recorder import AttachedRecording, DecisionRecording
from ganger_master.runtime.commits import CommandBatch, CommitPace, SealedBatch, StoreThread, refuse
from ganger_master.runtime.leadership import Ownership
from ganger_master.runtime.publication import CommittedState, LeaseStreams, publication_of
from ganger_master.runtime.state_directory import DatabaseMarks
from ganger_master.runtime.telemetry import JobTraces, MasterCounters
from ganger_master.store import tables
from ganger_master.store.tables import Codec, HistoryEntry, Problem, Store, StoreError

log = logging.getLogger(__name__)
_T = TypeVar("_T")

# Callers that may wait for one commit; more are rejected, and retry.
_MOST_WAITING: Final = 60_000
# Between attempts to read the store again after it failed, and before it is read after commits that failed in a row.
_RELOAD_S: Final = (0.1, 0.5, 2.0, 5.0)
# So many errors of the core within so many seconds, and the master ends: starting over does not cure it.
_MOST_CRASHES: Final = 5
_CRASHES_S: Final = 60.0
# So often the clocks are looked at where nothing else happens.
_LOOK_S: Final = 5.0
# What a recording may take to be written to its end when the master stops.
_RECORDING_S: Final = 10.0


def steady() -> float:
    """Return the seconds since boot, including suspends of the machine. This clock cannot be set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Writer:
    """Owns the state. All methods belong to one event loop. `clock`: Unix seconds, may be set. `steady`: monotonic."""

    def __init__(
        self,
        store: Store,
        settings: CoreSettings,
        clock: Callable[[], float],
        failpoints_of_process: Failpoints | None = None,
        steady: Callable[[], float] = steady,
        beside: DatabaseMarks | None = None,
        opens: OpenStore | None = None,
    ) -> None:
        self.committed = CommittedState()
        self.lease_streams = LeaseStreams()
        self.meter = MasterCounters()
        self._traces = JobTraces(tracer())
        self.state = State(settings, clock())
        # Set when the writer cannot continue: another master has taken the store over, or it is closed.
        self.stopped = asyncio.Event()
        # Why the store refuses this master, once it does.
        self.fenced: StoreError | None = None
        self.ownership = Ownership(store, settings, steady, self._end_fenced)
        self._store = store
        # The files beside it, and the command by which it is opened.
        self._beside = beside
        self._opens = opens
        self._settings = settings
        # Return the present in Unix seconds, by the clock of the core.
        self.now = clock
        self._steady = steady
        self._looked = ClockReading(clock(), steady())
        self._next_look: asyncio.TimerHandle | None = None
        self._failpoints = failpoints_of_process or Failpoints(tables.FAILPOINTS, "")
        self._thread = StoreThread("store")
        self._codec = Codec()
        self._pace = CommitPace()
        self._open = CommandBatch()
        self._committing = False
        # Set while no commit is under way.
        self._idle = asyncio.Event()
        self._idle.set()
        self._scheduled: asyncio.Handle | None = None
        self._alarm: asyncio.TimerHandle | None = None
        # The newest placement lease that was sent.
        self._newest_sent = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_open = False
        # Whether it accepts commands: not while it reads the store, also after an error.
        self.is_ready = False
        # The reason that callers get while it is not ready.
        self._away = "the master is starting"
        self._is_reloading = False
        self._is_closing = False
        self._crashes: deque[float] = deque(maxlen=_MOST_CRASHES)
        # Records all that is decided.
        self._recording = AttachedRecording()
        self._failed_commits = 0

    async def open(self, candidate: LeaseCandidate | None = None) -> LeaderLease | None:
        """Take the store over. With a candidate only if it may lead; otherwise return the lease of the master that
        leads, for this one to stand by. Raises StoreError."""
        other = await self._thread.call(self._take, candidate, asyncio.get_running_loop())
        if candidate is not None:
            self.ownership.stand_by(other)
        self._is_open = other is None
        return other

    def _take(self, candidate: LeaseCandidate | None, loop: asyncio.AbstractEventLoop) -> LeaderLease | None:
        """In the store's thread: take the store over, and renew its lease while the schema is updated."""
        began_at = self._steady()
        other = self._store.open(candidate)
        if candidate is not None and other is None:
            self.ownership.hold(candidate.lease_s, began_at, loop)
            try:
                self._store.migrate()
            except BaseException:
                # The next attempt takes the lease anew.
                self.ownership.drop()
                raise
        return other

    async def start(self) -> None:
        """Load everything, from the store that `open` has taken over, or that it takes over itself. Raises
        StoreError."""
        if not self._is_open:
            await self.open()
        # For how long this master stood by says nothing of its clock.
        self._looked = ClockReading(self.now(), self._steady())
        await self._load()
        self.ownership.lead()
        self._look_often()

    async def close(self) -> None:
        """Commit what is accepted, then close the store. Once: a second call does nothing."""
        if self._is_closing:
            return
        self._is_closing = True
        while self.is_ready and (self._committing or self._open.is_touched):
            await self._idle.wait()
            if not self._committing and self._open.is_touched:
                self._seal()
        self.end_recording("the master stopped")
        self.is_ready = False
        for timer in (self._alarm, self._next_look):
            if timer is not None:
                timer.cancel()
        await self._recording.wait(_RECORDING_S)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.ownership.close()
        await self._thread.call(self._store.close)
        self._thread.close()
        self.stopped.set()

    def submit(self, command: Command) -> asyncio.Future[Answer]:
        """Return the answer, once its content is durable. Raises NotReady or Internal; refusals are answers."""
        return self._taken((command,), itemgetter(0))

    def submit_all(self, commands: Sequence[Command]) -> asyncio.Future[Sequence[Answer]]:
        """Return the answers in the order of the commands, once all of them are durable."""
        return self._taken(commands, list)

    def judge(self, command: Command) -> Answer:
        """Return what would be answered to a command now, and change nothing. Raises NotReady."""
        if not self.is_ready or self._is_closing:
            raise self._not_ready()
        return machine.judged(self.state, command, self.now())

    def _taken(self, commands: Sequence[Command], answer_of: Callable[[list[Answer]], _T]) -> asyncio.Future[_T]:
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._look()
        if not self.is_ready or self._is_closing:
            future.set_exception(self._not_ready())
            return future
        batch = self._open
        if len(batch.callers) >= _MOST_WAITING:
            future.set_exception(NotReady("too many calls wait for the store: try again"))
            return future
        answers: list[Answer] = []
        now = self.now()
        for command in commands:
            try:
                answer, happened = machine.advance(self.state, command, now)
            except Exception as error:
                self._recording.broke(now, command, error)
                future.set_exception(self._crashed(type(command).__name__))
                return future
            self._recording.command(now, command, answer, happened)
            if happened:
                batch.is_touched = True
            self.meter.answered(answer)
            answers.append(answer)
        if not batch.is_touched and not self._committing:
            # Nothing is in doubt: what the answers rest on is durable.
            future.set_result(answer_of(answers))
        else:
            batch.callers.append((future, answer_of(answers)))
            batch.is_touched = True
            self._seal_soon()
        return future

    def record(self, recording: DecisionRecording) -> None:
        """Record all that is decided from the end of this batch on. Raises AlreadyRecording or NotReady."""
        if self._recording.is_taken:
            raise AlreadyRecording("a recording is being made already: wait until it has ended")
        if not self.is_ready:
            raise self._not_ready()
        self._recording.request(recording)
        if not self._open.is_touched:
            self._recording.between_batches(self.state, self.now())

    def _not_ready(self) -> ApiError:
        return NotReady(f"{'the master is stopping' if self._is_closing else self._away}: try again")

    def end_recording(self, reason: str) -> None:
        """End the recording with the end of this batch; do nothing if there is none."""
        self._recording.request_end(self.now(), reason)
        if not (self.is_ready and self._open.is_touched):
            self._recording.between_batches(self.state if self.is_ready else None, self.now())

    def enqueue(self, command: Command) -> None:
        """Submit a command without waiting for the answer."""
        self.submit(command).add_done_callback(_seen)

    async def history(self, subject: str, after_sequence: int, limit: int) -> Sequence[HistoryEntry]:
        return await asyncio.to_thread(self._store.history, subject, after_sequence, limit)

    async def oldest_sequence(self) -> int:
        return await asyncio.to_thread(self._store.oldest_sequence)

    async def compact(self, before_time: float, limit: int) -> int:
        """Delete old history, between two commits."""
        return await self._thread.call(self._store.compact, before_time, limit)

    def _seal_soon(self) -> None:
        if self._committing or self._scheduled is not None or not self._open.is_touched:
            return
        loop = asyncio.get_running_loop()
        wait = self._pace.wait_s(loop.time())
        # At the end of this turn of the loop even if alone: calls that came together go to the disk together.
        self._scheduled = loop.call_later(wait, self._seal) if wait > 0 else loop.call_soon(self._seal)

    def _seal(self) -> None:
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        state, now = self.state, self.now()
        try:
            effects = machine.finish(state, now)
            changes = state.take_changes()
            # Here and not in the store's thread, which would have to take the interpreter from this one for it.
            rows = self._codec.batch(changes.puts, changes.removes, effects.history)
            commit = self._store.prepare(rows)
        except Exception as error:
            self._recording.broke(now, None, error)
            self._crashed("batch")
            return
        batch, self._open = self._open, CommandBatch()
        turns = [state.leases[turn] for turn in effects.turns if turn in state.leases]
        self._recording.batch(now, effects, turns)
        self._recording.between_batches(state, now)
        sealed = SealedBatch(commit, effects, publication_of(state, changes, effects), turns, batch.callers)
        if rows.is_empty:
            self._let_out(sealed)
            return
        self._committing = True
        self._idle.clear()
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._pace.began(began)
        # Not awaited: a task and two futures would cost more than the rest of a small commit.
        self._thread.do(self._write_and_report, sealed, loop, began)

    def _write_and_report(self, sealed: SealedBatch, loop: asyncio.AbstractEventLoop, began: float) -> None:
        problem: BaseException | None = None
        try:
            self._write(sealed)
        except BaseException as error:
            problem = error
        loop.call_soon_threadsafe(self._written, sealed, began, problem)

    def _written(self, sealed: SealedBatch, began: float, problem: BaseException | None) -> None:
        self._committing = False
        self._idle.set()
        if isinstance(problem, StoreError):
            self._start_over(sealed, problem)
            return
        if problem is not None:
            self._give_up(problem)
            return
        self._failed_commits = 0
        seconds = asyncio.get_running_loop().time() - began
        self._pace.ended(len(sealed.callers), seconds)
        self.meter.committed(seconds, len(sealed.callers))
        if sealed.callers:
            self._failpoints.passing(tables.COMMIT_BEFORE_REPLY)
        self._let_out(sealed)
        self._seal_soon()

    def _write(self, sealed: SealedBatch) -> None:
        self._failpoints.passing(tables.BEFORE_COMMIT)
        if sealed.commits_a_move:
            self._failpoints.passing(tables.BEFORE_MOVE_COMMIT)
        sealed.commit()
        if self._beside is not None:
            self._beside.note(sealed.publication.puts.values())
        self._failpoints.passing(tables.AFTER_COMMIT)
        if sealed.commits_a_move:
            self._failpoints.passing(tables.AFTER_MOVE_COMMIT)

    def _let_out(self, sealed: SealedBatch) -> None:
        # Publish before answering: a caller that reads after its answer must find the change.
        self.committed.publish(sealed.publication)
        for future, answer in sealed.callers:
            if not future.done():
                future.set_result(answer)
        if sealed.turns:
            self._give(sealed.turns)
        self.meter.happened(sealed.effects.history)
        self._traces.follow(sealed.effects.history, self.committed.jobs)
        if sealed.effects.wake_at is not None:
            self._set_alarm(sealed.effects.wake_at)

    def _give(self, turns: Sequence[GrantedLease]) -> None:
        """Send leases to their holders. A lease begins with its delivery, so that the commit's duration is not lost."""
        if turns[0].is_sent_late(self.now()):
            self.enqueue(Tick(newest_sent=self._newest_sent))
        self._newest_sent = turns[-1].turn
        # The current version of each lease that still exists.
        self.lease_streams.give([held for turn in turns if (held := self.state.leases.get(turn.turn)) is not None])

    def _set_alarm(self, time: float) -> None:
        """Replace the alarm, unless it is due: frequent batches would otherwise postpone it for ever, and its tick
        handles every later time too."""
        loop = asyncio.get_running_loop()
        if self._alarm is not None:
            if self._alarm.when() <= loop.time():
                return
            self._alarm.cancel()
        self._alarm = loop.call_later(max(0.0, time - self.now()), self._tick)

    def _tick(self) -> None:
        self._alarm = None
        if self.is_ready and not self._is_closing:
            self.enqueue(Tick(newest_sent=self._newest_sent))

    def _look_often(self) -> None:
        self._next_look = asyncio.get_running_loop().call_later(_LOOK_S, self._look_often)
        self._look()
        # A master that lost its database must end even without calls.
        self.ownership.check()

    def _look(self) -> None:
        """Compare the clocks, before any decision that depends on them."""
        if not self.is_ready:
            # No call is answered meanwhile, so the time counts as standing still.
            return
        before, self._looked = self._looked, ClockReading(self.now(), self._steady())
        gap = noticed(before, self._looked)
        if gap is not None:
            passed = self._looked.steady - before.steady
            log.warning("clock was set or master stood still", extra={"set_by": gap.set_by, "passed": passed})
            self.enqueue(gap)

    def _crashed(self, what: str) -> ApiError:
        """Handle a failure of the core: discard all uncommitted changes, keep the durable state."""
        crash = uuid.uuid4().hex[:12]
        self.meter.core_errors += 1
        log.exception("core failed", extra={"command": what, "id": crash})
        lost, self._open = self._open, CommandBatch()
        self.is_ready = False
        self._away = "the master starts over after an error"
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        refuse(lost.callers, self._not_ready())
        now = asyncio.get_running_loop().time()
        self._crashes.append(now)
        if len(self._crashes) == _MOST_CRASHES and now - self._crashes[0] < _CRASHES_S:
            log.critical("too many errors of the core: ending")
            self.stopped.set()
        else:
            self._start(self._reload())
        return Internal(f"internal error {crash}: see the master's log", id=crash)

    def _start_over(self, sealed: SealedBatch, error: StoreError) -> None:
        self.meter.store_errors += 1
        log.error("commit failed", extra={"error": str(error), "callers": len(sealed.callers)})
        self.is_ready = False
        self._away = f"the master cannot write to its store ({error})"
        behind, self._open = self._open, CommandBatch()
        refusal = NotReady(f"not accepted: {error}")
        refuse(sealed.callers, refusal)
        refuse(behind.callers, refusal)
        if error.problem is Problem.FENCED:
            self._end_fenced(error)
            return
        pause = (0.0, *_RELOAD_S)[min(self._failed_commits, len(_RELOAD_S))]
        self._failed_commits += 1
        self._start(self._reload(pause, self.state))

    def _end_fenced(self, error: StoreError) -> None:
        """Accept and answer nothing from here on: the store is another master's."""
        if self.fenced is None:
            log.critical("fenced", extra={"error": str(error)})
        self.fenced = error
        self.ownership.lose()
        self.is_ready = False
        self.stopped.set()

    async def _reload(self, pause_s: float = 0.0, former: State | None = None) -> None:
        """Read the store again. `former`: the sound state before, if only its last changes are not stored."""
        if self._is_reloading:
            return
        self._is_reloading = True
        try:
            await asyncio.sleep(pause_s)
            for attempt in count(1):
                await self._idle.wait()
                try:
                    await self._load(former)
                    log.info("state reloaded", extra={"attempt": attempt})
                    return
                except StoreError as error:
                    log.error("reload failed", extra={"error": str(error)})
                    self._away = f"the master cannot read its store ({error})"
                    await asyncio.sleep(_RELOAD_S[min(attempt, len(_RELOAD_S)) - 1])
        finally:
            self._is_reloading = False

    async def _load(self, former: State | None = None) -> None:
        codec = Codec()
        elements = await self._thread.call(lambda: codec.elements(self._store.load()))
        self._failpoints.passing(tables.MID_LOAD)
        state = restored(self._settings, elements, self.now(), former)
        self.state, self._codec, self._open, self._newest_sent = state, codec, CommandBatch(), 0
        # From the state, not from the store: a restart voids sessions.
        self.committed.reset(state)
        self.is_ready = self.fenced is None
        self._recording.start_over(state, self.now(), "the state was read from the store")
        if self._opens is not None:
            # Before anything is decided by the content of the database.
            opens, self._opens = self._opens, None
            self.enqueue(opens)
        self.enqueue(Tick(looks_again=former is not None))
        for claim in self.lease_streams.claims():
            self.enqueue(claim)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (problem := task.exception()) is not None:
            self._give_up(problem)

    def _give_up(self, problem: BaseException) -> None:
        log.critical("writer failed", exc_info=problem)
        self.is_ready = False
        self.stopped.set()


def _seen(future: asyncio.Future[Answer]) -> None:
    if not future.cancelled():
        future.exception()
