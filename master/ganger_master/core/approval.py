"""The verdict on a gang request: the first candidate that fits and that is not kept for jobs ahead, or the refusals.

Conflicts are judged on the claimed devices, cores and bytes, never on version numbers: a request from an old view is
fine if what it claims is still free. A rejection brings fresh states of just the nodes that it is about. `judge` adds
what only the state has: quotas, shared storage, the users a daemon can switch to, and the order of the queue.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.fit import Company, demand, fit, gang_level
from ganger.cluster.placement import candidates
from ganger.cluster.preferences import GANDIVA
from ganger.cluster.refusals import Reason, Refusal, RefusalKind
from ganger.cluster.resources import Claim, GangShape, LocalityLevel, NodeRow
from ganger.cluster.search import PlacementRequest
from ganger.cluster.view import View
from ganger.protocol.gang_orders import Mechanism
from ganger.text import counted
from msgspec import Struct
from msgspec.structs import replace

from ganger_master.core import colocation, ending, gang_orders, reservations
from ganger_master.core.job_model import JobRecord
from ganger_master.core.kept_places import (
    NOTHING,
    KeptPlace,
    KeptPlaceRequest,
    Protected,
    begins_at,
    keep_places,
    protect,
    trespass,
)
from ganger_master.core.node_model import Node
from ganger_master.core.queue import Blocked, KeptPlaces
from ganger_master.core.state import State
from ganger_master.core.teams import is_of_partition, limit_of, owner_in_words

# The capability of a node with the instructions that programs may use there, in words.
_PROCESSOR: Final = "processor"
_LACKING_SHOWN = 8
# Places that the master looks at itself.
_FEW_PLACES = 4
# More candidates than this are not judged: the wire allows no more.
MOST_CANDIDATES = 16


class CandidateApproval(Struct, frozen=True, gc=False):
    """Candidate `candidate` (from 0) may be taken; `level` is the gang's worst pair."""

    candidate: int
    claims: tuple[Claim, ...]
    level: LocalityLevel


class CandidateRejection(Struct, frozen=True, gc=False):
    """The refusals of the last candidate, the true blocker first; `rows`: of all nodes that any candidate failed on."""

    refusals: tuple[Refusal, ...]
    rows: tuple[NodeRow, ...]


def approve(
    view: View,
    shape: GangShape,
    candidates: Sequence[Sequence[Claim]],
    *,
    rank: int = 0,
    job: str = "",
    protected: Protected = NOTHING,
    holding: Sequence[Claim] = (),
    retune: bool = False,
    company: Company | None = None,
) -> CandidateApproval | CandidateRejection:
    """Try the candidates in order; takes nothing itself.

    rank: the job's position in the policy's order; 0: behind all others, for a request without a lease. holding: pieces
    that are the job's own. retune, company: other cores and memory, and gangs that it may be beside, as `fit` has them.
    """
    refusals: tuple[Refusal, ...] = _NO_CANDIDATES
    conflicting: dict[str, NodeRow] = {}
    for index, claims in enumerate(candidates[:MOST_CANDIDATES]):
        refusals = fit(view, shape, claims, holding=holding, retune=retune, company=company or {})
        if not refusals and protected is not NOTHING:
            refusals = trespass(view, protected, claims, rank=rank, job=job, holding=holding)
        if not refusals:
            return CandidateApproval(index, tuple(claims), gang_level(view, claims))
        for refusal in refusals:
            if refusal.node in view and refusal.node not in conflicting:
                conflicting[refusal.node] = view.row(refusal.node)
    return CandidateRejection(order(refusals), tuple(conflicting.values()))


_NO_CANDIDATES = (Refusal(Reason.CLAIM_MISMATCH, detail="a request without candidates"),)


_KINDS = (RefusalKind.MISTAKE, RefusalKind.BLOCKER, RefusalKind.RACE)


def order(refusals: Sequence[Refusal]) -> tuple[Refusal, ...]:
    """Order refusals: mistakes first, then lasting blockers, then what a retry may solve; else as given."""
    return tuple(sorted(refusals, key=_rank))


