"""Whose a job is: a user reaches the own ones; of another's it sees what stands in any queue, and no more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

from ganger.v1 import array_pb2, job_pb2
from ganger.wire import errors
from ganger.wire.roles import CallerIdentity
from google.protobuf.message import Message

from ganger_master.core.model import JobRecord


def _fields(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Neither what it runs, nor with what, nor what came of it.
_SPEC: Final = _fields(
    "display_name roles device_type locality nodes priority time_limit gpu_memory_bytes max_failures preemptible"
    " gpus_min gpus_max deadline movable weight"
)
_JOB: Final = _fields(
    "name uid spec user state revision gang suspended_level create_time start_time end_time failures preemptions"
    " blockers queue_rank run run_time progress array"
)
_PROGRESS: Final = _fields("step samples steps_per_second time step_time since_time device_use")
_MEMBERSHIP: Final = _fields("array member size at_once held")
_ARRAY: Final = _fields("name display_name user size at_once create_time end_time states gpus")


class Jobs(Protocol):
    def job_named(self, number: int) -> JobRecord:
        """Raises JobNotFound."""


def check_jobs(caller: CallerIdentity, jobs: Jobs, numbers: Iterable[int]) -> None:
    """Raises JobNotYours, or JobNotFound, for a user; of nobody else anything is looked up."""
    if caller.has_own_jobs_only:
        for number in numbers:
            job = jobs.job_named(number)
            check_owner(caller, job.name, job.user)


def check_owner(caller: CallerIdentity, name: str, user: str) -> None:
    """Raises JobNotYours for a user, unless the job or array was submitted by it."""
    if caller.has_own_jobs_only and caller.name != user:
        raise errors.JobNotYours(
            f"{name} is {user}'s: only that user and operators may do this; this certificate is of {caller}",
            job=name,
            user=user,
        )


def outline(job: job_pb2.Job) -> job_pb2.Job:
    """What of a job is there for everybody to see."""
    seen = job_pb2.Job()
    seen.CopyFrom(job)
    _keep(seen, _JOB)
    _keep(seen.spec, _SPEC)
    if seen.HasField("progress"):
        _keep(seen.progress, _PROGRESS)
        # Not a number: none was reported.
        seen.progress.loss = float("nan")
    if seen.HasField("array"):
        _keep(seen.array, _MEMBERSHIP)
        _keep(seen.array.member, _fields("index"))
    return seen


def array_outline(array: array_pb2.Array) -> array_pb2.Array:
    """What of an array is there for everybody to see."""
    seen = array_pb2.Array()
    seen.CopyFrom(array)
    _keep(seen, _ARRAY)
    return seen


def _keep(message: Message, fields: frozenset[str]) -> None:
    for field, _ in message.ListFields():
        if field.name not in fields:
            message.ClearField(field.name)
