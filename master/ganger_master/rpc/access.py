"""Access of users to jobs: all fields of their own jobs, and of other jobs only what a queue listing shows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

from ganger.v1 import array_pb2, job_pb2
from ganger.wire import errors
from ganger.wire.methods import CallerIdentity
from google.protobuf.message import Message

from ganger_master.core.job_model import JobRecord


def _fields(message: type[Message], names: str) -> frozenset[str]:
    found = frozenset(names.split())
    assert found <= set(message.DESCRIPTOR.fields_by_name), f"{message.DESCRIPTOR.full_name} lacks some of: {names}"
    return found


# Fields visible to every user: neither commands and environments nor results.
_SPEC: Final = _fields(
    job_pb2.JobSpec,
    "display_name roles device_type locality nodes priority time_limit gpu_memory_bytes max_failures preemptible"
    " gpus_min gpus_max deadline movable weight",
)
_JOB: Final = _fields(
    job_pb2.Job,
    "name uid spec user state revision gang suspended_level create_time start_time end_time failures preemptions"
    " blockers queue_rank run_duration running_since_time progress array",
)
_PROGRESS: Final = _fields(
    job_pb2.Progress, "step samples steps_per_s time step_time first_step_time device_utilization"
)
_MEMBERSHIP: Final = _fields(array_pb2.ArrayMembership, "array member size max_concurrent held")
_ARRAY: Final = _fields(array_pb2.Array, "name display_name user size max_concurrent create_time end_time states gpus")


class Jobs(Protocol):
    def job_named(self, number: int) -> JobRecord:
        """Raises JobNotFound."""


def check_jobs(caller: CallerIdentity, jobs: Jobs, numbers: Iterable[int]) -> None:
    """Check that a user owns all of these jobs; other callers may access all jobs. Raises JobNotYours, JobNotFound."""
    if caller.has_own_jobs_only:
        for number in numbers:
            job = jobs.job_named(number)
            check_owner(caller, job.name, job.user)


def check_owner(caller: CallerIdentity, name: str, user: str) -> None:
    """Raise JobNotYours for a user that did not submit the job or array."""
    if caller.has_own_jobs_only and caller.name != user:
        raise errors.JobNotYours(
            f"{name} is {user}'s: only that user and operators may do this; this certificate is of {caller}",
            job=name,
            user=user,
        )


def outline(job: job_pb2.Job) -> job_pb2.Job:
    """Return a copy of a job with the fields that every user may read."""
    shown = job_pb2.Job()
    shown.CopyFrom(job)
    _keep(shown, _JOB)
    _keep(shown.spec, _SPEC)
    if shown.HasField("progress"):
        _keep(shown.progress, _PROGRESS)
        # Not a number: none was reported.
        shown.progress.loss = float("nan")
    if shown.HasField("array"):
        _keep(shown.array, _MEMBERSHIP)
        _keep(shown.array.member, _fields(array_pb2.ArrayMember, "index"))
    return shown


def array_outline(array: array_pb2.Array) -> array_pb2.Array:
    """Return a copy of an array with the fields that every user may read."""
    shown = array_pb2.Array()
    shown.CopyFrom(array)
    _keep(shown, _ARRAY)
    return shown


def _keep(message: Message, fields: frozenset[str]) -> None:
    for field, _ in message.ListFields():
        if field.name not in fields:
            message.ClearField(field.name)
