"""A handle on one job: refresh it, wait for it, read its logs, suspend, resume, move and cancel it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from ganger.job_state import JobState as JobState
from ganger.v1 import job_pb2, job_service_pb2

FINISHED = frozenset([job_pb2.Job.State.Value(f"STATE_{state.name}") for state in JobState if state.is_finished])
LEVELS = ("pause", "offload", "checkpoint")


class JobFailedError(Exception):
    """The job ended, but not well. `message` is the job as last seen (`ganger.v1.Job`)."""

    def __init__(self, message: job_pb2.Job) -> None:
        reason = f": {message.failure.reason}, {message.failure.message}" if message.HasField("failure") else ""
        super().__init__(f"{message.name} ended {state_of(message)}{reason}")
        self.message = message


class JobCalls(Protocol):
    """Calls to the master about one job, as `Client` has them. `job`: its name or number."""

    def get_job(self, job: str | int) -> job_pb2.Job: ...

    def watch_job(self, job: str | int) -> Iterator[job_pb2.Job]: ...

    def read_log(
        self, job: str | int, rank: int = 0, offset: int = 0, *, follow: bool = False
    ) -> Iterator[job_service_pb2.LogChunk]: ...

    def update(self, job: str | int, **changes: Any) -> job_pb2.Job: ...

    def cancel_job(self, job: str | int, reason: str = "") -> job_pb2.Job: ...

    def suspend_job(self, job: str | int, level: str | None = None) -> job_pb2.Job: ...

    def resume_job(self, job: str | int) -> job_pb2.Job: ...

    def move_job(self, job: str | int, nodes: Iterable[str] = ()) -> job_pb2.Job: ...

    def resize_job(self, job: str | int, gpus: int = 0, tasks: Mapping[str, int] | None = None) -> job_pb2.Job: ...

    def retune_job(self, job: str | int, cores_per_task: float) -> job_pb2.Job: ...

    def repin_job(self, job: str | int) -> job_pb2.Job: ...


class Job:
    """A submitted job. Properties call the master; `message` is the job as last received; `scheduler_log` is the log
    file of the job scheduler that was started with the submission, if one was."""

    def __init__(self, client: JobCalls, message: job_pb2.Job, *, scheduler_log: Path | None = None) -> None:
        self._client = client
        self.message = message
        self.scheduler_log = scheduler_log

    def __repr__(self) -> str:
        return f"Job({self.name!r}, {state_of(self.message)})"

    @property
    def name(self) -> str:
        """ "jobs/7"."""
        return self.message.name

    @property
    def id(self) -> int:
        return int(self.name.rpartition("/")[2])

    @property
    def state(self) -> JobState:
        return state_of(self.refresh())

    @property
    def progress(self) -> job_pb2.Progress:
        """Step, rates and loss as last reported."""
        return self.refresh().progress

    @property
    def nodes(self) -> tuple[str, ...]:
        """Ids of the nodes its gang holds pieces of."""
        return tuple(claim.node.removeprefix("nodes/") for claim in self.refresh().gang.claims)

    def refresh(self) -> job_pb2.Job:
        self.message = self._client.get_job(self.name)
        return self.message

    def wait(self, timeout_s: float | None = None, *, check: bool = True) -> JobState:
        """Wait until the job has ended. Raises TimeoutError, and JobFailedError if it failed and `check` is set."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        state = self.state
        # Polled rather than watched when there is a deadline: a stream cannot be left half-way without a thread.
        pause = 0.05
        while not state.is_finished:
            if deadline is None:
                for message in self._client.watch_job(self.name):
                    self.message = message
                state = state_of(self.message)
                continue
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError(f"{self.name} is still {state} after {timeout_s:g} s")
            time.sleep(min(pause, remaining))
            pause = min(pause * 1.5, 1.0)
            state = self.state
        if check and state not in (JobState.SUCCEEDED, JobState.STOPPED):
            raise JobFailedError(self.message)
        return state

    def logs(self, rank: int = 0, offset: int = 0, *, follow: bool = False) -> Iterator[bytes]:
        """Chunks of one rank's output, stdout and stderr, from a byte offset (negative: from the end)."""
        for chunk in self._client.read_log(self.name, rank, offset, follow=follow):
            yield chunk.data

    def cancel(self, reason: str = "") -> None:
        self.message = self._client.cancel_job(self.name, reason)

    def update(self, **changes: Any) -> None:
        """Changes what was asked for, as `Client.update`: job.update(priority=5, time="4h")."""
        self.message = self._client.update(self.name, **changes)

    def suspend(self, level: str | None = None) -> None:
        """Orders a stop at the next mini-batch boundary, at "pause", "offload" or "checkpoint"."""
        self.message = self._client.suspend_job(self.name, level)

    def resume(self) -> None:
        self.message = self._client.resume_job(self.name)

    def move(self, nodes: Iterable[str] = ()) -> None:
        """Orders a move, losing no step, to `nodes` or to others than the present ones."""
        self.message = self._client.move_job(self.name, nodes)

    def resize(self, gpus: int = 0, **tasks: int) -> None:
        """Orders another number of GPUs for an elastic job, or of tasks by role, losing no step."""
        self.message = self._client.resize_job(self.name, gpus, tasks)

    def retune(self, cores_per_task: float) -> None:
        self.message = self._client.retune_job(self.name, cores_per_task)

    def repin(self) -> None:
        self.message = self._client.repin_job(self.name)


def state_of(message: job_pb2.Job) -> JobState:
    return JobState(job_pb2.Job.State.Name(message.state).removeprefix("STATE_"))


def suspend_level(level: str | None) -> job_pb2.SuspendLevel.ValueType:
    """Return a suspend level of the API. Raises ValueError for an unknown name."""
    if level is None:
        return job_pb2.SUSPEND_LEVEL_UNSPECIFIED
    if level.lower() not in LEVELS:
        raise ValueError(f"{level!r} is not a suspend level; there are {', '.join(LEVELS)}")
    return job_pb2.SuspendLevel.Value(f"SUSPEND_LEVEL_{level.upper()}")
