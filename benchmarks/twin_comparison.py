"""A live run and its simulation: the trace and the costs that a run's own events tell, and how the two compare.

Pure. What a simulation needs to know beside the submissions is how fast each job went and what switching cost, and both
are measured in the very run: rates from the times that the jobs print, costs from the master's events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple


class JobEvent(NamedTuple):
    """An event of the master about a job; time is Unix seconds."""

    time: float
    job: str
    kind: str
    message: str = ""
    level: str = ""
    pause_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, means over the run; as `ganger simulate --cost` takes them. `count` of each kind that was seen."""

    start_s: float
    suspend_s: float
    resume_s: float
    # From a job's last step to its end; in a simulation part of its duration.
    end_s: float
    starts: int
    suspends: int
    resumes: int
    # From a job's last step where it was to its first elsewhere; and what a move takes beside that and a start, with
    # which it is prepared: the boundary, and what master and daemons say to each other.
    move_s: float = 0.0
    offload_s: float = 0.0
    moves: int = 0


@dataclass(frozen=True, slots=True)
class Ran:
    """A job of the live run; seconds from the first submission. `step_s`: the median time of one of its steps."""

    name: str
    gpus: int
    steps: int
    step_s: float
    submit_s: float
    deadline_s: float | None
    jct_s: float
    suspensions: int
    moves: int = 0

    def duration_s(self, costs: Costs) -> float:
        """What it takes once it steps: the first step is what a start ends with."""
        return (self.steps - 1) * self.step_s + costs.end_s


class TwinError(Exception):
    """The run is none that a simulation could repeat; the text says why."""


def costs_of(
    events: Sequence[JobEvent], last_steps: Mapping[str, float], needs: Sequence[str] = ("suspensions", "resumes")
) -> Costs:
    """`last_steps`: when each job made its last step. Raises TwinError where nothing was started, or where there was
    none of what it `needs`: suspensions, resumes, moves."""
    starts: list[float] = []
    resumes: list[float] = []
    suspends: list[float] = []
    ends: list[float] = []
    approved: dict[str, float] = {}
    ordered: dict[str, float] = {}
    moves: list[tuple[float, float]] = []
    begun: dict[str, float] = {}
    has_run: set[str] = set()
    for event in sorted(events):
        match event.kind:
            case "gang_approved":
                approved[event.job] = event.time
            case "gang_running" if event.job in approved:
                took = event.time - approved.pop(event.job)
                (resumes if event.job in has_run else starts).append(took)
                has_run.add(event.job)
            case "suspend_ordered":
                ordered[event.job] = event.time
            case "job_pending" if event.job in ordered:
                suspends.append(event.time - ordered.pop(event.job))
            case "move_begun":
                begun[event.job] = event.time
            case "move_done" if event.job in begun:
                moves.append((event.time - begun.pop(event.job), event.pause_ms / 1000))
            case "job_succeeded":
                ends.append(event.time - last_steps[event.job])
    seen = {"starts": len(starts), "suspensions": len(suspends), "resumes": len(resumes), "moves": len(moves)}
    if not all(seen[name] for name in ("starts", *needs)):
        raise TwinError(
            f"{', '.join(f'{count} {name}' for name, count in seen.items())}: {', '.join(needs)} are needed"
        )
    start = fmean(starts)
    pause = fmean([pause for _, pause in moves] or [0.0])
    return Costs(
        start_s=start,
        suspend_s=fmean(suspends or [0.0]),
        resume_s=max(0.0, fmean(resumes) - start) if resumes else 0.0,
        end_s=max(0.0, fmean(ends)),
        starts=len(starts),
        suspends=len(suspends),
        resumes=len(resumes),
        move_s=pause,
        offload_s=max(0.0, fmean([took for took, _ in moves] or [0.0]) - start - pause),
        moves=len(moves),
    )


def step_s(times: Sequence[tuple[int, float]]) -> float:
    """The median time of a step, of (step, Unix seconds) pairs that a job printed. TwinError for fewer than two."""
    pairs = [
        (later - earlier) / (step - before) for (before, earlier), (step, later) in pairwise(times) if step > before
    ]
    if not pairs:
        raise TwinError("a job printed the times of fewer than two of its steps")
    return median(pairs)


def trace_of(jobs: Iterable[Ran], costs: Costs) -> str:
    """The file that `ganger simulate` reads."""
    lines = ["job_id,submit_time_s,gpus,duration_s,deadline_s"]
    for job in jobs:
        deadline = "" if job.deadline_s is None else f"{job.submit_s + job.deadline_s:.3f}"
        lines.append(f"{job.name},{job.submit_s:.3f},{job.gpus},{job.duration_s(costs):.3f},{deadline}")
    return "\n".join(lines) + "\n"


def compared(jobs: Iterable[Ran], simulated: Mapping[str, tuple[float, int, int]]) -> list[dict[str, object]]:
    """A row a job; `simulated`: time from submission to end in seconds, suspensions, and moves, by name."""
    return [
        {
            "job": job.name,
            "gpus": job.gpus,
            "submit_s": round(job.submit_s, 3),
            "step_ms": round(1000 * job.step_s, 3),
            "live_jct_s": round(job.jct_s, 3),
            "simulated_jct_s": round(simulated[job.name][0], 3),
            "error": round(simulated[job.name][0] / job.jct_s - 1, 4),
            "live_suspensions": job.suspensions,
            "simulated_suspensions": simulated[job.name][1],
            "live_moves": job.moves,
            "simulated_moves": simulated[job.name][2],
        }
        for job in jobs
    ]
