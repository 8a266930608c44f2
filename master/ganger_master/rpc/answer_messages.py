"""Answers as messages: those of the core, also as errors; refused sessions of daemons; job arrays; lists in pages."""

from __future__ import annotations

import base64
import binascii
import math
import os
import pwd
import sys
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

import grpc
from ganger.v1 import array_pb2, job_pb2, job_service_pb2, node_pb2, scheduling_pb2, usage_pb2
from ganger.wire import errors, times
from ganger.wire import resource_messages as convert
from ganger.wire import resource_names as names
from ganger.wire.channels import PART_BYTES
from ganger.wire.errors import ApiError
from ganger.wire.methods import CallerIdentity
from google.protobuf.message import Message

from ganger_master.core import availability, colocation, commands
from ganger_master.core.answers import Approved, ChangeAnswer, Refused, RefusedError, Rejected
from ganger_master.core.array_model import MEMBERS_LIMIT, PARAMETERS_LIMIT, StopRule, best
from ganger_master.core.arrays import report_of
from ganger_master.core.explain import as_it_is, reported_blockers
from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord
from ganger_master.core.node_faults import service_reason, visible_to
from ganger_master.core.node_model import Node, NodeState
from ganger_master.core.preconditions import array_members, no_job
from ganger_master.core.timeslice_groups import has_turn
from ganger_master.core.usage import TeamReport
from ganger_master.rpc import job_messages
from ganger_master.rpc.job_messages import rule_from_wire, rule_to_wire
from ganger_master.runtime.publication import ProgressBoard, Sample
from ganger_master.runtime.writer import Writer


def submission_from_wire(request: job_service_pb2.CreateArrayRequest, caller: CallerIdentity) -> commands.SubmitArray:
    """Return the submission, judged only for its size and for a rule of no known kind. Raises SpecInvalid."""
    if len(request.members) > MEMBERS_LIMIT:
        raise _too_much(f"from 1 to {MEMBERS_LIMIT}, not {len(request.members)}")
    parameters = sum([len(member.parameters) for member in request.members])
    if parameters > PARAMETERS_LIMIT:
        raise _too_much(f"at most {PARAMETERS_LIMIT} parameters in all, not {parameters}")
    return commands.SubmitArray(
        job_messages.spec_from_wire(request.spec),
        tuple((member.index, dict(member.parameters)) for member in request.members),
        tuple([str(uuid.uuid4()) for _ in request.members]),
        request.max_concurrent,
        rule_from_wire(request.rule) if request.HasField("rule") else None,
        caller.name,
        request.request_id,
        limited=caller.has_own_jobs_only,
    )


def _too_much(text: str) -> errors.ApiError:
    return errors.SpecInvalid("the array cannot be accepted", violations=[errors.Violation("members", text)])


def array_to_wire(members: Sequence[JobRecord], samples: Sequence[Sample | None]) -> array_pb2.Array:
    """Return the message of an array. `members`: those remembered, at least one; `samples`: the last of each."""
    first, array = members[0], members[0].spec.array
    assert array is not None
    states = Counter("held" if job.held and not job.state.is_finished else job.state.value.lower() for job in members)
    if len(members) < array.size:
        states["forgotten"] = array.size - len(members)
    is_over = all(job.state.is_finished for job in members)
    # Ended members keep their old name and partition.
    newest = next((job for job in members if not job.state.is_finished), first)
    message = array_pb2.Array(
        name=f"arrays/{array.array}",
        display_name=newest.spec.display_name,
        user=first.user,
        size=array.size,
        max_concurrent=array.at_once,
        rule=None if array.rule is None else rule_to_wire(array.rule),
        create_time=times.timestamp(first.create_time),
        end_time=times.timestamp(max(job.end_time for job in members)) if is_over else None,
        states=states,
        gpus=first.spec.gpus,
        partition=newest.partition.name,
    )
    if array.rule is not None:
        _add_best(message, array.rule, members, samples)
    return message


def _add_best(
    message: array_pb2.Array, rule: StopRule, members: Sequence[JobRecord], samples: Sequence[Sample | None]
) -> None:
    found = best(rule, [(place, _newest(rule, job, samples[place])) for place, job in enumerate(members)])
    if found is not None:
        place, message.best_value = found
        array = members[place].spec.array
        assert array is not None
        message.best.index = array.index
        message.best.parameters.update(array.parameters)


