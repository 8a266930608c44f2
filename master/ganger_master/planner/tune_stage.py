"""Cores and memory by a tuning: of the jobs that `plan` starts, or after other stages of running jobs alone.

New jobs are placed as if each gang held at most its share of a node, and then all are tuned anew. Wishes become changes
in an order in which each fits after those before it; those that do not fit are left out. Requested cores are a wish;
requested memory is guaranteed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np
from ganger.cluster.capacity_index import Trial
from ganger.cluster.claims import resplit_cores, split_cores
from ganger.cluster.fit import demand, memory_named
from ganger.cluster.resources import Claim, GangShape, LocalityLevel
from ganger.cluster.view import View
from msgspec import structs

from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord
from ganger_master.core.plan_changes import CoresChange, PlanChange, StartChange
from ganger_master.planner.context import NOTHING_TO_DO, PassTerms, PlanContext, PlanDraft, PlanStage, held_of
from ganger_master.planner.device_groups import Claims, shares_devices
from ganger_master.planner.plan import plan
from ganger_master.policies.tunings import NOTHING, Known, Tuning, TuningNodes, known_gangs, pieces

# Millicores and bytes of each claim.
Amounts: TypeAlias = tuple[tuple[int, int], ...]
Placed: TypeAlias = tuple[JobRecord, Claims]

_NO_TRIALS: Final[Mapping[int, int]] = MappingProxyType({})


def known_of(context: PlanContext) -> Known:
    """Return the rates by cores and memory that are known of jobs."""
    return NOTHING if context.rates is None else context.rates.known


def plan_tuned(tuning: Tuning, context: PlanContext) -> PlanDraft:
    """Return the changes of `plan` with tuned starts, and CORES changes of running jobs, which keep their places. For a
    trial, millicores per GPU replace the tuning, as far as other jobs leave them and no job is to start."""
    table, room, terms = context.jobs, context.room, context.terms
    if not (context.is_news or table.has_waiting):
        # The last plan has tuned all that there is, by the same measurements.
        return NOTHING_TO_DO
    room.follow()
    view = room.view
    running = [pair for pair in table.running if is_tuned(view, *pair) and tuning.decides_cores_of(pair[0].shape)]
    placing = running if table.has_waiting else []
    lent = [(gang.claims, least_claims(view, job.shape, gang.claims)) for job, gang in placing]
    lent = [
        (held, least) for held, least in lent if held != least and context.kept_on.isdisjoint(one.node for one in held)
    ]
    least_of = dict(lent)
    lending = Trial(room)
    for held, least in lent:
        lending.give(held)
        lending.take(least)
    shares = PassTerms(
        lambda job: with_shares(terms.shape(job)) if tuning.decides_cores_of(job.shape) else terms.shape(job),
        lambda gang: least_of.get(held_of(gang), held_of(gang)),
        terms.co_located_now,
        terms.preferred,
    )
    found = plan(structs.replace(context, terms=shares))
    lending.undo()
    stops = [change for change in found.changes if not isinstance(change, StartChange)]
    if not (context.is_news or found.changes):
        return found
    stopped = {change.number for change in stops}
    starts = {change.number: change.claims for change in found.changes if isinstance(change, StartChange)}
    gangs = [(job, gang.claims) for job, gang in running if job.number not in stopped]
    newcomers = [(job, starts[number]) for number in sorted(starts) if (job := table.jobs[table.row(number)])]
    wishes = _wishes(tuning, view, gangs, newcomers, known_of(context), trials_of(context), terms.shape)
    tuned = fitted(view, *wishes, context.kept_on)
    return replace(found, changes=(*stops, *tuned.changes), waits=found.waits or tuned.held_back)


def trials_of(context: PlanContext) -> Mapping[int, int]:
    """Return millicores for each GPU that are being tried, by job number."""
    return _NO_TRIALS if context.rates is None else context.rates.trials


class TuneStage(PlanStage):
    """The stage where jobs are not started by rank. It plans where no earlier stage has changes, and keeps no state."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning

    def plan(self, context: PlanContext) -> None:
        if not context.draft.changes:
            context.draft = replace(context.draft, changes=self._changes(context))

    def _changes(self, context: PlanContext) -> tuple[PlanChange, ...]:
        """Return changes of the cores of running jobs; they keep their memory. While jobs are pending, no job has more
        than its share: a job that is about to start finds its own."""
        context.room.follow()
        view, table = context.room.view, context.jobs
        gangs = [
            (job, gang.claims)
            for job, gang in table.running
            if is_tuned(view, job, gang) and self._tuning.decides_cores_of(job.shape)
        ]
        trials = _NO_TRIALS if table.has_waiting else trials_of(context)
        shape_of = context.terms.shape
        wishes, _ = _wishes(self._tuning, view, gangs, (), known_of(context), trials, shape_of)
        for at, wish in enumerate(wishes):
            most = asked(view, shape_of(wish.job), wish.claims) if table.has_waiting else wish.amounts
            cores = [min(amount[0], limit[0]) for amount, limit in zip(wish.amounts, most, strict=True)]
            memory = [claim.memory_bytes for claim in wish.claims]
            wishes[at] = replace(wish, amounts=tuple(zip(cores, memory, strict=True)))
        return tuple(fitted(view, wishes, (), context.kept_on).changes)


