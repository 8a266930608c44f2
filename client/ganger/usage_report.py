"""What jobs of a time have used and how they fared, by user: jobs by state, GPU-hours, waiting, completion times,
deadlines, preemptions. Pure: records and events in, figures out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ganger.job_state import JobState, Span, deadline_outcome


@dataclass(frozen=True, slots=True)
class ReportedJob:
    """A job as the report needs it. Times are Unix seconds, 0 for none. ``spans``: its states, empty where its history
    is not to be had; then ``run_s`` counts, up to its end or the present. ``advice``: on its deadline."""

    user: str
    state: JobState
    create_time: float
    start_time: float
    end_time: float
    gpus: int
    run_s: float
    preemptions: int
    deadline: float = 0.0
    advice: str = ""
    spans: Sequence[Span] = ()


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and quantiles of several times, in seconds; NaN without any."""

    mean: float
    p50: float
    p95: float
    count: int


@dataclass(slots=True)
class UserFigures:
    """Figures of one user's jobs. ``held_gpu_s``: GPU-seconds that their gangs held; ``stepped_gpu_s``: of them those
    in which they ran; ``jct_s`` and ``waiting_s``: of jobs that ended in the time of the report."""

    user: str
    states: Counter[str] = field(default_factory=Counter)
    live: int = 0
    stepped_gpu_s: float = 0.0
    held_gpu_s: float = 0.0
    jct_s: list[float] = field(default_factory=list)
    waiting_s: list[float] = field(default_factory=list)
    deadlines: Counter[str] = field(default_factory=Counter)
    preemptions: int = 0
    without_history: int = 0

    @property
    def idle_gpu_s(self) -> float:
        """GPU-seconds that were held while the jobs did not run: starting, moving, paused."""
        return max(0.0, self.held_gpu_s - self.stepped_gpu_s)

    def add(self, job: ReportedJob, since: float, until: float) -> None:
        """Add a job to the figures of [since, until); one that ended before or came after adds nothing."""
        if job.create_time >= until or (job.end_time and job.end_time < since):
            return
        stepped_s, held_s = gpu_seconds(job, since, until)
        self.stepped_gpu_s += stepped_s
        self.held_gpu_s += held_s
        self.without_history += not job.spans
        self.preemptions += job.preemptions
        has_ended = bool(job.end_time) and job.end_time < until
        if has_ended:
            self.states[job.state.value.lower()] += 1
            self.waiting_s.append(waiting_s(job))
            if job.state is JobState.SUCCEEDED:
                self.jct_s.append(job.end_time - job.create_time)
        else:
            self.live += 1
        is_late = job.advice.startswith("cannot be met")
        ended_or_now = job.end_time if has_ended else until
        outcome = deadline_outcome(job.state, job.deadline, ended_or_now, is_over=has_ended, is_late=is_late)
        if outcome is not None:
            self.deadlines[outcome.value] += 1


def gpu_seconds(job: ReportedJob, since: float, until: float) -> tuple[float, float]:
    """Return the GPU-seconds in which a job ran and those that it held, between two times.

    Without its history: its run time, taken to be the last of its life."""
    spans: Iterable[Span] = job.spans
    if not job.spans:
        end = job.end_time or until
        spans = [Span(end - job.run_s, end, "ran", job.gpus, 1.0, True)]
    stepped_s = held_s = 0.0
    for span in spans:
        # Events of array members, and of jobs without GPUs, name no number.
        amount = (span.gpus or job.gpus) * span.part * max(0.0, min(span.end, until) - max(span.begin, since))
        if span.state in ("ran", "turns"):
            stepped_s += amount
        if span.keeps:
            held_s += amount
    return stepped_s, held_s


def waiting_s(job: ReportedJob) -> float:
    """Return for how long a job that has ended had waited in all; without its history, until its first step."""
    if job.spans:
        # Of an array member the first event is that it has a gang.
        before = max(0.0, job.spans[0].begin - job.create_time)
        return before + math.fsum(span.end - span.begin for span in job.spans if span.state == "waited")
    return (job.start_time or job.end_time) - job.create_time


def spread(values: Sequence[float]) -> Spread:
    """Return mean, median and 95th percentile (nearest rank)."""
    if not values:
        return Spread(math.nan, math.nan, math.nan, 0)
    ordered = sorted(values)

    def rank(share: float) -> float:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    return Spread(math.fsum(ordered) / len(ordered), rank(0.5), rank(0.95), len(ordered))


def report_of(jobs: Iterable[ReportedJob], since: float, until: float) -> list[UserFigures]:
    """Return the figures of [since, until), in Unix seconds, by user; with several users, the sum of all first."""
    found: dict[str, UserFigures] = {}
    whole = UserFigures("")
    for job in jobs:
        found.setdefault(job.user, UserFigures(job.user)).add(job, since, until)
        whole.add(job, since, until)
    users = [found[user] for user in sorted(found) if found[user].live or found[user].states]
    return [whole, *users] if len(users) > 1 else users
