"""Fairness between time-sliced jobs: how far each is behind its share, and which jobs are to move for it.

Gangs of one size and priority on one kind of device share what they all receive, by weight, up to the whole time. What
a job is owed is bounded, so that an error of measurement does not last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from ganger.cluster.topology import bits
from ganger.cluster.view import View

from ganger_master.core.gang_model import Gang, GangPhase
from ganger_master.core.job_model import JobRecord
from ganger_master.core.moves import can_hand_over
from ganger_master.core.plan_changes import PlanChange, claims_in
from ganger_master.planner.device_groups import seat_of
from ganger_master.planner.migration_context import move_costs
from ganger_master.policies.fairness import Going, ServiceBalance, SliceShare, balanced, shares

# Quanta that a job may be behind or ahead at most.
_MOST_OWED: Final = 8.0

Pairs: TypeAlias = Collection[tuple[JobRecord, Gang]]
_Kind: TypeAlias = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Fairness:
    """The state between two passes, by number. `heard_s`: received seconds at the last pass; `behind_s`: seconds behind
    its share; `since_s`: when it came to its place; `bound_for`: destinations of jobs on their way."""

    heard_s: Mapping[int, float] = field(default_factory=dict)
    behind_s: Mapping[int, float] = field(default_factory=dict)
    since_s: Mapping[int, float] = field(default_factory=dict)
    bound_for: Mapping[int, frozenset[str]] = field(default_factory=dict)


NOTHING: Final = Fairness()


def credited(
    before: Fairness,
    pairs: Pairs,
    weights: Mapping[int, float],
    received_s: Mapping[int, float],
    view: View,
    now: float,
    quantum_s: float,
) -> Fairness:
    """Return the state after jobs have received device time. A new job, one without reports, and one that starts or
    moves are neither ahead nor behind: they have slices, but no steps show them."""
    groups: dict[_Kind, list[tuple[JobRecord, Gang]]] = {}
    steps = {job.number for job, gang in pairs if gang.phase is not GangPhase.STARTING and job.number in received_s}
    for job, gang in pairs:
        # A job without devices shares none.
        if job.gpus and job.number in steps and job.number in before.heard_s:
            groups.setdefault(_kind(job, gang, view), []).append((job, gang))
    behind = {job.number: before.behind_s.get(job.number, 0.0) for job, _ in pairs}
    most = _MOST_OWED * quantum_s
    for group in groups.values():
        got = {job.number: received_s[job.number] - before.heard_s[job.number] for job, _ in group}
        devices = {(claim.node, bit) for _, gang in group for claim in gang.claims for bit in bits(claim.device_mask)}
        sharers = [SliceShare(job.number, job.gpus, weight=weights.get(job.number, 1.0)) for job, _ in group]
        entitled = shares(sharers, len(devices))
        whole, total = sum(entitled.values()), sum(got.values())
        for number, own in got.items():
            owed = behind[number] + total * entitled[number] / whole - own
            behind[number] = min(max(owed, -most), most)
    since = {job.number: before.since_s.get(job.number, now) for job, _ in pairs}
    heard = {number: received_s[number] for number in steps}
    moving = {job.number for job, _ in pairs if job.next_epoch}
    bound_for = {number: nodes for number, nodes in before.bound_for.items() if number in moving}
    return Fairness(heard, behind, since, bound_for)


def going(
    fairness: Fairness, pairs: Pairs, may_share: Collection[int], view: View, now: float, quantum_s: float
) -> list[Going]:
    """Return the jobs to move now, with their destinations. `may_share`: numbers of jobs that may be time-sliced."""
    costs = move_costs(pairs)
    standings = [
        ServiceBalance(
            job.number,
            _kind(job, gang, view),
            seat_of(gang.claims),
            fairness.behind_s.get(job.number, 0.0),
            now - fairness.since_s.get(job.number, now),
            costs.pause_s(job, gang),
            job.number in may_share,
            may_go(job, gang),
        )
        for job, gang in pairs
    ]
    return balanced(standings, quantum_s)


def moved(fairness: Fairness, changes: Iterable[PlanChange], now: float) -> Fairness:
    """Return the state after these changes have moved jobs."""
    nodes = {change.number: frozenset(claim.node for claim in claims_in(change)) for change in changes}
    since = {**fairness.since_s, **dict.fromkeys(nodes, now)}
    return replace(fairness, since_s=since, bound_for={**fairness.bound_for, **nodes})


def stayed(fairness: Fairness, before: Fairness, numbers: Collection[int]) -> Fairness:
    """Return the state after the moves of these jobs were refused."""
    since = {**fairness.since_s, **{one: before.since_s[one] for one in numbers if one in before.since_s}}
    bound_for = {number: nodes for number, nodes in fairness.bound_for.items() if number not in numbers}
    return replace(fairness, since_s=since, bound_for=bound_for)


def may_go(job: JobRecord, gang: Gang) -> bool:
    """Return whether the job may be moved for other jobs."""
    return job.spec.movable and can_go(job, gang)


def can_go(job: JobRecord, gang: Gang) -> bool:
    """Return whether the job can be moved at all."""
    return gang.phase is GangPhase.RUNNING and not job.next_epoch and can_hand_over(job)


def _kind(job: JobRecord, gang: Gang, view: View) -> _Kind:
    names = {view.topology(claim.node).configuration_set.name for claim in gang.claims if claim.device_mask}
    return (job.gpus, job.spec.priority, *sorted(names))