def _rank(refusal: Refusal) -> tuple[int, bool, bool]:
    reason, figures = refusal.reason, refusal.figures
    # More devices would help, but enough are free: what they lack comes first.
    is_indirect = reason is Reason.GPUS and figures.get("largest_free", 0) >= figures.get("needed", 1)
    return (_KINDS.index(reason.kind), not reason.is_named_first, is_indirect)


def judge(
    state: State,
    job: JobRecord,
    wanted: Sequence[tuple[Claim, ...]],
    rank: int,
    now: float,
    retune: bool = False,
    shape: GangShape | None = None,
) -> CandidateApproval | CandidateRejection:
    """Return the first candidate that a job may have, or why it may not have the last one.

    rank: position in the policy's order; 0: out of turn. retune: allow other cores and memory, as `fit` does. shape:
    that of another size which the job accepts."""
    shape = job.shape if shape is None else shape
    refusals = rules(state, job, shape.gpus)
    if refusals:
        return CandidateRejection(refusals, ())
    allowed = wanted
    if state.nodes.choosy or job.capabilities.mechanism is Mechanism.IMAGE:
        allowed = [claims for claims in wanted if not (refusals := node_rules(state, job, claims))]
    if state.reservations and allowed:
        allowed = [some for some in allowed if not (refusals := _reserved_ahead(state, job, some, now))]
    if not allowed:
        return CandidateRejection(refusals, ())
    if job.epoch and "MOVE" in job.capabilities.missing:
        allowed = [claims for claims in allowed if _is_where_it_rests(state, job, claims)]
        if not allowed:
            detail = f"it can go on only where it rests: {job.capabilities.missing['MOVE']}"
            return CandidateRejection((Refusal(Reason.LEVEL_UNAVAILABLE, job=job.name, detail=detail),), ())
    company: Company = {}
    if any(claim.shared_mask for claims in allowed for claim in claims):
        refusals = colocation.rules(state, job, allowed[0])
        if refusals:
            return CandidateRejection(refusals, ())
        company = colocation.company_of(state, job, allowed[0])
    verdict = approve(
        state.view,
        shape,
        allowed,
        rank=rank,
        job=job.name,
        protected=protected_from(state, job, now, out_of_turn=not rank),
        holding=holding_of(state, job, allowed[0]) if job.epoch else (),
        retune=retune,
        company=company,
    )
    if isinstance(verdict, CandidateApproval) and len(allowed) < len(wanted):
        return CandidateApproval(list(wanted).index(allowed[verdict.candidate]), verdict.claims, verdict.level)
    return verdict


def _reserved_ahead(state: State, job: JobRecord, claims: Sequence[Claim], now: float) -> tuple[Refusal, ...]:
    return reservations.start_rules(state, job, {claim.node for claim in claims}, now)


def _is_where_it_rests(state: State, job: JobRecord, claims: Sequence[Claim]) -> bool:
    parked = state.gangs.get(job.epoch)
    return parked is not None and gang_orders.same_place(parked.claims, claims)


def has_place(state: State, job: JobRecord, now: float) -> bool:
    """Return whether a request of a waiting job would be granted now, had it waited for its wish long enough."""
    avoid = frozenset([refusal.node for refusal in forbidden_nodes(state, job, now)])
    request = PlacementRequest(job.shape, _PATIENT, avoid=avoid, limit=_FEW_PLACES)
    found = GANDIVA.places(CapacityIndex.of(state.view), request)
    return isinstance(judge(state, job, found, state.queue_rank(job.number), now), CandidateApproval)


