"""Fairness between time-sliced jobs: their slices, how far each is behind its share, which ones are to move, and host
memory for those that resume.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from ganger.cluster.topology import bits
from ganger.cluster.view import View

from ganger_master.core.gang_model import Gang, GangIntent, GangPhase
from ganger_master.core.gang_orders import same_place
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.plan_changes import NO_PURPOSE, Goal, PlanChange, Purpose, SuspendChange, claims_in
from ganger_master.planner.colocations import is_settled
from ganger_master.planner.device_groups import Claims, seat_of
from ganger_master.planner.migration_plans import move_costs
from ganger_master.policies.fairness import Going, ServiceBalance, SliceShare, balanced, shares

# Quanta that a job may be behind or ahead at most.
_MOST_OWED: Final = 8.0

# Slices in one cycle at most, once every gang has a slice. Longer cycles would approach the shares more closely, but
# the gang with the smallest share would wait longer for its slice.
_CYCLE_MOST: Final = 12

NodeDevice: TypeAlias = tuple[str, int]
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
    return gang.phase is GangPhase.RUNNING and not job.next_epoch and job.capabilities.can_hand_over


def _kind(job: JobRecord, gang: Gang, view: View) -> _Kind:
    names = {view.topology(claim.node).configuration_set.name for claim in gang.claims if claim.device_mask}
    return (job.gpus, job.priority, *sorted(names))


# -- slices ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlicedJob:
    """A job that is time-sliced, or is to be. `claims`: its devices now, or those that it is to have. `purpose`: why a
    job that runs elsewhere is to move to `claims`."""

    job: JobRecord
    gang: Gang | None
    claims: Claims
    purpose: Purpose = NO_PURPOSE

    @property
    def number(self) -> int:
        return self.job.number

    @property
    def starts(self) -> bool:
        """Whether it holds nothing at `claims` yet. A gang parked there holds all but the devices."""
        return self.gang is None or not same_place(self.gang.claims, self.claims)

    @property
    def devices(self) -> frozenset[NodeDevice]:
        return frozenset((claim.node, device) for claim in self.claims for device in bits(claim.device_mask))

    @property
    def missing_claims(self) -> Claims:
        """Return what it needs there beyond its gang's holdings, which at OFFLOAD are less memory than it claims."""
        return self.claims if self.gang is None or self.starts else self.gang.lacking_claims


def rows_of(sharers: Sequence[SlicedJob], cores: Mapping[str, Sequence[int]]) -> list[list[SlicedJob]]:
    """Return the slice matrix: the jobs that run at once, slice by slice.

    Jobs of one slice share no device and need no more of a node's `cores` (millicores by socket) than it has. Stride
    scheduling fills each slice (Waldspurger and Weihl 1995): jobs with the fewest slices for their weight come first,
    then all others that fit. Among cycles of up to `_CYCLE_MOST` slices that contain every job, the result is the
    shortest one that brings the gangs of each device closest to their shares.
    """
    if not sharers:
        return []
    weights = [one.job.spec.weight for one in sharers]
    crowds = _crowds(sharers)
    rows: list[list[SlicedJob]] = []
    had = [0] * len(sharers)
    length, least = 0, math.inf
    while not all(had) or (len(rows) < _CYCLE_MOST and least > 0.0):
        row: list[SlicedJob] = []
        for index in sorted(range(len(sharers)), key=lambda index: had[index] / weights[index]):
            if not row or _fits(sharers[index], row, cores):
                row.append(sharers[index])
                had[index] += 1
        rows.append(row)
        error = _error([count / weight for count, weight in zip(had, weights, strict=True)], crowds)
        if all(had) and error < least:
            length, least = len(rows), error
    return rows[:length]


def _crowds(sharers: Sequence[SlicedJob]) -> list[list[int]]:
    found: dict[NodeDevice, list[int]] = {}
    for index, one in enumerate(sharers):
        for device in one.devices:
            found.setdefault(device, []).append(index)
    return [crowd for crowd in found.values() if len(crowd) > 1]


