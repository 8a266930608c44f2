"""Why a job waits or is suspended, the true blocker first, and when it may start where an interval can be given."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.placement import candidates
from ganger.cluster.preferences import GANDIVA
from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import Claim, GangShape
from ganger.cluster.search import PlacementRequest, widest_now
from ganger.cluster.view import View
from ganger.job_state import JobState
from ganger.text import counted
from msgspec import Struct
from msgspec.structs import replace

from ganger_master.core import accounting, approval, availability, dependencies, ending, reservations, usage
from ganger_master.core.approval import order
from ganger_master.core.array_model import Membership
from ganger_master.core.colocation import holders_on
from ganger_master.core.ending import is_backing_off
from ganger_master.core.gang_model import GangIntent, GangPhase, ObservedPhase
from ganger_master.core.job_model import JobRecord
from ganger_master.core.job_rules import forbidden_nodes, full_share, refusal_by_partition, rules, shut_out
from ganger_master.core.kept_places import NOTHING, Protected, protected_from, trespass
from ganger_master.core.lifecycle import trouble_of
from ganger_master.core.node_faults import service_reason
from ganger_master.core.node_model import Node, NodeState
from ganger_master.core.plan_changes import Purpose
from ganger_master.core.quarantine import END_UNKNOWN, FOUND_AT_REST
from ganger_master.core.state import State

# Candidates that are checked before a job counts as kept out: another place may be free.
_CANDIDATES = 16
_NEVER = 1e12


class Holder(Struct, frozen=True, gc=False):
    """A gang's claims and the time at which it ends at the latest; None: unknown. Or a reservation, which closes
    `nodes` to a job until then."""

    name: str
    claims: tuple[Claim, ...]
    ends_by: float | None
    nodes: frozenset[str] = frozenset()


class StartEstimate(Struct, frozen=True, gc=False):
    """When a gang starts, in seconds from now. If that is unknown both are zero, and `assumption` gives the reason."""

    after: float
    before: float
    assumption: str


def placement_blockers(
    view: View, shape: GangShape, *, waited: float, protected: Protected = NOTHING, rank: int = 0, job: str = ""
) -> tuple[Refusal, ...]:
    """Return what keeps a job from starting now; empty when its next lease will place it."""
    placement = candidates(view, shape, waited_s=waited, limit=_CANDIDATES)
    if not placement.candidates:
        return order(placement.refusals)
    kept: tuple[Refusal, ...] = ()
    for claims in placement.candidates:
        refusals = trespass(view, protected, claims, rank=rank, job=job)
        if not refusals:
            return ()
        kept = kept or refusals
    return order(kept)


def estimate(view: View, shape: GangShape, holders: Sequence[Holder], now: float) -> StartEstimate:
    """Estimate when the gang fits if every holder runs to its limit; unknown if a needed holder has no limit.

    Holders may end sooner, so the interval begins now. Jobs ahead in the queue do not count, as the assumption states.
    """
    limited = sorted(
        [(one.ends_by, one.name, one) for one in holders if one.ends_by is not None], key=lambda one: one[:2]
    )

    def fits(later: View, ended: int) -> bool:
        closed = shape.closed_nodes.union(*[one.nodes for _, _, one in limited[ended:]])
        return _fits(later, shape if closed == shape.closed_nodes else replace(shape, closed_nodes=closed))

    if fits(view, 0):
        if widest_now(shape, 0.0) < shape.locality.widest:
            left = shape.locality.patience_s
            return StartEstimate(0.0, left, "its patience ends by then and nothing it needs is taken meanwhile")
        return StartEstimate(0.0, 1.0, "it can be placed at once and no job is ahead")
    # Room only grows as jobs end: find the number that must end by bisection.
    low, high, later = 0, len(limited) + 1, view
    while low + 1 < high:
        middle = (low + high) // 2
        tried = _without(later, limited[low:middle])
        if fits(tried, middle):
            high = middle
        else:
            low, later = middle, tried
    if high <= len(limited):
        ends_by, last, _ = limited[high - 1]
        before = max(1.0, ends_by - now)
        run = "jobs run to their time limits"
        run += ", reservations to their ends" if any(one.nodes for one in holders) else ""
        return StartEstimate(0.0, before, f"{run}, {last} being the last needed, and no job is ahead")
    unlimited = [holder.name for holder in holders if holder.ends_by is None]
    if unlimited:
        return StartEstimate(0.0, 0.0, f"unknown, because {unlimited[0]} has no time limit")
    return StartEstimate(0.0, 0.0, "unknown, because it would not fit even if all running jobs ended")


def _without(view: View, ended: Sequence[tuple[float, str, Holder]]) -> View:
    later = view.copy()
    for _, _, holder in ended:
        for claim in holder.claims:
            later.give(claim)
    return later


def _fits(view: View, shape: GangShape) -> bool:
    return GANDIVA.place(CapacityIndex.of(view), PlacementRequest(shape, _NEVER)) is not None


class Explanation(Struct, frozen=True, gc=False):
    """Why a job waits, and when it starts, in seconds from now. If that is unknown both are zero, and `assumption`
    gives the reason. `is_ranked`: it waits for its turn in the planner's order, from which a forecast can be made.
    `share`: the owner of the limit that it waits for, and the limit: a forecast follows from the jobs that count for
    it."""

    blockers: tuple[Refusal, ...]
    start_after_s: float = 0.0
    start_before_s: float = 0.0
    assumption: str = ""
    is_ranked: bool = False
    share: tuple[accounting.Owner, int] | None = None


def explain(state: State, number: int, now: float, *, has_planner: bool = True) -> Explanation:
    """Return why a job waits or is suspended, without changing any decision. Raises KeyError for an unknown job.

    `has_planner`: whether a planner is connected.
    """
    kept, blocked = state.queue.kept, state.queue.blocked
    try:
        return _explain(state, state.jobs[number], now, has_planner)
    finally:
        # A place found for this answer must not be what is kept for the next request; and the state is as it was.
        state.queue.kept, state.queue.blocked = kept, blocked


def _explain(state: State, job: JobRecord, now: float, has_planner: bool) -> Explanation:
    if job.held and not job.state.is_finished:
        return Explanation(reported_blockers(state, job, now), assumption=_at_rest(state, job))
    if is_backing_off(job):
        wait = max(0.0, job.again_at - now)
        text = f"unknown, because it is tried again in {wait:.0f} s, and then has to find a place"
        return Explanation(reported_blockers(state, job, now), assumption=text)
    if not job.is_waiting:
        leaving = tuple([as_it_is(state, one, job) for one in availability.held_up(state, job, now)])
        stuck = (*_silent_nodes(state, job, now), *leaving)
        if stuck:
            return Explanation(stuck, assumption=_at_rest(state, job))
        trouble = "" if job.state.is_finished else job.trouble or trouble_of(state.gangs.get(job.epoch))
        if trouble in (END_UNKNOWN, FOUND_AT_REST) and job.state is JobState.SUSPENDED:
            return Explanation((), assumption=trouble)
        trouble = f"; {trouble}" if trouble else ""
        return Explanation((), assumption=_at_rest(state, job) + trouble)
    if state.partitions and (refusal := refusal_by_partition(state, job, job.gpus)) is not None:
        never = (
            "never in this partition: name another one (`ganger update -p`), or have an operator change its settings"
        )
        return Explanation((refusal,), assumption=never)
    if accounting.beyond(state.limits, state.owners(job), job.gpus) is not None:
        never = "never under this quota: ask for fewer GPUs, or have an operator raise the quota"
        return Explanation(rules(state, job), assumption=never)
    blockers = blockers_of(state, job, now)
    if full := full_share(state, job, job.gpus):
        until = f"unknown, because that depends on when other jobs of {full[0]} end"
        return Explanation(blockers, assumption=until, share=full)
    if blockers and blockers[0].reason in _CLOSED and (closers := _closers(state, job, now)):
        found = _once_open(state, job, closers, now)
        return Explanation(blockers, found.after, found.before, found.assumption)
    if state.is_planned:
        blockers = _lacks_memory(state, job) or blockers
        assumption = "unknown, because each pass decides anew which job gets the next free devices"
        if not has_planner:
            return Explanation((_no_planner(state), *blockers), assumption="unknown, because no planner is connected")
        reported = reported_blockers(state, job, now)
        known = {one.reason for one in blockers}
        reported = (*blockers, *(one for one in reported if one.reason not in known))
        reported = tuple([_with_standing(state, job, one, now) for one in reported])
        is_ranked = all(one.reason.waits_for_capacity or one.reason in _BEHIND for one in blockers[:1])
        if not is_ranked:
            assumption = f"unknown, because {blockers[0].message}"
        return Explanation(reported, assumption=assumption, is_ranked=is_ranked)
    holders = tuple(_holders(state, now))
    if any(not one.reason.waits_for_capacity and one.reason not in _BEHIND for one in blockers[:1]):
        return Explanation(blockers, assumption=f"unknown, because {blockers[0].message}")
    expected = estimate(state.view, job.shape, holders, now)
    if not expected.before and any(blocker.reason is Reason.NODE_UNAVAILABLE for blocker in blockers[:1]):
        return Explanation(blockers, assumption=f"unknown, because {blockers[0].message}")
    return Explanation(blockers, expected.after, expected.before, expected.assumption)


def reported_blockers(state: State, job: JobRecord, now: float, *, has_planner: bool = True) -> tuple[Refusal, ...]:
    """Return why a job waits, as last reported: by its scheduler, or by the planner's ranking where that places.

    `has_planner`: whether a planner is connected.
    """
    if job.awaits and job.state is JobState.PENDING:
        detail = f"it starts after {dependencies.sentence(state.jobs, job.awaits)}"
        return (Refusal(Reason.DEPENDENCY, detail=detail),)
    if job.held and job.state is JobState.PENDING and job.spec.array is not None:
        return (_held_back(job.spec.array),)
    if is_backing_off(job):
        return (_failing(state, job),)
    reported = state.blockers_of(job.number)
    if reported and reported[0].reason in (Reason.QUOTA, Reason.PARTITION_LIMIT):
        # Other jobs of its user may have come and gone since.
        return rules(state, job) or reported
    if reported or not state.is_planned or not job.is_waiting:
        return reported
    # A job that its user's quota keeps out is not ranked.
    lacks = _lacks_memory(state, job) or _lacks_devices(state, job, now)
    placing = (*lacks, _ranked(state, job)) if has_planner else (_no_planner(state), *lacks)
    return rules(state, job) or placing


def _held_back(array: Membership) -> Refusal:
    detail = f"at most {array.at_once} of the members of arrays/{array.array} run or wait at once"
    return Refusal(Reason.ARRAY_LIMIT, detail=detail)


def _failing(state: State, job: JobRecord) -> Refusal:
    delay = ending.delay_after(state.settings, job.failed_in_row)
    failed = f"its last {counted(job.failed_in_row, 'attempt')} failed ({job.reason})"
    return Refusal(Reason.FAILING, detail=f"{failed}, so it is tried again {delay:.0f} s after the last")


def _lacks_devices(state: State, job: JobRecord, now: float) -> tuple[Refusal, ...]:
    """Return the refusal of a job that needs more devices than are free, whatever the order of jobs. It reads no node,
    or all of them once for all jobs in partitions, so that a list of jobs stays cheap; and for a job that reservations
    keep out of nodes only these."""
    needed, free, inside = job.gpus, state.nodes.free_devices, job.partition.name
    if inside:
        free = state.view.free_devices_in(inside)
    closed = reservations.closed_to(state, job, now) if needed <= free else frozenset()
    if closed and (kept := _free_on(state, job, closed)) and needed > free - sum(kept.values()):
        first = shut_out(state, job, [min(kept)], now)
        more = tuple([reservations.for_reader(state, one, now) for one in first])
        if more:
            return more
    if inside and free < needed:
        detail = f"not enough free devices in partition {inside!r}"
        return (Refusal(Reason.GPUS, {"needed": needed, "free": free}, detail=detail),)
    if needed <= free:
        return ()
    view, slots = state.view, state.view.slots
    draining = sum([view.free[slots[name]].bit_count() for name in state.nodes.draining if name in slots])
    figures = {"needed": needed, "free": free} | ({"draining": draining} if draining else {})
    return (Refusal(Reason.GPUS, figures),)


def _free_on(state: State, job: JobRecord, names: frozenset[str]) -> dict[str, int]:
    """Return the free devices, if any, of those of the nodes that take gangs and are in the job's partition."""
    view, key = state.view, (names, job.partition.name)
    if state.free_on[0] != view.version:
        state.free_on = view.version, {}
    if (known := state.free_on[1].get(key)) is not None:
        return known
    found = state.free_on[1][key] = dict[str, int]()
    for name in names:
        slot = view.slots.get(name)
        if slot is not None and view.available[slot] and view.free[slot] and _is_inside(state, job, name):
            found[name] = view.free[slot].bit_count()
    return found


