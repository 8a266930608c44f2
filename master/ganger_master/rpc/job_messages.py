"""Jobs with their array membership, gangs and specs: the core's values and `ganger.v1` messages, both ways."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

from ganger.cluster.refusals import Refusal
from ganger.cluster.resources import Locality
from ganger.job_state import JobState
from ganger.protocol.gang_orders import Mechanism
from ganger.v1 import array_pb2, job_pb2, job_service_pb2
from ganger.wire import errors, times
from ganger.wire import resource_messages as convert
from ganger.wire import resource_names as names
from ganger.wire.errors import SpecInvalid, Violation
from msgspec import Struct

from ganger_master.core.array_model import LOSS, STEP, Membership, RuleKind, StopRule
from ganger_master.core.colocation import offload_obstacle
from ganger_master.core.desired_projection import ranks_by_claim
from ganger_master.core.ending import runs_since
from ganger_master.core.events import cut
from ganger_master.core.gang_model import Gang, GangPhase
from ganger_master.core.job_model import (
    Capabilities,
    Checkpoint,
    JobMetric,
    JobProgress,
    JobRecord,
    RefusedMechanism,
    SuspendLevel,
)
from ganger_master.core.job_spec import Agent, Condition, Dependency, JobSpec, RoleProgram, Update, resolved
from ganger_master.core.lifecycle import trouble_of
from ganger_master.runtime.publication import Sample

_KINDS: Final = {kind: array_pb2.StopRule.Kind.Value(f"KIND_{kind.name}") for kind in RuleKind}
_KINDS_FROM_WIRE: Final = {number: kind for kind, number in _KINDS.items()}
_MECHANISMS: Final = {int(mechanism): mechanism for mechanism in Mechanism}
# Levels that a daemon may report as missing, and the characters of each reason.
_MISSING_MOST: Final = 8
_WHY_MOST: Final = 200
# More metrics than a page has room for.
_METRICS_MOST: Final = 16
_NAME_MOST: Final = 64


@cache
def _pairs(names: str, is_from_wire: bool) -> tuple[tuple[str, str], ...]:
    parts = [name.partition(":") for name in names.split()]
    pairs = [(here, there or here) for here, _, there in parts]
    return tuple([(there, here) for here, there in pairs] if is_from_wire else pairs)


def plain(source: object, names: str, convert: Callable[[Any], Any] | None = None) -> dict[str, Any]:
    """Return values of a struct of the core, or of its message, by their names in the other one.

    source: the struct, or the message. names: of the fields, as "step detail", or "concern:stall_reason" where the
    message has another name than the struct. convert: None: values are the same in both."""
    pairs = _pairs(names, not isinstance(source, (Struct, Sample)))
    if convert is not None:
        return {there: convert(getattr(source, here)) for here, there in pairs}
    return {there: getattr(source, here) for here, there in pairs}


def mechanism_to_wire(mechanism: Mechanism) -> job_pb2.Mechanism.ValueType:
    return job_pb2.Mechanism.ValueType(mechanism)


def mechanism_from_wire(number: int) -> Mechanism:
    """Return the mechanism; unspecified for one that this program does not have."""
    return _MECHANISMS.get(number, Mechanism.UNSPECIFIED)


_CAPABILITIES: Final = (
    "pause:can_pause offload:can_offload checkpoint:can_checkpoint resize:can_resize reshard:can_reshard"
    " resize_divides presumed:is_presumed"
)


def capabilities_to_wire(value: Capabilities) -> job_pb2.Capabilities:
    return job_pb2.Capabilities(
        **plain(value, _CAPABILITIES),
        **plain(value, "can_move offload_by role_divides"),
        missing=dict(value.missing),
        mechanism=mechanism_to_wire(value.mechanism),
        refused_mechanisms=[
            job_pb2.RefusedMechanism(mechanism=mechanism_to_wire(one.mechanism), reason=one.reason)
            for one in value.refused_mechanisms
        ],
    )


def capabilities_from_wire(message: job_pb2.Capabilities) -> Capabilities:
    missing = sorted(message.missing.items())[:_MISSING_MOST]
    return Capabilities(
        **plain(message, _CAPABILITIES),
        missing={level[:_WHY_MOST]: cut(why, _WHY_MOST) for level, why in missing},
        known=True,
        mechanism=mechanism_from_wire(message.mechanism),
        role_divides=tuple(message.role_divides[: _ENTRIES_MOST["roles"]]),
        offload_by=cut(message.offload_by, _WHY_MOST),
        refused_mechanisms=tuple(
            RefusedMechanism(mechanism_from_wire(one.mechanism), cut(one.reason, _WHY_MOST))
            for one in message.refused_mechanisms[: len(Mechanism)]
        ),
    )


def membership_to_wire(job: JobRecord, array: Membership) -> array_pb2.ArrayMembership:
    return array_pb2.ArrayMembership(
        array=f"arrays/{array.array}",
        member=array_pb2.ArrayMember(index=array.index, parameters=array.parameters),
        rule=None if array.rule is None else rule_to_wire(array.rule),
        held=job.held,
        rungs=map(_number_to_wire, job.rungs),
        **plain(array, "size at_once:max_concurrent"),
    )


def _number_to_wire(value: float | None) -> float:
    return math.nan if value is None else value


def metrics_to_wire(metrics: Sequence[JobMetric]) -> list[job_pb2.Metric]:
    return [job_pb2.Metric(name=one.name, value=_number_to_wire(one.value), step=one.step) for one in metrics]


def metrics_from_wire(progress: job_pb2.Progress) -> tuple[JobMetric, ...]:
    """Return the metrics; a value that is no number is None, so that it does not become durable."""
    return tuple(
        JobMetric(one.name[:_NAME_MOST], one.value if math.isfinite(one.value) else None, one.step)
        for one in progress.metrics[:_METRICS_MOST]
    )


_RULE: Final = "metric maximise:higher_is_better resource first:first_rung factor every:rung_interval bound"


def rule_to_wire(rule: StopRule) -> array_pb2.StopRule:
    return array_pb2.StopRule(kind=_KINDS[rule.kind], **plain(rule, _RULE))


def rule_from_wire(message: array_pb2.StopRule) -> StopRule:
    kind = _KINDS_FROM_WIRE.get(message.kind)
    if kind is None:
        known = ", ".join(one.name for one in RuleKind)
        raise SpecInvalid(
            "the array cannot be accepted", violations=[Violation("rule.kind", f"must be one of {known}")]
        )
    given = plain(message, _RULE)
    # Zero factors, and names that are empty, are those that were not given.
    defaults: dict[str, Any] = {"metric": LOSS, "resource": STEP, "factor": StopRule(kind).factor}
    return StopRule(kind, **{name: value or defaults.get(name, value) for name, value in given.items()})


STATES: Final[Mapping[JobState, job_pb2.Job.State.ValueType]] = {
    state: job_pb2.Job.State.Value(f"STATE_{state.name}") for state in JobState
}
STATES_FROM_WIRE: Final = {number: state for state, number in STATES.items()}
PHASES: Final[Mapping[GangPhase, job_pb2.Gang.Phase.ValueType]] = {
    phase: job_pb2.Gang.Phase.Value(f"PHASE_{phase.name}") for phase in GangPhase
}
_LEVELS: Final = {
    level: job_pb2.SuspendLevel.Value(f"SUSPEND_LEVEL_{level.name if level else 'UNSPECIFIED'}")
    for level in SuspendLevel
}
_SLICE_STATES: Final[Mapping[bool | None, job_pb2.Gang.SliceState.ValueType]] = {
    None: job_pb2.Gang.SLICE_STATE_UNSPECIFIED,
    True: job_pb2.Gang.SLICE_STATE_ACTIVE,
    False: job_pb2.Gang.SLICE_STATE_INACTIVE,
}
_STOP_GRACE_S: Final = 60.0
_ANYWHERE: Final = Locality()
_COPIES_MOST: Final = 4
_ENTRIES_MOST: Final = {
    "command": 1_000,
    "environment": 10_000,
    "roles": 100,
    "labels": 100,
    "role_programs": 100,
    "dependencies": 100,
}
# The largest number of steps, samples or bytes that a store can hold.
_COUNT_MOST: Final = (1 << 63) - 1
_LEVELS_FROM_WIRE: Final[Mapping[int, SuspendLevel]] = {number: level for level, number in _LEVELS.items()}


def level_to_wire(level: SuspendLevel) -> job_pb2.SuspendLevel.ValueType:
    return _LEVELS[level]


def level_from_wire(level: int) -> SuspendLevel:
    """Return the level; unspecified for a level that this program does not have."""
    return _LEVELS_FROM_WIRE.get(level, SuspendLevel.NONE)


def spec_from_wire(message: job_pb2.JobSpec) -> JobSpec:
    """Return the spec, judged only for its size: the core reports all violations at once. Raises RequestInvalid and
    SpecInvalid."""
    for name, most in _ENTRIES_MOST.items():
        if len(getattr(message, name)) > most:
            raise errors.SpecInvalid(
                "the job cannot be accepted", violations=[errors.Violation(f"spec.{name}", f"at most {most}")]
            )
    return JobSpec(
        **plain(message, _SPEC),
        command=tuple(message.command),
        roles=tuple([convert.role_from_wire(role) for role in message.roles]),
        environment=dict(message.environment),
        role_programs=tuple(
            [RoleProgram(one.role, tuple(one.command), dict(one.environment)) for one in message.role_programs]
        ),
        locality=convert.locality_from_wire(message.locality) if message.HasField("locality") else _ANYWHERE,
        time_limit_s=times.seconds(message.time_limit) if message.HasField("time_limit") else None,
        preemptible=message.preemptible if message.HasField("preemptible") else True,
        checkpoint_interval_s=times.seconds(message.checkpoint_interval),
        labels=dict(message.labels),
        agent=Agent.NONE if message.agent == job_pb2.JobSpec.AGENT_NONE else Agent.AUTOMATIC,
        deadline=times.unix_s(message.deadline),
        movable=message.movable if message.HasField("movable") else True,
        weight=message.weight or 1.0,
        least_decrease=message.convergence.least_decrease,
        converged_passes=message.convergence.passes or 1,
        mechanism=mechanism_from_wire(message.mechanism),
        stop_grace_s=times.seconds(message.stop_grace) if message.HasField("stop_grace") else _STOP_GRACE_S,
        dependencies=tuple([_dependency_from_wire(one) for one in message.dependencies]),
    )


_CONDITIONS: Final = {one: job_pb2.Dependency.Condition.Value(f"CONDITION_{one.name}") for one in Condition}
_CONDITIONS_FROM_WIRE: Final = {number: one for one, number in _CONDITIONS.items()}


def _dependency_from_wire(message: job_pb2.Dependency) -> Dependency:
    condition = _CONDITIONS_FROM_WIRE.get(message.condition)
    if condition is None:
        known = ", ".join(one.name for one in Condition)
        wrong = errors.Violation("spec.dependencies", f"the condition must be one of {known}")
        raise errors.SpecInvalid("the job cannot be accepted", violations=[wrong])
    return Dependency(condition, message.number)


def spec_to_wire(spec: JobSpec, *, with_environment: bool, into: job_pb2.JobSpec | None = None) -> job_pb2.JobSpec:
    """Return the message of a spec, in the empty message `into` if there is one. What is at its default is not set: on
    the wire that is the same, and to set a field takes time."""
    message = job_pb2.JobSpec() if into is None else into
    if spec.array is not None:
        spec = resolved(spec)
    message.command.extend(spec.command)
    _put(message, spec, _PROGRAM)
    if with_environment:
        message.environment.update(spec.environment)
    if spec.labels:
        message.labels.update(spec.labels)
    if spec.mechanism:
        message.mechanism = mechanism_to_wire(spec.mechanism)
    if spec.stop_signal:
        message.stop_grace.CopyFrom(times.duration(spec.stop_grace_s))
    message.agent = job_pb2.JobSpec.AGENT_NONE if spec.agent is Agent.NONE else job_pb2.JobSpec.AGENT_AUTOMATIC
    for role in spec.roles:
        convert.role_to_wire(role, message.roles.add())
    for program in spec.role_programs:
        environment = program.environment if with_environment else None
        message.role_programs.add(role=program.role, command=program.command, environment=environment)
    for dependency in spec.dependencies:
        message.dependencies.add(condition=_CONDITIONS[dependency.condition], number=dependency.number)
    convert.locality_to_wire(spec.locality, message.locality)
    _put(message, spec, _RESOURCES)
    _rules_to_wire(spec, message)
    return message


# Fields that a spec has under the same name in its message: of the program, of what it needs, and of what ends it.
_PROGRAM: Final = "display_name working_directory scheduler distributed is_move_required closes_connections stop_signal"
_RESOURCES: Final = "device_type partition nodes gpu_memory_bytes gpus_min gpus_max checkpoint_copies"
_RULES: Final = "priority max_failures is_scheduled_at_epochs"
_SPEC: Final = f"{_PROGRAM} {_RESOURCES} {_RULES}"


def _put(message: job_pb2.JobSpec, spec: JobSpec, names: str) -> None:
    for name, _ in _pairs(names, False):
        if value := getattr(spec, name):
            setattr(message, name, value)


def _rules_to_wire(spec: JobSpec, message: job_pb2.JobSpec) -> None:
    """Fill in how the job is ordered among others, which changes it permits, and what ends it."""
    _put(message, spec, _RULES)
    if spec.weight != 1.0:
        message.weight = spec.weight
    message.preemptible = spec.preemptible
    if not spec.movable:
        message.movable = False
    if spec.checkpoint_interval_s:
        message.checkpoint_interval.CopyFrom(times.duration(spec.checkpoint_interval_s))
    if spec.time_limit_s is not None:
        message.time_limit.CopyFrom(times.duration(spec.time_limit_s))
    if spec.deadline:
        message.deadline.CopyFrom(times.timestamp(spec.deadline))
    if spec.least_decrease:
        message.convergence.least_decrease = spec.least_decrease
        message.convergence.passes = spec.converged_passes


def update_from_wire(message: job_service_pb2.JobUpdate) -> Update:
    """Return the update, which is not yet validated as a spec. Raises RequestInvalid."""
    same = ("display_name", "priority", "device_type", "partition", "memory_bytes", "millicores_per_gpu")
    given: dict[str, Any] = {field.name: value for field, value in message.ListFields() if field.name in same}
    return Update(
        **given,
        time_limit_s=times.seconds(message.time_limit) if message.HasField("time_limit") else None,
        locality=convert.locality_from_wire(message.locality) if message.HasField("locality") else None,
    )


def job_to_wire(
    job: JobRecord,
    gang: Gang | None,
    destination: Gang | None,
    *,
    blockers: tuple[Refusal, ...] = (),
    queue_rank: int = 0,
    sample: Sample | None = None,
    beside: Sequence[int] = (),
    has_turn: bool | None = None,
    with_environment: bool = False,
) -> job_pb2.Job:
    message = job_pb2.Job(
        **plain(job, "name uid user revision failures preemptions"),
        state=STATES[job.state],
        suspended_level=_LEVELS[job.suspended_level],
        queue_rank=queue_rank,
        trouble=job.trouble or trouble_of(gang),
        attempt=job.attempt if job.starts or gang is not None else 0,
    )
    spec_to_wire(job.spec_now, with_environment=with_environment, into=message.spec)
    message.create_time.CopyFrom(times.timestamp(job.create_time))
    if job.start_time:
        message.start_time.CopyFrom(times.timestamp(job.start_time))
    if job.end_time:
        message.end_time.CopyFrom(times.timestamp(job.end_time))
    if job.run_s:
        message.run_duration.CopyFrom(times.duration(job.run_s))
    if since := _running_since(job, gang):
        message.running_since_time.CopyFrom(times.timestamp(since))
    for blocker in blockers:
        convert.refusal_to_wire(blocker, message.blockers.add())
    if job.checkpoint is not None:
        message.checkpoint.CopyFrom(checkpoint_to_wire(job.checkpoint))
    if job.capabilities.known:
        message.capabilities.CopyFrom(capabilities_to_wire(job.capabilities))
        if job.capabilities.offload and (why := offload_obstacle(job, gang)):
            message.capabilities.can_offload = False
            message.capabilities.missing["OFFLOAD"] = why
    if job.spec.array is not None:
        message.array.CopyFrom(membership_to_wire(job, job.spec.array))
    if job.state in (JobState.CANCELLED, JobState.STOPPED):
        message.end_reason = job.reason
    if job.progress is not None or sample is not None:
        message.progress.CopyFrom(_latest_progress_to_wire(job, sample))
        if not job.state.is_finished:
            epoch = max([one.epoch for one in (job.progress, sample) if one is not None])
            _as_it_stands(message.progress, job, gang, epoch, is_waiting=has_turn is False)
    if gang is not None and not job.state.is_finished:
        message.gang.CopyFrom(gang_to_wire(job, gang, destination, beside, has_turn))
    if job.failure is not None:
        failure = job_pb2.Failure(**plain(job.failure, "reason message exit_code rank epoch"))
        message.failure.CopyFrom(failure)
    return message


def _running_since(job: JobRecord, gang: Gang | None) -> float:
    """Return since when the job runs; before its first step, since when its daemons report its processes. Zero while it
    does not run, or a daemon has not acknowledged the order to run."""
    if job.running_since or gang is None:
        return job.running_since
    is_acknowledged = all(piece.master_sequence >= gang.master_sequence for piece in gang.pieces)
    return runs_since(job, gang) if is_acknowledged else 0.0


def _latest_progress_to_wire(job: JobRecord, sample: Sample | None) -> job_pb2.Progress:
    """Return the figures of the later step: of the last sample, or of where the job rested or ended. A sample taken
    before the job came to rest still has what only samples have, as a concern."""
    kept = job.progress
    if sample is None:
        return job_pb2.Progress() if kept is None else _kept_progress_to_wire(kept)
    if kept is not None and job.state.is_finished and (kept.epoch, kept.step) >= (sample.epoch, sample.step):
        return _kept_progress_to_wire(kept)
    progress = progress_to_wire(sample)
    if kept is not None and (kept.epoch, kept.step) > (sample.epoch, sample.step):
        progress.ClearField("step_time")
        progress.step, progress.samples, progress.steps_per_s = kept.step, kept.samples, 0.0
        progress.loss = _number_to_wire(kept.loss)
    return progress


def _as_it_stands(progress: job_pb2.Progress, job: JobRecord, gang: Gang | None, epoch: int, is_waiting: bool) -> None:
    """Correct figures of an attempt that is over, or at rest: steps that were lost are not progress, and a job that
    does not run has no rate. `epoch`: of the attempt that reported them. `is_waiting`: for its time slice."""
    if gang is None or is_waiting or gang.phase in (GangPhase.PARKED, GangPhase.STARTING):
        progress.steps_per_s = 0.0
    if gang is None:
        # It begins at its checkpoint, or anew.
        kept = 0 if job.checkpoint is None else job.checkpoint.step
    elif epoch < gang.epoch:
        progress.steps_per_s = 0.0
        kept = gang.restore.step
    else:
        return
    if progress.step > kept:
        progress.step = kept
        progress.ClearField("samples")
        progress.loss = math.nan


def gang_to_wire(
    job: JobRecord, gang: Gang, destination: Gang | None, beside: Sequence[int] = (), has_turn: bool | None = None
) -> job_pb2.Gang:
    """Return the message of a gang. `has_turn`: None if it is not time-sliced, or no node has reported its slice."""
    pids, cores = pids_and_cores(job, gang)
    idle = gang.idle
    return job_pb2.Gang(
        epoch=gang.epoch,
        phase=PHASES[gang.phase],
        claims=convert.claims_to_wire(gang.claims),
        level=convert.level_to_wire(gang.level),
        parked_level=_LEVELS[gang.park_level],
        move_claims=[] if destination is None else convert.claims_to_wire(destination.claims),
        pids=pids,
        cores=cores,
        stop_step=gang.stop_step,
        start_time=times.timestamp(gang.create_time),
        colocated_jobs=map(names.job_name, beside),
        slice_state=_SLICE_STATES[has_turn],
        idle=None
        if idle is None
        else job_pb2.IdleDevices(
            since=times.timestamp(idle.since),
            park_time=times.timestamp(idle.park_time) if idle.park_time else None,
            park_refusal=idle.park_refusal,
        ),
    )


def pids_and_cores(job: JobRecord, gang: Gang) -> tuple[list[int], list[str]]:
    """Return the process id and the cores of each rank; zero and empty where they are not known."""
    by_piece = ranks_by_claim(job.spec.roles, gang.claims)
    world = sum([len(ranks) for ranks in by_piece])
    pids, cores = [0] * world, [""] * world
    for piece, ranks in zip(gang.pieces, by_piece, strict=True):
        for rank, pid in zip(ranks, piece.pids, strict=False):
            pids[rank] = pid
        for rank, text in zip(ranks, piece.cores, strict=False):
            cores[rank] = text
    return pids, cores


def checkpoint_to_wire(checkpoint: Checkpoint) -> job_pb2.Checkpoint:
    created = times.timestamp(checkpoint.create_time) if checkpoint.create_time else None
    return job_pb2.Checkpoint(
        **plain(checkpoint, "step epoch path size_bytes"),
        create_time=created,
        nodes=map(names.node_name, checkpoint.nodes),
    )


def checkpoint_from_wire(message: job_pb2.Checkpoint) -> Checkpoint:
    return Checkpoint(
        min(message.step, _COUNT_MOST),
        message.epoch,
        message.path,
        min(message.size_bytes, _COUNT_MOST),
        times.unix_s(message.create_time),
        tuple(map(names.parse_node_name, message.nodes[:_COPIES_MOST])),
    )


def progress_from_wire(epoch: int, message: job_pb2.Progress) -> JobProgress:
    """Return the progress of an ended attempt. The core sets its time when it receives the first report."""
    loss = message.loss if math.isfinite(message.loss) else None
    waited = min(1.0, max(0.0, message.data_wait_share))
    metrics = metrics_from_wire(message)
    step, samples = min(message.step, _COUNT_MOST), min(message.samples, _COUNT_MOST)
    return JobProgress(epoch, step, samples, loss, data_wait_share=waited, metrics=metrics)


def _kept_progress_to_wire(progress: JobProgress) -> job_pb2.Progress:
    return job_pb2.Progress(
        **plain(progress, "step samples data_wait_share"),
        loss=_number_to_wire(progress.loss),
        time=times.timestamp(progress.time),
        metrics=metrics_to_wire(progress.metrics),
    )


SAMPLE: Final = (
    "step samples steps_per_second:steps_per_s loss training_epoch training_epochs working_set_bytes used_memory_bytes"
    " least_memory_bytes trial_memory_bytes"
)
EVALUATED: Final = "evaluated:batches evaluated_in_row:batches_in_row"


def progress_to_wire(sample: Sample) -> job_pb2.Progress:
    message = job_pb2.Progress(
        **plain(sample, SAMPLE),
        **plain(sample, "data_wait_share concern:stall_reason device_use:device_utilization"),
        **plain(sample, "refault_bytes_per_s"),
        time=times.timestamp(sample.time),
        step_time=times.timestamp(sample.step_time) if sample.step_time else None,
        first_step_time=times.timestamp(sample.since_time) if sample.since_time else None,
        metrics=metrics_to_wire(sample.metrics),
    )
    if sample.evaluated_time:
        evaluated_time = times.timestamp(sample.evaluated_time)
        message.evaluation.CopyFrom(job_pb2.Evaluation(**plain(sample, EVALUATED), time=evaluated_time))
    return message