def judge_change(
    state: State,
    job: JobRecord,
    claims: tuple[Claim, ...],
    holding: Sequence[Claim] = (),
    retune: bool = False,
    arena: int | None = None,
    agreed_only: bool = False,
    shape: GangShape | None = None,
) -> tuple[Refusal, ...]:
    """Return why a job may not change to these claims, by a move or with other cores; empty if it may.

    agreed_only: on devices of other gangs only where these share them already. shape: that of another size which the
    job accepts."""
    refusals = node_rules(state, job, claims) or colocation.rules(state, job, claims)
    if refusals:
        return refusals
    if shape is None:
        shape = job.shape if arena is None else job.shape_with(arena)
    company = colocation.company_of(state, job, claims, agreed_only)
    refusals = fit(state.view, shape, claims, holding=tuple(holding), retune=retune, company=company)
    if not refusals and state.queue.kept_by_plan:
        refusals = trespass(state.view, _kept_by_plan(state, job), claims, job=job.name, holding=holding)
    return refusals


def requested_memory(state: State, job: JobRecord, claim: Claim) -> int:
    """Return the bytes that a job requests, or has a right to while it runs, for the tasks of a claim; 0 for a node
    that left. What it was measured to use counts from its next start on."""
    slot = state.view.slots.get(claim.node)
    if slot is None:
        return 0
    shape = replace(job.shape, task_memory_bytes=0)
    return demand(state.view.topologies[slot].configuration_set, shape, claim.tasks).memory_bytes


def level_of(state: State, claims: Sequence[Claim]) -> LocalityLevel:
    return gang_level(state.view, tuple(claims))


def find_place(
    state: State, job: JobRecord, avoid: frozenset[str], within: frozenset[str] | None = None
) -> tuple[tuple[Claim, ...], LocalityLevel] | None:
    """A place for a job on other nodes than those to avoid, and on none but `within`; None if there is none now."""
    shape = job.shape
    avoid = avoid | closed_to_image(state, job).keys() | _closed_nodes(state, job).keys()
    request = PlacementRequest(shape, _PATIENT, avoid=avoid, only=within, limit=_FEW_PLACES)
    for claims in GANDIVA.places(CapacityIndex.of(state.view), request):
        if not judge_change(state, job, claims):
            return claims, level_of(state, claims)
    return None


def lacks(state: State, job: JobRecord, avoid: frozenset[str]) -> tuple[Refusal, ...]:
    """Return why `find_place` finds no place for a job."""
    placement = candidates(state.view, job.shape, waited_s=_PATIENT, avoid=avoid)
    for claims in placement.candidates:
        refusals = judge_change(state, job, claims)
        if refusals:
            return refusals
    return order(placement.refusals)


# Has waited long enough for every wish: a move has no time for it.
_PATIENT = 1e12


def rules(
    state: State, job: JobRecord, gpus: int | None = None, taken: Mapping[str, int] = MappingProxyType({})
) -> tuple[Refusal, ...]:
    """Return what keeps the job from any place: a gang of it that runs already, its partition, or a limit.

    gpus: devices to judge by; by default those that the job requests. taken: devices that other jobs of the same change
    take, by the owner of a limit."""
    if job.uid in state.nodes.strays_of:
        return (_quarantined(state, job),)
    needed = job.gpus if gpus is None else gpus
    if state.partitions and (refusal := partition_refusal(state, job, needed)) is not None:
        return (refusal,)
    full = full_share(state, job, needed, taken)
    if full is None:
        return ()
    owner, limit = full
    held, shown = state.jobs.shares.beside(job.number, owner) + taken.get(owner, 0), owner_in_words(owner)
    figures = {"needed": needed, "held": held, "limit": limit}
    if needed > limit:
        detail = f"it needs {counted(needed, 'GPU')} and the whole quota of {shown} is {limit}"
    else:
        kind = "limit" if is_of_partition(owner) else "quota"
        detail = f"{shown} holds {held} of the {counted(limit, 'GPU')} of its {kind}: {_holders(state, job, owner)}"
    reason = Reason.PARTITION_LIMIT if is_of_partition(owner) else Reason.QUOTA
    return (Refusal(reason, figures, detail=detail),)


