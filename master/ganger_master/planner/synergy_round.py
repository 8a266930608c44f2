"""One round with a tuning that places jobs: pack all chosen jobs as if the cluster were empty, and keep as many gangs
as possible where they are (leases of Synergy, OSDI 2022, section 4.2). The others stop, and start in their new places
once these are free: plans repeat `plan_packed` until then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np
from ganger.cluster.capacity_index import Trial
from ganger.cluster.fit import bandwidth_of, memory_named, share_of_memory
from ganger.cluster.resources import Claim, LocalityLevel, accepts_type
from ganger.cluster.search import PlacementRequest
from ganger.cluster.view import View
from msgspec import structs

from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.plan_changes import StartChange, SuspendChange
from ganger_master.planner.context import PlanContext, PlanDraft
from ganger_master.planner.device_groups import Claims
from ganger_master.planner.gang_fitting import ChosenJobs
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.plan import choose, queue_of
from ganger_master.planner.tune_stage import (
    Amounts,
    CoresWish,
    asked,
    fitted,
    is_tuned,
    known_of,
    nodes_of,
    trials_of,
    whole,
    wish_of,
    with_shares,
)
from ganger_master.policies.migration_choice import LEAST_GAIN
from ganger_master.policies.orders import Flags
from ganger_master.policies.tunings import (
    Gangs,
    Known,
    Pieces,
    Profiles,
    Tuning,
    TuningNodes,
    known_gangs,
    pieces,
    rates,
)

# (node, GPUs there) of a gang, by node.
Where: TypeAlias = tuple[tuple[int, int], ...]

Place: TypeAlias = tuple[Where, Amounts]

# Where a gang is to run: (node, GPUs, millicores, bytes) by node.
Rows: TypeAlias = Sequence[tuple[str, int, int, int]]

# To keep a gang where it is counts so much more than to keep its amounts: more than there are GPUs on nodes alike.
_FEW_PARTS = 1 << 16
# Nodes alike up to which they are matched: the table of all pairs has as many entries, squared.
_MOST_MATCHED = 1024


class Packing(NamedTuple):
    """`places`: by job. `apart`: of pending jobs that cannot be packed. `stopped`: running jobs that have to stop."""

    places: Mapping[int, Rows]
    apart: Mapping[int, Claims]
    stopped: frozenset[int]


def remembering(tuning: Tuning) -> Tuning:
    """Return the tuning with its last placement remembered: most rounds have the same gangs on the same nodes."""
    place = tuning.place
    assert place is not None, f"{tuning.name} places no job"
    last: list[tuple[object, Profiles, Pieces]] = []

    def placed(gangs: Gangs, nodes: TuningNodes) -> Pieces:
        arrays = (gangs.gpus, gangs.profile, gangs.is_local, nodes.gpus, nodes.cores, nodes.memory_bytes)
        key = tuple([array.tobytes() for array in arrays])
        if not last or last[0][0] != key or last[0][1] is not gangs.profiles:
            last[:] = [(key, gangs.profiles, place(gangs, nodes))]
        return last[0][2]

    return replace(tuning, place=placed)


def packing_of(tuning: Tuning, context: PlanContext) -> Packing | None:
    """Return where the tuning places the jobs that the order chooses. Running jobs that cannot be packed keep what they
    have. Pending ones have places of the policy's placement, around which the others are packed; where it finds none,
    the order chooses without them. None: jobs share devices, or the packing gains nothing."""
    found = _packed(tuning, context)
    # Each pass leaves out at least one more pending job, so there are at most as many passes as jobs.
    while isinstance(found, frozenset):
        context = structs.replace(context, excluded=context.excluded.resting(found))
        found = _packed(tuning, context)
    return found


def _packed(tuning: Tuning, context: PlanContext) -> Packing | frozenset[int] | None:
    """Return `packing_of` of the jobs that the order chooses, or the numbers of the pending ones among them for which
    the policy's placement finds no place."""
    assert tuning.place is not None, f"{tuning.name} places no job"
    table, view, known = context.jobs, context.room.view, known_of(context)
    choice = choose(queue_of(context))
    facts, packable = choice.facts, _Packable(view, known)
    may_stop = facts.is_running & facts.is_preemptible
    fixed = [job.number for job, gang in _gangs(table, choice, may_stop) if not packable.is_movable(job, gang)]
    is_movable = may_stop & ~table.are_among(choice.rows, fixed)
    names = [name for slot, name in enumerate(view.nodes) if view.available[slot]]
    numbered = {name: at for at, name in enumerate(names)}
    not_chosen = _gangs(table, choice, may_stop & ~choice.is_chosen)
    # A gang leaves no room on nodes that take no jobs.
    leaving = [(job, gang) for job, gang in not_chosen if any(claim.node in numbered for claim in gang.claims)]
    running = {job.number: (job, gang) for job, gang in _gangs(table, choice, is_movable & choice.is_chosen)}
    is_packed = choice.is_chosen & (is_movable | ~facts.is_running)
    chosen = table.jobs_at(choice.rows[choice.line[is_packed[choice.line]]])
    if context.terms.co_located:
        return None
    jobs = [job for job in chosen if packable.by_gpus(job)]
    held = [gang for _, gang in (*running.values(), *leaving, *table.going)]
    if len(jobs) == len(chosen):
        apart = _Apart({}, nodes_of(view, numbered, list(map(_with_arenas, held)), ()))
    else:
        others = [job for job in chosen if not packable.by_gpus(job)]
        apart = _set_apart(context, others, held, numbered)
        if len(apart.claims) < len(others):
            return frozenset([job.number for job in others if job.number not in apart.claims])
    nodes = apart.nodes
    gpus = np.array([job.gpus for job in jobs], np.int64)
    is_local = np.array([_is_local(job) for job in jobs], bool)
    gangs = known_gangs(known, np.array([job.number for job in jobs], np.int64), gpus, is_local, nodes)
    present = [_place_of(running[job.number][1], numbered) if job.number in running else None for job in jobs]
    kinds: list[Hashable] = list(zip(gangs.profile.tolist(), gpus.tolist(), is_local.tolist(), strict=True))
    packed = tuning.place(gangs, nodes)
    is_unknown = np.array([not known.knows_memory_of(job.number) for job in jobs], bool)
    if not (len(packed) or leaving or table.going):
        return None
    is_settled = all(present) and not apart.needs_room
    if is_settled and not (jobs and _is_faster(gangs, packed, present, is_unknown)):
        return None
    places = {
        job.number: tuple([(names[node], count, *some) for (node, count), some in zip(*place, strict=True)])
        for job, place in zip(jobs, keeping(present, kinds, _targets(packed), _alike(view, names, nodes)), strict=True)
        if place is not None
    }
    stays = {
        number
        for number, (job, gang) in running.items()
        if number in places
        and _staying(view, job, gang, places[number], known) is not None
        and not apart.has_devices_of(gang)
    }
    return Packing(places, apart.claims, frozenset({*[job.number for job, _ in leaving], *running} - stays))


