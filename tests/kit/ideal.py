"""What an ideal cluster does to a trace: a slow and obvious reference that the simulator is held against.

The cluster is a number of GPUs, all alike, any of which serve any job; nothing costs time but training. A job has an
arrival, a gang of GPUs and a duration, and progresses one second a second whenever it holds its whole gang. Jobs that
have arrived and not ended are *live*. A policy is an order over the live jobs, smallest key first:

    fifo, fifo-backfill   arrival
    srtf                  remaining seconds
    srsf                  remaining seconds x GPUs
    las                   attained seconds
    las2d                 attained seconds x GPUs

and every tie is broken by arrival, then by job id (ids that are whole numbers as numbers, before all others). The
service in the keys is continuous, not in queues.

*By events* (no round). The clock stops at each arrival and each end; all arrivals and ends of one instant are counted
before anything is chosen. Then the running set is chosen anew: live jobs in policy order, each taken if its gang fits
into the GPUs not yet taken, passed over if not. Two exceptions: under fifo and fifo-backfill no running job is stopped,
so running jobs are taken first; and fifo ends the pass at the first job that does not fit. A job ends the instant its
last second is served.

*By rounds* of r seconds. Decisions are made only at multiples of r, among the jobs that have arrived by then (an
arrival at that instant included). Each round starts from an empty cluster: live jobs in policy order, whatever ran
before, each taken if it fits and passed over if not; fifo, here too, ends the pass at the first that does not fit. The
chosen hold their GPUs to the round's end and get min(r, remaining) seconds of service; a job whose remaining time falls
to zero ends at the round's end, not before.

Average JCT is the mean of end - arrival; makespan is the last end minus the first arrival. Times are exact (whole
numbers, or fractions where a trace has decimals): no rounding can turn a tie.

Sources: by events this is what Tiresias's simulator does (its fifo, fjf, shortest and shortest-gpu, placing by counts);
by rounds what Synergy's does. Synergy's LAS is las2d, its FIFO is fifo-backfill, with one freedom more: jobs of the
same arrival second come in no fixed order, so its 34,985.0 on synth1k is fifo-backfill with ties broken by the last id.
Blox's FIFO, without its placement defect, is fifo by rounds (37,342).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

Exact = int | Fraction


@dataclass(frozen=True)
class IdealJob:
    """A gang of `gpus` that needs `duration` seconds with all of them."""

    job_id: str
    arrival: Exact
    gpus: int
    duration: Exact


@dataclass
class _Live:
    job: IdealJob
    remaining: Exact
    attained: Exact = 0


@dataclass(frozen=True)
class IdealOutcome:
    """Of each job, in the order given: when it first ran and when it ended."""

    jobs: tuple[IdealJob, ...]
    first_starts: tuple[Exact, ...]
    ends: tuple[Exact, ...]

    @property
    def average_jct(self) -> float:
        waits = (end - job.arrival for job, end in zip(self.jobs, self.ends, strict=True))
        return float(Fraction(sum(waits), len(self.jobs)))

    @property
    def makespan(self) -> float:
        return float(max(self.ends) - min(job.arrival for job in self.jobs))


ORDERS: dict[str, Callable[[_Live], Exact]] = {
    "fifo": lambda live: 0,
    "fifo-backfill": lambda live: 0,
    "srtf": lambda live: live.remaining,
    "srsf": lambda live: live.remaining * live.job.gpus,
    "las": lambda live: live.attained,
    "las2d": lambda live: live.attained * live.job.gpus,
}
NEVER_STOPPED = ("fifo", "fifo-backfill")


def ideal(jobs: Iterable[IdealJob], gpus: int, policy: str, round_seconds: Exact | None = None) -> IdealOutcome:
    """Runs the jobs to their ends. Every gang must fit into the cluster and every duration be positive."""
    given = tuple(jobs)
    assert all(0 < job.gpus <= gpus and job.duration > 0 for job in given)
    run = _by_events if round_seconds is None else _by_rounds
    starts: dict[str, Exact] = {}
    ends: dict[str, Exact] = {}
    run(given, gpus, policy, round_seconds or 0, starts, ends)
    return IdealOutcome(given, tuple(starts[job.job_id] for job in given), tuple(ends[job.job_id] for job in given))


def _by_events(
    jobs: Sequence[IdealJob],
    gpus: int,
    policy: str,
    _: Exact,
    starts: dict[str, Exact],
    ends: dict[str, Exact],
) -> None:
    waiting = sorted(jobs, key=lambda job: job.arrival)
    live: list[_Live] = []
    running: list[_Live] = []
    now: Exact = 0
    while waiting or live:
        instants = [waiting[0].arrival] if waiting else []
        instants += [now + one.remaining for one in running]
        later = min(instants)
        _serve(running, later - now)
        now = later
        while waiting and waiting[0].arrival == now:
            job = waiting.pop(0)
            live.append(_Live(job, job.duration))
        live = _end(live, now, ends)
        running = [one for one in running if one.remaining > 0]
        running = _choose(live, running if policy in NEVER_STOPPED else [], gpus, policy)
        _note_starts(running, now, starts)


def _by_rounds(
    jobs: Sequence[IdealJob],
    gpus: int,
    policy: str,
    seconds: Exact,
    starts: dict[str, Exact],
    ends: dict[str, Exact],
) -> None:
    waiting = sorted(jobs, key=lambda job: job.arrival)
    live: list[_Live] = []
    now: Exact = 0
    while waiting or live:
        while waiting and waiting[0].arrival <= now:
            job = waiting.pop(0)
            live.append(_Live(job, job.duration))
        running = _choose(live, [], gpus, policy)
        _note_starts(running, now, starts)
        for one in running:
            _serve([one], min(seconds, one.remaining))
        now += seconds
        live = _end(live, now, ends)


def _choose(live: Sequence[_Live], kept: Sequence[_Live], gpus: int, policy: str) -> list[_Live]:
    chosen = list(kept)
    free = gpus - sum(one.job.gpus for one in kept)
    order = ORDERS[policy]
    for one in sorted(live, key=lambda one: (order(one), one.job.arrival, id_order(one.job.job_id))):
        if any(one is other for other in kept):
            continue
        if one.job.gpus <= free:
            chosen.append(one)
            free -= one.job.gpus
        elif policy == "fifo":
            break
    return chosen


def id_order(job_id: str) -> tuple[bool, int, str]:
    """Whole numbers as numbers, then everything else as text."""
    return (False, int(job_id), job_id) if job_id.isascii() and job_id.isdigit() else (True, 0, job_id)


def _serve(running: Iterable[_Live], seconds: Exact) -> None:
    for one in running:
        one.remaining -= seconds
        one.attained += seconds


def _note_starts(running: Iterable[_Live], now: Exact, starts: dict[str, Exact]) -> None:
    for one in running:
        starts.setdefault(one.job.job_id, now)


def _end(live: Iterable[_Live], now: Exact, ends: dict[str, Exact]) -> list[_Live]:
    """Those that go on; the others are stamped."""
    for one in live:
        if one.remaining == 0:
            ends[one.job.job_id] = now
    return [one for one in live if one.remaining > 0]


def exact(text: str) -> Exact:
    """A decimal number without rounding."""
    number = Fraction(text)
    return int(number) if number.denominator == 1 else number
