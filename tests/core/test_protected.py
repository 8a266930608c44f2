"""Protected pieces are kept from requests behind, and from none ahead: agreement with a naive implementation."""

from __future__ import annotations

import pytest
from ganger.cluster.refusals import Reason
from ganger.cluster.resources import Claim
from ganger.cluster.view import View
from ganger_master.core.kept_places import KeptPlace, ProtectedPieces, protect, trespass
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.clusters import GIB, cluster

# Two of them fit beside each other, three do not.
MEMORY = st.sampled_from([0, 24 * GIB])
CORES = st.tuples(st.sampled_from([0, 2000]), st.sampled_from([0, 2000]))
JOBS = st.sampled_from(["jobs/1", "jobs/2", "jobs/3"])


def claims(arena: bool = True) -> st.SearchStrategy[Claim]:
    arenas = st.sampled_from([0, 0, 20 * GIB]) if arena else st.just(0)
    masks = st.sampled_from([0, 0, 0, 0b0001, 0b1100])
    return st.builds(Claim, st.just("s0"), masks, CORES, MEMORY, arenas, st.just((1,)))


def naive_may(view: View, kept: list[ProtectedPieces], claim: Claim, own: Claim | None, rank: int, job: str) -> bool:
    """What is left of the free pieces, with all that is kept for those ahead left alone. It has its own ones."""
    have = own or Claim("s0", 0, (0, 0), 0)
    row = view.row("s0")
    ahead = [one for one in kept if one.job != job and (rank == 0 or one.rank < rank)]
    if not ahead:
        return True
    if any(one.device_mask & claim.device_mask & ~have.device_mask for one in ahead):
        return False
    for socket, (wanted, got) in enumerate(zip(claim.millicores, have.millicores, strict=True)):
        more = wanted - got
        if more > 0 and more + sum(one.millicores[socket] for one in ahead) > row.free_millicores[socket]:
            return False
    memory = claim.memory_bytes + claim.arena_bytes - have.memory_bytes - have.arena_bytes
    return memory <= 0 or memory + sum(one.memory_bytes for one in ahead) <= row.free_memory_bytes


@settings(max_examples=150)
@given(
    held=claims(arena=False),
    kept=st.lists(st.tuples(JOBS, st.integers(1, 3), claims()), max_size=4),
    claim=claims(),
    own=st.none() | claims(),
    rank=st.integers(0, 4),
    job=JOBS,
)
def test_pieces_are_refused_exactly_where_they_are_kept_for_others_ahead(
    held: Claim, kept: list[tuple[str, int, Claim]], claim: Claim, own: Claim | None, rank: int, job: str
) -> None:
    view = cluster(1)
    view.take(held)
    protected = protect(view, [KeptPlace(of, its_rank, (pieces,)) for of, its_rank, pieces in kept])
    refusals = trespass(view, protected, [claim], rank=rank, job=job, holding=[own] if own else [])
    # What is kept counts with its arena.
    naive = [
        ProtectedPieces(of, its_rank, p.device_mask, p.millicores, p.memory_bytes + p.arena_bytes)
        for of, its_rank, p in kept
    ]
    assert (not refusals) == naive_may(view, naive, claim, own, rank, job)
    for refusal in refusals:
        assert (refusal.reason, refusal.node) == (Reason.KEPT, "s0")
        assert refusal.job != job


@pytest.mark.parametrize(
    "one",
    [
        Claim("s0", 0, (0, 0), 24 * GIB, 0, (1,)),
        Claim("s0", 0, (0, 0), 4 * GIB, 20 * GIB, (1,)),
        Claim("s0", 0, (2000, 0), 0, 0, (1,)),
    ],
)
def test_what_is_kept_for_several_adds_up(one: Claim) -> None:
    view = cluster(1)
    first = [KeptPlace(f"jobs/{rank}", rank, (one,)) for rank in (1, 2)]
    assert trespass(view, protect(view, first[:1]), [one], rank=3, job="jobs/3") == ()
    (refusal,) = trespass(view, protect(view, first), [one], rank=3, job="jobs/3")
    assert (refusal.reason, refusal.job) == (Reason.KEPT, "jobs/2")
