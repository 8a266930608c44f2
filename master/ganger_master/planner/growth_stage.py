"""Growth of elastic jobs onto idle GPUs, and their shrinking as soon as pending jobs need GPUs.

One job grows at a time, by one size, on its own nodes, on trial (Gandiva, OSDI 2018, section 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from ganger.cluster.capacity_index import CapacityIndex, Claims, Trial
from ganger.cluster.placement import resized
from ganger.cluster.preferences import BEST_FIT
from ganger.cluster.resources import Claim, GangShape
from ganger.cluster.search import PlacementRequest
from ganger.cluster.topology import bits
from ganger.cluster.view import View
from ganger.text import counted

from ganger_master.core.elastic import tasks_divide
from ganger_master.core.gang_model import Gang, GangPhase
from ganger_master.core.job_model import JobRecord
from ganger_master.core.plan_changes import Goal, PlanChange, Purpose, ResizeChange, TrialFinding
from ganger_master.planner.context import PlanContext, PlanDraft, PlanOutcome, PlanStage
from ganger_master.planner.device_groups import as_held
from ganger_master.planner.in_place_resize import given_back
from ganger_master.planner.job_table import LiveTable
from ganger_master.policies.make_room import overlap
from ganger_master.policies.placements import PlacementPreference
from ganger_master.policies.trials import FIRST_WINDOWS, FailedTrials, Judged, TrialRates, TrialVerdict, judge

if TYPE_CHECKING:
    from ganger_master.planner.rate_registry import JobRates

# With more pending jobs than these, every elastic job shrinks to its least size, without a search for the cheapest.
_FEW: Final = 16
# Time for which GPUs must have been idle before a job grows onto them; no paper gives a number.
IDLE_S: Final = 60.0
# Of a linear speed-up.
_LEAST_SHARE: Final = 0.7
# A trial ends after this time, since a job may report no progress.
_TRIAL_MOST_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class SizeTrial:
    """A trial of `more` GPUs by a job that had `fewer`. `before` are its windows with fewer."""

    fewer: int
    more: int
    before: tuple[float, ...]
    began_s: float


@dataclass(frozen=True, slots=True)
class GrowthTrials:
    """State from one pass to the next. If it is lost, jobs under trial keep their sizes."""

    # Times since which devices are free, by node and device, on nodes of jobs that might grow.
    idle: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    trials: Mapping[int, SizeTrial] = field(default_factory=dict)
    # Job number and size of trials that failed or were rejected.
    failed: FailedTrials[tuple[int, int]] = field(default_factory=FailedTrials)
    # Claims that are being given back to pending jobs, by the job that gives them.
    giving: Mapping[int, Claims] = field(default_factory=dict)

    def without(self, numbers: Iterable[int], now: float) -> GrowthTrials:
        """Return the state after the master has rejected the changes proposed for these jobs."""
        rejected = set(numbers)
        failed = self.failed
        for number in rejected & self.trials.keys():
            failed = failed.noted((number, self.trials[number].more), now)
        return replace(
            self,
            trials={number: trial for number, trial in self.trials.items() if number not in rejected},
            giving={number: claims for number, claims in self.giving.items() if number not in rejected},
            failed=failed,
        )


@dataclass(frozen=True, slots=True)
class Sizes:
    """Changes of size to propose, and findings of trials. `is_giving`: GPUs are being given back to pending jobs, so
    that no job need be preempted for them. `next_s`: when to plan again without another event; infinite if there is no
    need."""

    changes: tuple[PlanChange, ...] = ()
    findings: tuple[TrialFinding, ...] = ()
    is_giving: bool = False
    next_s: float = math.inf


def plan_sizes(context: PlanContext, growing: GrowthTrials) -> tuple[Sizes, GrowthTrials]:
    """Return the changes of size to propose now, and the state for the next pass. `growing`: that of the last pass."""
    table, now, room, speeds = context.jobs, context.now, context.room, context.job_rates
    # GPUs must have been idle for this time before a job grows onto them.
    idle_s = min(IDLE_S, context.settings.pace.every_s)
    room.follow()
    pairs = [pair for pair in table.running if _may_change(*pair)]
    running = {job.number: (job, gang) for job, gang in pairs if job.number not in context.on_trial}
    growing = _followed(growing, table, now)
    if table.has_waiting:
        found = _given_back(context, growing, running)
        trials = {number: trial for number, trial in growing.trials.items() if number not in found}
        giving = {**growing.giving, **{number: given for number, (_, given) in found.items()}}
        changes = tuple([change for change, _ in found.values()])
        growing = replace(growing, idle={}, trials=trials, giving=giving)
        return Sizes(changes, is_giving=bool(giving)), growing
    changes, findings, growing = _judged(running, speeds, growing, room.view, now)
    quotas = table.quotas
    changing = {change.number for change in changes} | growing.trials.keys() | growing.giving.keys()
    growable = [
        pair
        for number, pair in running.items()
        if number not in changing and (quotas is None or quotas.left(pair[0]) > pair[1].devices)
    ]
    growing = replace(growing, idle=_idle(growing.idle, room.view, list(running.values()), now))
    # Parked jobs need GPUs to resume, as pending jobs do to start, and perhaps more than are free yet.
    growth = None if table.parked else _grown(growable, speeds, growing, room.view, now, idle_s)
    if growth is not None:
        change, trial = growth
        changes = (*changes, change)
        growing = replace(growing, trials={**growing.trials, change.number: trial})
    due = [since + idle_s for devices in growing.idle.values() for since in devices.values()]
    next_s = min([at for at in due if at > now], default=math.inf)
    return Sizes(changes, findings, next_s=next_s), growing


class GrowthStage(PlanStage):
    """The stage, with its state. It comes first: while it takes GPUs back, no job is preempted for pending jobs."""

    def __init__(self, growing: GrowthTrials | None) -> None:
        self.growing = growing or GrowthTrials()
        self._changed: frozenset[int] = frozenset()

    def plan(self, context: PlanContext) -> None:
        sizes, self.growing = plan_sizes(context, self.growing)
        self._changed = frozenset(change.number for change in sizes.changes)
        context.add(PlanDraft(sizes.changes))
        context.come_back(sizes.next_s)
        context.findings.extend(sizes.findings)
        if sizes.is_giving:
            context.is_giving, context.may_preempt = True, False

    def settle(self, outcome: PlanOutcome) -> None:
        self.growing = self.growing.without(outcome.refused & self._changed, outcome.now)

    @property
    def memory(self) -> Mapping[str, Any]:
        return {"growing": self.growing}


def _may_change(job: JobRecord, gang: Gang) -> bool:
    can = job.spec.is_elastic and job.spec.preemptible and job.capabilities.resize and not job.next_epoch
    # A part that has ended has given its devices back.
    is_whole = all(piece.held is not None for piece in gang.pieces)
    settled = gang.phase is GangPhase.RUNNING and job.ending is None and is_whole
    # A co-located or time-sliced job keeps its size until it has devices of its own.
    return can and settled and not gang.node_set and not any(claim.shared_mask for claim in gang.claims)


def _followed(growing: GrowthTrials, table: LiveTable, now: float) -> GrowthTrials:
    """Return the state without changes that are complete, and with trials that did not come about as failed."""
    giving = {}
    for number, claims in growing.giving.items():
        found = table.pair(number)
        if found is not None and found[0].next_epoch and overlap(claims, found[1].held):
            giving[number] = claims
    trials, failed = {}, growing.failed
    for number, trial in growing.trials.items():
        found = table.pair(number)
        if found is None:
            continue
        job, gang = found
        if gang.devices == trial.more or (job.next_epoch and gang.devices == trial.fewer):
            trials[number] = trial
        elif now > trial.began_s:
            failed = failed.noted((number, trial.more), now)
    return replace(growing, giving=giving, trials=trials, failed=failed)


# -- giving back


def _given_back(
    context: PlanContext, growing: GrowthTrials, running: Mapping[int, tuple[JobRecord, Gang]]
) -> dict[int, tuple[PlanChange, Claims]]:
    room, placement, speeds = context.room, context.policy.placement, context.job_rates
    shrinkable = {number: pair for number, pair in running.items() if pair[1].devices > _least_size(*pair)}
    found: dict[int, tuple[PlanChange, Claims]] = {}
    waiting = context.jobs.waiting_jobs(_FEW) if shrinkable else []
    if not waiting:
        cuts = {number: _cut(pair, _least_size(*pair), room.view, 0) for number, pair in shrinkable.items()}
        return {number: cut for number, cut in cuts.items() if cut is not None}
    trying = Trial(room)
    claims_of = {number: gang.claims for number, (_, gang) in shrinkable.items()}
    for claims in growing.giving.values():
        _give(trying, claims)
    for job in waiting:
        elastic = [
            _elastic(*pair, speeds, growing.failed) for number, pair in shrinkable.items() if number not in found
        ]
        for number, gpus in shrink(elastic, room, job.shape, claims_of, placement).items():
            cut = _cut(shrinkable[number], gpus, room.view, job.number)
            if cut is not None:
                found[number] = cut
                _give(trying, cut[1])
        place = placement.place(room, PlacementRequest(job.shape, math.inf))
        if place is not None:
            trying.take(place)
    trying.undo()
    return found


def _give(trying: Trial, claims: Claims) -> None:
    """Free these claims on trial, except those whose devices are free in the view already."""
    view = trying.room.view
    for claim in claims:
        slot = view.slots.get(claim.node)
        if slot is not None and not view.free[slot] & claim.device_mask:
            trying.give((claim,))


def _cut(pair: tuple[JobRecord, Gang], gpus: int, view: View, pending: int) -> tuple[PlanChange, Claims] | None:
    """Return the change that shrinks a job to so many GPUs for a pending job, 0 for all of them."""
    job, gang = pair
    claims = _claims(job, gang, gpus, view)
    if claims is None:
        return None
    purpose = Purpose(Goal.GIVE_BACK, pending)
    return _change(job, claims, f"from {counted(gang.devices, 'GPU')} to {gpus}", purpose), given_back(gang, claims)


# -- growing


def _judged(
    running: Mapping[int, tuple[JobRecord, Gang]], speeds: JobRates, growing: GrowthTrials, view: View, now: float
) -> tuple[tuple[PlanChange, ...], tuple[TrialFinding, ...], GrowthTrials]:
    changes: list[PlanChange] = []
    findings: list[TrialFinding] = []
    trials, failed = dict(growing.trials), growing.failed
    for number, trial in growing.trials.items():
        if number not in running or running[number][1].devices != trial.more:
            continue
        job, gang = running[number]
        judged = judge_growth(trial.fewer, trial.more, TrialRates(trial.before, speeds.of_size(number)))
        is_late = now > trial.began_s + _TRIAL_MOST_S
        if judged.verdict is TrialVerdict.MEASURE and not is_late:
            continue
        del trials[number]
        keeps = judged.verdict is TrialVerdict.KEEP
        if not math.isnan(judged.gain.value):
            is_open = judged.verdict is TrialVerdict.MEASURE or judged.is_open
            detail = "its windows leave open whether it gained enough" if is_open else ""
            findings.append(TrialFinding(number, Goal.GROW, keeps, judged.gain.value, judged.gain.deviation, detail))
        if keeps:
            failed = failed.forgotten((number, trial.more))
            continue
        failed = failed.noted((number, trial.more), now)
        claims = _claims(job, gang, trial.fewer, view)
        if claims is not None:
            gain = "not measured" if math.isnan(judged.gain.value) else f"{judged.gain.value:.2f} times as fast"
            text = f"{gain} with {counted(trial.more, 'GPU')}, {trial.fewer} will do"
            changes.append(_change(job, claims, text, Purpose(Goal.GIVE_BACK)))
    return tuple(changes), tuple(findings), replace(growing, trials=trials, failed=failed)


def _idle(
    before: Mapping[str, Mapping[int, float]], view: View, pairs: Sequence[tuple[JobRecord, Gang]], now: float
) -> dict[str, dict[int, float]]:
    """Return since when devices are free on the nodes of these jobs, by node and device. `before`: the last pass's."""
    found: dict[str, dict[int, float]] = {}
    for name in {claim.node for _, gang in pairs for claim in gang.claims}:
        slot = view.slots.get(name)
        if slot is not None and view.available[slot]:
            free_since = before.get(name, {})
            found[name] = {device: free_since.get(device, now) for device in bits(view.free[slot])}
    return found