def _lacks_memory(state: State, job: JobRecord) -> tuple[Refusal, ...]:
    """Return the nodes whose free host memory is too little to time-slice a resumed job where it is parked."""
    gang = state.gangs.get(job.epoch)
    if gang is None or not state.gangs.sets or job.number not in state.queue.resuming:
        return ()
    found = []
    for piece in gang.pieces:
        slot, held = state.view.slots.get(piece.claim.node), piece.held
        if slot is None or held is None:
            continue
        kept = held.memory_bytes + held.arena_bytes
        needed, free = piece.claim.memory_bytes + piece.claim.arena_bytes - kept, state.view.memory[slot]
        if needed > free:
            figures = {"needed_bytes": needed, "free_bytes": int(free)}
            found.append(Refusal(Reason.MEMORY, figures, node=piece.claim.node))
    return tuple(found)


def _no_planner(state: State) -> Refusal:
    """Return the refusal of a job that a planner is to place while none is connected."""
    remedy = "start one with `ganger planner run`, or restart the master without --no-planner"
    text = f"policy {state.settings.policy} needs a planner, and none is connected: {remedy}"
    return Refusal(Reason.RANKED, detail=text)


def _ranked(state: State, job: JobRecord) -> Refusal:
    """Return what the planner's ranking means for a waiting job."""
    rank, policy = state.queue.ranks.get(job.number, 0), state.queue.ranked_by or state.settings.policy
    if job.number in state.queue.passed:
        text = "its scheduler passed its last lease without a reason, and gets another one when devices are freed"
        return Refusal(Reason.RANKED, detail=text)
    if not rank:
        return Refusal(Reason.RANKED, detail=f"the planner of policy {policy} has not ranked it yet")
    why = _takes_no_turns(state, job)
    alone = f"; it is not time-sliced, because {why}" if why else ""
    if rank == 1:
        text = f"first in the queue, it starts once the planner of policy {policy} finds it a place{alone}"
        return Refusal(Reason.RANKED, detail=text)
    text = f"the planner of policy {policy} lets others go first{alone}"
    return Refusal(Reason.RANKED, {"ahead": rank - 1}, detail=text)


