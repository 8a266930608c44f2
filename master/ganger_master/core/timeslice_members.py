"""The jobs of a proposed slice matrix: whether each may be time-sliced, and whether it starts, stays or moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import Bandwidth, Claim, LocalityLevel
from msgspec.structs import replace

from ganger_master.core import colocation, gang_orders, timeslice_groups
from ganger_master.core.answers import RefusedError
from ganger_master.core.colocation import has_arenas
from ganger_master.core.gang_model import Gang, GangIntent, GangPhase, GangRole, TimesliceGroup
from ganger_master.core.gang_orders import has_two_worlds
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.plan_changes import SliceChange
from ganger_master.core.preconditions import unfinished
from ganger_master.core.state import State

Claims: TypeAlias = tuple[Claim, ...]


class MatrixRefusedError(Exception):
    """A refusal of a matrix. `number`: the job that it is about."""

    def __init__(self, number: int, refusal: Refusal) -> None:
        self.number, self.refusal = number, refusal


@dataclass(slots=True, eq=False)
class SlicedMember:
    """A job of a proposed matrix. `claims`: its place now or then. `gang`: its present gang, None if it has none."""

    change: SliceChange
    job: JobRecord
    gang: Gang | None
    claims: Claims
    level: LocalityLevel
    is_parked: bool = False
    is_moving: bool = False

    @property
    def needs_devices(self) -> bool:
        """Return whether it has no devices at `claims` yet."""
        return self.is_new_there or self.is_parked

    @property
    def is_new_there(self) -> bool:
        """Return whether it holds nothing at `claims` yet."""
        return self.gang is None or self.is_moving

    def memory_for(self, place: int) -> int:
        """Return the bytes of host memory that it takes for one of its claims, beyond what it holds there."""
        claim = self.claims[place]
        if self.is_new_there or self.gang is None:
            return claim.memory_bytes + claim.arena_bytes
        return self.gang.lacking_claims[place].memory_bytes if self.is_parked else 0

    def bandwidth_for(self, place: int) -> Bandwidth:
        """Return the same of the node's bandwidth."""
        if self.is_new_there or self.gang is None:
            return self.claims[place].bandwidth
        return self.gang.lacking_claims[place].bandwidth if self.is_parked else ()


def proposed_member(state: State, change: SliceChange, before: TimesliceGroup | None) -> SlicedMember:
    """Return the member that a change proposes for the set `before` (None: a new set). Raises MatrixRefusedError."""
    job = _sliceable_job(state, change)
    gang = state.gangs.get(job.epoch)
    if job.is_waiting and gang is not None:
        return _parked(state, change, job, gang)
    if job.is_waiting:
        if not change.claims:
            refuse(job.number, Reason.WRONG_STATE, detail="where it is to start is missing")
        if any(claim.shared_mask for claim in change.claims):
            refuse(job.number, Reason.NOT_SUPPORTED, detail="a co-located job is not time-sliced")
        return SlicedMember(change, job, None, change.claims, LocalityLevel.CLUSTER)
    if gang is not None and _is_parked_by_plan(gang) and not job.next_epoch and job.ending is None:
        return _parked(state, change, job, gang)
    return _running(state, change, job, gang, before)


def _sliceable_job(state: State, change: SliceChange) -> JobRecord:
    """Return the job of a change, if its spec and its earlier attempts allow time slices. Raises MatrixRefusedError."""
    try:
        job = unfinished(state, change.number)
    except RefusedError as error:
        refuse(change.number, Reason.WRONG_STATE, detail=error.refused.message)
    if change.revision != job.revision:
        refuse(job.number, Reason.STALE_REVISION, {"revision": job.revision, "given": change.revision})
    if not job.spec.preemptible:
        refuse(job.number, Reason.WRONG_STATE, detail="the job is not preemptible, so it is not time-sliced")
    if job.spec.time_limit_s is not None:
        refuse(job.number, Reason.WRONG_STATE, detail="the job has a time limit, which continues while it is parked")
    if job.capabilities.no_turns:
        refuse(job.number, Reason.WRONG_STATE, detail=job.capabilities.no_turns)
    return job


