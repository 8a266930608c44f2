"""Settlement after a database was restored from a backup: what happened to each job since, and what is done about it.

The nodes' reports and the records of ends are the evidence (`core.rollback` collects it): `verdict_of` judges each job.
Then everything is settled at once: gangs are adopted where they are, jobs that have ended end, and a job whose end is
not known is suspended until its user decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple, TypeAlias

from ganger.job_state import JobState
from msgspec.structs import replace

from ganger_master.core import ending, events, gang_orders, observation, quarantine
from ganger_master.core.commands import FinishedGang, Observe, ObservedGang, RecordedEnd
from ganger_master.core.gang_model import (
    Gang,
    GangIntent,
    ObservedPhase,
    Outcome,
    OutcomeKind,
    Piece,
    StoredOrder,
    TimesliceGroup,
)
from ganger_master.core.job_model import Failure, JobRecord, SuspendLevel
from ganger_master.core.node_model import Stray
from ganger_master.core.quarantine import END_UNKNOWN
from ganger_master.core.rollback import EndedGangs, LiveGangs, awaited, by_job, completed_reports
from ganger_master.core.state import State

# Revisions that callers may have seen since the copy was made are not given again.
_REVISIONS_SKIPPED: Final = 1 << 20
# Order numbers that a node without a report may have are not given again either.
_ORDERS_SKIPPED: Final = 1 << 10


# By the uid of a job, and by node.
_Living: TypeAlias = Mapping[str, LiveGangs]
_Reports: TypeAlias = Mapping[str, Observe]


class VerdictKind(StrEnum):
    """What happened to a job since the backup; the history counts jobs by it."""

    # It has ended in the state of the verdict.
    ENDED = "ended"
    # Its end is not known: suspend it until its user decides.
    UNKNOWN = "suspended"
    # No report contradicts the database: keep what it has.
    KEPT = "kept"
    # It has the gang of the verdict's epoch: adopt that.
    ADOPTED = "adopted"
    # The gang that the database has was never launched: the job waits for another one.
    REQUEUED = "requeued"


class Verdict(NamedTuple):
    """`state` and `by`: of a job that has ended, and the evidence. `epoch`: of the gang to adopt, else zero."""

    kind: VerdictKind
    state: JobState = JobState.PENDING
    by: str = ""
    epoch: int = 0


_ASK: Final = Verdict(VerdictKind.UNKNOWN)
_KEEP: Final = Verdict(VerdictKind.KEPT)


def _ended_as(state: JobState, by: str) -> Verdict:
    return Verdict(VerdictKind.ENDED, state, by)


def _adopt_as(epoch: int) -> Verdict:
    return Verdict(VerdictKind.ADOPTED, epoch=epoch)


def verdict_of(state: State, job: JobRecord, alive: LiveGangs, over: EndedGangs, ended: RecordedEnd | None) -> Verdict:
    """Return what happened to a job since the backup.

    `alive` and `over`: its gangs that nodes report, living and ended; `ended`: its recorded end, if there is one."""
    if ended is not None:
        return (
            _ended_as(ended.state, "it is recorded that it ended")
            if ended.state is not None
            else _by_storage_note(over)
        )
    living = newest_living(state, alive)
    news = {epoch: parts for epoch, parts in over.items() if _is_unknown_end(state, job, epoch, parts)}
    newest = max(news, default=0)
    # A living gang is a copy that the job was moved from, or was on a node that was lost, where a later attempt has
    # stepped and ended. Without steps of the later one, its move or its launch was given up.
    is_copy = newest > living and any(_has_stepped(newest, part) for part in news[newest].values())
    if living and not is_copy:
        return _KEEP if is_as_stored(state, living, alive[living], alive, job) else _adopt_as(living)
    if not newest:
        return _KEEP if not alive.keys() - {job.epoch, job.next_epoch} else _ASK
    return _by_outcomes(state, job, newest, news[newest])


def _by_storage_note(over: EndedGangs) -> Verdict:
    parts = over[max(over)].values() if over else ()
    if parts and all(part.outcome.kind is OutcomeKind.DONE for part in parts):
        return _ended_as(JobState.SUCCEEDED, "storage has a note that it ended, and its ranks had finished")
    return _ended_as(JobState.CANCELLED, "storage has a note that it ended, but not how")


def newest_living(state: State, alive: LiveGangs) -> int:
    """Return the newest epoch that may step; zero if there is none."""
    return max([epoch for epoch, parts in alive.items() if may_step(state, epoch, parts)], default=0)


def may_step(state: State, epoch: int, parts: Mapping[str, ObservedGang]) -> bool:
    """Return whether a gang is neither ending nor the destination of a move that is not committed."""
    gang = state.gangs.get(epoch)
    if orders := [part.newest_order for part in parts.values() if part.newest_order is not None]:
        return max(orders, key=lambda one: one.master_sequence).intent not in (GangIntent.STOP, GangIntent.PREPARE)
    # A daemon that cannot describe the order: by the database, or by the phases.
    if gang is not None and max(part.master_sequence for part in parts.values()) <= gang.master_sequence:
        return gang.intent not in (GangIntent.STOP, GangIntent.PREPARE)
    return all(part.phase in (ObservedPhase.RUNNING, ObservedPhase.PARKED) for part in parts.values())


def _is_unknown_end(state: State, job: JobRecord, epoch: int, parts: Mapping[str, FinishedGang]) -> bool:
    """Return whether the database neither knows that this attempt ended nor had ordered it to end."""
    gang = state.gangs.get(epoch)
    if gang is None:
        return quarantine.is_skipped(state, epoch) or bool(quarantine.quarantined_parts(state, job.uid, epoch))
    is_wanted_over = gang.intent is GangIntent.STOP and all(
        part.outcome.kind is not OutcomeKind.DONE for part in parts.values()
    )
    return gang.job == job.number and not is_wanted_over


def _has_stepped(epoch: int, part: FinishedGang) -> bool:
    """Return whether an ended part shows that its gang did steps: its daemon reports them, or, where an older one does
    not, waiting destinations do not end well or save."""
    wrote = part.checkpoint is not None and part.checkpoint.epoch == epoch
    return part.has_stepped or wrote or part.outcome.kind in (OutcomeKind.DONE, OutcomeKind.YIELDED)


def is_as_stored(state: State, epoch: int, parts: Mapping[str, ObservedGang], alive: LiveGangs, job: JobRecord) -> bool:
    """Return whether a gang is where the database has it, without time slices or orders that the database lacks."""
    gang = state.gangs.get(epoch)
    if gang is None or gang.job != job.number or epoch not in (job.epoch, job.next_epoch):
        return False
    if any(node not in gang.nodes for node in parts):
        return False
    if alive.keys() - set(state.gangs.epochs_of.get(job.number, ())):
        return False
    if epoch not in state.gangs.set_of and any(
        part.newest_order is not None and part.newest_order.is_sliced for part in parts.values()
    ):
        return False
    return all(part.master_sequence <= gang.master_sequence for part in parts.values())


def _by_outcomes(state: State, job: JobRecord, epoch: int, parts: Mapping[str, FinishedGang]) -> Verdict:
    kinds = {part.outcome.kind for part in parts.values()}
    if kinds == {OutcomeKind.DONE} and len(parts) == _nodes_of(state, job, epoch, parts):
        return _ended_as(JobState.SUCCEEDED, "every rank has finished")
    is_users = bool(kinds & {OutcomeKind.FAILED, OutcomeKind.OUT_OF_MEMORY})
    if is_users and job.failures >= job.spec.max_failures:
        failed = next(part.outcome for part in parts.values() if part.outcome.kind not in _WELL)
        return _ended_as(JobState.FAILED, failed.message or f"an attempt ended as {failed.kind.value}")
    return _ASK


def _nodes_of(state: State, job: JobRecord, epoch: int, parts: Mapping[str, FinishedGang]) -> int:
    """Return the number of nodes of a gang that has ended; zero if it is not known."""
    gang = state.gangs.get(epoch)
    if gang is not None:
        return len(gang.nodes)
    orders = [part.newest_order for part in quarantine.quarantined_parts(state, job.uid, epoch).values()]
    known = [len(order.nodes) for order in orders if order is not None]
    return max([*known, *(part.nodes for part in parts.values())])


_WELL: Final = (OutcomeKind.DONE, OutcomeKind.YIELDED, OutcomeKind.STOPPED)


def settle(state: State, event: events.RestoreSettled) -> None:
    """Take what was reported as it is, and change the database to match."""
    now, cause = event.time, event.cause
    reports = completed_reports(state)
    ends, missing = state.ends or {}, awaited(state)
    alive, over = by_job(reports)
    _note_checkpoints(state, alive, over, now)
    _note_parts(state, alive, over, reports)
    verdicts = {
        number: verdict_of(state, state.jobs[number], alive.get(uid, {}), over.get(uid, {}), ends.get(uid))
        for number in list(state.jobs.live)
        for uid in (state.jobs[number].uid,)
    }
    _forget_changed_sets(state, reports, alive, verdicts)
    _release_gangs(state, verdicts, alive, reports, now)
    _note_strays(state, reports, alive, verdicts, ends)
    counts = Counter(verdict.kind.value for verdict in verdicts.values())
    for number, verdict in verdicts.items():
        job = state.jobs[number]
        if verdict.kind is VerdictKind.ADOPTED and not _adopt(state, job, verdict.epoch, now, cause):
            counts["quarantined"] += 1
        elif verdict.kind is VerdictKind.ENDED:
            failure = Failure("EXIT", verdict.by) if verdict.state is JobState.FAILED else None
            ending.end(state, number, verdict.state, now, verdict.by, failure)
        elif verdict.kind is VerdictKind.UNKNOWN:
            _suspend(state, job, now, cause)
    for number in list(state.jobs.live):
        job = state.jobs[number]
        state.put_job(replace(job, revision=job.revision + _REVISIONS_SKIPPED))
    for gang in list(state.gangs.values()):
        if not reports.keys() >= set(gang.nodes):
            later = replace(gang, master_sequence=gang.master_sequence + _ORDERS_SKIPPED)
            state.put_gang(gang_orders.begin_anew(later))
    state.counters.restoring, state.reports, state.ends = None, {}, None
    state.nodes.next_silence_check = now
    for name, report in reports.items():
        state.dirty.wants[name] = None
        observation.observe(state, replace(report, finished=()), now, cause)
        follow_ended_strays(state, name, now, cause)
    for name in missing:
        state.dirty.wants[name] = None
    text = f"without {', '.join(missing)}" if missing else ""
    state.history(now, "cluster", "restore_settled", cause, text, **dict(sorted(counts.items())))


def _note_checkpoints(state: State, alive: _Living, over: Mapping[str, EndedGangs], now: float) -> None:
    for number in list(state.jobs.live):
        job = state.jobs[number]
        known = [part.checkpoint for parts in alive.get(job.uid, {}).values() for part in parts.values()]
        known += [part.checkpoint for parts in over.get(job.uid, {}).values() for part in parts.values()]
        newest = max([one for one in known if one is not None], key=lambda one: (one.epoch, one.step), default=None)
        if newest is not None and ending.is_newer(newest, job.checkpoint):
            ending.record(state, job, newest, now, f"epoch:{newest.epoch}")


def _forget_changed_sets(state: State, reports: _Reports, alive: _Living, verdicts: dict[int, Verdict]) -> None:
    """Forget time-slice groups that have changed since the copy was made, and mark all their gangs for adoption, which
    quarantines those that are time-sliced: daemons keep such gangs off each other's devices.

    A group has changed if its daemons know a newer matrix or do not know the group, or if a gang of it is not as
    stored. Such a gang leaves the database; the other gangs, if they stayed, would be given its devices while it still
    runs there. Gangs of which no node has reported anything stay in the group. Any other gang holds nothing on a node
    that has not reported, where a gang that stays may have the same devices; if the node comes back with it, it is
    stopped."""
    adopted = {verdict.epoch for verdict in verdicts.values() if verdict.kind is VerdictKind.ADOPTED}
    for number, node_set in list(state.gangs.sets.items()):
        is_heard = not reports.keys().isdisjoint(node_set.nodes)
        known = [rows.known for report in reports.values() for rows in report.rows if rows.node_set == number]
        epochs = {epoch for row in node_set.rows for epoch in row} & state.gangs.keys()
        is_same = max(known) <= node_set.newest.version if known else not is_heard
        if is_same and not epochs & adopted:
            continue
        for epoch in sorted(epochs):
            gang = state.gangs[epoch]
            job = state.jobs[gang.job]
            parts = alive.get(job.uid)
            if job.number not in verdicts or verdicts[job.number].kind is not VerdictKind.KEPT:
                continue
            if parts:
                # The job may be about to move into the group or out of it: it has the gang that may step.
                verdicts[job.number] = _adopt_as(newest_living(state, parts) or epoch)
            elif gang.intent is not GangIntent.STOP and reports.keys() >= set(gang.nodes):
                verdicts[job.number] = Verdict(VerdictKind.REQUEUED)
        kept = [epoch for epoch in sorted(epochs) if _is_kept(state, epoch, alive, verdicts)]
        _shrink_set(state, node_set, kept)
        for gang in [state.gangs[epoch] for epoch in sorted(epochs.difference(kept))]:
            if gang.node_set == number:
                pieces = tuple([piece if piece.claim.node in reports else _given_up(piece) for piece in gang.pieces])
                state.put_gang(replace(gang, node_set=0, pieces=pieces))


def _is_kept(state: State, epoch: int, alive: _Living, verdicts: Mapping[int, Verdict]) -> bool:
    gang = state.gangs[epoch]
    is_kept = gang.job in verdicts and verdicts[gang.job].kind is VerdictKind.KEPT
    return is_kept and gang.intent is not GangIntent.STOP and not alive.get(state.jobs[gang.job].uid)


def _shrink_set(state: State, node_set: TimesliceGroup, kept: Sequence[int]) -> None:
    state.forget_set(node_set.number)
    if not kept:
        return
    nodes = tuple(sorted({node for epoch in kept for node in state.gangs[epoch].nodes}))
    rows = tuple([own for row in node_set.newest.rows if (own := tuple([one for one in row if one in kept]))])
    leader = node_set.leader if node_set.leader in nodes else nodes[0]
    matrix = replace(node_set.newest, rows=rows or (tuple(kept),))
    state.put_set(replace(node_set, nodes=nodes, leader=leader, active=matrix, coming=None))


def _release_gangs(
    state: State, verdicts: Mapping[int, Verdict], alive: _Living, reports: _Reports, now: float
) -> None:
    """Release gangs of the database that their jobs no longer have: forget unreported ones, stop the rest."""
    for number, verdict in verdicts.items():
        if verdict.kind is VerdictKind.KEPT:
            continue
        job = state.jobs[number]
        taken = verdict.epoch if verdict.kind is VerdictKind.ADOPTED else 0
        for gang in state.gangs.of_job(number):
            there = alive.get(job.uid, {}).get(gang.epoch, {})
            if gang.epoch == taken:
                # Its parts are found anew.
                state.forget_gang(gang.epoch)
                continue
            sequence = max([gang.master_sequence, *(part.master_sequence for part in there.values())])
            left = replace(
                gang, master_sequence=sequence, pieces=tuple([_vacated(piece, there, reports) for piece in gang.pieces])
            )
            if all(piece.gone for piece in left.pieces) and gang_orders.holds_nothing(left):
                state.forget_gang(gang.epoch)
            else:
                state.put_gang(gang_orders.stop(left, now))
        if job.next_epoch or job.epoch != taken or (job.epoch and job.epoch not in state.gangs):
            kept = job.epoch if job.epoch in state.gangs and verdict.kind is not VerdictKind.ADOPTED else 0
            state.put_job(_waiting(replace(job, epoch=kept, next_epoch=0), now))


def _note_parts(state: State, alive: _Living, over: Mapping[str, EndedGangs], reports: _Reports) -> None:
    """Take the parts of gangs of the database as their nodes report them, before any gang is judged: other gangs may
    have the devices of a part that has ended, and share those of one that lives."""
    for gang in list(state.gangs.values()):
        uid = state.jobs[gang.job].uid
        there, ended = alive.get(uid, {}).get(gang.epoch, {}), over.get(uid, {}).get(gang.epoch, {})
        pieces = []
        for piece in gang.pieces:
            node = piece.claim.node
            part = there.get(node)
            if part is not None:
                pieces.append(_shared_as_described(piece, gang, part.newest_order))
            elif gang.intent is GangIntent.STOP or node in ended:
                pieces.append(_ended(piece, ended.get(node), reports))
            else:
                pieces.append(piece)
        state.put_gang(replace(gang, pieces=tuple(pieces)))


def _shared_as_described(piece: Piece, gang: Gang, order: StoredOrder | None) -> Piece:
    """Return the part with the shared devices of an order that is newer than the database's: each order that follows
    must name them as well, for the gangs that joined may still be there."""
    if order is None or order.master_sequence <= gang.master_sequence:
        return piece
    return gang_orders.shared(piece, order.claim.shared_mask)


def _ended(piece: Piece, end: FinishedGang | None, reports: _Reports) -> Piece:
    """Return the part as gone if its node reports. `end`: how it ended, where its node has a record of that. Without
    one it was to stop, and nothing starts it again."""
    if piece.gone and not piece.lost:
        return piece
    gone = _vacated(piece, {}, reports)
    return gone if end is None or piece.lost else replace(gone, outcome=end.outcome)


def _vacated(piece: Piece, there: Mapping[str, ObservedGang], reports: _Reports) -> Piece:
    node = piece.claim.node
    if node in there or node not in reports:
        return piece
    return _over(piece, "it was gone when the database was restored")


def _given_up(piece: Piece) -> Piece:
    return _over(piece, f"nodes/{piece.claim.node} had not reported when the database was restored")


def _over(piece: Piece, message: str) -> Piece:
    outcome = Outcome(OutcomeKind.UNKNOWN, message=message)
    return replace(piece, gone=True, lost=False, held=None, phase=ObservedPhase.ENDED, outcome=outcome)


def _waiting(job: JobRecord, now: float) -> JobRecord:
    """Return the job without a gang: pending, or suspended at CHECKPOINT."""
    if job.epoch:
        return job
    if job.state is JobState.SUSPENDED:
        storage = SuspendLevel.CHECKPOINT
        return replace(job, ending=None, suspended_level=storage)
    job = ending.clock_stopped(job, now)
    return replace(job, state=JobState.PENDING, pending_since=job.pending_since or now, ending=None)


def _note_strays(
    state: State, reports: _Reports, alive: _Living, verdicts: Mapping[int, Verdict], ends: Mapping[str, RecordedEnd]
) -> None:
    """Note each reported gang that the database lacks as a stray: quarantined, or to be stopped if it is over."""
    for name, report in reports.items():
        strays = []
        for observed in report.gangs:
            gang = state.gangs.get(observed.epoch)
            if gang is not None and state.jobs[gang.job].uid == observed.uid:
                continue
            job = state.jobs.get(observed.job)
            is_known = job is not None and job.uid == observed.uid and observed.job in verdicts
            kind = verdicts[observed.job].kind if is_known else None
            parts = alive.get(observed.uid, {}).get(observed.epoch, {"": observed})
            is_over = (
                kind in (VerdictKind.ENDED, VerdictKind.UNKNOWN, VerdictKind.KEPT)
                or (kind is VerdictKind.ADOPTED and not may_step(state, observed.epoch, parts))
                or observed.uid in ends
                or observed.epoch < newest_living(state, alive.get(observed.uid, {}))
            )
            is_final = job is not None and job.uid == observed.uid and job.state.is_finished
            note = "an attempt that is over" if is_over or is_final else _note_of(observed, job)
            if observed.phase is ObservedPhase.ENDED and (is_over or is_final or kind is VerdictKind.ADOPTED):
                continue
            strays.append(quarantine.stray_of(observed, not (is_over or is_final), note))
        node = state.nodes[name]
        if node.strays != tuple(strays):
            state.put_node(replace(node, strays=tuple(strays)))


def _note_of(observed: ObservedGang, job: JobRecord | None) -> str:
    if job is None:
        return "an unknown job"
    return "an unknown job under a known number" if job.uid != observed.uid else "an epoch of after the backup"


def _adopt(state: State, job: JobRecord, epoch: int, now: float, cause: str) -> bool:
    """Adopt the gang. Return False if it stays quarantined; then its job waits for an operator."""
    parts: dict[str, Stray] = quarantine.quarantined_parts(state, job.uid, epoch)
    taken: Gang | str = "nothing of it is there"
    if parts:
        taken = quarantine.adoptable_gang(state, job, epoch, parts, now)
    if isinstance(taken, Gang):
        quarantine.give_gang(state, job, taken, now, cause)
        return True
    state.put_job(replace(job, trouble=f"its gang of epoch {epoch} is quarantined: {taken}"))
    state.history(now, job, "adoption_refused", cause, taken, epoch=epoch)
    return False


def _suspend(state: State, job: JobRecord, now: float, cause: str) -> None:
    if job.state is not JobState.SUSPENDED or job.epoch:
        ending.end(state, job.number, JobState.SUSPENDED, now, END_UNKNOWN)
    # It was started, so what it waited for has come.
    state.put_job(replace(state.jobs[job.number], trouble=END_UNKNOWN, held=False, awaits=()))
    state.history(now, job, "end_not_known", cause, END_UNKNOWN)


def follow_ended_strays(state: State, name: str, now: float, cause: str) -> None:
    """Dismiss quarantined gangs of known jobs that have ended on all their nodes; end or suspend those jobs."""
    for stray in state.nodes[name].strays:
        job = state.jobs.get(stray.job)
        if not stray.quarantined or stray.phase is not ObservedPhase.ENDED or job is None or job.uid != stray.uid:
            continue
        parts = quarantine.quarantined_parts(state, stray.uid, stray.epoch)
        if any(part.phase is not ObservedPhase.ENDED for part in parts.values()):
            continue
        quarantine.dismiss(state, stray.uid, stray.epoch)
        if job.state.is_finished or job.ending is not None or job.epoch or quarantine.live_epochs(state, stray.uid):
            continue
        if all(part.outcome.kind is OutcomeKind.DONE for part in parts.values()):
            ending.end(state, job.number, JobState.SUCCEEDED, now, "every rank has finished")
        else:
            _suspend(state, job, now, cause)