def is_tuned(view: View, job: JobRecord, gang: Gang) -> bool:
    """Return whether the cores and memory of a gang may change. Gangs that move or share devices, and those with pieces
    without devices or on nodes that left, keep what they have."""
    return not (job.next_epoch or shares_devices(gang)) and all(
        claim.device_mask and claim.node in view.slots for claim in gang.claims
    )


def _wishes(
    tuning: Tuning,
    view: View,
    running: Sequence[Placed],
    starting: Sequence[Placed],
    known: Known,
    trials: Mapping[int, int],
    shape_of: Callable[[JobRecord], GangShape],
) -> tuple[list[CoresWish], list[CoresWish]]:
    """Return what the tuning gives to each job on its nodes."""
    others = [_as_asked(tuning, view, job, claims, shape_of(job)) for job, claims in starting]
    tunable = [
        wish
        for wish in others
        if tuning.decides_cores_of(wish.job.shape) and all(claim.device_mask for claim in wish.claims)
    ]
    gangs = sorted([*running, *[(wish.job, wish.claims) for wish in tunable]], key=lambda pair: pair[0].number)
    if not gangs:
        return [], others
    names = {name: at for at, name in enumerate(sorted({claim.node for _, claims in gangs for claim in claims}))}
    given = _divided(tuning, view, names, running, gangs, known)
    is_measured = known.position(np.array([job.number for job, _ in gangs])) >= 0
    starts = {wish.job.number for wish in tunable}
    starts_on = {claim.node for wish in others for claim in wish.claims}
    wishes: tuple[list[CoresWish], list[CoresWish]] = ([], [wish for wish in others if wish.job.number not in starts])
    for at, (job, claims) in enumerate(gangs):
        is_start = job.number in starts
        # Where profiles cover memory, the tuning weighs what a job that may be co-located later would leave unused.
        knows_memory = known.knows_memory_of(job.number)
        shape = job.shape if knows_memory else shape_of(job)
        share = asked(view, shape, claims)
        got = [given.get((at, names[claim.node])) for claim in claims]
        amounts = tuple([some or mine for some, mine in zip(got, share, strict=True)])
        if tuning.by_profiles and not is_measured[at]:
            # What its neighbours leave may be wanted by the next job, and nothing shows that this one uses it.
            amounts = tuple([(min(some[0], mine[0]), some[1]) for some, mine in zip(amounts, share, strict=True)])
        tried = trials.get(job.number)
        if tried is not None and starts_on.isdisjoint([claim.node for claim in claims]):
            gpus = [claim.device_mask.bit_count() for claim in claims]
            amounts = tuple([(tried * count, memory) for count, (_, memory) in zip(gpus, amounts, strict=True)])
        if not (is_start or knows_memory):
            # Without a memory profile it may use all that it has.
            amounts = tuple([(cores, own.memory_bytes) for (cores, _), own in zip(amounts, claims, strict=True)])
        wish = wish_of(view, job, shape, claims, amounts, is_start)
        # A job that the tuning leaves out waits for others, if there are any.
        if not is_start or None not in got or not running:
            wishes[is_start].append(wish)
    return wishes