def _with_standing(state: State, job: JobRecord, refusal: Refusal, now: float) -> Refusal:
    """Return what the ranking means, with the use and share of the job's team, if there are teams."""
    standing = usage.standing(state, job.user, now) if refusal.reason is Reason.RANKED else ""
    return replace(refusal, detail=f"{refusal.detail}; {standing}") if standing else refusal


def _takes_no_turns(state: State, job: JobRecord) -> str:
    """Return why a job is not time-sliced where others are; empty if it is not kept from it."""
    if not state.gangs.sets:
        return ""
    if not job.preemptible:
        return "it is not to be suspended"
    if job.time_limit_s is not None:
        return "it has a time limit, which goes on while it rests"
    return job.no_time_slices


def blockers_of(state: State, job: JobRecord, now: float) -> tuple[Refusal, ...]:
    """Judge the job as a request of it would be now; its scheduler's own blockers come last."""
    quota = rules(state, job)
    forbidden = forbidden_nodes(state, job, now)
    own = approval.holding_of(state, job, state.gangs[job.epoch].claims) if job.number in state.queue.resuming else ()
    view = state.view
    if forbidden or own:
        view = view.copy()
        for refusal in forbidden:
            view.set_available(refusal.node, False)
        for claim in own:
            # What it keeps where it is parked does not block the job itself.
            view.give(claim)
    found = order(quota) if quota else _placement_blockers(state, job, now, view)
    if not found:
        # A reservation of some nodes keeps no job waiting that fits on others.
        forbidden = tuple([one for one in forbidden if one.reason is not Reason.NODE_RESERVED])
    if forbidden and not quota and not _placement_blockers(state, job, now, state.view):
        # The nodes it may not use are what it lacks.
        found = (*forbidden, *(one for one in found if one.reason is not Reason.NODE_UNAVAILABLE))
    blockers = tuple(_with_keeper(state, job, one) for one in found) or state.blockers_of(job.number)
    return tuple(reservations.for_reader(state, as_it_is(state, one, job), now) for one in blockers)