class _Apart(NamedTuple):
    """Places of jobs that cannot be packed, by number, and what they leave to the packing. `needs_room`: some of them
    are free only once running gangs leave."""

    claims: Mapping[int, Claims]
    nodes: TuningNodes
    needs_room: bool = False

    def has_devices_of(self, gang: Gang) -> bool:
        own = {claim.node: claim.device_mask for claim in gang.claims}
        return any(claim.device_mask & own.get(claim.node, 0) for one in self.claims.values() for claim in one)


def _set_apart(
    context: PlanContext, jobs: Sequence[JobRecord], stoppable: Sequence[Gang], numbered: dict[str, int]
) -> _Apart:
    """Place each of the jobs where it fits now, else where it would fit without the gangs that the round may stop."""
    room, found = context.room, dict[int, Claims]()
    room.follow()
    trying = Trial(room)

    def place(job: JobRecord) -> bool:
        request = PlacementRequest(with_shares(context.terms.shape(job)), max(0.0, context.now - job.pending_since))
        claims = context.policy.placement.place(room, request)
        if claims is not None:
            trying.take(claims)
            found[job.number] = claims
        return claims is not None

    left = [job for job in jobs if not place(job)]
    for gang in stoppable:
        trying.give(gang.held)
    makes_room_for = [job for job in left if place(job)]
    nodes = nodes_of(room.view, numbered, (), ())
    trying.undo()
    return _Apart(found, nodes, bool(makes_room_for))


class RoundDraft(NamedTuple):
    """`unsettled`: numbers of the jobs whose places are not free yet."""

    draft: PlanDraft
    unsettled: frozenset[int]


