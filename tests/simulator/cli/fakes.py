"""Simulators that do one thing each, for the processes they run in; where a process finds them by name."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from ganger_master.simulator.inputs import ReplayOptions
from ganger_master.simulator.report.outcomes import Run, outcomes
from ganger_master.simulator.traces.servers import Servers
from ganger_master.simulator.traces.workload import Workload

Progress = Callable[[int, int], None]


def one_by_one(jobs: Workload, servers: Servers, policy: str, options: ReplayOptions, progress: Progress) -> Run:
    """All jobs at once, each ending after its duration."""
    progress(len(jobs), len(jobs))
    done = outcomes(jobs, jobs.submit_s, jobs.submit_s + jobs.duration_s, jobs.duration_s)
    return Run(policy, done, servers.gpus, servers.millicores / 1000, 0.0, float(done.end_s.max()), seed=options.seed)


def threads_of_linear_algebra(
    jobs: Workload, servers: Servers, policy: str, options: ReplayOptions, progress: Progress
) -> Run:
    assert os.environ["OPENBLAS_NUM_THREADS"] == "1"
    return one_by_one(jobs, servers, policy, options, progress)


def killed_if_srtf(jobs: Workload, servers: Servers, policy: str, options: ReplayOptions, progress: Progress) -> Run:
    if policy == "srtf":
        os.kill(os.getpid(), signal.SIGKILL)
    return one_by_one(jobs, servers, policy, options, progress)


def leaves(jobs: Workload, servers: Servers, policy: str, options: ReplayOptions, progress: Progress) -> Run:
    os._exit(3)


def fails(jobs: Workload, servers: Servers, policy: str, options: ReplayOptions, progress: Progress) -> Run:
    raise RuntimeError("the planner has no plan")


def runs_out_of_memory(
    jobs: Workload, servers: Servers, policy: str, options: ReplayOptions, progress: Progress
) -> Run:
    raise MemoryError


def reports_its_pid_and_stays(
    jobs: Workload, servers: Servers, policy: str, options: ReplayOptions, progress: Progress
) -> Run:
    progress(os.getpid(), 0)
    threading.Event().wait()
    raise AssertionError("nothing wakes it")