def as_it_is(state: State, refusal: Refusal, job: JobRecord) -> Refusal:
    """Return a refusal with the nodes that take no gangs and the reasons, which only an operator can change. A refusal
    without a node covers all nodes of the job's partition."""
    if refusal.reason is not Reason.NODE_UNAVAILABLE or refusal.detail:
        return refusal
    closed = [refusal.node]
    if not refusal.node:
        closed = [name for name in sorted(state.nodes) if _is_inside(state, job, name) and not _is_open(state, name)]
    reported = [_condition(state.nodes[name]) for name in closed[:_NODES_SHOWN] if name in state.nodes]
    more = [f"{len(closed) - _NODES_SHOWN} more"] if len(closed) > _NODES_SHOWN else []
    return replace(refusal, node="", detail="; ".join([*reported, *more]))


def _silent_nodes(state: State, job: JobRecord, now: float) -> tuple[Refusal, ...]:
    """Return the nodes of its gang whose daemons do not call: its state there is unknown, and no order reaches it."""
    gang = state.gangs.get(job.epoch)
    reported, fate = [], _once_lost(job)
    patience = math.inf if state.silent_after is None else state.silent_after
    cut_off: Mapping[str, float] | None = None
    for name in gang.nodes if gang is not None else ():
        node, answered = state.nodes.get(name), state.nodes.last_answer.get(name)
        silent = 0.0 if answered is None else now - answered
        if node is None or node.lost:
            continue
        is_silent = node.state is NodeState.SILENT or silent > patience
        if node.heard and not is_silent:
            continue
        how = f"has not called for {silent:.0f} s" if node.heard else "has not reported yet what runs there"
        if node.unanswerable:
            how = f"cannot be sent what it is to do: {node.unanswerable}"
        patience_s = state.lost_after
        cut_off = availability.fallen_at_once(state, now) if cut_off is None else cut_off
        if name in cut_off:
            how = f"{how}; {availability.suspicion(cut_off[name])}, see that nodes reach it"
            patience_s = None if cut_off[name] == math.inf else cut_off[name] - (answered or 0.0)
        lost = "only " if patience_s is None else f"once its silence has lasted {patience_s:.0f} s, or "
        detail = (
            f"nodes/{name} {how}: the job's state is the one last reported, and no order reaches"
            f" it; it {fate} {lost}when an operator says so (`ganger lost {name}`)"
        )
        # Right after a restart it is only expected.
        reason = Reason.NODE_SILENT if is_silent else Reason.NODE_UNAVAILABLE
        reported.append(Refusal(reason, detail=detail))
    return tuple(reported)


