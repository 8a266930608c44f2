"""One round with a tuning that places jobs: pack all chosen jobs as if the cluster were empty, and keep as many gangs
as possible where they are (leases of Synergy, OSDI 2022, section 4.2). The others stop, and start in their new places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TypeAlias

import numpy as np
from ganger.cluster.resources import Claim, LocalityLevel
from ganger.cluster.view import View

from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.plan_changes import StartChange, SuspendChange
from ganger_master.planner.context import PlanContext, PlanDraft, held_alone
from ganger_master.planner.gang_fitting import ChosenJobs
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.plan import choose, queue_of
from ganger_master.planner.tune_stage import Amounts, CoresWish, fitted, is_tuned, known_of, nodes_of, whole, wish_of
from ganger_master.policies.job_facts import Flags, Integers
from ganger_master.policies.tunings import Pieces, Tuning, TuningNodes, known_gangs

# (node, GPUs there) of a gang, by node.
Where: TypeAlias = tuple[tuple[int, int], ...]

Place: TypeAlias = tuple[Where, Amounts]

# To keep a gang where it is counts so much more than to keep its amounts: more than there are GPUs on nodes alike.
_FEW_PARTS = 1 << 16
# Nodes alike up to which they are matched: the table of all pairs has as many entries, squared.
_MOST_MATCHED = 1024


def plan_packed(tuning: Tuning, context: PlanContext) -> PlanDraft | None:
    """Return the changes that lead to the packing. None: a chosen job cannot be packed by GPUs, or the packing places
    no job."""
    assert tuning.place is not None, f"{tuning.name} places no job"
    table, view = context.jobs, context.room.view
    choice = choose(queue_of(context))
    is_movable = choice.facts.is_running & choice.facts.is_preemptible
    running = {job.number: gang for job, gang in _gangs(table, choice, is_movable)}
    jobs = _jobs(table, choice, choice.line[(choice.is_chosen & (is_movable | ~choice.facts.is_running))[choice.line]])
    leaving = [job for job, _ in _gangs(table, choice, is_movable & ~choice.is_chosen)]
    going = [gang for _, gang in _gangs(table, choice, table.is_going(choice.rows))]
    if not all(map(_is_packable, jobs)) or not all(is_tuned(view, *pair) for pair in _gangs(table, choice, is_movable)):
        return None
    names = [name for slot, name in enumerate(view.nodes) if view.available[slot]]
    numbered = {name: at for at, name in enumerate(names)}
    held = [held_alone(gang) for gang in (*running.values(), *going)]
    nodes = nodes_of(view, numbered, held, ())
    gpus = np.array([job.spec.gpus for job in jobs], np.int64)
    is_local = np.array([_is_local(job) for job in jobs], bool)
    gangs = known_gangs(known_of(context), np.array([job.number for job in jobs], np.int64), gpus, is_local, nodes)
    present = [_place_of(running[job.number].claims, numbered) if job.number in running else None for job in jobs]
    kinds: list[Hashable] = list(zip(gangs.profile.tolist(), gpus.tolist(), is_local.tolist(), strict=True))
    targets = _targets(tuning.place(gangs, nodes))
    if not targets and not running and not going:
        return None
    places = keeping(present, kinds, targets, _alike(view, names, nodes))
    may_start = set(choice.facts.number[choice.waiting].tolist())
    stays: list[CoresWish] = []
    starts: list[CoresWish] = []
    for job, place in zip(jobs, places, strict=True):
        if job.number in running:
            wish = None if place is None else _staying(view, names, job, running[job.number], *place)
            if wish is None:
                leaving.append(job)
            else:
                stays.append(wish)
        elif place is not None and job.number in may_start:
            starts.append(_starting(view, names, job, *place))
    tuned = fitted(view, stays, starts)
    stopped = leaving if context.may_preempt else []
    stops = [SuspendChange(job.number, job.revision, level=SuspendLevel.CHECKPOINT) for job in stopped]
    started = sum(isinstance(change, StartChange) for change in tuned.changes)
    return PlanDraft((*stops, *tuned.changes), len(stays) + started < len(jobs), choice.changes_at, choice.queue)


def _jobs(table: LiveTable, choice: ChosenJobs, positions: Integers) -> list[JobRecord]:
    return [job for row in choice.rows[positions].tolist() if (job := table.jobs[row]) is not None]


def _gangs(table: LiveTable, choice: ChosenJobs, among: Flags) -> list[tuple[JobRecord, Gang]]:
    pairs = [(table.jobs[row], table.gangs[row]) for row in choice.rows[among].tolist()]
    return [(job, gang) for job, gang in pairs if job is not None and gang is not None]


def _staying(
    view: View, names: Sequence[str], job: JobRecord, gang: Gang, where: Where, amounts: Amounts
) -> CoresWish | None:
    """Return the wish of a gang that stays; None if it cannot continue there with these amounts."""
    by_node = {names[node]: amount for (node, _), amount in zip(where, amounts, strict=True)}
    if {claim.node: claim.device_mask.bit_count() for claim in gang.claims} != {names[node]: n for node, n in where}:
        return None
    ordered = tuple([by_node[claim.node] for claim in gang.claims])
    wish = wish_of(view, job, job.shape, gang.claims, ordered, is_start=False)
    return wish if all(got[1] <= want[1] for got, want in zip(wish.amounts, ordered, strict=True)) else None


def _starting(view: View, names: Sequence[str], job: JobRecord, where: Where, amounts: Amounts) -> CoresWish:
    gpus = tuple([count for _, count in where])
    roles = job.shape.roles
    tasks = [tuple([role.tasks for role in roles])] if len(where) == 1 else [(count,) for count in gpus]
    claims = tuple([Claim(names[node], 0, (), 0, tasks=own) for (node, _), own in zip(where, tasks, strict=True)])
    return wish_of(view, job, job.shape, claims, amounts, is_start=True, gpus=gpus)


def _is_packable(job: JobRecord) -> bool:
    shape = job.shape
    is_plain = len(shape.roles) == 1 and shape.roles[0].shape.gpus == 1
    names_memory = any(role.shape.memory_bytes for role in shape.roles)
    is_choosy = bool(shape.device_type or shape.nodes or names_memory)
    return shape.gpus > 0 and (is_plain or _is_local(job)) and not is_choosy


def _is_local(job: JobRecord) -> bool:
    return job.spec.locality.widest <= LocalityLevel.NODE


def _targets(placed: Pieces) -> dict[int, Place]:
    found: dict[int, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {}
    columns = (placed.gang, placed.node, placed.gpus, placed.cores, placed.memory_bytes)
    for gang, node, gpus, cores, memory in zip(*(column.tolist() for column in columns), strict=True):
        where, amounts = found.setdefault(gang, ([], []))
        where.append((node, gpus))
        amounts.append((whole(1000 * cores), whole(memory)))
    return {gang: (tuple(where), tuple(amounts)) for gang, (where, amounts) in found.items()}


def _place_of(claims: Sequence[Claim], numbered: dict[str, int]) -> Place | None:
    """Return its place; None if one of its nodes takes no gangs."""
    if any(claim.node not in numbered for claim in claims):
        return None
    ordered = sorted(claims, key=lambda claim: numbered[claim.node])
    return (
        tuple([(numbered[claim.node], claim.device_mask.bit_count()) for claim in ordered]),
        tuple([(sum(claim.millicores), claim.memory_bytes) for claim in ordered]),
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