def _newest(rule: StopRule, job: JobRecord, sample: Sample | None) -> float | None:
    kept = job.progress
    if sample is not None and (kept is None or (sample.epoch, sample.step) > (kept.epoch, kept.step)):
        found = report_of(rule, sample.step, _finite(sample.loss), sample.metrics)
    elif kept is not None:
        found = report_of(rule, kept.step, kept.loss, kept.metrics)
    else:
        found = None
    return None if found is None else found[0]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def usage_to_wire(reports: Sequence[TeamReport], since: float, half_life_s: float) -> usage_pb2.Usage:
    """Return the message of the use of teams. `since`: the beginning of its first day, in Unix seconds."""
    message = usage_pb2.Usage(since_time=times.timestamp(since), half_life=times.duration(half_life_s))
    for team in reports:
        users = [
            usage_pb2.UserUsage(
                user=user.user,
                gpu_seconds=user.gpu_s,
                used_share=user.used,
                running_gpus=user.running,
                gpus_limit=user.limit,
            )
            for user in team.users
        ]
        message.teams.add(
            team=team.team,
            weight=team.weight,
            share=team.share,
            used_share=team.used,
            gpus_limit=team.limit,
            users=users,
        )
    return message


_NODES_MOST: Final = 1_000
_TEXT_MOST: Final = 500
# A refused daemon tries again within 15 s. One that does not is stopped: its refusal is out of date.
_KEPT_S: Final = 120.0


class SessionRefusal(NamedTuple):
    """Why a daemon is not accepted: the reason of the error and a text. `time`: Unix seconds."""

    time: float
    reason: str
    text: str


_ACCEPTED: Final = SessionRefusal(0.0, "", "")


class SessionRefusals:
    """The newest refusal of each node. `now`: the present in Unix seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        # The oldest refusal first.
        self._entries: OrderedDict[str, SessionRefusal] = OrderedDict()

    def note(self, node: str, error: ApiError) -> None:
        """Keep the reason of a refusal; a master that is not ready refuses nothing."""
        if error.code is grpc.StatusCode.UNAVAILABLE:
            return
        self._entries.pop(node, None)
        if len(self._entries) >= _NODES_MOST:
            self._entries.popitem(last=False)
        self._entries[node] = SessionRefusal(self._now(), error.reason, f"not accepted: {error.message}"[:_TEXT_MOST])

    def forget(self, node: str) -> None:
        """Drop the refusal of a node whose daemon is accepted."""
        self._entries.pop(node, None)

    def of(self, node: str) -> SessionRefusal:
        """Return why the node is not accepted; with empty texts if nothing is known."""
        entry = self._entries.get(node, _ACCEPTED)
        return _ACCEPTED if self._now() > entry.time + _KEPT_S else entry

    def nodes(self) -> list[str]:
        """Return the nodes that are not accepted."""
        return [node for node in self._entries if self.of(node).reason]


PAGE_DEFAULT: Final = 100
PAGE_MOST: Final = 1_000
# A page of large messages must still fit into one.
PAGE_BYTES: Final = PART_BYTES

# Most bytes that an entry takes in its message beyond its own.
_FIELD_BYTES: Final = 16
# Entries that are examined before other calls are served.
ENTRIES_AT_ONCE: Final = 500

_Place = TypeVar("_Place")
_Entry = TypeVar("_Entry", bound=Message)


class PageRoom:
    """Room in one message: so many entries, together of at most PAGE_BYTES, but always one."""

    def __init__(self, entries: int = sys.maxsize) -> None:
        self._entries = entries
        self._bytes = PAGE_BYTES
        self._is_empty = True

    def take(self, *messages: Message) -> bool:
        """Return whether there is room for an entry of these messages; if so, count it."""
        size = sum([message.ByteSize() + _FIELD_BYTES for message in messages])
        if not self._is_empty and (self._entries <= 0 or size > self._bytes):
            return False
        self._is_empty = False
        self._entries -= 1
        self._bytes -= size
        return True


def in_messages(entries: Iterable[_Entry]) -> Iterator[list[_Entry]]:
    """Yield the entries in lists that fit into one message each."""
    page, room = list[_Entry](), PageRoom()
    for entry in entries:
        if not room.take(entry):
            yield page
            page, room = [], PageRoom()
            room.take(entry)
        page.append(entry)
    if page:
        yield page


def page_token(name: str) -> str:
    """Return the token of the page after the entry with this name."""
    return base64.urlsafe_b64encode(f"after:{name}".encode()).decode()


def place_of(token: str, parse: Callable[[str], _Place], first: _Place) -> _Place:
    """Return what the name in a token means; `first` without a token. Raises PageTokenInvalid."""
    if not token:
        return first
    try:
        word, _, name = base64.urlsafe_b64decode(token.encode()).decode().partition(":")
        if word == "after":
            return parse(name)
    except (ValueError, binascii.Error, errors.NameInvalid):
        pass
    raise errors.PageTokenInvalid(f"page_token {token[:40]!r} was not made by this method: start without one")


_Kind = TypeVar("_Kind")

# Most jobs that are named with one trouble of a node.
_JOBS_NAMED: Final = 3
_NODE_STATES = {state: node_pb2.Node.State.Value(f"STATE_{state.name}") for state in NodeState}


def owner() -> str:
    """Return the user that holds the start-up token: the one this master runs as."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def error_of(refused: Refused) -> errors.ApiError:
    kind = errors.ApiError._by_reason.get(refused.reason)
    assert kind is not None, f"the core refuses with {refused.reason}, which the wire does not know"
    violations = [errors.Violation(path, text) for path, text in refused.violations]
    error = kind(refused.message, violations=violations)
    error.metadata = dict(refused.metadata)
    return error


