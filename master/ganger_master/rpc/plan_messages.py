"""Plans as messages and as the core's values, both ways: changes, what they are for, places kept, what was found."""

from __future__ import annotations

import math
from typing import Final, TypedDict, assert_never

from ganger.v1 import job_service_pb2, scheduling_pb2
from ganger.wire import errors, times
from ganger.wire import resource_messages as convert
from ganger.wire import resource_names as names

from ganger_master.core import commands
from ganger_master.core.explain import OnTheWay
from ganger_master.core.plan_changes import (
    NO_PURPOSE,
    CoresChange,
    Goal,
    MoveChange,
    PlanChange,
    Purpose,
    ResizeChange,
    ResumeChange,
    SliceChange,
    StartChange,
    SuspendChange,
    TrialFinding,
)
from ganger_master.rpc import job_messages

_ROWS_MOST: Final = 1_000
# Of what a plan, or a change, is said to be for.
REASON_MOST: Final = 1_000
# Of what people are told of a change.
_DETAIL_MOST: Final = 500
# Of a policy's name, which is shown to people.
_POLICY_MOST: Final = 100
_GOALS: Final = {goal: scheduling_pb2.Purpose.Goal.Value(f"GOAL_{goal.value or 'UNSPECIFIED'}") for goal in Goal}
_GOALS_FROM_WIRE: Final = {number: goal for goal, number in _GOALS.items()}


class _Common(TypedDict):
    """The fields of every change."""

    together: int
    reason: str
    purpose: Purpose


def plan_from_wire(message: scheduling_pb2.Plan) -> commands.ProposePlan:
    """Not yet judged. Raises PlanInvalid and RequestInvalid."""
    if len(message.changes) > commands.CHANGES_LIMIT:
        many = f"a plan has at most {commands.CHANGES_LIMIT} changes, this one {len(message.changes)}"
        raise errors.PlanInvalid(f"{many}: propose the others in the next one")
    line = None
    if message.HasField("line"):
        if len(message.line.jobs) > commands.LINE_LIMIT:
            many = f"a line has at most {commands.LINE_LIMIT} jobs, this one {len(message.line.jobs)}"
            raise errors.PlanInvalid(many)
        numbers = tuple([names.parse_job_name(job) for job in message.line.jobs])
        line = commands.Line(numbers, message.line.policy[:_POLICY_MOST])
    kept = message.reservations.reservations
    if max(len(kept), len(message.findings)) > commands.PROMISES_LIMIT:
        raise errors.PlanInvalid(f"a plan keeps at most {commands.PROMISES_LIMIT} places, and reports as many findings")
    claims = max(sum([_claims_in(change) for change in message.changes]), sum([len(one.claims) for one in kept]))
    if claims > commands.CLAIMS_LIMIT:
        raise errors.PlanInvalid(f"a plan has at most {commands.CLAIMS_LIMIT} claims, this one {claims}")
    promises = None
    if message.HasField("reservations"):
        promises = tuple(
            [commands.Promise(names.parse_job_name(one.job), convert.claims_from_wire(one.claims)) for one in kept]
        )
    return commands.ProposePlan(
        tuple([_change_from_wire(change) for change in message.changes]),
        message.reason[:REASON_MOST],
        line=line,
        promises=promises,
        findings=tuple([_finding_from_wire(one) for one in message.findings]),
    )


def change_to_wire(change: PlanChange, reason: str = "") -> scheduling_pb2.Change:
    """A start, a move, a resize, a suspend, a resume, other cores or slices."""
    message = scheduling_pb2.Change(
        job=names.job_name(change.number),
        revision=change.revision,
        group=change.together,
        reason=reason or change.reason,
    )
    match change:
        case StartChange():
            message.start.claims.extend(convert.claims_to_wire(change.claims))
        case MoveChange():
            message.move.claims.extend(convert.claims_to_wire(change.claims))
        case CoresChange():
            message.cores.claims.extend(convert.claims_to_wire(change.claims))
        case ResizeChange():
            message.resize.claims.extend(convert.claims_to_wire(change.claims))
        case ResumeChange():
            message.resume.SetInParent()
        case SliceChange():
            row = message.slice
            row.node_set = names.node_set_name(change.node_set) if change.node_set else ""
            row.slices.extend(change.rows)
            row.claims.extend(convert.claims_to_wire(change.claims))
            row.quantum.CopyFrom(times.duration(change.quantum_seconds))
            row.level = job_messages.level_to_wire(change.level)
        case SuspendChange():
            message.suspend.level = job_messages.level_to_wire(change.level)
        case _:
            assert_never(change)
    if change.purpose != NO_PURPOSE:
        purpose_to_wire(change.purpose, message.purpose)
    return message


