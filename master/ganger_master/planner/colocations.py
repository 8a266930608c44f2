"""Co-locations: try two running gangs on the same devices, and keep or end each by the measured rates (Gandiva, Xiao et
al., OSDI 2018, section 3.3). Without the state existing co-locations are undone and may be tried anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Final

from ganger.cluster.claims import resplit_cores
from ganger.cluster.fit import demand
from ganger.cluster.resources import Claim, exceeds
from ganger.cluster.view import View
from ganger.job_state import JobState
from ganger.text import counted
from msgspec import structs

from ganger_master.core.colocation import has_arenas
from ganger_master.core.gang_model import Gang, GangIntent, GangPhase
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.plan_changes import (
    CoresChange,
    Goal,
    MoveChange,
    PlanChange,
    Purpose,
    SuspendChange,
    TrialFinding,
)
from ganger_master.estimators.speed import UNKNOWN_DEVICE, Contention, Pressure, learn
from ganger_master.planner.context import PlanContext
from ganger_master.planner.device_groups import (
    Holder,
    as_held,
    fits_beside,
    may_be_slower,
    seat_of,
    shares_all,
    takes_turns,
)
from ganger_master.policies import Tune
from ganger_master.policies.make_room import overlap
from ganger_master.policies.trials import (
    ALONE_WINDOWS,
    FIRST_WINDOWS,
    Berth,
    ColocationProposal,
    FailedTrials,
    Judged,
    Pair,
    Resident,
    TrialRates,
    TrialVerdict,
    judge_colocation,
    lesson,
    normalised,
    proposals,
    still_pays,
)

if TYPE_CHECKING:
    from ganger_master.planner.rate_registry import JobRates

# One of so many devices at most is in a trial at once.
_DEVICES_PER_TRIAL: Final = 8
# A trial without enough windows by then has failed.
_LONGEST_TRIAL_S: Final = 3600.0
# A kept co-location is judged by its latest windows, so that older ones do not hide new interference.
_WATCHED_WINDOWS: Final = 16
_NO_ROOM: Final = "jobs that rest on their devices keep so much memory there that both have no room any more"


@dataclass(frozen=True, slots=True)
class Colocation:
    """A co-location, or one whose jobs leave their time-slice groups first."""

    proposal: ColocationProposal
    since_s: float
    is_kept: bool = False

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the numbers of its jobs, hosts first."""
        berths = self.proposal.host, self.proposal.guest
        return tuple([one.number for berth in berths for one in berth.residents])

    @property
    def host(self) -> int:
        return self.proposal.host.residents[0].number

    @property
    def guest(self) -> int:
        return self.proposal.guest.residents[0].number


@dataclass(frozen=True, slots=True)
class Colocations:
    """Co-locations and trials; jobs that leave groups for one; undone ones whose hosts get their cores back."""

    present: tuple[Colocation, ...] = ()
    leaving: tuple[Colocation, ...] = ()
    parting: tuple[Colocation, ...] = ()
    failed: FailedTrials[Pair] = field(default_factory=FailedTrials)
    contention: Mapping[str, Contention] = field(default_factory=dict)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        return tuple([colocation.numbers for colocation in self.present])

    @property
    def is_trying(self) -> bool:
        """Return whether any co-location is `on_trial`."""
        return bool(self.leaving or self.parting) or any(not colocation.is_kept for colocation in self.present)

    @property
    def on_trial(self) -> frozenset[int]:
        """Return the numbers of jobs in trials, and of those on their way into or out of one."""
        if not self.is_trying:
            return frozenset()
        trying = [colocation for colocation in self.present if not colocation.is_kept]
        return frozenset([number for one in (*trying, *self.leaving, *self.parting) for number in one.numbers])

    def without(self, proposal: ColocationProposal, now: float) -> Colocations:
        """Return the state after a co-location has failed."""
        return replace(self, failed=self.failed.noted(proposal.pair, now))