def _grown(
    pairs: Sequence[tuple[JobRecord, Gang]],
    speeds: JobRates,
    growing: GrowthTrials,
    view: View,
    now: float,
    idle_s: float,
) -> tuple[PlanChange, SizeTrial] | None:
    nodes = {name for name, devices in growing.idle.items() if any(now >= at + idle_s for at in devices.values())}
    candidates = [
        (job, gang)
        for job, gang in pairs
        if any(claim.node in nodes for claim in gang.claims)
        and len(windows := speeds.of_size(job.number)) >= FIRST_WINDOWS
        and min(windows) > 0.0
    ]
    jobs = [_elastic(job, gang, speeds, growing.failed, now) for job, gang in candidates]
    if not any(job.larger for job in jobs):
        return None
    if any(now < since + idle_s for devices in growing.idle.values() for since in devices.values()):
        view = view.copy()
        for name, devices in growing.idle.items():
            young = sum([1 << device for device, since in devices.items() if now < since + idle_s])
            if young:
                sockets = len(view.millicores[view.slots[name]])
                view.take(Claim(name, young, (0,) * sockets, 0), young.bit_count())
    growth = grow(jobs, view)
    if growth is None:
        return None
    number, gpus = growth
    job, gang = next(pair for pair in candidates if pair[0].number == number)
    claims = _claims(job, gang, gpus, view, one_node_only=True)
    if claims is None:
        return None
    rate = speeds.by_gpus(number)[gang.devices]
    text = f"idle GPUs; {rate:.4g} a second with {gang.devices}, to be measured with {gpus}"
    trial = SizeTrial(gang.devices, gpus, speeds.of_size(number), now)
    return _change(job, claims, text, Purpose(Goal.GROW)), trial