def _once_lost(job: JobRecord) -> str:
    if job.ending is not None and job.ending.is_finished:
        return "ends"
    if job.state is JobState.SUSPENDED:
        return "rests on its last checkpoint" if job.checkpoint is not None else "rests, and starts from the beginning,"
    return "goes on elsewhere"


_NODES_SHOWN = 3


def _is_inside(state: State, job: JobRecord, name: str) -> bool:
    """Return whether a node is in the job's partition. Without topology it is in none."""
    slot, partition = state.view.slots.get(name), job.partition.name
    return not partition or (slot is not None and state.view.topologies[slot].is_in(partition))


def _is_open(state: State, name: str) -> bool:
    return state.nodes[name].takes_gangs


def _condition(node: Node) -> str:
    why = node.unanswerable or ("its daemon does not call" if node.state is NodeState.SILENT else service_reason(node))
    return f"nodes/{node.name} is {node.state.value.lower()}" + (f" ({why})" if why else "")


def _with_keeper(state: State, job: JobRecord, refusal: Refusal) -> Refusal:
    """Return a refusal with the job that keeps the most device memory: ending or parking it at CHECKPOINT helps."""
    if refusal.reason is not Reason.DEVICE_MEMORY or refusal.job or not refusal.node:
        return refusal
    kept = {
        number: sum(claim.parked_bytes)
        for number, claim in holders_on(state, refusal.node)
        if claim.parked_bytes and number != job.number
    }
    keeper = max(kept, key=lambda number: (kept[number], -number), default=0)
    return replace(refusal, job=f"jobs/{keeper}") if keeper else refusal


_BEHIND = frozenset({Reason.PROTECTED, Reason.KEPT})


def _placement_blockers(state: State, job: JobRecord, now: float, view: View) -> tuple[Refusal, ...]:
    protected, rank = protected_from(state, job, now), state.queue_rank(job.number)
    return placement_blockers(
        view, job.shape, waited=now - job.pending_since, protected=protected, rank=rank, job=job.name
    )


# Refusals of nodes that may be open once a reservation has ended.
_CLOSED: Final = (Reason.NODE_RESERVED, Reason.NODE_UNAVAILABLE)


