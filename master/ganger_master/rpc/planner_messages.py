"""What master and planner send each other: live jobs and plans, as messages and as the core's values, both ways.

Live jobs contain what ranking and placement need, and leave out commands, environments and observations.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, TypeAlias, TypedDict, assert_never

from ganger.cluster.resources import LocalityLevel, Role
from ganger.job_state import JobState
from ganger.v1 import job_pb2, job_service_pb2, scheduling_pb2, usage_pb2
from ganger.wire import errors, times
from ganger.wire import resource_messages as convert
from ganger.wire import resource_names as names
from msgspec.structs import replace

from ganger_master.core import commands
from ganger_master.core.accounting import Limits, Owner, UserUsage
from ganger_master.core.explain import RoomInProgress
from ganger_master.core.gang_model import Gang, GangIntent, GangPhase, GangRole, Piece
from ganger_master.core.job_model import JobRecord
from ganger_master.core.plan_changes import (
    CURVE_POINTS,
    NO_PURPOSE,
    CoresChange,
    CoresCurve,
    CurvePoint,
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
from ganger_master.core.tenancy import NO_TERMS, PRIORITY_LIMIT, PartitionTerms, Team
from ganger_master.planner.remaining_time import Calibration, RemainingTime
from ganger_master.rpc import job_messages
from ganger_master.rpc.job_messages import plain

_STATES: Final = job_messages.STATES_FROM_WIRE
_PHASES: Final = {number: phase for phase, number in job_messages.PHASES.items()}


# A number; the expression reads each sign once. A word longer than _LONGEST_NUMBER is not one.
_NUMBER: Final = re.compile(r"[+-]?(?:\d++(?:\.\d*+)?|\.\d++)(?:e[+-]?\d++)?", re.ASCII | re.IGNORECASE)
_LONGEST_NUMBER: Final = 64


def teams_to_wire(teams: Mapping[str, Team]) -> list[usage_pb2.Team]:
    return [usage_pb2.Team(name=name, users=team.users, weight=team.weight) for name, team in teams.items()]


def teams_from_wire(messages: Iterable[usage_pb2.Team]) -> dict[str, Team]:
    """Return teams by name, without their limits."""
    return {message.name: Team(tuple(message.users), message.weight) for message in messages}


def limits_to_wire(limits: Limits) -> list[scheduling_pb2.Limit]:
    return [
        *[scheduling_pb2.Limit(**owner._asdict(), gpus=gpus) for owner, gpus in limits.by_owner.items()],
        *[scheduling_pb2.Limit(partition=name, is_per_job=True, gpus=gpus) for name, gpus in limits.per_job.items()],
    ]


def limits_from_wire(messages: Iterable[scheduling_pb2.Limit]) -> Limits:
    by_owner, per_job = {}, {}
    for one in messages:
        if one.is_per_job:
            per_job[one.partition] = one.gpus
        else:
            by_owner[Owner(one.user if one.HasField("user") else None, one.team, one.partition)] = one.gpus
    return Limits(by_owner, per_job)


def use_to_wire(usage: UserUsage) -> usage_pb2.DecayedUse:
    return usage_pb2.DecayedUse(
        user=usage.user,
        time=times.timestamp(usage.time),
        gpu_seconds=usage.decayed_gpu_s,
        running_gpus=usage.gpus,
    )


def use_from_wire(message: usage_pb2.DecayedUse) -> UserUsage:
    """Return the use without its days."""
    gpus, gpu_s = _finite(message.running_gpus), _finite(message.gpu_seconds)
    return UserUsage(message.user, times.unix_s(message.time), gpus, gpu_s)


# Times of a job that are set: in the record, in the message, and how each is made of the other.
_TIMES: Final[Sequence[tuple[str, Any, Callable[[float], Any], Callable[[Any], float]]]] = (
    ("create_time", "create_time", times.timestamp, times.unix_s),
    ("pending_since", "pending_time", times.timestamp, times.unix_s),
    ("start_time", "start_time", times.timestamp, times.unix_s),
    ("running_since", "running_since_time", times.timestamp, times.unix_s),
    ("run_s", "run_duration", times.duration, times.seconds),
    ("move_pause_s", "move_pause", times.duration, times.seconds),
)


def live_job_to_wire(job: JobRecord, gang: Gang | None, into: scheduling_pb2.LiveJob) -> None:
    """Write a live job into the empty message `into`. `gang`: that of the job's present epoch."""
    into.job, into.revision, into.user = job.name, job.revision, job.user
    into.peak_device_bytes, into.used_device_bytes = job.peak_device_bytes, job.used_device_bytes
    into.working_set_bytes = job.working_set_bytes
    into.state = job_messages.STATES[job.state]
    # What it requests now: a planner does not need the reason.
    spec = replace(job.spec, command=(), labels={}, roles=job.shape.roles, partition=job.partition.name)
    job_messages.spec_to_wire(spec, with_environment=False, into=into.spec)
    if (limit := job.time_limit_s) is not None:
        into.spec.time_limit.CopyFrom(times.duration(limit))
    into.partition_priority, into.is_protected = job.partition.priority, not job.partition.preemptible
    for own, name, to_wire, _ in _TIMES:
        if value := getattr(job, own):
            getattr(into, name).CopyFrom(to_wire(value))
    into.signature = signature_of(job.user, job.spec.all_words, job.spec.roles)
    into.is_ending = job.ending is not None
    into.is_moving = job.next_epoch != 0
    if job.capabilities.known:
        into.capabilities.CopyFrom(job_messages.capabilities_to_wire(job.capabilities))
    if gang is not None:
        _gang_to_wire(gang, into.gang)