def expect(answer: object, kind: type[_Kind]) -> _Kind:
    """Return the answer, which must be of this kind. Raises ApiError for a refusal."""
    if isinstance(answer, Refused):
        raise error_of(answer)
    assert isinstance(answer, kind), f"expected {kind.__name__}, the core answered {type(answer).__name__}"
    return answer


class VisibleState:
    """Messages of what is durable, with what is only advisory (blockers, rank, progress) as of now."""

    def __init__(self, writer: Writer, progress: ProgressBoard, refusals: SessionRefusals) -> None:
        self._writer = writer
        self._progress = progress
        self._refusals = refusals

    def job_named(self, number: int) -> JobRecord:
        job = self._writer.committed.jobs.get(number)
        if job is None:
            raise self.not_found(number)
        return job

    def not_found(self, number: int) -> errors.ApiError:
        return error_of(no_job(self._writer.state, number).refused)

    def node_named(self, node: str) -> Node:
        found = self._writer.committed.nodes.get(node)
        if found is None:
            raise errors.NodeNotFound(
                f"there is no nodes/{node}: `ganger nodes` lists them", node=names.node_name(node)
            )
        return found

    def job(self, number: int, *, with_environment: bool = False) -> job_pb2.Job:
        """Return the message of a job. Raises JobNotFound."""
        job = self.job_named(number)
        state, committed = self._writer.state, self._writer.committed
        reported = reported_blockers(state, job, self._writer.now(), has_planner=committed.has_planner)
        gang = committed.gangs.get(job.epoch)
        message = job_messages.job_to_wire(
            job,
            gang,
            committed.gangs.get(job.next_epoch),
            # In a list of many jobs not all nodes are looked at for each.
            blockers=tuple([as_it_is(state, one, job) if one.node else one for one in reported]),
            queue_rank=state.queue_rank(number),
            sample=self._progress.of(number),
            beside=() if gang is None else colocation.beside(state, gang),
            has_turn=self._has_turn(gang),
            with_environment=with_environment,
        )
        remaining = self._progress.remaining.get(number)
        if remaining is not None and job.running_since:
            message.remaining_time.CopyFrom(remaining)
        return message

    def _has_turn(self, gang: Gang | None) -> bool | None:
        node_set = None if gang is None else self._writer.committed.sets.get(gang.node_set)
        return (
            None
            if gang is None or node_set is None
            else has_turn(node_set, self._writer.state.gangs.rows_seen, gang.epoch)
        )

    def members(self, array: int) -> list[JobRecord]:
        """Return the remembered members of an array. Raises ArrayNotFound."""
        try:
            return array_members(self._writer.committed.jobs, array)
        except RefusedError as error:
            raise error_of(error.refused) from None

    def array(self, number: int) -> array_pb2.Array:
        """Return the message of an array. Raises ArrayNotFound."""
        members = self.members(number)
        return array_to_wire(members, [self._progress.of(job.number) for job in members])

    def node(
        self, name: str, caller: CallerIdentity, fallen_at_once: Mapping[str, float] | None = None
    ) -> node_pb2.Node:
        """Return the node as far as the caller may see it. `fallen_at_once`: for lists, once. Raises NodeNotFound."""
        refusal = self._refusals.of(name)
        if refusal.reason and name not in self._writer.committed.nodes:
            return node_pb2.Node(
                name=names.node_name(name),
                state=node_pb2.Node.STATE_UNKNOWN,
                state_reason=refusal.text,
                refusal=refusal.reason,
            )
        node = self.node_named(name)
        row = self._writer.committed.rows.get(name)
        seen = self._writer.state.nodes.last_answer.get(name)
        cut_off = self.fallen_at_once() if fallen_at_once is None else fallen_at_once
        reasons = (
            refusal.text or _silent_why(node, cut_off.get(name)),
            service_reason(node),
            self._storage_trouble(node),
        )
        return node_pb2.Node(
            name=names.node_name(node.name),
            machine_uuid=node.machine_uuid,
            configuration_set=node.configuration_set,
            state=_NODE_STATES[node.state],
            state_reason="; ".join(filter(None, reasons)),
            view_entry=None if row is None else convert.node_row_to_wire(row),
            capabilities=dict(node.capabilities),
            peer_address=node.peer_address,
            version=node.version,
            last_seen_time=None if seen is None else times.timestamp(seen),
            device_faults=dict(node.device_faults),
            device_warnings=dict(node.device_warnings),
            faults=dict(node.faults),
            reservation=node.reservation,
            quarantined=[f"{stray.uid} epoch {stray.epoch}" for stray in node.strays if stray.quarantined],
            rack=node.rack,
            fabric=node.fabric,
            refusal=refusal.reason,
            launch_failures=node.launch_failures,
            launch_failure=(
                visible_to(self._writer.committed.jobs, node.launch_failure, caller.name)
                if caller.has_own_jobs_only
                else node.launch_failure
            ),
        )

    def _storage_trouble(self, node: Node) -> str:
        """Return what the node's gangs and its daemon report of the storage: codes and jobs, no text of a job."""
        if not node.heard:
            return ""
        jobs: dict[str, list[int]] = {}
        for gang in self._writer.state.gangs.living_on(node.name):
            for piece in gang.pieces:
                code = piece.trouble.partition(":")[0]
                if piece.claim.node == node.name and code.startswith("STORAGE_"):
                    jobs.setdefault(code, []).append(gang.job)
        reported = [
            f"{code}, reported by {_jobs_text(numbers)}: see `ganger why {numbers[0]}`"
            for code, numbers in sorted(jobs.items())
        ]
        if not node.storage_proved:
            reported.append("its daemon does not find the cluster's storage: no job with a checkpoint can go on here")
        return "; ".join(reported)

    def node_names(self) -> list[str]:
        """Return the known nodes and those that the master does not accept, in order."""
        return sorted({*self._writer.committed.nodes, *self._refusals.nodes()})

    def fallen_at_once(self) -> Mapping[str, float]:
        """Return the nodes whose missed heartbeats may be the master's fault, and when each is lost all the same."""
        return availability.fallen_at_once(self._writer.state, self._writer.now())


