"""The stream of jobs of `ganger bench chaos`: its submissions, by the library and by the command line.

A submission has a request id. It is repeated with it until it is accepted: while no master answers, and when its
command line was killed.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ganger.array_spec import make_array
from ganger.client import Client
from ganger.console import ExitCode
from ganger.job import FINISHED
from ganger.v1 import job_pb2
from ganger.wire.endpoints import EndpointError
from ganger.wire.errors import ApiError

from benchmarks.chaos_cluster import ChaosCluster, Killer
from benchmarks.chaos_plan import SCRIPT, JobKind, next_kind
from benchmarks.witnesses import WITNESS_JOB, Record

# Steps of a job are a multiple of an epoch's.
FEWEST_STEPS, MOST_STEPS, EPOCH_STEPS, STEP_S = 40, 160, 8, 0.08
SAVED_EVERY: Final = "3s"
LIVE: Final = [state for state in job_pb2.Job.State.values() if state and state not in FINISHED]
_SCHEDULER: Final = """
from ganger.cluster.placement import candidates
from ganger.scheduling import JobScheduler, Proposal

class Own(JobScheduler):
    def propose(self, lease, view):
        found = candidates(view, lease.shape, only=[max(view.names())])
        return Proposal(found.candidates, found.refusals)
"""


@dataclass
class ChaosJob:
    """A submission. `name`, `uid`: of the job, or the name of the array; empty until it is accepted."""

    label: str
    kind: JobKind
    steps: int
    request_id: str
    record: Record
    name: str = ""
    uid: str = ""
    command: subprocess.Popen[bytes] | None = None


class JobStream:
    """Jobs that are submitted one after the other, as `next_kind` chooses. `jobs`: accepted; `pending`: not yet;
    `calls`: refusals and errors of calls, by reason; `findings`: what no user should have met."""

    def __init__(self, cluster: ChaosCluster, killer: Killer, dice: random.Random) -> None:
        self._cluster, self._killer, self._dice = cluster, killer, dice
        self.hurry = cluster.directory / "hurry"
        self.jobs: list[ChaosJob] = []
        self.pending: list[ChaosJob] = []
        self.calls: Counter[str] = Counter()
        self.findings: list[str] = []
        (cluster.directory / "own_schedulers.py").write_text(_SCHEDULER)

    def failed(self, what: str, error: ApiError | EndpointError) -> None:
        """Count an error of a call."""
        reason = error.reason if isinstance(error, ApiError) else "no master is found"
        self.calls[f"{what}: {reason}"] += 1
        if reason in ("INTERNAL", "UNKNOWN", ""):
            self.findings.append(f"{what}: {error!r}")

    def feed(self, client: Client) -> None:
        """Add one job, if one of some kind is missing, and submit what is pending. Raises as the client."""
        live = {job.name for job in client.list_jobs(LIVE, fold_arrays=True)}
        live |= {array.name for array in client.list_arrays(live=True)}
        alive = Counter(job.kind.name for job in self.jobs if job.name in live)
        alive.update(job.kind.name for job in self.pending)
        kind = next_kind(self._dice, alive, self._killer.elapsed_s)
        if kind is not None:
            steps = EPOCH_STEPS * self._dice.randint(FEWEST_STEPS // EPOCH_STEPS, MOST_STEPS // EPOCH_STEPS)
            self.pending.append(self.new(kind, steps))
        self.submit(client)

    def submit(self, client: Client) -> None:
        """Submit what is not accepted yet, and has no command line at work."""
        for job in list(self.pending):
            if job.command is None and (job.kind.has_scheduler or self._is_by_command(job)):
                job.command = self._submit_by_command(job)
            elif job.command is None:
                self._submit(client, job)

    def new(self, kind: JobKind, steps: int) -> ChaosJob:
        """Return a submission with a label and a request id of its own."""
        label = f"{kind.name}-{len(self.jobs) + len(self.pending)}"
        request = str(uuid.UUID(int=self._dice.getrandbits(128), version=4))
        return ChaosJob(label, kind, steps, request, Record(label, self._cluster.directory / f"{label}.record"))

    @staticmethod
    def _is_by_command(job: ChaosJob) -> bool:
        return job.kind.name == "two"

    def described(self, job: ChaosJob, step_s: float = STEP_S) -> dict[str, Any]:
        """Return the keys of its job file."""
        common = {
            "name": job.label,
            "gpus": job.kind.gpus or "1:4",
            "cpus_per_gpu": 1,
            "memory": "512M",
            "gpu_memory": "64M",
            "max_failures": 1000,
            "checkpoint_every": SAVED_EVERY,
            "directory": str(self._cluster.directory),
        }
        if not job.kind.has_steps:
            return {**common, "agent": "none", "command": ["sh", "-c", SCRIPT.format(label=job.label)]}
        command = [sys.executable, str(WITNESS_JOB), "--record", str(job.record.path), "--steps", str(job.steps)]
        command += ["--step-seconds", str(step_s), "--hurry-once", str(self.hurry)]
        return {**common, "command": [*command, *([] if job.kind.gpus else ["--elastic"])]}

    def _submit(self, client: Client, job: ChaosJob) -> None:
        """Submit it by the library. While no master answers it is repeated in the next round, with its request id."""
        try:
            if job.kind.members:
                indices = f"0-{job.kind.members - 1}"
                request = make_array({**self.described(job), "array": {"indices": indices, "at_once": 2}})
                self._accepted(job, client.submit_array(request, request_id=job.request_id).name, "")
            else:
                message = client.submit(**self.described(job), request_id=job.request_id).message
                self._accepted(job, message.name, message.uid)
        except (ApiError, EndpointError) as error:
            self.failed("submit", error)

    def _accepted(self, job: ChaosJob, name: str, uid: str) -> None:
        self.pending.remove(job)
        self.jobs.append(job)
        job.name, job.uid = name, uid
        self._killer.note(f"accepted: {name} ({job.label}, {job.steps} steps)")

    def _submit_by_command(self, job: ChaosJob) -> subprocess.Popen[bytes]:
        path = self._cluster.directory / f"{job.label}.job.yaml"
        path.write_text(json.dumps(self.described(job)))
        words = ["submit", "--json", "--request-id", job.request_id, "--file", str(path)]
        words += ["--scheduler", "own_schedulers:Own"] if job.kind.has_scheduler else []
        return self.begin(words, self._cluster.directory / f"{job.label}.answer")

    def begin(self, words: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
        """Start a command line of a user."""
        with output.open("wb") as out, output.with_suffix(".errors").open("wb") as errors:
            process = self._cluster.begin(words, out, errors)
        self._killer.note(f"command {process.pid}: {' '.join(words[:6])}")
        return process

    def collect(self) -> None:
        """Take the answers of command lines that have ended. One that was killed is repeated with its request id."""
        for job in list(self.pending):
            if job.command is None or (code := job.command.poll()) is None:
                continue
            answer = self._cluster.directory / f"{job.label}.answer"
            job.command = None
            if code == 0:
                message = json.loads(answer.read_text())
                self._accepted(job, str(message["name"]), str(message["uid"]))
                continue
            errors = answer.with_suffix(".errors").read_text()[-500:]
            # Its job scheduler may have been killed before it had received the job.
            is_victim = "was killed by SIGKILL while it was loaded" in errors
            if code not in (-signal.SIGKILL, ExitCode.UNREACHABLE) and not is_victim:
                self.pending.remove(job)
                self.findings.append(f"`ganger submit` of {job.label} ended with {code}: {errors}")
