"""The verdict on a gang request: the first candidate that fits and that nobody ahead is kept, or why not.

Conflicts are judged on the claimed devices, cores and bytes, never on version numbers: a request from an old view is
fine if what it claims is still free. A rejection brings fresh rows of just the nodes it is about.
"""

from __future__ import annotations

from collections.abc import Sequence

from ganger.cluster.fit import Company, fit, gang_level
from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import Claim, GangShape, LocalityLevel, NodeRow
from ganger.cluster.view import View
from msgspec import Struct

from ganger_master.core.approval_explain import order
from ganger_master.core.reservations import NOTHING, Protected, trespass

# More candidates than this are not looked at: the wire allows no more.
MOST_CANDIDATES = 16


class CandidateApproval(Struct, frozen=True, gc=False):
    """Candidate `candidate` (from 0) may be taken; `level` is the gang's worst pair."""

    candidate: int
    claims: tuple[Claim, ...]
    level: LocalityLevel


class CandidateRejection(Struct, frozen=True, gc=False):
    """Of the last candidate tried, the true blocker first; `rows` of all nodes any candidate failed on."""

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
    """Tries the candidates in order; takes nothing itself.

    `rank` is the job's position in the policy's order, 0 for a request out of turn, which goes behind everybody.
    `holding`: pieces that are the job's own. `retune`: with other cores and memory, `company`: beside whom it may be,
    as `fit` has them.
    """
    refusals: tuple[Refusal, ...] = _NO_CANDIDATES
    conflicting: dict[str, NodeRow] = {}
    for index, claims in enumerate(candidates[:MOST_CANDIDATES]):
        refusals = fit(view, shape, claims, holding=holding, retune=retune, company=company or {})
        if not refusals and protected is not NOTHING:
            refusals = trespass(view, protected, claims, rank=rank, job=job)
        if not refusals:
            return CandidateApproval(index, tuple(claims), gang_level(view, claims))
        for refusal in refusals:
            if refusal.node in view and refusal.node not in conflicting:
                conflicting[refusal.node] = view.row(refusal.node)
    return CandidateRejection(order(refusals), tuple(conflicting.values()))


_NO_CANDIDATES = (Refusal(Reason.CLAIM_MISMATCH, detail="a request without candidates"),)
