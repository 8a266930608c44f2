"""What daemons observe and what is wanted of them: `ganger.agent.v1` messages and the core's values.

Observed sets that a daemon sends in several calls, because they do not fit into one message.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final

from ganger.agent.v1 import agent_pb2
from ganger.v1 import job_pb2
from ganger.wire import errors, times
from ganger.wire import resource_messages as convert
from ganger.wire import resource_names as names
from ganger.wire.channels import PART_BYTES

from ganger_master.core import commands
from ganger_master.core.desired_projection import DesiredGang, DesiredSet, DesiredSlices, GangMember
from ganger_master.core.events import cut
from ganger_master.core.gang_model import GangIntent, ObservedPhase, Outcome, OutcomeKind, Restore, StoredOrder
from ganger_master.core.job_model import Capabilities
from ganger_master.core.job_spec import JobSpec
from ganger_master.rpc import job_messages
from ganger_master.rpc.job_messages import plain

# No quantum is fifty times as long as that.
_LONGEST_SWITCH_S: Final = 3600.0
# As many as a mask has bits.
_DEVICES_MOST: Final = 64
_CHECKPOINTS_MOST: Final = 16
_SEQUENCE_MOST: Final = (1 << 63) - 1
# No node has more memory: sums of such numbers still fit into a message.
_BYTES_MOST: Final = 1 << 50
# Characters of the list of a rank's cores.
_CORES_MOST: Final = 200
# No cluster ever gives so many ids.
_ID_MOST: Final = 1 << 53
# Characters of an outcome's message, which has the last lines of a log.
_OUTCOME_MOST: Final = 4_096
# Characters of a node's fault and of its source, and faults of a node.
_REASON_MOST: Final = 400
_SOURCE_MOST: Final = 40
_FAULTS_MOST: Final = 16
# Most bytes that a spec takes in its gang's message beyond its own.
_FIELD_BYTES: Final = 16
_INTENTS: Final[Mapping[GangIntent, agent_pb2.Intent.ValueType]] = {
    intent: agent_pb2.Intent.Value(f"INTENT_{intent.name}") for intent in GangIntent
}
_INTENTS_FROM_WIRE: Final = {value: intent for intent, value in _INTENTS.items()}
_PHASES_FROM_WIRE: Final = {
    agent_pb2.ObservedGang.Phase.Value(f"PHASE_{phase.name}"): phase
    for phase in ObservedPhase
    if phase is not ObservedPhase.NONE
}
_OUTCOMES_FROM_WIRE: Final = {agent_pb2.Outcome.KIND_UNSPECIFIED: OutcomeKind.NONE} | {
    agent_pb2.Outcome.Kind.Value(f"KIND_{kind.name}"): kind for kind in OutcomeKind if kind is not OutcomeKind.NONE
}


def open_session_from_wire(message: agent_pb2.CreateSessionRequest) -> commands.OpenSession:
    """Raises NameInvalid, RequestInvalid."""
    position = message.database_position
    ids = plain(position, "desired_version next_epoch next_job", lambda number: min(number, _ID_MOST))
    return commands.OpenSession(
        node=names.parse_node_name(message.node),
        configuration_set=convert.configuration_set_from_wire(message.configuration_set),
        capabilities=dict(message.capabilities),
        seen=commands.Marks(position.store, **ids),
        **plain(message, "machine_uuid boot_id rack fabric peer_address stream_address version storage_token"),
    )


def observe_from_wire(node: str, message: agent_pb2.ReconcileRequest) -> commands.Observe:
    """Raises NameInvalid, and RequestInvalid for numbers that nothing has and that would be reckoned with."""
    if (named := max([*message.device_faults, *message.device_warnings], default=0)) >= _DEVICES_MOST:
        raise errors.RequestInvalid(f"device {named} has a fault: a node has devices 0 to {_DEVICES_MOST - 1}")
    if any(gang.order.master_sequence > _SEQUENCE_MOST for gang in message.gangs):
        raise errors.RequestInvalid("an order with a number beyond 2^63 was never given")
    epochs = [gang.epoch for gang in message.gangs] + [gang.epoch for gang in message.finished]
    if max(epochs, default=0) >= _ID_MOST:
        raise errors.RequestInvalid("an epoch beyond 2^53 was never given")
    return commands.Observe(
        node=node,
        **plain(message, "session observation desired_version storage_proved"),
        gangs=tuple(observed_gang_from_wire(gang) for gang in message.gangs),
        device_faults=dict(message.device_faults),
        device_warnings={device: cut(why, _REASON_MOST) for device, why in message.device_warnings.items()},
        node_faults={cut(source, _SOURCE_MOST): cut(why, _REASON_MOST) for source, why in _faults(message)},
        rows=tuple([_observed_rows_from_wire(rows) for rows in message.slices]),
        finished=tuple([_finished_from_wire(gang) for gang in message.finished]),
    )


def _faults(message: agent_pb2.ReconcileRequest) -> list[tuple[str, str]]:
    return sorted(message.node_faults.items())[:_FAULTS_MOST]


def _finished_from_wire(message: agent_pb2.FinishedGang) -> commands.FinishedGang:
    return commands.FinishedGang(
        job=_job_number(message.job),
        **plain(message, "uid:job_uid epoch nodes has_stepped"),
        outcome=_outcome_from_wire(message.outcome),
        checkpoint=job_messages.checkpoint_from_wire(message.checkpoint) if message.HasField("checkpoint") else None,
    )


def _job_number(name: str) -> int:
    number = names.parse_job_name(name) if name else 0
    if number >= _ID_MOST:
        raise errors.RequestInvalid("a job's number beyond 2^53 was never given")
    return number


_PARKED: Final = "alone peak_device_bytes is_process_image"


def _order_from_wire(message: agent_pb2.ObservedGang) -> StoredOrder | None:
    """Return the order in it; None for one that this master cannot read, as one of a newer master."""
    order = message.newest_order
    intent = _INTENTS_FROM_WIRE.get(order.intent)
    if intent is None or not order.members:
        return None
    restore, parked = order.restore, order.restore.parked
    return StoredOrder(
        master_sequence=min(order.order.master_sequence, _SEQUENCE_MOST),
        intent=intent,
        claim=convert.claim_from_wire(order.claim),
        nodes=tuple([names.parse_node_name(member.node) for member in order.members]),
        level=job_messages.level_from_wire(order.level),
        stop_sequence=min(order.stop_sequence, _SEQUENCE_MOST),
        user=order.user,
        spec=_spec_from_wire(order),
        restore=Restore(restore.checkpoint_path, parked.epoch, restore.step, **plain(parked, _PARKED)),
        **plain(order, "threads checkpoint_request repin_request"),
        is_sliced=message.in_time_slices,
    )


def _spec_from_wire(order: agent_pb2.DesiredGang) -> JobSpec | None:
    try:
        return job_messages.spec_from_wire(order.spec)
    except errors.ApiError:
        return None


def _observed_rows_from_wire(message: agent_pb2.ObservedSlices) -> commands.ObservedSlices:
    switch_s = times.seconds(message.switch_duration)
    return commands.ObservedSlices(
        **plain(message, "node_set version known:known_version row:active_slice"),
        switch_s=switch_s if 0.0 <= switch_s < _LONGEST_SWITCH_S else 0.0,
        unable=tuple(message.unable_epochs),
    )


def desired_rows_to_wire(rows: DesiredSlices) -> agent_pb2.DesiredSlices:
    return agent_pb2.DesiredSlices(
        node_set=rows.node_set,
        version=rows.matrix.version,
        slices=[agent_pb2.Slice(epochs=row) for row in rows.matrix.rows],
        quantum=times.duration(rows.matrix.quantum_s),
        level=job_messages.level_to_wire(rows.matrix.level),
        members=[_member_to_wire(member) for member in rows.members],
        set_epoch=rows.set_epoch,
    )


_OBSERVED: Final = (
    "uid:job_uid epoch stop_sequence presumed:capabilities_presumed threads repin_done device_mask:claim_device_mask"
    " devices_idle has_stepped"
)


def observed_gang_from_wire(message: agent_pb2.ObservedGang) -> commands.ObservedGang:
    has_said = message.progress.step or message.progress.metrics
    return commands.ObservedGang(
        job=_job_number(message.job),
        **plain(message, _OBSERVED),
        phase=_PHASES_FROM_WIRE.get(message.phase, ObservedPhase.NONE),
        master_sequence=message.order.master_sequence,
        level=job_messages.level_from_wire(message.level),
        stop_step=min(message.stop_step, _SEQUENCE_MOST),
        pids=tuple(rank.pid for rank in sorted(message.ranks, key=lambda rank: rank.rank)),
        outcome=_outcome_from_wire(message.outcome),
        checkpoint=(job_messages.checkpoint_from_wire(message.checkpoint) if message.HasField("checkpoint") else None),
        peak_device_bytes=min(message.peak_device_bytes, _BYTES_MOST),
        capabilities=(
            job_messages.capabilities_from_wire(message.capabilities)
            if message.HasField("capabilities")
            else Capabilities()
        ),
        arena_bytes=min(message.arena_bytes, _BYTES_MOST),
        trouble=cut(message.trouble),
        cores=tuple([cut(text, _CORES_MOST) for text in message.cores]),
        residue_bytes=tuple([min(size, _BYTES_MOST) for size in message.residue_bytes[:_DEVICES_MOST]]),
        kept_memory_bytes=min(message.kept_memory_bytes, _BYTES_MOST),
        working_set_bytes=min(message.working_set_bytes, _BYTES_MOST),
        last_step_time=times.unix_s(message.last_step_time),
        first_step_time=times.unix_s(message.first_step_time),
        progress=job_messages.progress_from_wire(message.epoch, message.progress) if has_said else None,
        newest_order=_order_from_wire(message) if message.HasField("newest_order") else None,
    )


_DESIRED: Final = (
    "uid:job_uid epoch stop_sequence user threads checkpoint_request repin_request checkpoint_first kept_checkpoints"
    " attempt trial_memory_bytes"
)


def desired_gang_to_wire(gang: DesiredGang) -> agent_pb2.DesiredGang:
    """Return the gang without its spec, which is added to an answer where it is needed and there is room."""
    interval_s = gang.checkpoint_interval_s
    message = agent_pb2.DesiredGang(
        **plain(gang, _DESIRED),
        job=names.job_name(gang.job) if gang.job else "",
        order=agent_pb2.OrderKey(epoch=gang.epoch, master_sequence=gang.master_sequence),
        intent=_INTENTS[gang.intent],
        level=job_messages.level_to_wire(gang.level),
        claim=convert.claim_to_wire(gang.claim),
        members=[_member_to_wire(member) for member in gang.members],
        checkpoint_interval=times.duration(interval_s) if interval_s > 0 else None,
        grace=times.duration(gang.grace_s),
        idle_after=times.duration(gang.idle_after_s) if gang.idle_after_s else None,
        checkpoints_on_nodes=gang.on_nodes,
    )
    restore = gang.restore
    if restore.parked_epoch:
        members = [_member_to_wire(member) for member in restore.parked_members]
        parked = agent_pb2.ParkedState(epoch=restore.parked_epoch, members=members, **plain(restore, _PARKED))
        message.restore.parked.CopyFrom(parked)
        message.restore.step = restore.step
    elif restore.checkpoint_path:
        message.restore.checkpoint_path = restore.checkpoint_path
        message.restore.unreadable_paths.extend(restore.unreadable)
        message.restore.step = restore.step
    return message


def response_to_wire(
    desired: DesiredSet, observation: int, version: int, missing_specs: Collection[int] = ()
) -> agent_pb2.ReconcileResponse:
    """Return the answer to a daemon that has applied `version`. The set in it is complete. Specs are added while the
    answer is below PART_BYTES, those in `missing_specs` first; `later_specs` names the rest."""
    message = agent_pb2.ReconcileResponse(
        desired_version=desired.version,
        changed=desired.version != version,
        acknowledged_epochs=desired.acknowledged_epochs,
        observation=observation,
        describe_epochs=desired.describe,
    )
    if not message.changed:
        return message
    message.slices.extend(desired_rows_to_wire(rows) for rows in desired.rows)
    gangs = desired.gangs
    message.gangs.extend(map(desired_gang_to_wire, gangs))
    _add_specs(message, gangs, set(missing_specs))
    return message


def _add_specs(message: agent_pb2.ReconcileResponse, gangs: Sequence[DesiredGang], missing: Set[int]) -> None:
    places = [place for place, gang in enumerate(gangs) if gang.needs_spec and gang.spec is not None]
    places.sort(key=lambda place: gangs[place].epoch not in missing)
    room = PART_BYTES - message.ByteSize() - _FIELD_BYTES * len(places)
    for number, place in enumerate(places):
        gang = gangs[place]
        assert gang.spec is not None
        spec = job_messages.spec_to_wire(gang.spec, with_environment=True)
        room -= spec.ByteSize() + _FIELD_BYTES
        # Every answer has at least one, so that the daemon gets all in the end.
        if room < 0 and number:
            message.later_specs.extend([gangs[late].epoch for late in places[number:]])
            return
        message.gangs[place].spec.CopyFrom(spec)


def _member_to_wire(member: GangMember) -> agent_pb2.Member:
    return agent_pb2.Member(node=names.node_name(member.node), **plain(member, "peer_address stream_address ranks"))


def _outcome_from_wire(message: agent_pb2.Outcome) -> Outcome:
    return Outcome(
        _OUTCOMES_FROM_WIRE.get(message.kind, OutcomeKind.UNKNOWN),
        message.exit_code,
        message.rank,
        cut(message.message, _OUTCOME_MOST),
        tuple([job_messages.checkpoint_from_wire(one) for one in message.checkpoints[:_CHECKPOINTS_MOST]]),
        cut(message.node_fault, _REASON_MOST),
    )


def sample_time(progress: job_pb2.Progress, now: float) -> float:
    """A daemon's clock is not trusted beyond the present."""
    return min(times.unix_s(progress.time) or now, now)