def _divided(
    tuning: Tuning, view: View, names: dict[str, int], running: Sequence[Placed], gangs: Sequence[Placed], known: Known
) -> dict[tuple[int, int], tuple[int, int]]:
    nodes = nodes_of(view, names, [claims for _, claims in running], gangs)
    rows = [(at, names[claim.node], claim) for at, (_, claims) in enumerate(gangs) for claim in claims]
    placed = pieces(
        [row[0] for row in rows],
        [row[1] for row in rows],
        [row[2].device_mask.bit_count() for row in rows],
        [
            sum([n for n, role in zip(claim.tasks, gangs[at][0].shape.roles, strict=True) if not role.shape.gpus])
            for at, _, claim in rows
        ],
    )
    of_tuning = known_gangs(
        known,
        np.array([job.number for job, _ in gangs]),
        np.bincount(placed.gang, weights=placed.gpus).astype(np.int64),
        np.zeros(len(gangs), bool),
        nodes,
    )
    result = tuning.tune(of_tuning, nodes, placed)
    return {
        (gang, node): (whole(1000 * cores), whole(memory))
        for gang, node, cores, memory in zip(
            result.gang.tolist(), result.node.tolist(), result.cores.tolist(), result.memory_bytes.tolist(), strict=True
        )
    }


def wish_of(
    view: View,
    job: JobRecord,
    shape: GangShape,
    claims: Claims,
    amounts: Amounts,
    is_start: bool,
    gpus: tuple[int, ...] = (),
) -> CoresWish:
    """Return the amounts with the memory that the job requests, and never below its minimum. `shape`: the one that it
    is placed with. A job that leaves memory for a co-located one gets no more than its share of it at its start; what
    it has of the whole share later, it may use."""
    share = asked(view, shape if is_start else unmeasured(shape), claims)
    whole_share = share if is_start else asked(view, unmeasured(job.shape), claims)
    wanted, least = [], []
    for claim, (millicores, memory), (share_millicores, share_memory), (_, most) in zip(
        claims, amounts, share, whole_share, strict=True
    ):
        named = memory_named(shape, claim.tasks)
        is_less = shape.residents > 1 or (is_start and shape.task_memory_bytes > 0)
        memory = min(memory, share_memory) if is_less else memory
        memory = named or (memory if is_start else max(memory, min(claim.memory_bytes, most)))
        wanted.append((max(1, millicores), max(1, memory)))
        least.append((min(max(1, millicores), share_millicores), named or min(memory, share_memory)))
    return CoresWish(job, claims, tuple(wanted), tuple(least), gpus)


def nodes_of(view: View, names: dict[str, int], held: Sequence[Claims], gangs: Sequence[Placed]) -> TuningNodes:
    """Return what is free on each node or held by these gangs, less requested memory, which is not distributed."""
    gpus, millicores, memory = ([0] * len(names) for _ in range(3))
    for name, at in names.items():
        slot = view.slots[name]
        gpus[at] = view.free[slot].bit_count()
        millicores[at] = sum(view.millicores[slot])
        memory[at] = view.memory[slot]
    for claims in held:
        for claim in claims:
            node = names.get(claim.node)
            if node is not None:
                gpus[node] += claim.device_mask.bit_count()
                millicores[node] += sum(claim.millicores)
                memory[node] += claim.memory_bytes
    for job, claims in gangs:
        for claim in claims:
            memory[names[claim.node]] -= memory_named(job.shape, claim.tasks)
    return TuningNodes(
        np.array(gpus, np.int64), np.array(millicores, float) / 1000, np.maximum(np.array(memory, float), 0.0)
    )


def whole(amount: float) -> int:
    """Round down, except for errors of floating point."""
    return int(amount * (1.0 + 1e-12) + 1e-6)