def plan_colocations(
    colocations: Colocations,
    context: PlanContext,
    is_oversubscribed: bool,
    is_time_sliced: bool = True,
    wanted: Callable[[Berth], float] = lambda guest: math.inf,
) -> tuple[tuple[PlanChange, ...], Colocations, tuple[TrialFinding, ...]]:
    """Return the changes to propose now, the state if they are proposed, and the findings of trials.

    Jobs alone on their devices get their cores back, unless a tuning decides about these. Jobs that are migrating begin
    no trial.

    is_time_sliced: a guest whose co-location ends is time-sliced with its host; else it is parked on storage and waits.
        Then jobs with a time limit, and jobs of different priorities, are not co-located.
    wanted: how many of the devices that a guest would leave pending jobs want.
    """
    view, now, measured = context.room.view, context.now, context.job_rates
    rests = partial(parking, in_memory=is_time_sliced)
    running = {pair[0].number: pair for pair in context.jobs.running}
    changes: list[PlanChange] = []
    left: list[Colocation] = []
    findings: list[TrialFinding] = []
    for colocation in colocations.present:
        colocations, stays, found = _judged(colocations, colocation, running, context)
        findings.extend(found)
        limited = not is_time_sliced and any(
            not may_be_slower(running[n][0]) for n in colocation.numbers if n in running
        )
        if stays is not None and not (limited and _is_together(colocation, running)):
            left.append(stays)
        elif _is_together(colocation, running):
            detail = "a job has a time limit now" if limited else "its gain could not be measured"
            detail = found[0].detail if found else detail
            changes.append(rests(*running[colocation.guest], Purpose(Goal.UNPACK, detail=detail)))
            colocations = replace(colocations, parting=(*colocations.parting, replace(colocation, since_s=now)))
    colocations = replace(colocations, present=tuple(left))
    busy = {number for colocation in left for number in colocation.numbers} | {change.number for change in changes}
    busy |= colocations.on_trial
    changes.extend(_strangers(running, busy, measured, rests))
    busy |= {change.number for change in changes}
    if not context.policy.has(Tune):
        changes.extend(whole_again(running, busy, view, measured))
    trying = len(colocations.leaving) + sum([not colocation.is_kept for colocation in left])
    most = max(1, context.capacity.gpus // _DEVICES_PER_TRIAL) - trying
    if not is_oversubscribed or most <= 0:
        return tuple(changes), colocations, tuple(findings)
    busy |= {change.number for change in changes} | context.migrating
    berths = [
        berth
        for number, (job, gang) in running.items()
        if number not in busy and (berth := _berth(job, gang, view, measured, is_time_sliced)) is not None
    ]
    may = _feasible(running, view, is_time_sliced)
    chosen = proposals(berths, colocations.failed, now, colocations.contention, most, may, wanted)
    begun, colocations = _begun(colocations, chosen, running, context)
    return (*changes, *begun), colocations, tuple(findings)


def _begun(
    colocations: Colocations, chosen: Iterable[ColocationProposal], running: Mapping[int, Holder], context: PlanContext
) -> tuple[list[PlanChange], Colocations]:
    """Return the first changes of these trials, and the state with them. Time-sliced jobs leave their groups first."""
    changes: list[PlanChange] = []
    for proposal in chosen:
        host, guest = [running[one.number] for one in proposal.residents]
        if host[1].node_set or guest[1].node_set:
            colocations = replace(colocations, leaving=(*colocations.leaving, Colocation(proposal, context.now)))
        elif begun := move_in(proposal, host, guest, context.room.view):
            changes.extend(begun)
            colocations = replace(colocations, present=(*colocations.present, Colocation(proposal, context.now)))
    return changes, colocations


def with_refusals(
    before: Colocations, planned: Colocations, refused: Set[int], barred: Set[int] = frozenset()
) -> Colocations:
    """Return the state after the master refused changes of these jobs: a trial whose guest was not admitted did not
    begin, and one whose guest was not parked continues. `barred`: jobs for which asking again would fail, so that
    others are tried."""
    if not refused:
        return planned
    known = {colocation.numbers for colocation in before.present}
    there = {colocation.numbers for colocation in planned.present}
    begun = [p for p in planned.present if p.numbers not in known and not refused.isdisjoint(p.numbers)]
    undone = [p for p in before.present if p.numbers not in there and p.guest in refused]
    left = tuple([colocation for colocation in planned.present if colocation not in begun])
    # A job that left its time slices in vain does not do so again at once.
    failed, on_their_way = planned.failed, []
    for colocation in begun:
        if not barred.isdisjoint(colocation.numbers):
            failed = failed.noted(colocation.proposal.pair, colocation.since_s)
    for one in planned.leaving:
        if refused.isdisjoint(one.numbers):
            on_their_way.append(one)
        else:
            failed = failed.noted(one.proposal.pair, one.since_s)
    parting = tuple([one for one in planned.parting if one.guest not in {colocation.guest for colocation in undone}])
    return replace(planned, present=(*left, *undone), leaving=tuple(on_their_way), parting=parting, failed=failed)


def parking(job: JobRecord, gang: Gang, purpose: Purpose, in_memory: bool = True) -> PlanChange:
    """Return the change that parks a gang: with `in_memory` in host memory if it can, else on storage."""
    has_arena = in_memory and job.capabilities.offload and has_arenas(gang)
    level = SuspendLevel.OFFLOAD if has_arena else SuspendLevel.CHECKPOINT
    return SuspendChange(job.number, job.revision, level=level, purpose=purpose)


def _strangers(
    running: Mapping[int, Holder],
    busy: Collection[int],
    measured: JobRates,
    rests: Callable[[JobRecord, Gang, Purpose], PlanChange],
) -> Iterator[PlanChange]:
    """Yield the changes that separate jobs whose trial is not in the state: the job that came last is parked."""
    for number, (job, gang) in running.items():
        co_located = measured.neighbours(number)
        if not co_located or number in busy or not co_located.isdisjoint(busy) or not is_settled(job, gang):
            continue
        epochs = [running[one][1].epoch for one in co_located if one in running]
        if gang.epoch > max(epochs, default=0):
            detail = "the expected gain of its co-location is lost"
            yield rests(job, gang, Purpose(Goal.UNPACK, detail=detail))


def whole_again(
    running: Mapping[int, Holder], busy: Collection[int], view: View, measured: JobRates
) -> Iterator[PlanChange]:
    """Yield the changes that give jobs alone on their devices the cores that belong to these, as far as free."""
    free: dict[str, tuple[int, ...]] = {}
    # Few nodes of an oversubscribed cluster have free cores: skip all others early.
    with_cores = {view.nodes[slot] for slot in view.columns().millicores.nonzero()[0].tolist()}
    for number, (job, gang) in running.items():
        if with_cores.isdisjoint(gang.nodes):
            continue
        # Time-sliced gangs share their cores.
        if number in busy or measured.neighbours(number) or not is_settled(job, gang) or gang.node_set:
            continue
        claims, shape = [], job.shape
        for claim in gang.claims:
            slot = view.slots[claim.node]
            have = free.setdefault(claim.node, view.millicores[slot])
            wanted = demand(view.topologies[slot].configuration_set, shape, claim.tasks).millicores
            held = sum(claim.millicores)
            if held >= wanted:
                claims.append(claim)
                continue
            cores = resplit_cores(claim.millicores, have, min(wanted, held + sum(have)))
            free[claim.node] = tuple([h + o - n for h, o, n in zip(have, claim.millicores, cores, strict=True)])
            claims.append(structs.replace(claim, millicores=cores))
        if tuple(claims) != gang.claims:
            yield CoresChange(number, job.revision, tuple(claims))


def _judged(
    colocations: Colocations, colocation: Colocation, running: Mapping[int, Holder], context: PlanContext
) -> tuple[Colocations, Colocation | None, list[TrialFinding]]:
    """Return the state, the co-location if it continues, and findings."""
    table, view, now, measured = context.jobs, context.room.view, context.now, context.job_rates
    proposal, numbers = colocation.proposal, colocation.numbers
    alone = [measured.alone(number) for number in numbers]
    if not all(alone):
        # One of its jobs has ended.
        return colocations, None, []
    members = {*numbers}
    if not all(measured.neighbours(number) == members - {number} for number in numbers):
        guest = table.get(colocation.guest)
        if colocation.is_kept and guest is not None and _is_kept_out(*guest, running.get(colocation.numbers[0]), view):
            # It would stay parked while its host runs; a time-sliced job gets its share.
            findings = [TrialFinding(number, Goal.PACK, False, 1.0, 0.0, _NO_ROOM) for number in numbers]
            colocations = replace(
                colocations.without(proposal, now), parting=(*colocations.parting, replace(colocation, since_s=now))
            )
            return colocations, None, findings
        if colocation.is_kept:
            # A job that its user has suspended may stay so for long.
            rests = any(found is None or found[0].state is JobState.SUSPENDED for found in map(table.get, numbers))
            apart = rests or all(number in running and is_settled(*running[number]) for number in numbers)
            left = any(not shares_all(running[number][1].claims) for number in numbers if number in running)
            return colocations, None if apart or left else colocation, []
        if guest is not None and _is_coming(*guest) and now < colocation.since_s + _LONGEST_TRIAL_S:
            return colocations, colocation, []
        # The master refused it, or one of its jobs was preempted meanwhile.
        return colocations.without(proposal, now), None, []
    first = -_WATCHED_WINDOWS if colocation.is_kept else 0
    rates = {n: TrialRates(before, measured.present(n)[first:]) for n, before in zip(numbers, alone, strict=True)}
    if colocation.is_kept:
        if still_pays(proposal.residents, rates):
            return colocations, colocation, []
        return colocations.without(proposal, now), None, _trial_findings(numbers, rates, is_kept=False)
    is_measured = min(len(one.after) for one in rates.values()) >= FIRST_WINDOWS
    judged = judge_colocation(proposal, rates) if is_measured else Judged(TrialVerdict.MEASURE)
    found = judged.verdict
    if found is TrialVerdict.MEASURE and now < colocation.since_s + _LONGEST_TRIAL_S:
        return colocations, colocation, []
    if not is_measured:
        return colocations.without(proposal, now), None, []
    known = colocations.contention.get(proposal.host.device_type, UNKNOWN_DEVICE)
    learned = {**colocations.contention, proposal.host.device_type: learn(known, [lesson(proposal, rates)])}
    colocations = replace(colocations, contention=learned)
    is_open = found is TrialVerdict.MEASURE or judged.is_open
    findings = _trial_findings(numbers, rates, is_kept=found is TrialVerdict.KEEP, is_open=is_open)
    if found is TrialVerdict.KEEP:
        colocations = replace(colocations, failed=colocations.failed.forgotten(proposal.pair))
        return colocations, replace(colocation, is_kept=True), findings
    return colocations.without(proposal, now), None, findings


def _is_kept_out(job: JobRecord, gang: Gang | None, host: Holder | None, view: View) -> bool:
    """Return whether a guest parked in its time slice cannot resume beside its host, because gangs parked on their
    devices since then hold memory there."""
    if gang is None or host is None or job.state is not JobState.HOLDING or not is_settled(*host):
        return False
    return is_resting(job, gang) and not fits_beside(job, gang.parked_claims, [host[0]], view)


def _is_coming(job: JobRecord, gang: Gang | None) -> bool:
    """Return whether a migrated guest has not reported yet that it runs."""
    holds = gang is not None and gang.intent is GangIntent.RUN and job.state is JobState.HOLDING
    return bool(job.next_epoch) or (holds and not job.running_since)


def _trial_findings(
    numbers: Sequence[int], rates: Mapping[int, TrialRates], is_kept: bool, is_open: bool = False
) -> list[TrialFinding]:
    gain = normalised(rates.values())
    each = ", ".join([f"jobs/{number} at {normalised([rates[number]]).value:.2f}" for number in numbers])
    windows = min(len(one.after) for one in rates.values())
    measured = f"by {counted(windows, 'window')}" + (", which leave open whether that pays" if is_open else "")
    detail = f"{each} of the rate alone, {measured}; in turns they would make 1.00 together"
    return [TrialFinding(number, Goal.PACK, is_kept, gain.value, gain.deviation, detail) for number in numbers]


def _is_together(colocation: Colocation, running: Mapping[int, Holder]) -> bool:
    places = [[(c.node, c.device_mask) for c in running[n][1].claims] for n in colocation.numbers if n in running]
    return len(places) == len(colocation.numbers) and all(place == places[0] for place in places)


def is_settled(job: JobRecord, gang: Gang) -> bool:
    return gang.phase is GangPhase.RUNNING and not job.next_epoch


def is_resting(job: JobRecord, gang: Gang) -> bool:
    """Return whether it is parked in host memory until it is ordered to resume."""
    parked = gang.phase is GangPhase.PARKED and gang.intent is GangIntent.PARK and not job.next_epoch
    return parked and gang.park_level is SuspendLevel.OFFLOAD


def _berth(job: JobRecord, gang: Gang, view: View, measured: JobRates, is_time_sliced: bool) -> Berth | None:
    """Return a gang alone on its devices with measured rates, as a candidate; None if it is not one. With
    `is_time_sliced` only jobs that can be time-sliced are candidates: a guest has to resume on the host's devices when
    a trial ends."""
    if gang.phase is not GangPhase.RUNNING or job.next_epoch or (gang.node_set and not is_time_sliced):
        return None
    can_turn = takes_turns(job) and job.capabilities.offload
    can = can_turn if is_time_sliced else may_be_slower(job) and job.capabilities.checkpoint
    windows = measured.alone(job.number)
    needed = job.shape.device_memory_bytes
    if not can or len(windows) < ALONE_WINDOWS or not needed or measured.neighbours(job.number):
        return None
    made = view.topology(gang.claims[0].node).configuration_set
    if not made.device_memory_bytes:
        # No two jobs are known to fit.
        return None
    pressure = Pressure(measured.utilisation(job.number), float(needed))
    resident = Resident(job.number, measured.signature(job.number), pressure)
    return Berth(seat_of(gang.claims), made.device_type, made.device_memory_bytes, (resident,))


def _feasible(running: Mapping[int, Holder], view: View, is_time_sliced: bool) -> Callable[[Berth, Berth], bool]:
    """Return the test whether a guest fits beside a host. No third job may be time-sliced on the host's devices."""

    @cache
    def sliced_with(there: int) -> frozenset[int]:
        """Return the jobs that are time-sliced on the devices of a job; none if it is not."""
        gang = running[there][1]
        if not gang.node_set:
            return frozenset()
        group = [(number, other) for number, (_, other) in running.items() if other.node_set == gang.node_set]
        return frozenset([number for number, other in group if overlap(other.claims, gang.claims)])

    def may(host: Berth, guest: Berth) -> bool:
        there, comes = host.residents[0].number, guest.residents[0].number
        if not running[comes][0].capabilities.can_hand_over or not sliced_with(there) <= {there, comes}:
            return False
        if not is_time_sliced and running[there][0].priority != running[comes][0].priority:
            return False
        if not all(view.available[view.slots[node]] for node, _ in host.seat):
            return False
        guest_job = running[comes][0]
        if not all(view.topology(node).is_in(guest_job.partition.name) for node, _ in host.seat):
            return False
        if not guest_job.closed_nodes.isdisjoint([node for node, _ in host.seat]):
            return False
        if not running[there][1].node_set and _beside(running[there], running[comes], view) is None:
            return False
        return fits_beside(running[comes][0], running[there][1].claims, [running[there][0]], view)

    return may


def move_in(proposal: ColocationProposal, at: Holder, comes: Holder, view: View) -> Sequence[PlanChange]:
    """Return the changes that move the guest there, with half of the host's cores; empty if its tasks do not fit."""
    found = _beside(at, comes, view)
    if found is None:
        return ()
    (host, _), (guest, _) = at, comes
    kept, taken = found
    expected = proposal.forecast
    between = f"{expected.low:.2f} to {expected.high:.2f}"
    detail = f"with {host.name}: {expected.gain:.2f} expected ({between}), 1.00 in turns"
    purpose = Purpose(Goal.PACK, detail=detail)
    gives = f"half of its cores for {guest.name}, which comes to its GPUs"
    return (
        CoresChange(host.number, host.revision, tuple(kept), together=guest.number, reason=gives),
        MoveChange(guest.number, guest.revision, tuple(taken), together=guest.number, purpose=purpose),
    )


def _beside(at: Holder, comes: Holder, view: View) -> tuple[list[Claim], list[Claim]] | None:
    """Return the claims of host and guest, the latter with its present host memory; None if it does not fit."""
    shape = as_held(comes[0].shape, comes[1])
    gpus_of_task = shape.roles[0].shape.gpus
    kept: list[Claim] = []
    taken: list[Claim] = []
    for claim in at[1].claims:
        gpus = claim.device_mask.bit_count()
        if gpus % gpus_of_task:
            return None
        tasks = (gpus // gpus_of_task,)
        needed = demand(view.topology(claim.node).configuration_set, shape, tasks)
        memory = needed.memory_bytes
        left = view.memory[view.slots[claim.node]] - memory
        if left < 0 or exceeds(needed.bandwidth, view.bandwidth.get(view.slots[claim.node], ())):
            return None
        halves = tuple([cores // 2 for cores in claim.millicores])
        kept.append(
            structs.replace(
                claim, millicores=tuple([have - half for have, half in zip(claim.millicores, halves, strict=True)])
            )
        )
        arena = needed.arena_bytes if needed.arena_bytes <= left else 0
        mask = claim.device_mask
        bandwidth = needed.bandwidth
        taken.append(Claim(claim.node, mask, halves, memory, arena, tasks, shared_mask=mask, bandwidth=bandwidth))
    return kept, taken