def _running(
    state: State, change: SliceChange, job: JobRecord, gang: Gang | None, before: TimesliceGroup | None
) -> SlicedMember:
    is_active = gang is not None and gang.role is GangRole.ACTIVE
    settled = is_active and gang is not None and gang.phase in (GangPhase.STARTING, GangPhase.RUNNING)
    if gang is None or not settled or gang.intent is not GangIntent.RUN or job.next_epoch or job.ending is not None:
        refuse(job.number, Reason.WRONG_STATE, detail="only a running or pending job can be time-sliced")
    is_new = gang.phase is GangPhase.STARTING and not gang.stepped and gang.epoch not in state.gangs.set_of
    if is_new and len(gang.pieces) > 1:
        # Its parts may wait on their devices for parts that are not launched yet. Time slices that begin then are a
        # deadlock: those parts reach no boundary without the others, which wait for their slice.
        refuse(job.number, Reason.WRONG_STATE, detail="it is on several nodes and has not stepped on all of them yet")
    if colocation.beside(state, gang):
        refuse(job.number, Reason.NOT_SUPPORTED, detail="a co-located job is not time-sliced")
    if has_two_worlds(state, job.number):
        refuse(job.number, Reason.WRONG_STATE, detail="it is being resized: its former world is still ending")
    if change.claims and not gang_orders.same_place(change.claims, gang.claims):
        return _moving(state, change, job, gang)
    of = state.gangs.set_of.get(gang.epoch)
    if of is not None and (before is None or of != before.number):
        refuse(
            job.number, Reason.WRONG_STATE, {"node_set": of}, detail="it is time-sliced already, in another node set"
        )
    return SlicedMember(change, job, gang, gang.claims, gang.level)


def _parked(state: State, change: SliceChange, job: JobRecord, gang: Gang) -> SlicedMember:
    if gang.phase is not GangPhase.PARKED or gang.rested_level is not SuspendLevel.OFFLOAD:
        refuse(job.number, Reason.WRONG_STATE, detail="it is not parked in host memory")
    if change.claims and not gang_orders.same_place(change.claims, gang.claims):
        return _moving(state, change, job, gang)
    if gang_orders.is_superseded(state, gang):
        refuse(job.number, Reason.WRONG_STATE, detail="its parked gang is superseded and cannot resume where it is")
    claims = tuple([replace(claim, shared_mask=0) for claim in gang.claims])
    return SlicedMember(change, job, gang, claims, gang.level, is_parked=True)


def _moving(state: State, change: SliceChange, job: JobRecord, gang: Gang) -> SlicedMember:
    if gang.phase is GangPhase.STARTING or has_two_worlds(state, job.number) or not job.capabilities.can_hand_over:
        refuse(job.number, Reason.WRONG_STATE, detail="its state cannot be moved, or not yet")
    if gang.node_set and not has_arenas(gang):
        refuse(job.number, Reason.WRONG_STATE, detail="no host memory is reserved for it to leave its time slices")
    if any(claim.shared_mask for claim in change.claims):
        refuse(job.number, Reason.NOT_SUPPORTED, detail="a co-located job is not time-sliced")
    if gang.phase is not GangPhase.PARKED and not timeslice_groups.is_free_of_turns([change.claims, gang.claims]):
        refuse(job.number, Reason.CLAIM_MISMATCH, detail="it would move onto devices of its own")
    if sum(claim.device_mask.bit_count() for claim in change.claims) != gang.devices:
        refuse(job.number, Reason.CLAIM_MISMATCH, detail="a move does not change the size of a job")
    return SlicedMember(change, job, gang, change.claims, LocalityLevel.CLUSTER, is_moving=True)


def _is_parked_by_plan(gang: Gang) -> bool:
    offloaded = gang.rested_level is SuspendLevel.OFFLOAD and gang.park_level is SuspendLevel.OFFLOAD
    return gang.phase is GangPhase.PARKED and gang.intent is GangIntent.PARK and gang.parked_by_plan and offloaded


def refuse(
    number: int, reason: Reason, figures: Mapping[str, int] | None = None, node: str = "", detail: str = ""
) -> NoReturn:
    raise MatrixRefusedError(number, Refusal(reason, figures or {}, node, f"jobs/{number}", detail))