def least_claims(view: View, shape: GangShape, claims: Claims) -> Claims:
    """Return the claims that a running gang can be reduced to."""
    least = []
    for claim, (millicores, memory) in zip(claims, asked(view, shape, claims), strict=True):
        held = sum(claim.millicores)
        if millicores >= held and memory >= claim.memory_bytes:
            least.append(claim)
            continue
        split = claim.millicores
        if millicores < held:
            split = _less(split, millicores)
        least.append(structs.replace(claim, millicores=split, memory_bytes=min(memory, claim.memory_bytes)))
    return tuple(least)


def _less(held: tuple[int, ...], millicores: int) -> tuple[int, ...]:
    """Return so many of these millicores, those of the first sockets first."""
    left = millicores
    kept = []
    for own in held:
        kept.append(min(own, left))
        left -= kept[-1]
    return tuple(kept)


def asked(view: View, shape: GangShape, claims: Sequence[Claim]) -> Amounts:
    """Return the share of each claim's node in cores, and the requested memory or else the share."""
    shape = with_shares(shape)
    sets = [view.topologies[view.slots[claim.node]].configuration_set for claim in claims]
    needs = [demand(made, shape, claim.tasks) for made, claim in zip(sets, claims, strict=True)]
    return tuple([(needed.millicores, needed.memory_bytes) for needed in needs])


def _as_asked(tuning: Tuning, view: View, job: JobRecord, claims: Claims, shape: GangShape) -> CoresWish:
    """Return the wish of a job that is to start with what it names, or else with its share, or less of that."""
    if tuning.decides_cores_of(job.shape):
        return CoresWish(job, claims, asked(view, shape, claims), ((0, 0),) * len(claims))
    named = tuple([(sum(claim.millicores), claim.memory_bytes) for claim in claims])
    return CoresWish(job, claims, named, named)


def unmeasured(shape: GangShape) -> GangShape:
    """Return the shape with shares of memory: what a job was measured to use counts from its next start on."""
    return structs.replace(shape, task_memory_bytes=0) if shape.task_memory_bytes else shape


@lru_cache(4096)
def with_shares(shape: GangShape) -> GangShape:
    """Return the shape with a share of cores for each task, whatever it requests."""
    roles = tuple([structs.replace(role, shape=structs.replace(role.shape, millicores=0)) for role in shape.roles])
    return structs.replace(shape, roles=roles)


# -- amounts to changes ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CoresWish:
    """Other amounts for a gang's claims. For a job that is to start, the claims name its nodes, with device masks, or
    without them if `gpus` has the numbers. With less than `least` it does not start."""

    job: JobRecord
    claims: Claims
    amounts: Amounts
    least: Amounts
    gpus: tuple[int, ...] = ()


@dataclass(slots=True)
class Fitted:
    """`held_back`: some jobs could not start yet."""

    changes: list[PlanChange] = field(default_factory=list)
    held_back: bool = False


def fitted(
    view: View, running: Sequence[CoresWish], starting: Sequence[CoresWish], kept_on: Collection[str] = ()
) -> Fitted:
    """Return changes in an order in which they fit. `view` is left unchanged. On nodes of `kept_on` nothing is made of
    what running gangs give back in this plan: it is kept for other jobs first."""
    free = _Free(view, kept_on)
    found = Fitted()
    growing = []
    for wish in running:
        if all(_is_less(claim, amounts) for claim, amounts in zip(wish.claims, wish.amounts, strict=True)):
            _retune(free, wish, found)
        else:
            growing.append(wish)
    # A gang that gives one resource and wants more of another comes first.
    growing.sort(key=lambda wish: not _gives(wish))
    giving = sum(map(_gives, growing))
    for wish in growing[:giving]:
        _retune(free, wish, found)
    for wish in starting:
        claims = free.place(wish)
        if claims is None:
            found.held_back = True
        else:
            found.changes.append(StartChange(wish.job.number, wish.job.revision, claims))
    for wish in growing[giving:]:
        _retune(free, wish, found)
    return found


