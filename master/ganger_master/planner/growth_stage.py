"""The pass of whoever grows elastic jobs: onto GPUs that nobody wants, and back at once when somebody does.

It goes before the pass that says who starts. Who grows, how far, and who gives back are for
`policies.elastic_growth` to say; here is what that needs to know: for how long GPUs have been idle, how fast jobs
are with how many, what is being tried, and what is on its way to those who wait. A job is tried with one size more at a
time, and kept there only if it gained enough by it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.placement import resized
from ganger.cluster.resources import Claim
from ganger.cluster.topology import bits
from ganger.cluster.trial import Claims, WhatIf
from ganger.cluster.view import View

from ganger_master.core.change_reason import Goal, Purpose, TrialFinding
from ganger_master.core.commands import Change
from ganger_master.core.elastic import tasks_divide
from ganger_master.core.model import Gang, GangPhase, JobRecord
from ganger_master.planner.in_place_resize import given_back
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.plan import PlanDraft
from ganger_master.planner.slices import as_held
from ganger_master.policies.backoff import FailedTrials
from ganger_master.policies.elastic_growth import IDLE_S, Elastic, grow, shrink, verdict
from ganger_master.policies.placements import PlacementPreference, Want
from ganger_master.policies.trial_test import FIRST_WINDOWS, TrialRates, TrialVerdict

# Of more who wait than these nobody looks whom one cut serves: everybody gives back what it can.
_FEW: Final = 16
# Somebody may have asked for it to be judged, but no progress is told of.
_TRIAL_MOST_S: Final = 600.0
_ANYWHERE: Final = Want(math.inf)


class SpeedSource(Protocol):
    """What is measured of elastic jobs, by number. Rates are in whatever is done per second, alike for all sizes."""

    def windows(self, number: int) -> tuple[float, ...]:
        """Of the last windows since its size changed, oldest first."""
        ...

    def rates(self, number: int) -> Mapping[int, float]:
        """By number of GPUs, as last measured with each."""
        ...


@dataclass(frozen=True, slots=True)
class SizeTrial:
    """It had `fewer` GPUs and is to have `more`; `before`: its rates by windows until then."""

    fewer: int
    more: int
    before: tuple[float, ...]
    began_s: float


@dataclass(frozen=True, slots=True)
class GrowthTrials:
    """What is remembered from one pass to the next. Lost, who is on trial keeps its size."""

    # Since when devices are free, by node, of nodes where somebody might grow.
    idle: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    trials: Mapping[int, SizeTrial] = field(default_factory=dict)
    # Job and size that was not worth it, or could not be had.
    failed: FailedTrials[tuple[int, int]] = field(default_factory=FailedTrials)
    # Pieces on their way to those who wait, by the job that gives them.
    giving: Mapping[int, Claims] = field(default_factory=dict)

    def without(self, numbers: Iterable[int], now: float) -> GrowthTrials:
        """What was proposed for these jobs was refused."""
        gone = set(numbers)
        failed = self.failed
        for number in gone & self.trials.keys():
            failed = failed.noted((number, self.trials[number].more), now)
        return replace(
            self,
            trials={number: trial for number, trial in self.trials.items() if number not in gone},
            giving={number: claims for number, claims in self.giving.items() if number not in gone},
            failed=failed,
        )


@dataclass(frozen=True, slots=True)
class Sizes:
    """`is_giving`: GPUs are on their way to who waits, so that nobody need be stopped. `next_s`: when to ask again
    though nothing happens; infinite: not before."""

    changes: tuple[Change, ...] = ()
    findings: tuple[TrialFinding, ...] = ()
    is_giving: bool = False
    next_s: float = math.inf


def plan_sizes(
    placement: PlacementPreference,
    table: LiveTable,
    now: float,
    room: CapacityIndex,
    speeds: SpeedSource,
    growing: GrowthTrials,
    idle_s: float = IDLE_S,
    busy: Collection[int] = (),
) -> tuple[Sizes, GrowthTrials]:
    """The changes of size to propose now. `room` is left as it is. `busy`: numbers of those who keep theirs."""
    room.refresh()
    pairs = [pair for pair in table.running if _may_change(*pair)]
    running = {job.number: (job, gang) for job, gang in pairs if job.number not in busy}
    growing = _followed(growing, table, now)
    if table.has_waiting:
        found = _given_back(placement, table, room, speeds, growing, running)
        trials = {number: trial for number, trial in growing.trials.items() if number not in found}
        giving = {**growing.giving, **{number: given for number, (_, given) in found.items()}}
        changes = tuple([change for change, _ in found.values()])
        growing = replace(growing, idle={}, trials=trials, giving=giving)
        return Sizes(changes, is_giving=bool(giving)), growing
    changes, findings, growing = _judged(running, speeds, growing, room.view, now)
    changing = {change.number for change in changes} | growing.trials.keys() | growing.giving.keys()
    growable = [pair for number, pair in running.items() if number not in changing and _may_have_more(table, *pair)]
    growing = replace(growing, idle=_idle(growing.idle, room.view, list(running.values()), now))
    # Who rests in host memory by a plan needs GPUs to go on, as who waits does, and maybe more than are free yet.
    growth = None if table.parked else _grown(growable, speeds, growing, room.view, now, idle_s)
    if growth is not None:
        change, trial = growth
        changes = (*changes, change)
        growing = replace(growing, trials={**growing.trials, change.number: trial})
    due = [since + idle_s for devices in growing.idle.values() for since in devices.values()]
    next_s = min([at for at in due if at > now], default=math.inf)
    return Sizes(changes, findings, next_s=next_s), growing


def with_sizes(found: PlanDraft, sizes: Sizes) -> PlanDraft:
    """What another pass found, after these changes of size. Whose size changes is left alone by it, and so is whoever
    was to change together with it."""
    numbers = {change.number for change in sizes.changes}
    groups = {change.together for change in found.changes if change.together and change.number in numbers}
    others = [one for one in found.changes if one.number not in numbers and one.together not in groups]
    changes = (*sizes.changes, *others)
    return replace(found, changes=changes, next_change_s=min(found.next_change_s, sizes.next_s))


def _may_change(job: JobRecord, gang: Gang) -> bool:
    can = job.spec.is_elastic and job.spec.preemptible and job.capabilities.resize and not job.next_epoch
    settled = gang.phase is GangPhase.RUNNING and job.ending is None
    # Who shares its devices, at once or in turns, keeps its size until it has some of its own.
    return can and settled and not gang.node_set and not any(claim.shared_mask for claim in gang.claims)


def _may_have_more(table: LiveTable, job: JobRecord, gang: Gang) -> bool:
    return table.quotas is None or table.quotas.left(job) > gang.devices


def _followed(growing: GrowthTrials, table: LiveTable, now: float) -> GrowthTrials:
    """Without what is done, and what came to nothing."""
    giving = {}
    for number, claims in growing.giving.items():
        found = table.get(number)
        gang = found[1] if found is not None else None
        if found is not None and gang is not None and found[0].next_epoch and _holds(gang, claims):
            giving[number] = claims
    trials, failed = {}, growing.failed
    for number, trial in growing.trials.items():
        found = table.get(number)
        if found is None or found[1] is None:
            continue
        job, gang = found
        devices = gang.devices if gang is not None else 0
        if devices == trial.more or (job.next_epoch and devices == trial.fewer):
            trials[number] = trial
        elif now > trial.began_s:
            failed = failed.noted((number, trial.more), now)
    return replace(growing, giving=giving, trials=trials, failed=failed)


def _holds(gang: Gang, claims: Claims) -> bool:
    held = {piece.claim.node: piece.held for piece in gang.pieces}
    return any((own := held.get(claim.node)) is not None and own.device_mask & claim.device_mask for claim in claims)


# -- giving back


def _given_back(
    placement: PlacementPreference,
    table: LiveTable,
    room: CapacityIndex,
    speeds: SpeedSource,
    growing: GrowthTrials,
    running: Mapping[int, tuple[JobRecord, Gang]],
) -> dict[int, tuple[Change, Claims]]:
    """By number: its change, and the pieces that it gives back."""
    can = {number: pair for number, pair in running.items() if pair[1].devices > _least(*pair)}
    found: dict[int, tuple[Change, Claims]] = {}
    waiting = table.waiting_jobs(_FEW) if can else []
    if not waiting:
        for number, pair in can.items():
            cut = _cut(pair, _least(*pair), room.view, 0)
            if cut is not None:
                found[number] = cut
        return found
    trying = WhatIf(room)
    claims_of = {number: gang.claims for number, (_, gang) in can.items()}
    try:
        for claims in growing.giving.values():
            _give(trying, claims)
        for job in waiting:
            elastic = [_elastic(*can[number], speeds, growing.failed) for number in can if number not in found]
            for number, gpus in shrink(elastic, room, job.shape, claims_of, placement).items():
                cut = _cut(can[number], gpus, room.view, job.number)
                if cut is not None:
                    found[number] = cut
                    _give(trying, cut[1])
            place = placement.place(room, job.shape, _ANYWHERE)
            if place is not None:
                trying.take(place)
    finally:
        trying.undo()
    return found


def _give(trying: WhatIf, claims: Claims) -> None:
    view = trying.room.view
    for claim in claims:
        slot = view.slots.get(claim.node)
        # What its daemon has seen free already is in the view.
        if slot is not None and not view.free[slot] & claim.device_mask:
            trying.give((claim,))


def _cut(pair: tuple[JobRecord, Gang], gpus: int, view: View, waits: int) -> tuple[Change, Claims] | None:
    job, gang = pair
    claims = _claims(job, gang, gpus, view)
    if claims is None:
        return None
    purpose = Purpose(Goal.GIVE_BACK, waits)
    return _change(job, claims, f"from {gang.devices} GPUs to {gpus}", purpose), given_back(gang, claims)


# -- growing


def _judged(
    running: Mapping[int, tuple[JobRecord, Gang]], speeds: SpeedSource, growing: GrowthTrials, view: View, now: float
) -> tuple[tuple[Change, ...], tuple[TrialFinding, ...], GrowthTrials]:
    """Who grew and stays so, or not."""
    changes: list[Change] = []
    findings: list[TrialFinding] = []
    trials, failed = dict(growing.trials), growing.failed
    for number, trial in growing.trials.items():
        if number not in running or running[number][1].devices != trial.more:
            continue
        job, gang = running[number]
        judged = verdict(trial.fewer, trial.more, TrialRates(trial.before, speeds.windows(number)))
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
            text = f"{gain} with {trial.more} GPUs, {trial.fewer} will do"
            changes.append(_change(job, claims, text, Purpose(Goal.GIVE_BACK)))
    return tuple(changes), tuple(findings), replace(growing, trials=trials, failed=failed)


def _idle(
    known: Mapping[str, Mapping[int, float]], view: View, pairs: Sequence[tuple[JobRecord, Gang]], now: float
) -> dict[str, dict[int, float]]:
    """Since when devices are free on the nodes of jobs that might grow."""
    found: dict[str, dict[int, float]] = {}
    for name in {claim.node for _, gang in pairs for claim in gang.claims}:
        slot = view.slots.get(name)
        if slot is not None and view.available[slot]:
            before = known.get(name, {})
            found[name] = {device: before.get(device, now) for device in bits(view.free[slot])}
    return found


def _grown(
    pairs: Sequence[tuple[JobRecord, Gang]],
    speeds: SpeedSource,
    growing: GrowthTrials,
    view: View,
    now: float,
    idle_s: float,
) -> tuple[Change, SizeTrial] | None:
    nodes = {name for name, devices in growing.idle.items() if any(now >= at + idle_s for at in devices.values())}
    measured = [
        (job, gang)
        for job, gang in pairs
        if any(claim.node in nodes for claim in gang.claims)
        and len(windows := speeds.windows(job.number)) >= FIRST_WINDOWS
        and min(windows) > 0.0
    ]
    jobs = [_elastic(job, gang, speeds, growing.failed, now) for job, gang in measured]
    if not any(job.larger for job in jobs):
        return None
    if any(now < since + idle_s for devices in growing.idle.values() for since in devices.values()):
        view = view.copy()
        for name, devices in growing.idle.items():
            young = sum([1 << device for device, since in devices.items() if now < since + idle_s])
            if young:
                sockets = len(view.millicores[view.slots[name]])
                view.take(Claim(name, young, (0,) * sockets, 0), young.bit_count())
    growth = grow(jobs, view, math.inf)
    if growth is None:
        return None
    job, gang = next(pair for pair in measured if pair[0].number == growth.number)
    claims = _claims(job, gang, growth.gpus, view, one_node_only=True)
    if claims is None:
        return None
    rate = speeds.rates(job.number)[gang.devices]
    text = f"idle GPUs; {rate:.4g} a second with {gang.devices}, to be measured with {growth.gpus}"
    trial = SizeTrial(gang.devices, growth.gpus, speeds.windows(job.number), now)
    return _change(job, claims, text, Purpose(Goal.GROW)), trial


def _elastic(
    job: JobRecord, gang: Gang, speeds: SpeedSource, failed: FailedTrials[tuple[int, int]], now: float = -math.inf
) -> Elastic:
    """Of one that was not measured yet, as if it gained by each GPU."""
    sizes = _sizes(job, gang)
    rates = {gpus: rate for gpus, rate in speeds.rates(job.number).items() if gpus in sizes and rate > 0.0}
    rates = rates or {gang.devices: float(gang.devices)}
    rates.setdefault(gang.devices, max(rates.values()))
    ceiling = min([gpus for gpus in sizes if failed.holds((job.number, gpus), now)], default=1 << 30)
    seat = tuple([(claim.node, claim.device_mask) for claim in gang.claims])
    return Elastic(job.number, sizes, seat, rates, ceiling=ceiling)


def _sizes(job: JobRecord, gang: Gang) -> tuple[int, ...]:
    """Numbers of GPUs that it may have, its present one among them."""
    spec = job.spec
    each = spec.roles[0].shape.gpus
    may = [gpus for gpus in range(spec.gpus_min, spec.gpus_max + 1, each) if tasks_divide(job, gpus)]
    return tuple(sorted({*may, gang.devices}))


def _least(job: JobRecord, gang: Gang) -> int:
    return _sizes(job, gang)[0]


def _claims(job: JobRecord, gang: Gang, gpus: int, view: View, one_node_only: bool = False) -> Claims | None:
    shape = job.spec.shape(job.arena_bytes_per_device, job.used_device_bytes, gpus)
    return resized(view, as_held(shape, gang), gang.claims, one_node_only)


def _change(job: JobRecord, claims: Claims, reason: str, purpose: Purpose) -> Change:
    return Change(job.number, job.revision, "RESIZE", claims, reason=reason, purpose=purpose)