def full_share(
    state: State, job: JobRecord, needed: int, taken: Mapping[str, int] = MappingProxyType({})
) -> tuple[str, int] | None:
    """Return the owner of a limit that has no room for so many devices of a job, and the limit; None if all have room.
    taken: as in `rules`."""
    quotas = state.settings.quota_devices
    for owner in state.owners(job) if quotas else ():
        limit = limit_of(quotas, owner)
        if limit is not None and state.jobs.shares.beside(job.number, owner) + taken.get(owner, 0) + needed > limit:
            return owner, limit
    return None


def partition_refusal(state: State, job: JobRecord, gpus: int) -> Refusal | None:
    """Return why a job may not be in its partition with so many devices; None if it may."""
    team, limit = state.teams.of(job.user), job.time_limit_s
    if job.start_time:
        # A job that has run keeps the time limit that it has.
        limit = None
    return state.partitions.refusal(job.partition.name, job.user, team, gpus, limit)


def is_beyond_quota(state: State, job: JobRecord) -> bool:
    """Return whether the job needs more devices than its user or team may ever hold, so that it can never start."""
    limits = [limit_of(state.settings.quota_devices, owner) for owner in state.owners(job)]
    return any(limit is not None and job.gpus > limit for limit in limits)


def _holders(state: State, job: JobRecord, owner: str) -> str:
    """Name the jobs that hold most of the share of a job's user or team: "jobs/3 (4), jobs/1 (2), 5 more jobs"."""
    shares = state.jobs.shares
    told = [f"jobs/{number} ({devices})" for number, devices in shares.largest(owner, _HOLDERS_SHOWN, job.number)]
    more = shares.jobs_of(owner) - bool(shares.of(job.number)) - len(told)
    return ", ".join([*told, counted(more, "more job")] if more else told)


def _quarantined(state: State, job: JobRecord) -> Refusal:
    """Return the refusal of a job whose gang is quarantined: started again, the job would run twice."""
    names = sorted(state.nodes.strays_of[job.uid])
    epochs = sorted({one.epoch for name in names for one in state.nodes[name].strays if one.uid == job.uid})
    detail = (
        f"{Reason.QUARANTINED.meaning} on {', '.join(names)} (epoch {', '.join(map(str, epochs))}): an operator adopts "
        "or ends it with `ganger nodes quarantine`"
    )
    return Refusal(Reason.QUARANTINED, detail=detail, job=job.name)


def node_rules(state: State, job: JobRecord, claims: Sequence[Claim]) -> tuple[Refusal, ...]:
    """Return why a job may not use these nodes, whatever is free there; empty if it may."""
    refusals = []
    failed = _launch_failed_on(state, job)
    source = _where_its_image_is_taken(state, job)
    for claim in claims:
        node = claim.node
        if node not in state.nodes:
            refusals.append(Refusal(Reason.NODE_GONE, node=node))
        elif job.partition.name and (outside := _outside_partition(state, job, node)) is not None:
            refusals.append(outside)
        elif node in state.nodes.choosy:
            reason = _node_rule(job, state.nodes[node], failed)
            if reason is not None:
                refusals.append(_closed(state, job, node, reason))
        if source is not None and node in state.nodes and (why := cannot_restore(source, state.nodes[node])):
            detail = f"{Reason.CANNOT_RESTORE.meaning}: {why}"
            refusals.append(Refusal(Reason.CANNOT_RESTORE, node=node, job=job.name, detail=detail))
    return tuple(refusals)


def _outside_partition(state: State, job: JobRecord, node: str) -> Refusal | None:
    """Return the refusal of a node that is not in the job's partition. None for one that is, and where the job is
    already: it stays where it was when the settings changed."""
    gang = state.gangs.get(job.epoch)
    if (gang is not None and gang.piece(node) is not None) or node not in state.view:
        return None
    name = job.partition.name
    if state.view.topology(node).is_in(name):
        return None
    return Refusal(Reason.NOT_IN_PARTITION, node=node, job=job.name, detail=f"the node is not in partition {name!r}")