def _jobs_text(numbers: Sequence[int]) -> str:
    more = len(numbers) - _JOBS_NAMED
    named = ", ".join(names.job_name(number) for number in numbers[:_JOBS_NAMED])
    return f"{named} and {more} more" if more > 0 else named


def _silent_why(node: Node, lost_at: float | None) -> str:
    if node.unanswerable:
        return node.unanswerable
    if lost_at is not None:
        return availability.suspicion(lost_at)
    return "its daemon does not call" if node.state is NodeState.SILENT else ""


def verdict_of(job: str, answer: object) -> scheduling_pb2.Verdict:
    """Return a verdict. Raises ApiError if the request was refused."""
    verdict = scheduling_pb2.Verdict(job=job)
    match answer:
        case Approved():
            approved = scheduling_pb2.Approval(**job_messages.plain(answer, "epoch revision view_version candidate"))
            verdict.approved.CopyFrom(approved)
        case Rejected():
            rejected = verdict.rejected
            for refusal in answer.refusals:
                convert.refusal_to_wire(refusal, rejected.refusals.add())
            for row in answer.rows:
                convert.node_row_to_wire(row, rejected.rows.add())
            rejected.view_version = answer.view_version
            rejected.lease_kept = answer.turn_kept
        case Refused():
            raise error_of(answer)
        case _:
            raise AssertionError(f"no verdict: {type(answer).__name__}")
    return verdict


def change_verdict_of(answer: ChangeAnswer) -> scheduling_pb2.ChangeVerdict:
    return scheduling_pb2.ChangeVerdict(
        job=names.job_name(answer.number),
        approved=answer.approved,
        revision=answer.revision,
        refusals=convert.refusals_to_wire(answer.refusals),
    )