def _elastic(
    job: JobRecord, gang: Gang, speeds: JobRates, failed: FailedTrials[tuple[int, int]], now: float = -math.inf
) -> Elastic:
    """Return a job as the policy reads it. Without measured rates its speed-up counts as linear."""
    sizes = _sizes(job, gang)
    rates = {gpus: rate for gpus, rate in speeds.by_gpus(job.number).items() if gpus in sizes and rate > 0.0}
    rates = rates or {gang.devices: float(gang.devices)}
    rates.setdefault(gang.devices, max(rates.values()))
    ceiling = min([gpus for gpus in sizes if failed.holds((job.number, gpus), now)], default=1 << 30)
    return Elastic(job.number, sizes, {claim.node: claim.device_mask for claim in gang.claims}, rates, ceiling)


def _sizes(job: JobRecord, gang: Gang) -> tuple[int, ...]:
    spec = job.spec
    each = spec.roles[0].shape.gpus
    allowed = [gpus for gpus in range(spec.gpus_min, spec.gpus_max + 1, each) if tasks_divide(job, gpus)]
    return tuple(sorted({*allowed, gang.devices}))


def _least_size(job: JobRecord, gang: Gang) -> int:
    return _sizes(job, gang)[0]


def _claims(job: JobRecord, gang: Gang, gpus: int, view: View, one_node_only: bool = False) -> Claims | None:
    shape = job.shape_for(gpus)
    return resized(view, as_held(shape, gang), gang.claims, one_node_only)