def plan_packed(packing: Packing, context: PlanContext) -> RoundDraft:
    """Return the changes that lead to a packing. Where the context may preempt, the jobs that have to stop do."""
    table, view = context.jobs, context.room.view
    # A node may have been removed since the packing: its jobs go where they fit later.
    places = {number: rows for number, rows in packing.places.items() if all(node in view.slots for node, *_ in rows)}
    apart = {number: at for number, at in packing.apart.items() if all(claim.node in view.slots for claim in at)}
    known, trials, queue = known_of(context), trials_of(context), queue_of(context)
    running = {job.number: (job, gang) for job, gang in table.running}
    starting = {row[0] for number, rows in places.items() if number not in running for row in rows}
    stays: list[CoresWish] = []
    stops_now = packing.stopped if context.may_preempt else frozenset[int]()
    for number in sorted((places.keys() & running.keys()) - stops_now):
        job, gang = running[number]
        if is_tuned(view, job, gang):
            # A trial of cores lasts while no job starts beside it.
            tried = None if any(claim.node in starting for claim in gang.claims) else trials.get(number)
            wish = _staying(view, job, gang, places[number], known, tried)
            stays.extend([] if wish is None else [wish])
    waiting = table.jobs_at(queue.rows[queue.waiting])
    for job in waiting:
        # A reservation may have begun since the packing: the job goes where it fits later.
        if not job.closed_nodes.isdisjoint([node for node, *_ in places.get(job.number, ())]):
            del places[job.number]
        if not job.closed_nodes.isdisjoint([claim.node for claim in apart.get(job.number, ())]):
            del apart[job.number]
    starts = [_starting(view, job, places[job.number]) for job in waiting if job.number in places]
    starts += [_starting_apart(view, job, apart[job.number]) for job in waiting if job.number in apart]
    starts.sort(key=lambda wish: wish.job.number)
    tuned = fitted(view, stays, starts, context.kept_on)
    stops = [
        SuspendChange(number, running[number][0].revision, level=SuspendLevel.CHECKPOINT)
        for number in sorted(stops_now & running.keys())
    ]
    started = {change.number for change in tuned.changes if isinstance(change, StartChange)}
    returning = [job.number for job, _ in table.going]
    unsettled = (places.keys() | apart.keys()) & {
        *returning,
        *[change.number for change in stops],
        *[one.job.number for one in starts],
    }
    draft = PlanDraft((*stops, *tuned.changes), len(unsettled) > len(started), queue.changes_at, queue.line)
    return RoundDraft(draft, frozenset(unsettled - started))


def _is_faster(gangs: Gangs, packed: Pieces, present: Sequence[Place | None], is_unknown: Flags) -> bool:
    """Return whether running gangs gain enough by the packing, on average. `is_unknown`: without a memory profile."""
    rows = [
        (gang, node, gpus, millicores / 1000, memory)
        for gang, place in enumerate(present)
        if place is not None
        for (node, gpus), (millicores, memory) in zip(*place, strict=True)
    ]
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    there = pieces(*columns[:3]).given(*columns[3:])
    if is_unknown.any():
        packed, there = (
            one.given(one.cores, np.where(is_unknown[one.gang], np.inf, one.memory_bytes)) for one in (packed, there)
        )
    now = np.maximum(rates(gangs, there), 1e-9)
    return float(np.mean(rates(gangs, packed) / now)) > 1.0 + LEAST_GAIN


def _with_arenas(gang: Gang) -> Claims:
    """Return what a gang holds, with the room to park it as memory."""
    return tuple([structs.replace(one, memory_bytes=one.memory_bytes + one.arena_bytes) for one in gang.held])


def _gangs(table: LiveTable, choice: ChosenJobs, among: Flags) -> list[tuple[JobRecord, Gang]]:
    pairs = [(table.jobs[row], table.gangs[row]) for row in choice.rows[among].tolist()]
    return [(job, gang) for job, gang in pairs if job is not None and gang is not None]


def _staying(
    view: View, job: JobRecord, gang: Gang, rows: Rows, known: Known, tried: int | None = None
) -> CoresWish | None:
    """Return the wish of a gang that stays; None if it cannot continue there with these amounts. `tried`: millicores
    for each GPU, of a trial. Without a profile of memory it keeps what it has, as all of that may be in use."""
    by_node = {row[0]: row for row in rows}
    if {claim.node: claim.device_mask.bit_count() for claim in gang.claims} != {row[0]: row[1] for row in rows}:
        return None
    wanted, knows_memory = [], known.knows_memory_of(job.number)
    for claim in gang.claims:
        _, gpus, millicores, memory = by_node[claim.node]
        memory = memory - claim.arena_bytes if knows_memory else claim.memory_bytes
        wanted.append((millicores if tried is None else tried * gpus, memory))
    wish = wish_of(view, job, job.shape, gang.claims, tuple(wanted), is_start=False)
    is_enough = not knows_memory or all(got[1] <= want[1] for got, want in zip(wish.amounts, wanted, strict=True))
    return wish if is_enough else None


