"""What users do during `ganger bench chaos`: they order moves, suspensions, sizes and co-locations, and watch jobs."""

from __future__ import annotations

import random
import signal
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import grpc
from ganger.client import Client
from ganger.v1 import job_pb2, scheduling_pb2, scheduling_pb2_grpc
from ganger.wire.channels import open_channel
from ganger.wire.endpoints import EndpointError
from ganger.wire.errors import ApiError, from_rpc_error

from benchmarks.chaos_cluster import ChaosCluster, Killer
from benchmarks.chaos_plan import beside
from benchmarks.chaos_stream import LIVE, ChaosJob, JobStream

ORDER_EVERY_S: Final = 3.0
_LEVELS: Final = ("pause", "offload", "checkpoint")
# Errors after which the same order may succeed.
_PASSING: Final = ("UNREACHABLE", "NOT_READY", "DEADLINE_EXCEEDED", "NOT_LEADER", "LEASE_LOST", "JOB_BUSY")


class ChaosUsers:
    """Orders to running jobs, and two command lines that watch one at any time. `due`: jobs to be resumed, and when."""

    def __init__(self, cluster: ChaosCluster, killer: Killer, stream: JobStream, dice: random.Random) -> None:
        self._cluster, self._killer, self._stream, self._dice = cluster, killer, stream, dice
        self._ordered_at = 0.0
        self.due: list[tuple[float, str]] = []
        self.watchers: list[tuple[str, subprocess.Popen[bytes], Path]] = []

    def resume(self, client: Client) -> None:
        """Resume the jobs that were suspended some seconds ago."""
        now = time.monotonic()
        for at, job in [one for one in self.due if one[0] <= now]:
            self.due.remove((at, job))
            try:
                client.resume_job(job)
            except (ApiError, EndpointError) as error:
                self._stream.failed("resume", error)
                if isinstance(error, EndpointError) or error.reason in _PASSING:
                    self.due.append((now + 1.0, job))

    def order(self, client: Client) -> None:
        """Order something of a job that has started, every few seconds."""
        if time.monotonic() - self._ordered_at < ORDER_EVERY_S:
            return
        self._ordered_at = time.monotonic()
        running = {one.name for one in client.list_jobs([job_pb2.Job.STATE_HOLDING])}
        there = [job for job in self._stream.jobs if job.kind.has_steps and job.name in running]
        if not there:
            return
        job = self._dice.choice(there)
        what = self._dice.choice(("move", "co-locate", "suspend", "resize" if not job.kind.gpus else "repin"))
        try:
            if what == "move":
                client.move_job(job.name)
            elif what == "co-locate":
                what = self._colocate(client, there)
            elif what == "resize":
                client.resize_job(job.name, self._dice.randint(1, 4))
            elif what == "repin":
                client.repin_job(job.name)
            else:
                wake = time.monotonic() + self._dice.uniform(1.0, 4.0)
                # The order may have been carried out though its answer was lost.
                self.due.append((wake, job.name))
                client.suspend_job(job.name, self._dice.choice(_LEVELS))
            self._stream.calls[what] += 1
            self._killer.note(f"ordered: {what} {job.name}")
        except (ApiError, EndpointError) as error:
            self._stream.failed(what, error)

    def _colocate(self, client: Client, there: Sequence[ChaosJob]) -> str:
        """Propose that a job of one GPU joins another one on its device. Return what came of it, for the count."""
        single = [client.get_job(job.name) for job in there if job.kind.gpus == 1]
        held = [job for job in single if len(job.gang.claims) == 1 and not job.gang.claims[0].shared_mask]
        if len(held) < 2:
            return "co-locate: too few"
        mover, other = self._dice.sample(held, 2)
        move = scheduling_pb2.MoveChange(claims=[beside(mover.gang.claims[0], other.gang.claims[0])])
        change = scheduling_pb2.Change(job=mover.name, revision=mover.revision, move=move)
        try:
            with open_channel(client.endpoint) as channel:
                stub: Any = scheduling_pb2_grpc.SchedulingServiceStub(channel)
                (verdict,) = stub.ProposePlan(scheduling_pb2.Plan(changes=[change], reason="chaos")).verdicts
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return "co-locate" if verdict.approved else f"co-locate: {verdict.refusals[0].reason}"

    def watch(self, client: Client) -> None:
        """Have two command lines wait for a job at any time, one by its log."""
        for one in list(self.watchers):
            _, process, _ = one
            if process.poll() is not None:
                self.watchers.remove(one)
                self.judge_watcher(one)
        kinds = {what for what, _, _ in self.watchers}
        missing = [what for what in ("wait", "logs") if what not in kinds]
        live = [one.name for one in client.list_jobs(LIVE, fold_arrays=True)] if missing else []
        if missing and live:
            job = self._dice.choice(live).removeprefix("jobs/")
            words = ["wait", job] if missing[0] == "wait" else ["logs", "--follow", job]
            output = self._cluster.directory / f"watch-{uuid.uuid4().hex}.out"
            self.watchers.append((missing[0], self._stream.begin(words, output), output))

    def judge_watcher(self, one: tuple[str, subprocess.Popen[bytes], Path]) -> None:
        """Count the end of a command line that watched a job; a failure is a finding."""
        what, process, output = one
        self._stream.calls[f"watched by {what}: {process.returncode}"] += 1
        if process.returncode not in (0, -signal.SIGKILL):
            errors = output.with_suffix(".errors").read_text()[-500:]
            self._stream.findings.append(f"`ganger {what}` ended with {process.returncode}: {errors}")