def _change(job: JobRecord, claims: Claims, reason: str, purpose: Purpose) -> PlanChange:
    return ResizeChange(job.number, job.revision, claims, reason=reason, purpose=purpose)


# -- which job grows, and which ones shrink: pure choices


@dataclass(frozen=True, slots=True)
class Elastic:
    """A running job and the numbers of GPUs that it accepts, ascending. `seat`: the mask of its devices by node;
    `rates`: measured samples per second by number of GPUs, including the present one; `ceiling`: the size at which
    growth was undone."""

    number: int
    sizes: tuple[int, ...]
    seat: Mapping[str, int]
    rates: Mapping[int, float]
    ceiling: int = 1 << 30

    @property
    def gpus(self) -> int:
        return sum(mask.bit_count() for mask in self.seat.values())

    @property
    def least(self) -> int:
        return self.sizes[0]

    @property
    def larger(self) -> int | None:
        """The next number of GPUs that it might have."""
        return next((size for size in self.sizes if self.gpus < size < self.ceiling), None)

    def rate(self, gpus: int) -> float:
        """Return the samples per second: as measured, else in proportion to the present number of GPUs."""
        return self.rates[gpus] if gpus in self.rates else self.rates[self.gpus] * (gpus / self.gpus)


def grow(jobs: Collection[Elastic], view: View) -> tuple[int, int] | None:
    """Return the number of the one job to grow next and its GPUs then, if any. Call again once this was judged."""
    options = []
    for job in jobs:
        size = job.larger
        if size is None or (job.rate(size) / job.rate(job.gpus)) / (size / job.gpus) < _LEAST_SHARE:
            continue
        slots = [slot for name in job.seat if (slot := view.slots.get(name)) is not None and view.available[slot]]
        if sum([view.free[slot].bit_count() for slot in slots]) >= size - job.gpus:
            # Relative to the rate with its fewest GPUs, since rates of different jobs are not comparable.
            worth = (job.rate(size) - job.rate(job.gpus)) / (size - job.gpus) * (job.least / job.rate(job.least))
            options.append((-round(worth, 9), len(job.seat), job.number, size))
    return min(options)[2:] if options else None


