"""A cluster of GPUs, all alike, served in some order: a small and slow reference for promises about waiting.

Any free GPUs serve any job, and nothing costs time but training. Whenever a job arrives or ends, and whenever the order
says that it changes by itself, the jobs that hold GPUs are chosen anew (`ranked`, `selected`). The order gets the input
that a master would give it, an oracle's remaining times included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ganger_master.policies.orders import Facts, JobOrder, next_change_s, ranked, selected
from kit.facts import capacity_of, facts_of

# Work that counts as done: rounding of sums of seconds.
_DONE_S = 1e-6


@dataclass(frozen=True)
class Asked:
    number: int
    arrival_s: float
    gpus: int
    duration_s: float
    is_preemptible: bool = True
    deadline_s: float = math.inf
    user: int = 0
    priority: int = 0


@dataclass
class Life:
    """What became of a job. `waits`: when each began and ended, and how long it had run before."""

    asked: Asked
    attained_s: float = 0.0
    is_running: bool = False
    # When the present wait or stretch began.
    since_s: float = 0.0
    waited_before_s: float = 0.0
    started_s: float = math.inf
    end_s: float = math.inf
    waits: list[tuple[float, float, float]] = field(default_factory=list)

    @property
    def remaining_s(self) -> float:
        return self.asked.duration_s - self.attained_s


def serve(jobs: Sequence[Asked], gpus: int, order: JobOrder, until_s: float = math.inf) -> dict[int, Life]:
    """By number. Every gang must fit; without `until_s` all jobs end."""
    coming = sorted(jobs, key=lambda job: (job.arrival_s, job.number), reverse=True)
    lives = {job.number: Life(job, since_s=job.arrival_s) for job in jobs}
    live: list[Life] = []
    capacity = capacity_of(gpus)
    now, change = -math.inf, math.inf
    while coming or live:
        instants = [change] + [now + life.remaining_s for life in live if life.is_running]
        later = min(instants + [job.arrival_s for job in coming[-1:]])
        assert now < later < math.inf, "no job runs or arrives: time does not advance"
        if later > until_s:
            break
        for life in live:
            if life.is_running:
                life.attained_s += later - now
        now = later
        for life in live:
            if life.remaining_s <= _DONE_S:
                life.is_running, life.end_s = False, now
        live = [life for life in live if life.end_s == math.inf]
        while coming and coming[-1].arrival_s <= now:
            live.append(lives[coming.pop().number])
        facts = told(live, now)
        line = ranked(order, facts, now, capacity)
        holders = {int(at) for at in selected(order, facts, line, gpus)}
        assert sum(live[at].asked.gpus for at in holders) <= gpus
        for at, life in enumerate(live):
            if (at in holders) != life.is_running:
                _switch(life, now)
        change = next_change_s(order, told(live, now), now)
    return lives


def _switch(life: Life, now: float) -> None:
    if life.is_running:
        assert life.asked.is_preemptible, f"job {life.asked.number} was stopped"
        life.waited_before_s = 0.0
    else:
        life.waits.append((life.since_s, now, life.attained_s))
        life.waited_before_s = now - life.since_s
        life.started_s = min(life.started_s, now)
    life.is_running, life.since_s = not life.is_running, now


def told(live: Sequence[Life], now: float) -> Facts:
    return facts_of(
        *[
            {
                "number": life.asked.number,
                "arrival_s": life.asked.arrival_s,
                "gpus": life.asked.gpus,
                "priority": life.asked.priority,
                "user": life.asked.user,
                "deadline_s": life.asked.deadline_s,
                "is_running": life.is_running,
                "is_preemptible": life.asked.is_preemptible,
                "attained_s": life.attained_s,
                "waited_s": 0.0 if life.is_running else now - life.since_s,
                "started_s": life.started_s,
                "stretch_s": now - life.since_s if life.is_running else 0.0,
                "waited_before_s": life.waited_before_s,
                "remaining_s": life.remaining_s,
            }
            for life in live
        ]
    )