def _starting(view: View, job: JobRecord, rows: Rows) -> CoresWish:
    shape = job.shape
    claims, amounts = [], []
    for node, gpus, millicores, memory in rows:
        tasks = tuple([role.tasks for role in shape.roles]) if len(rows) == 1 else (gpus,)
        claim = Claim(node, 0, (), 0, tasks=tasks, bandwidth=bandwidth_of(shape, tasks))
        # Room to be parked in host memory, where that leaves it its share.
        arena = gpus * shape.arena_bytes_per_device
        if memory - arena >= asked(view, shape, (claim,))[0][1]:
            claim, memory = structs.replace(claim, arena_bytes=arena), memory - arena
        claims.append(claim)
        amounts.append((millicores, memory))
    return wish_of(view, job, shape, tuple(claims), tuple(amounts), is_start=True, gpus=tuple([row[1] for row in rows]))


def _starting_apart(view: View, job: JobRecord, claims: Claims) -> CoresWish:
    amounts = tuple([(sum(claim.millicores), claim.memory_bytes) for claim in claims])
    return wish_of(view, job, job.shape, claims, amounts, is_start=True)


class _Packable:
    """Which jobs a packing may place: it counts GPUs, cores and memory of nodes, and splits gangs by single GPUs."""

    def __init__(self, view: View, known: Known) -> None:
        self._view, self._known = view, known
        slots = [slot for slot, _ in enumerate(view.nodes) if view.available[slot]]
        sets = {one.name: one for slot in slots if (one := view.topologies[slot].configuration_set).devices}
        self._types = {one.device_type for one in sets.values()}
        self._partitions = {view.topologies[slot].partitions for slot in slots}
        self._least_share = min([share_of_memory(one, 1) for one in sets.values()], default=0)

    def by_gpus(self, job: JobRecord) -> bool:
        shape = job.shape
        is_plain = len(shape.roles) == 1 and shape.roles[0].shape.gpus == 1
        named = memory_named(shape, [role.tasks for role in shape.roles])
        # Without profiles of memory each gang is packed with its share.
        has_room = not named or (
            not self._known.knows_memory_of(job.number) and named <= shape.gpus * self._least_share
        )
        runs_anywhere = shape.nodes < 2 and all(accepts_type(shape.device_type, one) for one in self._types)
        is_bounded = bool(shape.closed_nodes) or (shape.names_bandwidth and bool(self._view.bandwidth))
        runs_anywhere = runs_anywhere and not is_bounded
        if shape.partition:
            runs_anywhere = runs_anywhere and all(shape.partition in names for names in self._partitions)
        return shape.gpus > 0 and (is_plain or _is_local(job)) and has_room and runs_anywhere

    def is_movable(self, job: JobRecord, gang: Gang) -> bool:
        return self.by_gpus(job) and is_tuned(self._view, job, gang)


def _is_local(job: JobRecord) -> bool:
    return job.spec.locality.widest <= LocalityLevel.NODE or job.shape.nodes == 1


