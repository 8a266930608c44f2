"""What job schedulers ask for: a gang, or to give one back. Verdicts are answers, not errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from ganger.cluster.refusals import Reason, Refusal, RefusalKind

from ganger_master.core import answers, commands, events
from ganger_master.core import placement_leases as queue
from ganger_master.core.answers import Answer, JobAnswer, Refused
from ganger_master.core.approval import CandidateApproval
from ganger_master.core.capacity import forbidden_nodes, judge, rules
from ganger_master.core.events import Event
from ganger_master.core.model import JobRecord, JobState
from ganger_master.core.preconditions import find_job, unfinished
from ganger_master.core.queue import WAITS_FOR_PIECES
from ganger_master.core.state import State
from ganger_master.policies import Places

Result: TypeAlias = tuple[tuple[Event, ...], Answer]

_CANDIDATES_LIMIT = 16
_TRIES_LIMIT = 3


def request_gang(state: State, command: commands.RequestGang, now: float) -> Result:
    job = find_job(state, command.number)
    if isinstance(job, Refused):
        return (), job
    if len(command.candidates) > _CANDIDATES_LIMIT or () in command.candidates:
        return (), Refused("REQUEST_INVALID", f"at most {_CANDIDATES_LIMIT} candidates, none of them empty")
    if any(claim.shared_mask for claims in command.candidates for claim in claims):
        return (), Refused("NOT_SUPPORTED", "only plans put gangs on devices of others")
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
    if isinstance(verdict, CandidateApproval):
        approved = events.GangApproved(now, cause, job.number, tuple(verdict.claims), verdict.level)
        return (approved,), answers.Approved(job.number, 0, 0, 0, verdict.candidate)
    # Another candidate may fit; what is kept for others stays kept.
    is_conflict = verdict.refusals[0].reason in WAITS_FOR_PIECES or verdict.refusals[0].reason.kind is RefusalKind.RACE
    kept = is_conflict and turn is not None and turn.tries + 1 < _TRIES_LIMIT
    refused = events.GangRefused(
        now, cause, job.number, tuple(verdict.refusals), command.turn, kept, state.view.version
    )
    rejected = answers.Rejected(job.number, tuple(verdict.refusals), tuple(verdict.rows), state.view.version, kept)
    return (refused,), rejected


def why_waiting(state: State, job: JobRecord, blockers: Sequence[Refusal]) -> tuple[Refusal, ...]:
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


def _check_asked(state: State, job: JobRecord, command: commands.RequestGang) -> Refusal | None:
    if state.policy.places is Places.PLANNER:
        text = f"the planner places all jobs: policy {state.settings.policy}"
        return Refusal(Reason.OUT_OF_TURN, detail=text, job=job.name)
    if command.revision != job.revision:
        figures = {"revision": job.revision, "given": command.revision}
        return Refusal(Reason.STALE_REVISION, figures, job=job.name)
    if not state.is_waiting(job):
        return Refusal(Reason.WRONG_STATE, job=job.name, detail=f"the job is {job.state.value} and waits for no gang")
    return None


def _rejected(state: State, job: JobRecord, refusals: tuple[Refusal, ...], kept: bool) -> answers.Rejected:
    return answers.Rejected(job.number, refusals, (), state.view.version, kept)
