"""What job schedulers and the planner ask for: a gang, giving one back, a plan. Verdicts are answers, not errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from ganger.resources.reasons import Kind, Reason, Refusal

from ganger_master.approval.verdicts import Approved
from ganger_master.core import answers, commands, events, queue
from ganger_master.core.answers import Answer, JobAnswer, Refused
from ganger_master.core.arenas import per_device
from ganger_master.core.capacity import WAITS_FOR_PIECES, forbidden_nodes, judge, judge_change, level_of, rules
from ganger_master.core.checks import check_move, check_suspend, find_job, unfinished
from ganger_master.core.events import Event
from ganger_master.core.model import GangPhase, Intent, Job, JobState, SuspendLevel
from ganger_master.core.state import State

Result: TypeAlias = tuple[tuple[Event, ...], Answer]

_CANDIDATES_LIMIT = 16
_CHANGES_LIMIT = 10_000
_TRIES_LIMIT = 3


def request_gang(state: State, command: commands.RequestGang, now: float) -> Result:
    job = find_job(state, command.number)
    if isinstance(job, Refused):
        return (), job
    if len(command.candidates) > _CANDIDATES_LIMIT or any(not claims for claims in command.candidates):
        return (), Refused("REQUEST_INVALID", f"at most {_CANDIDATES_LIMIT} candidates, none of them empty")
    if command.mode != "EXCLUSIVE":
        return (), Refused("NOT_SUPPORTED", f"mode {command.mode} is not built yet")
    refusal = _check_asked(state, job, command)
    if refusal is not None:
        return (), _rejected(state, job, (refusal,), False)
    turn = queue.valid_turn(state, job.number, command.turn, now) if command.turn else None
    if command.turn and turn is None:
        late = Refusal(Reason.OUT_OF_TURN, job=job.name)
        return (), _rejected(state, job, (late,), False)
    cause = f"scheduler:{command.scheduler}"
    if not command.candidates:
        refusals = why_waiting(state, job, command.blockers)
        version = min(command.view_version or state.view.version, state.view.version)
        event = events.GangRefused(now, cause, job.number, refusals, command.turn, False, version)
        return (event,), _rejected(state, job, refusals, False)
    rank = state.queue_rank(job.number) if turn is not None else 0
    verdict = judge(state, job, command.candidates, rank, now)
    if isinstance(verdict, Approved):
        approved = events.GangApproved(now, cause, job.number, tuple(verdict.claims), verdict.level)
        return (approved,), answers.Approved(job.number, 0, 0, 0, verdict.candidate)
    # Another candidate may fit; what is kept for others stays kept.
    is_conflict = verdict.refusals[0].reason in WAITS_FOR_PIECES or verdict.refusals[0].reason.kind is Kind.RACE
    kept = is_conflict and turn is not None and turn.tries + 1 < _TRIES_LIMIT
    refused = events.GangRefused(
        now, cause, job.number, tuple(verdict.refusals), command.turn, kept, state.view.version
    )
    rejected = answers.Rejected(job.number, tuple(verdict.refusals), tuple(verdict.rows), state.view.version, kept)
    return (refused,), rejected


def why_waiting(state: State, job: Job, blockers: Sequence[Refusal]) -> tuple[Refusal, ...]:
    """The scheduler's blockers, after what only the master knows."""
    own = rules(state, job)
    return (*own, *(blockers or ()), *(forbidden_nodes(state, job) if not own else ()))


def release_gang(state: State, command: commands.ReleaseGang, now: float) -> Result:
    job = unfinished(state, command.number)
    if isinstance(job, Refused):
        return (), job
    if job.epoch != command.epoch or job.next_epoch or job.ending is not None or job.state is not JobState.HOLDING:
        return (), Refused(
            "REVISION_CONFLICT", f"{job.name} does not hold epoch {command.epoch}", {"epoch": str(job.epoch)}
        )
    return (events.GangReleased(now, f"scheduler:{command.scheduler}", job.number),), JobAnswer(job.number)


def propose_plan(state: State, command: commands.ProposePlan, now: float) -> Result:
    """Changes of one non-zero `together` are approved as one. Each is judged against the state as it is: changes of a
    plan that need each other's pieces come in two plans."""
    if len(command.changes) > _CHANGES_LIMIT:
        return (), Refused("PLAN_INVALID", f"at most {_CHANGES_LIMIT} changes")
    numbers = [change.number for change in command.changes]
    if len(set(numbers)) != len(numbers):
        return (), Refused("PLAN_INVALID", "one change per job")
    unbuilt = next((change.kind for change in command.changes if change.kind not in _BUILT), None)
    if unbuilt is not None:
        return (), Refused("NOT_SUPPORTED", f"{unbuilt.lower()} changes are not built yet")
    judged = [_judge_change(state, change, command.proposer, now) for change in command.changes]
    spoiled = {
        change.together
        for change, one in zip(command.changes, judged, strict=True)
        if change.together and not isinstance(one, tuple)
    }
    happening: list[Event] = []
    verdicts = []
    taken: dict[str, int] = {}
    for change, one in zip(command.changes, judged, strict=True):
        if not isinstance(one, tuple):
            verdicts.append(answers.ChangeAnswer(change.number, False, 0, (one,)))
        elif change.together in spoiled or _overlaps(change, taken):
            spoiled.update({change.together} - {0})
            detail = "another change of the plan, or of the same id, stands in the way"
            refusal = Refusal(Reason.STALE_REVISION, detail=detail, job=f"jobs/{change.number}")
            verdicts.append(answers.ChangeAnswer(change.number, False, 0, (refusal,)))
        else:
            for claim in change.claims:
                taken[claim.node] = taken.get(claim.node, 0) | claim.device_mask
            happening.extend(one)
            verdicts.append(answers.ChangeAnswer(change.number, True, 0))
    return tuple(happening), answers.PlanAnswer(tuple(verdicts), state.view.version)