# Most bytes of one node's parts: more than any node has, and little enough to keep.
_MOST_BYTES: Final = 64 * 1024 * 1024


@dataclass(slots=True)
class _Collected:
    session: str
    observation: int
    gangs: list[agent_pb2.ObservedGang] = field(default_factory=list)
    size_bytes: int = 0


class ObservedParts:
    """The parts that each node has sent so far."""

    def __init__(self) -> None:
        self._by_node: dict[str, _Collected] = {}

    def complete(self, node: str, request: agent_pb2.ReconcileRequest) -> bool:
        """Return whether the observed set of a call is complete; then its earlier parts are merged into the request.
        Parts of another observation are dropped. Raises RequestInvalid for a set that is too large."""
        known = self._by_node.pop(node, None)
        if known is not None and (known.session, known.observation) != (request.session, request.observation):
            known = None
        if not request.has_more:
            if known is not None:
                request.gangs.MergeFrom(known.gangs)
            return True
        part = known or _Collected(request.session, request.observation)
        part.gangs.extend(request.gangs)
        part.size_bytes += request.ByteSize()
        if part.size_bytes > _MOST_BYTES:
            raise errors.RequestInvalid(f"the observed set of nodes/{node} takes more than {_MOST_BYTES} bytes")
        self._by_node[node] = part
        return False