def _targets(placed: Pieces) -> dict[int, Place]:
    found: dict[int, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {}
    columns = (placed.gang, placed.node, placed.gpus, placed.cores, placed.memory_bytes)
    for gang, node, gpus, cores, memory in zip(*(column.tolist() for column in columns), strict=True):
        where, amounts = found.setdefault(gang, ([], []))
        where.append((node, gpus))
        amounts.append((whole(1000 * cores), whole(memory)))
    return {gang: (tuple(where), tuple(amounts)) for gang, (where, amounts) in found.items()}


def _place_of(gang: Gang, numbered: dict[str, int]) -> Place | None:
    """Return its place; None if one of its nodes takes no gangs."""
    claims = gang.claims
    if any(claim.node not in numbered for claim in claims):
        return None
    ordered = sorted(claims, key=lambda claim: numbered[claim.node])
    return (
        tuple([(numbered[claim.node], claim.device_mask.bit_count()) for claim in ordered]),
        tuple([(sum(claim.millicores), claim.memory_bytes + claim.arena_bytes) for claim in ordered]),
    )


def _alike(view: View, names: Sequence[str], nodes: TuningNodes) -> list[Hashable]:
    return [
        (view.topologies[view.slots[name]].configuration_set.name, gpus, cores, memory)
        for name, gpus, cores, memory in zip(
            names, nodes.gpus.tolist(), nodes.cores.tolist(), nodes.memory_bytes.tolist(), strict=True
        )
    ]


def keeping(
    present: Sequence[Place | None], kinds: Sequence[Hashable], targets: dict[int, Place], alike: Sequence[Hashable]
) -> list[Place | None]:
    """Return for each gang a target of its kind, so that many gangs keep their place and amounts: first nodes that are
    `alike` are exchanged, then targets of equal gangs. The result is stable: a second call moves no further gang."""
    move = _relabelled(present, kinds, targets, alike)
    free: dict[Hashable, dict[Where, list[Amounts]]] = {}
    for gang in sorted(targets):
        where, amounts = targets[gang]
        moved = sorted(zip([(move[node], gpus) for node, gpus in where], amounts, strict=True))
        there = free.setdefault(kinds[gang], {}).setdefault(tuple([place for place, _ in moved]), [])
        there.append(tuple([amount for _, amount in moved]))
    places: list[Place | None] = [None] * len(present)
    for is_exact in (True, False):
        for gang, place in enumerate(present):
            waiting = free.get(kinds[gang], {}).get(place[0]) if place and places[gang] is None else None
            if place and waiting and (not is_exact or place[1] in waiting):
                amounts = place[1] if is_exact else waiting[0]
                waiting.remove(amounts)
                places[gang] = (place[0], amounts)
    left = {kind: [(w, a) for w, amounts in of_kind.items() for a in amounts] for kind, of_kind in free.items()}
    for gang in range(len(present)):
        if places[gang] is None and left.get(kinds[gang]):
            places[gang] = left[kinds[gang]].pop(0)
    return places


def _relabelled(
    present: Sequence[Place | None], kinds: Sequence[Hashable], targets: dict[int, Place], alike: Sequence[Hashable]
) -> list[int]:
    """Return the node that takes the place of each packed node, among equal ones, so that the most GPUs of gangs
    stay."""
    move = list(range(len(alike)))
    now = _contents([(gang, place) for gang, place in enumerate(present) if place], kinds)
    then = _contents(sorted(targets.items()), kinds)
    if not now:
        return move
    groups: dict[Hashable, list[int]] = {}
    for node, key in enumerate(alike):
        groups.setdefault(key, []).append(node)
    for members in groups.values():
        if 1 < len(members) <= _MOST_MATCHED and any(node in now for node in members):
            for node, place in zip(members, _matched(members, now, then), strict=True):
                move[node] = place
    return move


def _matched(
    members: Sequence[int], now: dict[int, Counter[Hashable]], then: dict[int, Counter[Hashable]]
) -> list[int]:
    # Takes a fifth of a second to import; only packing needs it.
    from scipy.optimize import linear_sum_assignment

    column = {kind: at for at, kind in enumerate(dict.fromkeys(kind for node in members for kind in now.get(node, ())))}
    have, want = (np.zeros((len(members), len(column))) for _ in range(2))
    for table, contents in ((have, now), (want, then)):
        for at, node in enumerate(members):
            for kind, gpus in contents.get(node, {}).items():
                if kind in column:
                    table[at, column[kind]] = gpus
    stay = np.zeros((len(members), len(members)))
    for at in column.values():
        stay += np.minimum(want[:, at, None], have[None, :, at])
    _, places = linear_sum_assignment(-stay)
    return [members[place] for place in places.tolist()]


def _contents(gangs: Sequence[tuple[int, Place]], kinds: Sequence[Hashable]) -> dict[int, Counter[Hashable]]:
    """GPUs by kind on each node, and a little for the same kind with the same amounts."""
    found: dict[int, Counter[Hashable]] = {}
    for gang, (where, amounts) in gangs:
        for (node, gpus), amount in zip(where, amounts, strict=True):
            on_node = found.setdefault(node, Counter())
            on_node[kinds[gang]] += _FEW_PARTS * gpus
            on_node[kinds[gang], amount] += gpus
    return found