def judge_growth(fewer: int, more: int, rates: TrialRates) -> Judged:
    """Judge the growth of a job by `rates` in samples, before and after."""
    return judge([rates], _LEAST_SHARE * more / fewer)


def shrink(
    jobs: Iterable[Elastic],
    room: CapacityIndex,
    shape: GangShape,
    claims_of: Mapping[int, Claims],
    placement: PlacementPreference = BEST_FIT,
) -> dict[int, int]:
    """Return the new numbers of GPUs, by number of job, with which a gang fits that does not fit now. It is empty where
    shrinking is not enough or not needed. The loss of rates is least on one node, and node by node for gangs over
    several. `claims_of`: the claims that the jobs hold."""
    if placement.place(room, PlacementRequest(shape, math.inf)) is not None:
        return {}
    view = room.view
    most = max((topology.devices for topology in view.topologies), default=0)
    count = shape.nodes or -(-shape.gpus // max(1, most))
    share = -(-shape.gpus // count)
    elastic = {job.number: job for job in sorted(jobs, key=lambda one: one.number)}
    options = []
    for slot, name in enumerate(view.nodes):
        missing = share - view.free[slot].bit_count()
        if view.available[slot] and view.topologies[slot].devices >= share:
            loss, cuts = _least_loss([job for job in elastic.values() if name in job.seat], name, missing)
            if loss < math.inf:
                options.append((round(loss, 9), slot, cuts))
    options.sort()
    trying = Trial(room)
    for start in range(len(options)):
        sizes: dict[int, int] = {}
        # A job on several of the nodes is cut once, first on the first of them.
        at: dict[int, str] = {}
        for _, slot, cuts in options[start : start + count]:
            for number, size in cuts.items():
                sizes[number] = min(size, sizes.get(number, size))
                at.setdefault(number, view.nodes[slot])
        for number, size in sizes.items():
            trying.give(_returned(elastic[number], size, at[number], claims_of[number], view))
        found = placement.place(room, PlacementRequest(shape, math.inf))
        trying.undo()
        if found is not None:
            return sizes
    return {}


def _least_loss(jobs: Sequence[Elastic], node: str, missing: int) -> tuple[float, dict[int, int]]:
    """Return the least loss of rate that frees `missing` more devices on a node, and the new sizes of the jobs that are
    cut. Rates are relative to that of one device at the least size; the loss is infinite if no cuts suffice."""
    # By devices released: the least loss, and the new sizes.
    best: list[tuple[float, dict[int, int]]] = [(0.0, {}), *[(math.inf, {})] * max(0, missing)]
    for job in jobs:
        base = job.rate(job.least) / job.least
        here = job.seat[node].bit_count()
        for devices in range(max(0, missing), 0, -1):
            for given in range(1, min(here, job.gpus - job.least) + 1):
                size = max(size for size in job.sizes if size <= job.gpus - given)
                loss, cuts = best[max(0, devices - given)]
                loss += (job.rate(job.gpus) - job.rate(size)) / base
                if loss < best[devices][0]:
                    best[devices] = (loss, {**cuts, job.number: size})
    return best[max(0, missing)]


def _returned(job: Elastic, size: int, node: str, claims: Claims, view: View) -> Claims:
    """Return the devices that it releases: on that node first, then where it has the fewest."""
    missing = job.gpus - size
    found = []
    for claim in sorted(claims, key=lambda one: (one.node != node, one.device_mask.bit_count(), one.node)):
        devices = claim.device_mask.bit_count()
        count = min(missing, devices)
        stays = view.topology(claim.node).best(claim.device_mask, devices - count)
        if count and stays is not None:
            missing -= count
            # Of cores and memory as much as of the devices; what stays is rounded down.
            cores = tuple([all_of_it - all_of_it * (devices - count) // devices for all_of_it in claim.millicores])
            memory = claim.memory_bytes * count // devices
            arena = claim.arena_bytes * count // devices
            bandwidth = tuple([all_of_it * count // devices for all_of_it in claim.bandwidth])
            found.append(Claim(claim.node, claim.device_mask & ~stays, cores, memory, arena, bandwidth=bandwidth))
    return tuple(found)