def _where_its_image_is_taken(state: State, job: JobRecord) -> Node | None:
    """Return the node of a job that continues by its process image; None for any other job."""
    gang = state.gangs.get(job.epoch) if job.capabilities.mechanism is Mechanism.IMAGE else None
    return state.nodes.get(gang.claims[0].node) if gang is not None and gang.claims else None


def cannot_restore(source: Node, node: Node) -> str:
    """Return why a node cannot restore process images that another node takes; empty if nothing is known against it."""
    if node.name == source.name:
        return ""
    images = node.capabilities.get("image", "")
    if images.startswith("none"):
        return images.removeprefix("none: ")
    return _lacks(node.capabilities.get(_PROCESSOR, ""), source.capabilities.get(_PROCESSOR, ""))


@lru_cache(maxsize=256)
def _lacks(processor: str, other: str) -> str:
    """Return which instructions of another processor one lacks, as a text; empty for none, or if that is not known."""
    lacking = sorted(set(other.split()) - set(processor.split())) if processor else []
    return f"its processor lacks {', '.join(lacking[:_LACKING_SHOWN])}" if lacking else ""


def closed_to_image(state: State, job: JobRecord) -> dict[str, str]:
    """Return the nodes that cannot restore a job's process image, and why; none for a job that has no image."""
    source = _where_its_image_is_taken(state, job)
    if source is None:
        return {}
    found = {name: cannot_restore(source, node) for name, node in state.nodes.items()}
    return {name: why for name, why in found.items() if why}


def _launch_failed_on(state: State, job: JobRecord) -> Collection[str]:
    """Nodes closed to a job that could not be launched there; none where it could go nowhere else."""
    if not job.launch_failed_on:
        return ()
    failed = ending.failed_on(state, job)
    if not failed:
        return ()
    others = [name for name in state.nodes.choosy if _node_rule(job, state.nodes[name], ()) is not None]
    return failed if ending.could_go_elsewhere(state, job, [*failed, *others]) else ()


def _closed(state: State, job: JobRecord, node: str, reason: Reason) -> Refusal:
    if reason is Reason.NODE_RESERVED:
        return Refusal(reason, node=node, detail=f"{reason.meaning} ({state.nodes[node].reservation})")
    if reason is not Reason.LAUNCH_FAILED:
        return Refusal(reason, node=node, job=job.name)
    said = ending.visible_to(state.jobs, state.nodes[node].launch_failure, job.user)
    detail = f"{reason.meaning}: {said}; it waits for another node, or for `ganger uncordon {node}`"
    return Refusal(reason, node=node, detail=detail)


def _node_rule(job: JobRecord, node: Node, failed: Collection[str]) -> Reason | None:
    if node.name in failed:
        return Reason.LAUNCH_FAILED
    if node.reserved_for and job.user not in node.reserved_for:
        return Reason.NODE_RESERVED
    if job.checkpoint is not None and not node.storage_proved:
        return Reason.STORAGE_NOT_SHARED
    if not can_become(node, job.user):
        return Reason.CANNOT_SWITCH_USER
    return None


def _closed_nodes(state: State, job: JobRecord) -> dict[str, Reason]:
    """Return the nodes that a job may not use, whatever is free there, and why."""
    failed = _launch_failed_on(state, job)
    found = {name: _node_rule(job, state.nodes[name], failed) for name in state.nodes.choosy}
    return {name: reason for name, reason in found.items() if reason is not None}


def may_never_start(state: State, job: JobRecord) -> Refusal | None:
    """Return why a waiting job may not start at all, whatever gets free, until the settings or the job change; None if
    it may. Limits do not count: they are kept where jobs are ranked."""
    return partition_refusal(state, job, 0) if state.partitions and job.is_waiting else None


