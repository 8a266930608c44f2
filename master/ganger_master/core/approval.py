"""The verdict on a gang request: the first candidate that fits and that is not kept for jobs ahead, or the refusals.

Conflicts are judged on the claimed devices, cores and bytes, never on version numbers: a request from an old view is
fine if what it claims is still free. A rejection brings fresh states of just the nodes that it is about. `judge` adds
what only the state has: quotas, shared storage, the users a daemon can switch to, and the order of the queue.
"""

from __future__ import annotations

from collections.abc import Sequence

from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.fit import Company, demand, fit, gang_level
from ganger.cluster.placement import candidates
from ganger.cluster.preferences import GANDIVA
from ganger.cluster.refusals import Reason, Refusal, RefusalKind
from ganger.cluster.resources import Claim, GangShape, LocalityLevel, NodeRow
from ganger.cluster.search import PlacementRequest
from ganger.cluster.view import View
from ganger.protocol.gang_orders import Mechanism
from msgspec import Struct
from msgspec.structs import replace

from ganger_master.core import colocation, gang_orders, reservations
from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord
from ganger_master.core.job_rules import closed_nodes, closed_to_image, forbidden_nodes, node_rules, rules
from ganger_master.core.kept_places import NOTHING, Protected, kept_by_plan, protected_from, trespass
from ganger_master.core.state import State

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
        refusals = trespass(state.view, kept_by_plan(state, job), claims, job=job.name, holding=holding)
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
    avoid = avoid | closed_to_image(state, job).keys() | closed_nodes(state, job).keys()
    request = PlacementRequest(shape, _PATIENT, avoid=avoid, only=within, limit=_FEW_PLACES)
    for claims in GANDIVA.places(CapacityIndex.of(state.view), request):
        if not judge_change(state, job, claims):
            return claims, level_of(state, claims)
    return None


def has_room_for(state: State, job: JobRecord, gang: Gang, shape: GangShape) -> bool:
    """Return whether there is a place of this shape for a job, once the gang that it has now is gone."""
    view = state.view.copy()
    for claim in gang.held:
        view.give(claim)
    avoid = closed_to_image(state, job).keys() | closed_nodes(state, job).keys()
    request = PlacementRequest(shape, _PATIENT, avoid=frozenset(avoid), limit=_FEW_PLACES)
    found = GANDIVA.places(CapacityIndex.of(view), request)
    return any(not judge_change(state, job, claims, gang.held, retune=True, shape=shape) for claims in found)


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


def holding_of(state: State, job: JobRecord, claims: Sequence[Claim]) -> tuple[Claim, ...]:
    """Return the pieces of a job that count as free for it: those it is parked on, if it requests just that place.

    The source of a move does not count: it never runs again, so a new gang needs room beside it."""
    parked = state.gangs.get(job.epoch)
    if parked is None or job.moved_from >= parked.epoch or not _is_where_it_rests(state, job, claims):
        return ()
    return parked.held
