"""Messages of live jobs for planners, from and to the core's values.

They contain what ranking and placement need, and leave out commands, environments and observations.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from typing import Final

from ganger.cluster.resources import LocalityLevel, Role
from ganger.job_state import JobState
from ganger.v1 import job_pb2, scheduling_pb2
from ganger.wire import resource_messages as convert
from ganger.wire import resource_names as names
from ganger.wire import times
from google.protobuf.timestamp_pb2 import Timestamp
from msgspec.structs import replace

from ganger_master.core.gang_model import Gang, GangIntent, GangPhase, GangRole, Piece
from ganger_master.core.job_model import JobRecord, JobSpec
from ganger_master.rpc import job_messages

_STATES: Final = job_messages.STATES_FROM_WIRE
_PHASES_TO_WIRE: Final = {phase: job_pb2.Gang.Phase.Value(f"PHASE_{phase.name}") for phase in GangPhase}
_PHASES: Final = {number: phase for phase, number in _PHASES_TO_WIRE.items()}


# A number; the expression reads each sign once. A word longer than _LONGEST_NUMBER is not one.
_NUMBER: Final = re.compile(r"[+-]?(?:\d++(?:\.\d*+)?|\.\d++)(?:e[+-]?\d++)?", re.ASCII | re.IGNORECASE)
_LONGEST_NUMBER: Final = 64


def live_job_to_wire(job: JobRecord, gang: Gang | None, into: scheduling_pb2.LiveJob) -> None:
    """`gang`: that of the job's present epoch; `into`: an empty message that is to hold it."""
    into.job = job.name
    into.revision = job.revision
    into.user = job.user
    into.state = job_messages.STATES[job.state]
    # What it asks for now: a planner need not know why.
    spec = replace(job.spec, command=(), labels={}, roles=job.shape.roles)
    job_messages.spec_to_wire(spec, with_environment=False, into=into.spec)
    _put_time(into.create_time, job.create_time)
    if job.pending_since:
        _put_time(into.pending_time, job.pending_since)
    if job.start_time:
        _put_time(into.start_time, job.start_time)
    if job.run_seconds:
        into.run_duration.CopyFrom(times.duration(job.run_seconds))
    if job.running_since:
        _put_time(into.running_since_time, job.running_since)
    into.signature = signature_of(job.user, job.spec.command, job.spec.roles)
    into.is_ending = job.ending is not None
    into.is_moving = job.next_epoch != 0
    into.peak_device_bytes = job.peak_device_bytes
    into.used_device_bytes = job.used_device_bytes
    if job.move_pause_seconds:
        into.move_pause.CopyFrom(times.duration(job.move_pause_seconds))
    if job.capabilities.known:
        into.capabilities.CopyFrom(job_messages.capabilities_to_wire(job.capabilities))
    if gang is not None:
        _gang_to_wire(gang, into.gang)


def live_job_from_wire(message: scheduling_pb2.LiveJob) -> tuple[JobRecord, Gang | None]:
    """Values of which only what the message carries is meant. Raises RequestInvalid for what does not exist."""
    number = names.parse_job_name(message.job)
    gang = _gang_from_wire(number, message.gang) if message.HasField("gang") else None
    spec: JobSpec = job_messages.spec_from_wire(message.spec)
    job = JobRecord(
        number,
        "",
        message.user,
        spec,
        _time(message.create_time),
        state=_STATES.get(message.state, JobState.PENDING),
        revision=message.revision,
        pending_since=_time(message.pending_time) if message.HasField("pending_time") else 0.0,
        start_time=_time(message.start_time) if message.HasField("start_time") else 0.0,
        run_seconds=times.seconds(message.run_duration),
        running_since=_time(message.running_since_time) if message.HasField("running_since_time") else 0.0,
        epoch=0 if gang is None else gang.epoch,
        # Not which: only that there is another.
        next_epoch=1 if message.is_moving else 0,
        peak_device_bytes=message.peak_device_bytes,
        used_device_bytes=message.used_device_bytes,
        move_pause_seconds=times.seconds(message.move_pause) if message.HasField("move_pause") else 0.0,
        # Nor how it ends: only that it does.
        ending=JobState.PENDING if message.is_ending else None,
    )
    if message.HasField("capabilities"):
        job = replace(job, capabilities=job_messages.capabilities_from_wire(message.capabilities))
    return job, gang


@lru_cache(4096)
def signature_of(user: str, command: tuple[str, ...], roles: tuple[Role, ...]) -> int:
    """The same for a series: one program with other numbers (`--lr 0.1`), on as many devices."""
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
    into.phase = _PHASES_TO_WIRE[gang.phase]
    into.parked_level = job_messages.level_to_wire(gang.park_level)
    into.is_stopping = gang.intent is GangIntent.STOP
    _put_time(into.create_time, gang.create_time)
    if gang.since:
        _put_time(into.phase_time, gang.since)
    into.node_set = gang.node_set
    into.claims.extend(convert.claims_to_wire(gang.claims))
    into.held.extend(convert.claims_to_wire(piece.held for piece in gang.pieces if piece.held is not None))


def _gang_from_wire(number: int, message: scheduling_pb2.LiveGang) -> Gang:
    held = {claim.node: claim for claim in convert.parked_claims_from_wire(message.held)}
    pieces = tuple([Piece(claim, held.get(claim.node)) for claim in convert.claims_from_wire(message.claims)])
    parked = job_messages.level_from_wire(message.parked_level)
    return Gang(
        message.epoch,
        number,
        GangRole.ACTIVE,
        _PHASES.get(message.phase, GangPhase.RUNNING),
        pieces,
        # Planners do not read the locality of a running gang.
        LocalityLevel.CLUSTER,
        _time(message.create_time),
        intent=GangIntent.STOP if message.is_stopping else GangIntent.PARK if parked else GangIntent.RUN,
        park_level=parked,
        since=_time(message.phase_time) if message.HasField("phase_time") else 0.0,
        node_set=message.node_set,
    )


def _put_time(message: Timestamp, unix_seconds: float) -> None:
    message.CopyFrom(times.timestamp(unix_seconds))


def _time(message: Timestamp) -> float:
    return times.unix_seconds(message)