def shut_out(state: State, job: JobRecord, nodes: Collection[str], now: float) -> tuple[Refusal, ...]:
    """Return why a waiting job may not start on these nodes for the sake of its partition or of reservations: one
    refusal for each closed node, or one without a node for all; empty if it may start on each."""
    if (refusal := may_never_start(state, job)) is not None:
        return (replace(refusal, job=job.name),)
    if not state.reservations:
        return ()
    known = [node for name in nodes if (node := state.nodes.get(name)) is not None]
    reserved = [node.name for node in known if node.reserved_for and job.user not in node.reserved_for]
    closed = [replace(_closed(state, job, name, Reason.NODE_RESERVED), job=job.name) for name in reserved]
    return (*closed, *reservations.start_rules(state, job, set(nodes).difference(reserved), now))


def can_become(node: Node, user: str) -> bool:
    """Return whether a node runs jobs of this user, as far as the master can know: a daemon that cannot switch users
    runs all as its own, and one that does runs none as root."""
    switches, own = node.capabilities.get("switch_user", "yes"), node.capabilities.get("user", "")
    if switches == "accounts":
        return user != "root"
    return switches != "no" or not user or not own or own == user


def forbidden_nodes(state: State, job: JobRecord, now: float) -> tuple[Refusal, ...]:
    """Return why the job may not start on nodes that take gangs now: one refusal for each of these nodes."""
    reasons = _closed_nodes(state, job)
    found = [_closed(state, job, name, reasons[name]) for name in sorted(reasons) if state.nodes[name].takes_gangs]
    closed = {refusal.node for refusal in found}
    reserved = {node for reservation in state.reservations.values() for node in reservation.nodes}
    open_ones = [name for name in reserved - closed if name in state.nodes and state.nodes[name].takes_gangs]
    return (*found, *reservations.start_rules(state, job, open_ones, now))


def holding_of(state: State, job: JobRecord, claims: Sequence[Claim]) -> tuple[Claim, ...]:
    """Return the pieces of a job that count as free for it: those it is parked on, if it requests just that place.

    The source of a move does not count: it never runs again, so a new gang needs room beside it."""
    parked = state.gangs.get(job.epoch)
    if parked is None or job.moved_from >= parked.epoch or not _is_where_it_rests(state, job, claims):
        return ()
    return parked.held


def protected_from(state: State, job: JobRecord, now: float, out_of_turn: bool = False) -> Protected:
    """Return what is kept from a job: the places that the planner keeps, and those of blocked jobs ahead of it in the
    policy's order; out of turn, of all other blocked jobs."""
    by_order = _protected_by_order(state, job, now, out_of_turn)
    if not state.queue.kept_by_plan:
        return by_order
    by_plan = _kept_by_plan(state, job)
    nodes = {
        name: (*by_plan.nodes.get(name, ()), *by_order.nodes.get(name, ()))
        for name in {**by_plan.nodes, **by_order.nodes}
    }
    return Protected(nodes, by_order.everything)


def _kept_by_plan(state: State, job: JobRecord) -> Protected:
    """Return what the planner keeps for other jobs; it comes before every request."""
    others = [
        KeptPlace(f"jobs/{number}", 0, claims)
        for number, claims in state.queue.kept_by_plan.items()
        if number != job.number
    ]
    return protect(state.view, others)


def _protected_by_order(state: State, job: JobRecord, now: float, out_of_turn: bool) -> Protected:
    if state.is_planned:
        # Its ranking and the places that it keeps say which job goes first.
        return NOTHING
    found = _blocked(state)
    # A queue that is not strict keeps room only for jobs that have waited long.
    if not found.numbers or (now < found.waited_from and not state.policy.protects_all):
        return NOTHING
    blocked = first_blocked(state)
    key = (state.policy.key(job), job.number)
    ahead = [
        other
        for other in blocked
        if (state.policy.key(other), other.number) < key or (out_of_turn and other.number != job.number)
    ]
    if job.number in state.queue.resuming:
        # It may hold what they lack: it resumes, or neither ever would.
        others = [other for other in ahead if not lacks_memory(state, other)]
        ahead = [] if state.policy.protects_all and others[:1] != ahead[:1] else others
    if not ahead:
        return NOTHING
    if state.policy.protects_all:
        return Protected(everything=(ahead[0].name, state.queue_rank(ahead[0].number)))
    places = _kept_places(state, blocked, ahead, now)
    return protect(state.view, places) if places else NOTHING