def _retune(free: _Free, wish: CoresWish, found: Fitted) -> None:
    claims = tuple([free.retuned(claim, *amounts) for claim, amounts in zip(wish.claims, wish.amounts, strict=True)])
    if claims != wish.claims:
        found.changes.append(CoresChange(wish.job.number, wish.job.revision, claims))


def _is_less(claim: Claim, amounts: tuple[int, int]) -> bool:
    return amounts[0] <= sum(claim.millicores) and amounts[1] <= claim.memory_bytes


def _gives(wish: CoresWish) -> bool:
    return any(
        amounts[0] < sum(claim.millicores) or amounts[1] < claim.memory_bytes
        for claim, amounts in zip(wish.claims, wish.amounts, strict=True)
    )


@dataclass(slots=True)
class _Node:
    slot: int
    mask: int
    millicores: list[int]
    memory: int


class _Free:
    def __init__(self, view: View, kept_on: Collection[str]) -> None:
        self._view, self._kept_on = view, kept_on
        self._nodes: dict[str, _Node] = {}

    def retuned(self, claim: Claim, millicores: int, memory_bytes: int) -> Claim:
        """Return the claim with these amounts, as far as they are free, and take the difference."""
        node = self._node(claim.node)
        if node is None:
            return claim
        held = sum(claim.millicores)
        wanted = min(millicores, held + sum(node.millicores))
        if wanted != held:
            split = resplit_cores(claim.millicores, node.millicores, wanted)
            node.millicores = [
                have + self._given_back(claim.node, old - new)
                for have, old, new in zip(node.millicores, claim.millicores, split, strict=True)
            ]
        else:
            split = claim.millicores
        memory = min(memory_bytes, claim.memory_bytes + node.memory)
        node.memory += self._given_back(claim.node, claim.memory_bytes - memory)
        return structs.replace(claim, millicores=split, memory_bytes=memory)

    def _given_back(self, node: str, amount: int) -> int:
        """Return how much more other gangs may have; `amount`: what a gang gives back, below zero what it takes."""
        return min(0, amount) if node in self._kept_on else amount

    def place(self, wish: CoresWish) -> Claims | None:
        """Return the claims with the wished amounts, as far as free, and take them; None if that is too little."""
        made = []
        for at, claim in enumerate(wish.claims):
            node = self._node(claim.node)
            if node is None or not self._view.available[node.slot]:
                return None
            millicores = min(wish.amounts[at][0], sum(node.millicores))
            memory = min(wish.amounts[at][1], node.memory - claim.arena_bytes)
            mask = claim.device_mask or self._mask(node, wish, at)
            if (
                mask is None
                or mask & ~node.mask
                or millicores < max(1, wish.least[at][0])
                or memory < wish.least[at][1]
            ):
                return None
            split = split_cores(self._view.topologies[node.slot], tuple(node.millicores), mask, millicores)
            assert split is not None, "so many are free"
            made.append(structs.replace(claim, device_mask=mask, millicores=split, memory_bytes=memory))
        for claim in made:
            node = self._nodes[claim.node]
            node.mask &= ~claim.device_mask
            node.millicores = [have - taken for have, taken in zip(node.millicores, claim.millicores, strict=True)]
            node.memory -= claim.memory_bytes + claim.arena_bytes
        return tuple(made)

    def _mask(self, node: _Node, wish: CoresWish, at: int) -> int | None:
        if not wish.gpus:
            return 0
        room = wish.job.shape.device_memory_bytes
        free = node.mask & self._view.roomy(node.slot, room) if room else node.mask
        widest = min(wish.job.shape.locality.widest, LocalityLevel.NODE)
        return self._view.topologies[node.slot].best(free, wish.gpus[at], widest)

    def _node(self, name: str) -> _Node | None:
        found = self._nodes.get(name)
        if found is None:
            slot = self._view.slots.get(name)
            if slot is None:
                return None
            view = self._view
            found = self._nodes[name] = _Node(slot, view.free[slot], list(view.millicores[slot]), view.memory[slot])
        return found
