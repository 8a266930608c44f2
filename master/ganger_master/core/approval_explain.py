"""Why a job waits, the true blocker first, and when it may start: an interval only where one is honest."""

from __future__ import annotations

from collections.abc import Sequence

from ganger.cluster.placement import candidates, places, widest_now
from ganger.cluster.refusals import Reason, Refusal, RefusalKind
from ganger.cluster.resources import Claim, GangShape
from ganger.cluster.view import View
from msgspec import Struct

from ganger_master.core.reservations import NOTHING, Protected, trespass

_KINDS = (RefusalKind.MISTAKE, RefusalKind.BLOCKER, RefusalKind.RACE)
# What no other change of the cluster helps against comes before what the next release may solve.
_FIRST = (
    Reason.QUOTA,
    Reason.DEVICE_TYPE,
    Reason.STORAGE_NOT_SHARED,
    Reason.CANNOT_SWITCH_USER,
    Reason.LAUNCH_FAILED,
)
# Candidates asked about before a job counts as kept out: the way may be free elsewhere.
_CANDIDATES = 16
_NEVER = 1e12


class Holder(Struct, frozen=True, gc=False):
    """A gang's claims and when it ends at the latest (None: nobody knows)."""

    job: str
    claims: tuple[Claim, ...]
    ends_by: float | None


class StartEstimate(Struct, frozen=True, gc=False):
    """Seconds from now; both zero when unknown, and then `assumption` says why."""

    after: float
    before: float
    assumption: str


def order(refusals: Sequence[Refusal]) -> tuple[Refusal, ...]:
    """The true blocker first: mistakes, then what lasts, then what a retry may solve; else in the order given."""
    return tuple(
        sorted(refusals, key=lambda one: (_KINDS.index(one.reason.kind), one.reason not in _FIRST, _is_indirect(one)))
    )


def _is_indirect(refusal: Refusal) -> bool:
    """More devices would help, but enough are free: what they lack comes first."""
    figures = refusal.figures
    return refusal.reason is Reason.GPUS and figures.get("largest_free", 0) >= figures.get("needed", 1)


def explain(
    view: View,
    shape: GangShape,
    *,
    waited: float,
    protected: Protected = NOTHING,
    rank: int = 0,
    job: str = "",
    quota: Sequence[Refusal] = (),
) -> tuple[Refusal, ...]:
    """What keeps the job from starting now; empty when nothing does and its turn will place it."""
    if quota:
        return order(quota)
    placement = candidates(view, shape, waited=waited, limit=_CANDIDATES)
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
    """When the gang fits if every holder runs to its limit; unknown as soon as that rests on one without a limit.

    Holders may end sooner, so the interval begins now. Jobs ahead in the queue are not counted: the assumption says so.
    """
    if _fits(view, shape):
        if widest_now(shape, 0.0) < shape.locality.widest:
            left = shape.locality.patience_seconds
            return StartEstimate(0.0, left, "its patience ends by then and nothing it needs is taken meanwhile")
        return StartEstimate(0.0, 1.0, "its turn comes at once and no job is ahead")
    limited = sorted(
        [(one.ends_by, one.job, one) for one in holders if one.ends_by is not None], key=lambda one: one[:2]
    )
    # Whoever else ends makes no less room: how many must end is found by halves.
    low, high, later = 0, len(limited) + 1, view
    while low + 1 < high:
        middle = (low + high) // 2
        tried = _without(later, limited[low:middle])
        if _fits(tried, shape):
            high = middle
        else:
            low, later = middle, tried
    if high <= len(limited):
        ends_by, last, _ = limited[high - 1]
        before = max(1.0, ends_by - now)
        return StartEstimate(
            0.0, before, f"jobs run to their time limits, {last} being the last needed, and no job is ahead"
        )
    unlimited = [holder.job for holder in holders if holder.ends_by is None]
    if unlimited:
        return StartEstimate(0.0, 0.0, f"unknown, because {unlimited[0]} has no time limit")
    return StartEstimate(0.0, 0.0, "unknown, because it would not fit even if all running jobs ended")


def _without(view: View, ended: Sequence[tuple[float, str, Holder]]) -> View:
    """The view once these have ended."""
    later = view.copy()
    for _, _, holder in ended:
        for claim in holder.claims:
            later.give(claim)
    return later


def _fits(view: View, shape: GangShape) -> bool:
    return bool(places(view, shape, waited=_NEVER, limit=1))