_BUILT = frozenset({"START", "MOVE", "SUSPEND", "RESUME", "CORES"})


def _overlaps(change: commands.Change, taken: dict[str, int]) -> bool:
    """Two changes that claim on one node are not approved in one plan: fit was judged for each alone."""
    return any(claim.node in taken for claim in change.claims)


def _check_asked(state: State, job: Job, command: commands.RequestGang) -> Refusal | None:
    if command.revision != job.revision:
        figures = {"revision": job.revision, "given": command.revision}
        return Refusal(Reason.STALE_REVISION, figures, job=job.name)
    if not state.is_waiting(job):
        return Refusal(Reason.WRONG_STATE, job=job.name, detail=f"the job is {job.state.value} and waits for no gang")
    return None


def _rejected(state: State, job: Job, refusals: tuple[Refusal, ...], kept: bool) -> answers.Rejected:
    return answers.Rejected(job.number, refusals, (), state.view.version, kept)


def _judge_change(state: State, change: commands.Change, proposer: str, now: float) -> tuple[Event, ...] | Refusal:
    job = unfinished(state, change.number)
    if isinstance(job, Refused):
        return Refusal(Reason.WRONG_STATE, detail=job.message, job=f"jobs/{change.number}")
    if change.revision != job.revision:
        return Refusal(Reason.STALE_REVISION, {"revision": job.revision, "given": change.revision}, job=job.name)
    if not job.spec.preemptible and change.kind in ("MOVE", "SUSPEND"):
        return Refusal(Reason.WRONG_STATE, detail="the job is not to be suspended or moved by plans", job=job.name)
    match change.kind:
        case "START":
            return _judge_start(state, job, change, proposer, now)
        case "MOVE":
            return _judge_move(state, job, change, proposer, now)
        case "CORES":
            return _judge_cores(state, job, change, proposer, now)
        case "SUSPEND":
            return _judge_suspend(state, job, change, proposer, now)
        case _:
            return _judge_resume(state, job, change, proposer, now)


def _judge_start(
    state: State, job: Job, change: commands.Change, proposer: str, now: float
) -> tuple[Event, ...] | Refusal:
    if not state.is_waiting(job) or not change.claims:
        return Refusal(Reason.WRONG_STATE, job=job.name)
    verdict = judge(state, job, (change.claims,), 0, now)
    if isinstance(verdict, Approved):
        return (events.GangApproved(now, proposer, job.number, tuple(verdict.claims), verdict.level),)
    return verdict.refusals[0]


def _judge_move(
    state: State, job: Job, change: commands.Change, proposer: str, now: float
) -> tuple[Event, ...] | Refusal:
    claims = check_move(state, job, (), change.claims)
    if isinstance(claims, Refused):
        return _refusal_of(job, claims)
    return (events.MoveBegun(now, proposer, job.number, claims, level_of(state, claims)),)


def _judge_cores(
    state: State, job: Job, change: commands.Change, proposer: str, now: float
) -> tuple[Event, ...] | Refusal:
    gang = state.gangs.get(job.epoch)
    if gang is None or gang.intent is not Intent.RUN or job.next_epoch or job.ending is not None:
        return Refusal(Reason.WRONG_STATE, job=job.name)
    held = [(c.node, c.device_mask, c.memory_bytes, c.arena_bytes, c.tasks) for c in gang.claims]
    if [(c.node, c.device_mask, c.memory_bytes, c.arena_bytes, c.tasks) for c in change.claims] != held:
        return Refusal(Reason.CLAIM_MISMATCH, job=job.name, detail="only the cores may differ from what is held")
    refusals = judge_change(state, job, change.claims, holding=gang.claims, retune=True, arena=per_device(gang))
    if refusals:
        return refusals[0]
    return (events.CoresChanged(now, proposer, job.number, change.claims, False),)


def _judge_suspend(
    state: State, job: Job, change: commands.Change, proposer: str, now: float
) -> tuple[Event, ...] | Refusal:
    gang = state.gangs.get(job.epoch)
    if job.state is not JobState.HOLDING or gang is None or job.ending is not None:
        return Refusal(Reason.WRONG_STATE, job=job.name)
    level = check_suspend(state, job, change.level)
    if isinstance(level, Refused):
        return _refusal_of(job, level)
    if level is SuspendLevel.NONE or (gang.intent is Intent.PARK and gang.park_level == level):
        return ()
    return (events.JobSuspended(now, proposer, job.number, level, by_plan=True),)


def _judge_resume(
    state: State, job: Job, change: commands.Change, proposer: str, now: float
) -> tuple[Event, ...] | Refusal:
    gang = state.gangs.get(job.epoch)
    if job.state is not JobState.HOLDING or gang is None or gang.intent is not Intent.PARK or job.next_epoch:
        return Refusal(Reason.WRONG_STATE, job=job.name)
    if gang.park_level is SuspendLevel.CHECKPOINT or job.ending is not None:
        return Refusal(Reason.WRONG_STATE, job=job.name, detail="its checkpoint is being written")
    if gang.phase is GangPhase.PARKED:
        held = tuple(piece.held for piece in gang.pieces if piece.held is not None)
        refusals = judge_change(state, job, gang.claims, holding=held, retune=True, arena=per_device(gang))
        if refusals:
            return refusals[0]
    return (events.JobResumed(now, proposer, job.number),)


def _refusal_of(job: Job, refused: Refused) -> Refusal:
    unavailable = refused.reason == "LEVEL_UNAVAILABLE"
    reason = Reason.LEVEL_UNAVAILABLE if unavailable else Reason.WRONG_STATE
    return Refusal(reason, detail=refused.message, job=job.name)