def live_job_from_wire(message: scheduling_pb2.LiveJob) -> tuple[JobRecord, Gang | None]:
    """Return the parts of a job that the message carries; other fields mean nothing. Raises RequestInvalid."""
    number = names.parse_job_name(message.job)
    gang = _gang_from_wire(number, message.gang) if message.HasField("gang") else None
    moments: dict[str, Any] = {"create_time": 0.0}
    moments |= {own: from_wire(getattr(message, name)) for own, name, _, from_wire in _TIMES if message.HasField(name)}
    spec = job_messages.spec_from_wire(message.spec)
    job = JobRecord(
        number,
        "",
        spec=spec,
        partition=_terms_from_wire(spec.partition, message),
        state=_STATES.get(message.state, JobState.PENDING),
        **plain(message, "revision user peak_device_bytes used_device_bytes working_set_bytes"),
        **moments,
        epoch=0 if gang is None else gang.epoch,
        # Not which: only that there is another.
        next_epoch=1 if message.is_moving else 0,
        # Nor how it ends: only that it does.
        ending=JobState.PENDING if message.is_ending else None,
    )
    if message.HasField("capabilities"):
        job = replace(job, capabilities=job_messages.capabilities_from_wire(message.capabilities))
    return job, gang


def _terms_from_wire(name: str, message: scheduling_pb2.LiveJob) -> PartitionTerms:
    # No partition has a larger priority; sums with it fit into the planner's columns.
    priority = min(message.partition_priority, PRIORITY_LIMIT)
    return PartitionTerms(name, priority, not message.is_protected) if name else NO_TERMS