def _closers(state: State, job: JobRecord, now: float) -> list[Holder]:
    """Return the reservations that close nodes to a job which are open to it otherwise."""
    closed = reservations.closed_to(state, job, now)
    emptied = {name for name in state.nodes.reserved if replace(state.nodes[name], reservation="").takes_gangs}
    found = []
    for one in state.reservations.values():
        nodes = [name for name in one.nodes if name in closed or name in state.nodes.reserved]
        nodes = [name for name in nodes if name in emptied or (name in state.nodes and state.nodes[name].takes_gangs)]
        if nodes and job.user not in one.users:
            found.append(Holder(f"reservation {one.name}", (), one.end, frozenset(nodes)))
    return found


def _once_open(state: State, job: JobRecord, closers: Sequence[Holder], now: float) -> StartEstimate:
    """Estimate when a job starts that reservations keep out: they end at the latest when they were made to."""
    view = state.view.copy()
    for name in frozenset[str]().union(*[one.nodes for one in closers]):
        view.set_available(name, True)
    for refusal in forbidden_nodes(state, job, now):
        if refusal.reason is not Reason.NODE_RESERVED:
            view.set_available(refusal.node, False)
    return estimate(view, job.shape, [*_holders(state, now), *closers], now)


def _holders(state: State, now: float) -> list[Holder]:
    holders = []
    for epoch in sorted(state.gangs):
        gang = state.gangs[epoch]
        job = state.jobs[gang.job]
        held = gang.held
        if held:
            holders.append(Holder(job.name, held, ending.ends_at(state, job)))
    return holders


def _on_the_way(state: State, job: JobRecord) -> str:
    """Return what a job was ordered to do that its nodes have not reported yet; empty if they have."""
    gang = state.gangs.get(job.epoch)
    if gang is None:
        return ""
    if gang.phase is GangPhase.STOPPING:
        pieces = [piece for piece in gang.pieces if not piece.gone and piece.phase is not ObservedPhase.PARKED]
        what = "end" if gang.intent is GangIntent.STOP else "rest"
        waits = "has not reported that it does"
    elif gang.phase is GangPhase.STARTING:
        pieces = [piece for piece in gang.pieces if piece.phase is ObservedPhase.NONE]
        what, waits = "start", "has not acknowledged the order yet"
    else:
        return ""
    names = [f"nodes/{piece.claim.node}" for piece in pieces]
    more = f" and {len(names) - _NODES_SHOWN} more" if len(names) > _NODES_SHOWN else ""
    return f"it was ordered to {what}; {', '.join(names[:_NODES_SHOWN])}{more} {waits}" if names else ""


def _at_rest(state: State, job: JobRecord) -> str:
    match job.state:
        case JobState.SUSPENDED:
            stays = f"it stays suspended until `ganger resume {job.number}`"
            return _on_the_way(state, job) or f"{stays}; `ganger history {job.number}` prints why it was suspended"
        case JobState.HOLDING:
            gang = state.gangs.get(job.epoch)
            reported = f"it has its gang, which is {gang.phase.value}" if gang else "it has its gang"
            if gang is not None and gang.phase is GangPhase.STARTING and ending.runs_since(job, gang):
                reported = "its processes run, and have reported no step so far"
            return _on_the_way(state, job) or reported
        case JobState.PENDING:
            other = "other jobs" if job.awaits else "another member"
            return f"unknown, because it waits for {other} to end" if job.held else "its gang is being made ready"
        case _:
            return f"it has ended: {job.state.value}"


class RoomInProgress(Struct, frozen=True, gc=False):
    """A job that leaves `source` to make room; `destination` is empty if it is parked. `phase`: of the source."""

    number: int
    purpose: Purpose
    source: tuple[str, ...]
    destination: tuple[str, ...]
    phase: GangPhase


def making_room_for(state: State, number: int) -> tuple[RoomInProgress, ...]:
    """Return the jobs that make room for a pending one, by number."""
    found = []
    for mover in sorted(state.jobs.live):
        job = state.jobs[mover]
        gang = state.gangs.get(job.epoch)
        if gang is None:
            continue
        destination = state.gangs.get(job.next_epoch)
        if destination is not None and destination.purpose.job == number:
            found.append(RoomInProgress(mover, destination.purpose, gang.nodes, destination.nodes, gang.phase))
        elif destination is None and gang.parked_by_plan and gang.purpose.job == number:
            found.append(RoomInProgress(mover, gang.purpose, gang.nodes, (), gang.phase))
    return tuple(found)


def kept_for(state: State, number: int) -> tuple[str, ...]:
    """Return the nodes of the place that the planner keeps for a job."""
    return tuple([claim.node for claim in state.queue.kept_by_plan.get(number, ())])
