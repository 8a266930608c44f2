"""What happened to a job since the backup that a database was restored from, by what its nodes report.

The nodes' reports and the records of ends are the evidence; `core.rollback` collects it and carries the verdicts out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

from ganger.job_state import JobState
from msgspec import Struct

from ganger_master.core import quarantine
from ganger_master.core.commands import FinishedGang, ObservedGang, RecordedEnd
from ganger_master.core.gang_model import GangIntent, ObservedPhase, OutcomeKind, StoredOrder
from ganger_master.core.job_model import JobRecord
from ganger_master.core.state import State

# Gangs of one job, by epoch and node: those that live, and those that have ended.
LiveGangs: TypeAlias = dict[int, dict[str, ObservedGang]]
EndedGangs: TypeAlias = dict[int, dict[str, FinishedGang]]


class EndVerdict(Struct, frozen=True):
    """The job has ended in this state; `by` names the evidence."""

    state: JobState
    by: str


class AskVerdict(Struct, frozen=True):
    """The end of the job is not known: suspend it until its user decides."""


class KeepVerdict(Struct, frozen=True):
    """No report contradicts the database: keep what it has."""


class AdoptVerdict(Struct, frozen=True):
    """The job has the gang of this epoch: adopt it."""

    epoch: int


class RequeueVerdict(Struct, frozen=True):
    """The gang that the database has was never launched: the job waits for another one."""


Verdict: TypeAlias = EndVerdict | AskVerdict | KeepVerdict | AdoptVerdict | RequeueVerdict
# As the history counts them.
COUNTED_AS: Final = {
    EndVerdict: "ended", AskVerdict: "suspended", KeepVerdict: "kept", AdoptVerdict: "adopted",
    RequeueVerdict: "requeued",
}  # fmt: skip


def verdict_of(state: State, job: JobRecord, alive: LiveGangs, over: EndedGangs, ended: RecordedEnd | None) -> Verdict:
    """Return what happened to a job since the backup.

    `alive` and `over`: its gangs that nodes report, living and ended; `ended`: its recorded end, if there is one."""
    if ended is not None:
        return (
            EndVerdict(ended.state, "it is recorded that it ended")
            if ended.state is not None
            else _by_storage_note(job, over)
        )
    living = newest_living(state, alive)
    news = {epoch: parts for epoch, parts in over.items() if _is_unknown_end(state, job, epoch, parts)}
    newest = max(news, default=0)
    if living and not _is_superseded(living, alive[living], newest, news):
        return KeepVerdict() if is_as_stored(state, living, alive[living], alive, job) else AdoptVerdict(living)
    if not newest:
        return KeepVerdict() if not alive.keys() - {job.epoch, job.next_epoch} else AskVerdict()
    return _by_outcomes(state, job, newest, news[newest])


def _by_storage_note(job: JobRecord, over: EndedGangs) -> Verdict:
    """Return the verdict for a job of which storage has only a note that it ended."""
    parts = over[max(over)].values() if over else ()
    if parts and all(part.outcome.kind is OutcomeKind.DONE for part in parts):
        return EndVerdict(JobState.SUCCEEDED, "storage has a note that it ended, and its ranks had finished")
    return EndVerdict(JobState.CANCELLED, "storage has a note that it ended, but not how")


def newest_living(state: State, alive: LiveGangs) -> int:
    """Return the newest epoch that may step; zero if there is none."""
    return max([epoch for epoch, parts in alive.items() if may_step(state, epoch, parts)], default=0)


def may_step(state: State, epoch: int, parts: Mapping[str, ObservedGang]) -> bool:
    """Return whether a gang is neither ending nor the destination of a move that is not committed."""
    newest, gang = _newest_order(parts), state.gangs.get(epoch)
    if newest is not None:
        return newest.intent not in (GangIntent.STOP, GangIntent.PREPARE)
    # A daemon that cannot describe the order: by the database, or by the phases.
    if gang is not None and max(part.master_sequence for part in parts.values()) <= gang.master_sequence:
        return gang.intent not in (GangIntent.STOP, GangIntent.PREPARE)
    return all(part.phase in (ObservedPhase.RUNNING, ObservedPhase.PARKED) for part in parts.values())


def _newest_order(parts: Mapping[str, ObservedGang]) -> StoredOrder | None:
    """Return the newest order for a gang that its daemons have described; None if none has described one."""
    orders_known = [part.told for part in parts.values() if part.told is not None]
    return max(orders_known, key=lambda one: one.master_sequence, default=None)


def _is_unknown_end(state: State, job: JobRecord, epoch: int, parts: Mapping[str, FinishedGang]) -> bool:
    """Return whether the database neither knows that this attempt ended nor had ordered it to end."""
    gang = state.gangs.get(epoch)
    if gang is None:
        return quarantine.is_skipped(state, epoch)
    is_wanted_over = gang.intent is GangIntent.STOP and all(
        part.outcome.kind is not OutcomeKind.DONE for part in parts.values()
    )
    return gang.job == job.number and not is_wanted_over


def _is_superseded(living: int, parts: Mapping[str, ObservedGang], newest: int, over: EndedGangs) -> bool:
    """Return whether a later attempt took over from the living one and has ended, so that the living one is a copy."""
    if newest <= living:
        return False
    order = _newest_order(parts)
    # If it was ordered to run since, the move to the later one was given up.
    is_handed_over = order is not None and order.intent is GangIntent.HAND_OVER
    return is_handed_over and all(part.outcome.kind is OutcomeKind.DONE for part in over[newest].values())


def is_as_stored(state: State, epoch: int, parts: Mapping[str, ObservedGang], alive: LiveGangs, job: JobRecord) -> bool:
    """Return whether a gang is where the database has it, without time slices or orders that the database does not
    know."""
    gang = state.gangs.get(epoch)
    if gang is None or gang.job != job.number or epoch not in (job.epoch, job.next_epoch):
        return False
    if any(node not in gang.nodes for node in parts):
        return False
    if alive.keys() - set(state.gangs.epochs_of.get(job.number, ())):
        return False
    if epoch not in state.gangs.set_of and any(
        part.told is not None and part.told.is_sliced for part in parts.values()
    ):
        return False
    return all(part.master_sequence <= gang.master_sequence for part in parts.values())


def _by_outcomes(state: State, job: JobRecord, epoch: int, parts: Mapping[str, FinishedGang]) -> Verdict:
    kinds = {part.outcome.kind for part in parts.values()}
    gang = state.gangs.get(epoch)
    nodes = len(gang.nodes) if gang is not None else max(part.nodes for part in parts.values())
    if kinds == {OutcomeKind.DONE} and len(parts) == nodes:
        return EndVerdict(JobState.SUCCEEDED, "every rank has finished")
    is_users = bool(kinds & {OutcomeKind.FAILED, OutcomeKind.OUT_OF_MEMORY})
    if is_users and job.failures >= job.spec.max_failures:
        failed = next(part.outcome for part in parts.values() if part.outcome.kind not in _WELL)
        return EndVerdict(JobState.FAILED, failed.message or f"an attempt ended as {failed.kind.value}")
    return AskVerdict()


_WELL: Final = (OutcomeKind.DONE, OutcomeKind.YIELDED, OutcomeKind.STOPPED)
