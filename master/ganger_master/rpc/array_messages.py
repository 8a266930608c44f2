"""Job arrays: the core's values and `ganger.v1` messages, both ways."""

from __future__ import annotations

import math
import uuid
from collections import Counter
from collections.abc import Sequence

from ganger.v1 import array_pb2, job_service_pb2
from ganger.wire import errors, times
from ganger.wire.methods import CallerIdentity

from ganger_master.core import commands
from ganger_master.core.array_model import MEMBERS_LIMIT, PARAMETERS_LIMIT, StopRule, best
from ganger_master.core.arrays import report_of
from ganger_master.core.job_model import JobRecord
from ganger_master.rpc import job_messages
from ganger_master.rpc.job_messages import rule_from_wire, rule_to_wire
from ganger_master.runtime.progress_board import Sample


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


def _too_much(text: str) -> errors.SpecInvalid:
    return errors.SpecInvalid("the array cannot be accepted", violations=[errors.Violation("members", text)])


def array_to_wire(members: Sequence[JobRecord], samples: Sequence[Sample | None]) -> array_pb2.Array:
    """Return the message of an array. `members`: those remembered, at least one; `samples`: the last of each."""
    first, array = members[0], members[0].spec.array
    assert array is not None
    states = Counter("held" if job.held and not job.state.is_finished else job.state.value.lower() for job in members)
    if len(members) < array.size:
        states["forgotten"] = array.size - len(members)
    message = array_pb2.Array(
        name=f"arrays/{array.array}",
        # Ended members keep their old name.
        display_name=next((job for job in members if not job.state.is_finished), first).spec.display_name,
        user=first.user,
        size=array.size,
        max_concurrent=array.at_once,
        rule=None if array.rule is None else rule_to_wire(array.rule),
        create_time=times.timestamp(first.create_time),
        end_time=times.timestamp(max(job.end_time for job in members)) if _have_ended(members) else None,
        states=states,
        gpus=first.spec.gpus,
    )
    if array.rule is not None:
        _add_best(message, array.rule, members, samples)
    return message


def _have_ended(members: Sequence[JobRecord]) -> bool:
    return all(job.state.is_finished for job in members)


def _add_best(
    message: array_pb2.Array, rule: StopRule, members: Sequence[JobRecord], samples: Sequence[Sample | None]
) -> None:
    values = []
    for place, (job, sample) in enumerate(zip(members, samples, strict=True)):
        newest = _newest(rule, job, sample)
        if newest is not None:
            values.append((place, newest))
    found = best(rule, values)
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