@lru_cache(4096)
def signature_of(user: str, command: tuple[str, ...], roles: tuple[Role, ...]) -> int:
    """Return the signature of a series of jobs: one program with other numbers (`--lr 0.1`), on as many devices."""
    words = [_without_number(word) for word in command]
    shape = [(role.name, role.tasks, role.shape.gpus) for role in roles]
    digest = hashlib.blake2b(repr((user, words, shape)).encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _without_number(word: str) -> str:
    """Return the word with "#" for its number: the whole word, or what follows its last equals sign."""
    name, equals, value = word.rpartition("=")
    is_number = len(value) <= _LONGEST_NUMBER and _NUMBER.fullmatch(value) is not None
    return f"{name}{equals}#" if is_number else word


def _gang_to_wire(gang: Gang, into: scheduling_pb2.LiveGang) -> None:
    into.epoch = gang.epoch
    into.phase = job_messages.PHASES[gang.phase]
    into.parked_level = job_messages.level_to_wire(gang.park_level)
    into.is_stopping = gang.intent is GangIntent.STOP
    into.is_handing_over = gang.intent is GangIntent.HAND_OVER
    into.create_time.CopyFrom(times.timestamp(gang.create_time))
    if gang.since:
        into.phase_time.CopyFrom(times.timestamp(gang.since))
    into.node_set = gang.node_set
    into.claims.extend(convert.claims_to_wire(gang.claims))
    into.held.extend(convert.claims_to_wire(gang.held))


def _gang_from_wire(number: int, message: scheduling_pb2.LiveGang) -> Gang:
    held = {claim.node: claim for claim in convert.parked_claims_from_wire(message.held)}
    pieces = tuple([Piece(claim, held.get(claim.node)) for claim in convert.claims_from_wire(message.claims)])
    return Gang(
        message.epoch,
        number,
        GangRole.ACTIVE,
        _PHASES.get(message.phase, GangPhase.RUNNING),
        pieces,
        # Planners do not read the locality of a running gang.
        LocalityLevel.CLUSTER,
        times.unix_s(message.create_time),
        intent=_intent_from_wire(message),
        park_level=job_messages.level_from_wire(message.parked_level),
        since=times.unix_s(message.phase_time),
        node_set=message.node_set,
    )


def _intent_from_wire(message: scheduling_pb2.LiveGang) -> GangIntent:
    if message.is_stopping:
        return GangIntent.STOP
    if message.is_handing_over:
        return GangIntent.HAND_OVER
    return GangIntent.PARK if message.parked_level else GangIntent.RUN


_ROWS_MOST: Final = 1_000
# Of what a plan, or a change, is said to be for.
REASON_MOST: Final = 1_000
# A remaining time beyond is not shown as one.
_LONGEST_S: Final = 10.0 * 365 * 86_400
# Of what people are told of a change.
_DETAIL_MOST: Final = 500
# Of a policy's name, which is shown to people.
_POLICY_MOST: Final = 100
_GOALS: Final = {goal: scheduling_pb2.Purpose.Goal.Value(f"GOAL_{goal.value or 'UNSPECIFIED'}") for goal in Goal}
_GOALS_FROM_WIRE: Final = {number: goal for goal, number in _GOALS.items()}


# Other phases of one curve.
_PHASES_MOST: Final = 4


class _Common(TypedDict):
    """The fields of every change."""

    together: int
    reason: str
    purpose: Purpose


def plan_from_wire(message: scheduling_pb2.Plan) -> commands.ProposePlan:
    """Return the plan, which is not yet judged. Raises PlanInvalid and RequestInvalid."""
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
    kept = message.kept_places.kept_places
    if max(len(kept), len(message.findings), len(message.cores_curves)) > commands.KEPT_PLACES_LIMIT:
        most = f"{commands.KEPT_PLACES_LIMIT} places, and reports as many findings and curves"
        raise errors.PlanInvalid(f"a plan keeps at most {most}")
    claims = max(sum([_claims_in(change) for change in message.changes]), sum([len(one.claims) for one in kept]))
    if claims > commands.CLAIMS_LIMIT:
        raise errors.PlanInvalid(f"a plan has at most {commands.CLAIMS_LIMIT} claims, this one {claims}")
    kept_places = None
    if message.HasField("kept_places"):
        kept_places = tuple(
            [commands.KeepPlace(names.parse_job_name(one.job), convert.claims_from_wire(one.claims)) for one in kept]
        )
    return commands.ProposePlan(
        tuple([_change_from_wire(change) for change in message.changes]),
        message.reason[:REASON_MOST],
        line=line,
        kept_places=kept_places,
        findings=tuple([_finding_from_wire(one) for one in message.findings]),
        curves=tuple([_curve_from_wire(one) for one in message.cores_curves]),
    )


def remaining_times_to_wire(
    found: Sequence[RemainingTime], calibration: Calibration, now: float
) -> list[scheduling_pb2.JobRemainingTime]:
    """Return the messages of remaining times, as of `now` in Unix seconds."""
    return [
        scheduling_pb2.JobRemainingTime(
            job=names.job_name(one.number),
            remaining_time=job_pb2.RemainingTime(
                expected=times.duration(min(one.value_s, _LONGEST_S)),
                low=times.duration(min(one.low_s, _LONGEST_S)),
                high=times.duration(one.high_s) if one.high_s < _LONGEST_S else None,
                is_guess=one.is_guess,
                time=times.timestamp(now),
                judged_ranges=calibration.judged,
                held_ranges=calibration.held,
            ),
        )
        for one in found[: commands.LINE_LIMIT]
    ]


def remaining_times_from_wire(
    messages: Sequence[scheduling_pb2.JobRemainingTime],
) -> dict[int, job_pb2.RemainingTime]:
    """Return remaining times by job number. Raises PlanInvalid and RequestInvalid."""
    if len(messages) > commands.LINE_LIMIT:
        raise errors.PlanInvalid(f"a plan has at most {commands.LINE_LIMIT} remaining times, this one {len(messages)}")
    return {names.parse_job_name(one.job): one.remaining_time for one in messages}


def change_to_wire(change: PlanChange, reason: str = "") -> scheduling_pb2.Change:
    """Return the message of a change of any kind."""
    message = scheduling_pb2.Change(
        job=names.job_name(change.number),
        revision=change.revision,
        group=change.together,
        reason=reason or change.reason,
    )
    match change:
        case StartChange() | MoveChange() | CoresChange() | ResizeChange():
            getattr(message, change.kind.lower()).claims.extend(convert.claims_to_wire(change.claims))
        case ResumeChange():
            message.resume.SetInParent()
        case SliceChange():
            row = message.slice
            row.node_set = names.node_set_name(change.node_set) if change.node_set else ""
            row.slices.extend(change.rows)
            row.claims.extend(convert.claims_to_wire(change.claims))
            row.quantum.CopyFrom(times.duration(change.quantum_s))
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
    into.pause.CopyFrom(times.duration(purpose.pause_s))
    into.detail = purpose.detail


def on_the_way_to_wire(one: RoomInProgress) -> job_service_pb2.MigrationStep:
    message = job_service_pb2.MigrationStep(
        job=names.job_name(one.number),
        from_nodes=[names.node_name(node) for node in one.source],
        to_nodes=[names.node_name(node) for node in one.destination],
        phase=job_messages.PHASES[one.phase],
    )
    purpose_to_wire(one.purpose, message.purpose)
    return message


def kept_place_to_wire(place: commands.KeepPlace) -> scheduling_pb2.KeptPlace:
    return scheduling_pb2.KeptPlace(job=names.job_name(place.number), claims=convert.claims_to_wire(place.claims))


def finding_to_wire(finding: TrialFinding) -> scheduling_pb2.Finding:
    kept = scheduling_pb2.Finding.VERDICT_KEPT if finding.kept else scheduling_pb2.Finding.VERDICT_REVERTED
    return scheduling_pb2.Finding(
        job=names.job_name(finding.number),
        goal=_GOALS[finding.goal],
        verdict=kept,
        **plain(finding, "gain deviation:gain_deviation detail"),
    )


_AMOUNT_MOST: Final = 1 << 50
_AMOUNTS: Final = "enough_millicores trial_millicores enough_memory_bytes trial_memory_bytes"
_CURVE: Final = "sweet_point sweet_low:sweet_point_low sweet_high:sweet_point_high fit_error"


def curve_to_wire(curve: CoresCurve) -> scheduling_pb2.CoresCurve:
    return scheduling_pb2.CoresCurve(
        job=names.job_name(curve.number),
        points=map(_point_to_wire, curve.points),
        fitted=map(_point_to_wire, curve.fitted),
        **plain(curve, f"{_CURVE} {_AMOUNTS} phase"),
        memory_points=map(_point_to_wire, curve.memory_points),
        tried=times.duration(curve.tried_s),
        lost=times.duration(curve.lost_s),
        other_phases=map(curve_to_wire, curve.others),
    )


def _point_to_wire(point: CurvePoint) -> scheduling_pb2.CurvePoint:
    return scheduling_pb2.CurvePoint(**plain(point, "cores rate:steps_per_s is_inherited memory_bytes"))


def _claims_in(message: scheduling_pb2.Change) -> int:
    kind = message.WhichOneof("change")
    return 0 if kind is None else len(getattr(getattr(message, kind), "claims", ()))


_ClaimsChange: TypeAlias = StartChange | MoveChange | CoresChange | ResizeChange
_WITH_CLAIMS: Final[dict[str, type[_ClaimsChange]]] = {
    "start": StartChange,
    "move": MoveChange,
    "cores": CoresChange,
    "resize": ResizeChange,
}


def _change_from_wire(message: scheduling_pb2.Change) -> PlanChange:
    number, revision = names.parse_job_name(message.job), message.revision
    common = _Common(
        together=message.group,
        reason=message.reason[:REASON_MOST],
        purpose=_purpose_from_wire(message.purpose) if message.HasField("purpose") else NO_PURPOSE,
    )
    match message.WhichOneof("change"):
        case "start" | "move" | "cores" | "resize" as kind:
            claims = convert.claims_from_wire(getattr(message, kind).claims)
            return _WITH_CLAIMS[kind](number, revision, claims, **common)
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


def _curve_from_wire(message: scheduling_pb2.CoresCurve, is_outer: bool = True) -> CoresCurve:
    others = message.other_phases[: _PHASES_MOST * is_outer]
    return CoresCurve(
        names.parse_job_name(message.job),
        tuple([_point_from_wire(one) for one in message.points[:CURVE_POINTS]]),
        tuple([_point_from_wire(one) for one in message.fitted[:CURVE_POINTS]]),
        **plain(message, _CURVE, _finite),
        **plain(message, _AMOUNTS, lambda amount: min(amount, _AMOUNT_MOST)),
        tried_s=max(0.0, times.seconds(message.tried)),
        lost_s=max(0.0, times.seconds(message.lost)),
        phase=message.phase[:_POLICY_MOST],
        others=tuple([_curve_from_wire(one, is_outer=False) for one in others]),
        memory_points=tuple([_point_from_wire(one) for one in message.memory_points[:CURVE_POINTS]]),
    )


def _point_from_wire(message: scheduling_pb2.CurvePoint) -> CurvePoint:
    rate = _finite(message.steps_per_s)
    return CurvePoint(_finite(message.cores), rate, message.is_inherited, min(message.memory_bytes, _AMOUNT_MOST))


def _finite(number: float) -> float:
    return number if math.isfinite(number) else 0.0