def _error(had: Sequence[float], crowds: Sequence[Sequence[int]]) -> float:
    """Return the largest relative gap between the smallest and the largest share on one device, from 0 to 1."""
    apart = [(min(shares), max(shares)) for shares in ([had[index] for index in crowd] for crowd in crowds)]
    return max((1.0 - low / high for low, high in apart if high), default=0.0)


def _fits(one: SlicedJob, row: Sequence[SlicedJob], cores: Mapping[str, Sequence[int]]) -> bool:
    if any(one.devices & other.devices for other in row):
        return False
    for claim in one.claims:
        there = [claim.millicores] + [own.millicores for other in row for own in other.claims if own.node == claim.node]
        if any(sum(wanted) > have for wanted, have in zip(zip(*there, strict=True), cores[claim.node], strict=True)):
            return False
    return True


@dataclass(frozen=True, slots=True)
class Shortage:
    """Host memory that `job` lacks on the nodes where it is parked: positive `missing_bytes` by node name."""

    job: JobRecord
    missing_bytes: Mapping[str, int]


def make_room(
    shortages: Iterable[Shortage],
    running: Sequence[tuple[JobRecord, Gang]],
    leaving: Iterable[tuple[JobRecord, Gang]],
    spared: Collection[int],
) -> list[PlanChange]:
    """Return the suspensions at CHECKPOINT that give jobs the host memory they lack. Those are of jobs behind them in
    the queue; none for a job that would lack it even so. `shortages`: in the order in which they are served; `leaving`:
    jobs that are giving back all they hold, which counts as free; `spared`: jobs (numbers) that are not to be
    suspended."""
    changes: list[PlanChange] = []
    taken = set(spared)
    left = _held(gang for _, gang in leaving)
    for shortage in shortages:
        missing = dict(shortage.missing_bytes)
        for node, needed in shortage.missing_bytes.items():
            covered = min(needed, left.get(node, 0))
            missing[node] = needed - covered
            left[node] = left.get(node, 0) - covered
        later = [pair for pair in running if pair[0].number not in taken and _can_yield(shortage.job, *pair)]
        for job, _ in _fewest(sorted(later, key=lambda pair: _queue_position(pair[0]), reverse=True), missing):
            purpose = Purpose(Goal.HOLE, shortage.job.number, detail="its host memory is for the other, which goes on")
            changes.append(SuspendChange(job.number, job.revision, level=SuspendLevel.CHECKPOINT, purpose=purpose))
            taken.add(job.number)
    return changes


def _fewest(pairs: Sequence[tuple[JobRecord, Gang]], missing: Mapping[str, int]) -> list[tuple[JobRecord, Gang]]:
    """Return the first of these jobs that hold the missing memory, without superfluous ones; none if it is less."""
    chosen: list[tuple[JobRecord, Gang]] = []
    for pair in pairs:
        if _covers(chosen, missing):
            break
        chosen.append(pair)
    if not _covers(chosen, missing):
        return []
    for pair in list(chosen):
        without = [one for one in chosen if one is not pair]
        if _covers(without, missing):
            chosen = without
    return chosen


def _covers(pairs: Iterable[tuple[JobRecord, Gang]], missing: Mapping[str, int]) -> bool:
    held = _held(gang for _, gang in pairs)
    return all(held.get(node, 0) >= needed for node, needed in missing.items())


def _held(gangs: Iterable[Gang]) -> dict[str, int]:
    found: dict[str, int] = {}
    for gang in gangs:
        for held in gang.held:
            found[held.node] = found.get(held.node, 0) + held.memory_bytes + held.arena_bytes
    return found


def _can_yield(helped: JobRecord, job: JobRecord, gang: Gang) -> bool:
    is_able = job.preemptible and job.capabilities.checkpoint and job.ending is None
    return (
        is_able
        and _queue_position(job) > _queue_position(helped)
        and gang.intent is GangIntent.RUN
        and is_settled(job, gang)
    )


def _queue_position(job: JobRecord) -> tuple[int, int]:
    return -job.priority, job.number