def purpose_to_wire(purpose: Purpose, into: scheduling_pb2.Purpose) -> None:
    into.goal = _GOALS[purpose.goal]
    if purpose.job:
        into.job = names.job_name(purpose.job)
    into.saved_gpu_s = purpose.saved
    into.pause.CopyFrom(times.duration(purpose.pause_seconds))
    into.detail = purpose.detail


def on_the_way_to_wire(one: OnTheWay) -> job_service_pb2.MigrationStep:
    message = job_service_pb2.MigrationStep(
        job=names.job_name(one.number),
        from_nodes=[names.node_name(node) for node in one.source],
        to_nodes=[names.node_name(node) for node in one.destination],
        phase=job_messages.PHASES[one.phase],
    )
    purpose_to_wire(one.purpose, message.purpose)
    return message


def promise_to_wire(promise: commands.Promise) -> scheduling_pb2.Reservation:
    return scheduling_pb2.Reservation(job=names.job_name(promise.number), claims=convert.claims_to_wire(promise.claims))


def finding_to_wire(finding: TrialFinding) -> scheduling_pb2.Finding:
    kept = scheduling_pb2.Finding.VERDICT_KEPT if finding.kept else scheduling_pb2.Finding.VERDICT_REVERTED
    return scheduling_pb2.Finding(
        job=names.job_name(finding.number),
        goal=_GOALS[finding.goal],
        verdict=kept,
        gain=finding.gain,
        gain_deviation=finding.deviation,
        detail=finding.detail,
    )


def _claims_in(message: scheduling_pb2.Change) -> int:
    kind = message.WhichOneof("change")
    return 0 if kind is None else len(getattr(getattr(message, kind), "claims", ()))


def _change_from_wire(message: scheduling_pb2.Change) -> PlanChange:
    number, revision = names.parse_job_name(message.job), message.revision
    common = _Common(
        together=message.group,
        reason=message.reason[:REASON_MOST],
        purpose=_purpose_from_wire(message.purpose) if message.HasField("purpose") else NO_PURPOSE,
    )
    match message.WhichOneof("change"):
        case "start":
            return StartChange(number, revision, convert.claims_from_wire(message.start.claims), **common)
        case "move":
            return MoveChange(number, revision, convert.claims_from_wire(message.move.claims), **common)
        case "cores":
            return CoresChange(number, revision, convert.claims_from_wire(message.cores.claims), **common)
        case "resize":
            return ResizeChange(number, revision, convert.claims_from_wire(message.resize.claims), **common)
        case "suspend":
            return SuspendChange(number, revision, job_messages.level_from_wire(message.suspend.level), **common)
        case "resume":
            return ResumeChange(number, revision, **common)
        case "slice":
            row = message.slice
            return SliceChange(
                number,
                revision,
                convert.claims_from_wire(row.claims),
                job_messages.level_from_wire(row.level),
                names.parse_node_set_name(row.node_set) if row.node_set else 0,
                tuple(sorted(set(row.slices[:_ROWS_MOST]))),
                times.seconds(row.quantum),
                **common,
            )
        case None:
            raise errors.PlanInvalid(f"a change of {message.job!r} says nothing")
        case kind:
            assert_never(kind)


def _purpose_from_wire(message: scheduling_pb2.Purpose) -> Purpose:
    return Purpose(
        _GOALS_FROM_WIRE.get(message.goal, Goal.NONE),
        names.parse_job_name(message.job) if message.job else 0,
        _finite(message.saved_gpu_s),
        max(0.0, times.seconds(message.pause)),
        message.detail[:_DETAIL_MOST],
    )


def _finding_from_wire(message: scheduling_pb2.Finding) -> TrialFinding:
    return TrialFinding(
        names.parse_job_name(message.job),
        _GOALS_FROM_WIRE.get(message.goal, Goal.NONE),
        message.verdict == scheduling_pb2.Finding.VERDICT_KEPT,
        _finite(message.gain),
        _finite(message.gain_deviation),
        message.detail[:_DETAIL_MOST],
    )


def _finite(number: float) -> float:
    return number if math.isfinite(number) else 0.0