def lacks_memory(state: State, job: JobRecord) -> bool:
    """Return whether a job waits for memory, of nodes or of devices: parked jobs keep some of it."""
    refusals = state.queue.refusals.get(job.number, ())
    return any(refusal.reason in (Reason.MEMORY, Reason.DEVICE_MEMORY) for refusal in refusals)


def kept_places_of(state: State, jobs: Sequence[JobRecord], now: float) -> tuple[KeptPlace, ...]:
    """Return places, by rank, for those of the jobs that are among the first blocked ones and waited long enough."""
    return _kept_places(state, first_blocked(state), jobs, now)


def _kept_places(
    state: State, blocked: Sequence[JobRecord], jobs: Sequence[JobRecord], now: float
) -> tuple[KeptPlace, ...]:
    waited = _waited(state, blocked, now)
    if not waited:
        return ()
    names = {job.name for job in jobs}
    if all(job.name not in names for job in waited):
        return ()
    kept = _places_for(state, waited, now)
    return tuple(
        KeptPlace(job.name, state.queue_rank(job.number), kept[job.name])
        for job in waited
        if job.name in names and job.name in kept
    )


def _waited(state: State, blocked: Sequence[JobRecord], now: float) -> list[JobRecord]:
    conflicts, after_s = state.queue.conflicts, state.settings.keep_place_after_s
    return [job for job in blocked if now >= begins_at(conflicts.get(job.number, 0), job.pending_since, after_s)]


def _places_for(state: State, waited: Sequence[JobRecord], now: float) -> Mapping[str, tuple[Claim, ...]]:
    """Return the kept places of jobs, searched anew only after a while: a search costs as much as many verdicts."""
    numbers = tuple(job.number for job in waited)
    kept = state.queue.kept
    if (
        kept is None
        or kept.numbers != numbers
        or (kept.view_version != state.view.version and not 0.0 <= now - kept.time < _KEPT_S)
    ):
        closures = reservations.NodeClosures(tuple(state.reservations.values()), now)
        wanting = [
            KeptPlaceRequest(job.name, rank, job.shape, (*_launch_failed_on(state, job), *closures.of(job, now)))
            for rank, job in enumerate(waited, 1)
        ]
        found = {one.job: one.claims for one in keep_places(state.view, wanting)}
        kept = KeptPlaces(numbers, state.view.version, now, found)
        state.queue.kept = kept
    return kept.places


_KEPT_S = 0.5
# Most jobs that a refusal by quota names.
_HOLDERS_SHOWN: Final = 3


def first_blocked(state: State) -> list[JobRecord]:
    """The first waiting jobs that lack pieces; those ahead of any job are the first ones of them."""
    return [state.jobs[number] for number in _blocked(state).numbers]


def _blocked(state: State) -> Blocked:
    blocked = state.queue.blocked
    if blocked is None:
        blocked = find_blocked(state)
        state.queue.blocked = blocked
    return blocked


_NO_BLOCKED: Final = Blocked((), 0.0)


def find_blocked(state: State) -> Blocked:
    """Return the first blocked jobs of the queue, which `state.queue.blocked` caches."""
    if not state.queue.lacking:
        return _NO_BLOCKED
    blocked: list[JobRecord] = []
    for number in state.queue.lacking:
        job = state.jobs[number]
        if number not in state.queue.declined and job.is_waiting:
            blocked.append(job)
            if len(blocked) >= state.settings.protected_jobs:
                break
    conflicts, after_s = state.queue.conflicts, state.settings.keep_place_after_s
    earliest = min(
        [begins_at(conflicts.get(job.number, 0), job.pending_since, after_s) for job in blocked], default=0.0
    )
    return Blocked(tuple([job.number for job in blocked]), earliest)
