"""Disk and network bandwidth: tasks name it, nodes declare it, and what gangs hold together stays within it."""

from __future__ import annotations

import pytest
from ganger.cluster.capacity_index import CapacityIndex, Trial
from ganger.cluster.claims import is_counted
from ganger.cluster.fit import fit
from ganger.cluster.placement import beside, candidates, resized
from ganger.cluster.refusals import Reason
from ganger.cluster.resources import Bandwidth, GangShape
from ganger.cluster.view import View
from kit.clusters import cluster, gang, idle_row, server
from msgspec.structs import replace

DISK = replace(server(), name="disk", dimensions={"disk_mb_per_s": 1_000.0})
BOTH = replace(server(), name="both", dimensions={"disk_mb_per_s": 1_000.0, "net_mb_per_s": 500.0})


def naming(gpus: int, disk: int, net: int = 0) -> GangShape:
    """Tasks of one GPU that name so much each."""
    (role,) = gang(gpus).roles
    return replace(gang(gpus), roles=(replace(role, shape=replace(role.shape, bandwidth=(disk, net))),))


# By nodes in order, and a gang: where it goes, and what it is refused for where it fits nowhere.
PLACES = {
    "undeclared is no limit": ([server()], naming(4, 9_000, 9_000), ["s0"], ()),
    "an undeclared dimension is none either": ([DISK], naming(4, 250, 9_000), ["s0"], ()),
    "exactly what there is": ([BOTH], naming(4, 250, 125), ["s0"], ()),
    "the sum of its tasks is too much": ([DISK], naming(4, 251), [], (Reason.DISK,)),
    "the other dimension": ([BOTH], naming(2, 0, 251), [], (Reason.NETWORK,)),
    "either would be too much": ([BOTH], naming(1, 1_001, 501), [], (Reason.DISK, Reason.NETWORK)),
    "past a node with too little": ([DISK, server()], naming(2, 800), ["s1"], ()),
    "over two nodes": ([DISK, DISK], naming(2, 800), ["s0", "s1"], ()),
}


@pytest.mark.parametrize("case", PLACES)
def test_a_gang_goes_where_its_bandwidth_is(case: str) -> None:
    nodes, shape, places, reasons = PLACES[case]
    view = View(nodes)
    for at, of in enumerate(nodes):
        view.put(idle_row(f"s{at}", of))
    found = candidates(view, shape)
    assert [claim.node for claims in found.candidates[:1] for claim in claims] == places
    assert tuple(refusal.reason for refusal in found.refusals) == reasons
    assert all(fit(view, shape, claims) == () for claims in found.candidates)


def one_node(free: Bandwidth = (1_000, 500)) -> View:
    view = cluster(1, BOTH)
    view.put(replace(view.row("s0"), free_bandwidth=free, version=0))
    return view


def test_a_claim_is_refused_for_what_is_missing_with_numbers_and_for_what_it_does_not_name() -> None:
    shape = naming(2, 400, 200)
    (claims,) = candidates(one_node(), shape, limit=1).candidates
    assert claims[0].bandwidth == (800, 400)
    (refusal,) = fit(one_node((700, 500)), shape, claims)
    assert refusal.reason is Reason.DISK
    assert refusal.message == "not enough free disk bandwidth (800 MB/s needed, 700 MB/s free), on s0"
    assert [one.reason for one in fit(one_node((700, 399)), shape, claims)] == [Reason.DISK, Reason.NETWORK]
    modest = (replace(claims[0], bandwidth=(0, 0)),)
    assert [one.reason for one in fit(one_node(), shape, modest)] == [Reason.CLAIM_MISMATCH]
    assert fit(one_node((200, 100)), shape, claims, holding=(replace(claims[0], bandwidth=(600, 300)),)) == ()


def test_what_is_taken_is_missing_until_it_is_given_back() -> None:
    view = one_node()
    index = CapacityIndex(view)
    (claims,) = candidates(view, naming(2, 400), limit=1).candidates
    trial = Trial(index)
    trial.take(claims)
    assert view.row("s0").free_bandwidth == (200, 500)
    assert candidates(view, naming(1, 201)).refusals[0].reason is Reason.DISK
    assert candidates(view, naming(1, 200)).candidates
    assert candidates(view, gang(1)).candidates, "a job that names none is not counted"
    trial.undo()
    assert view.row("s0").free_bandwidth == (1_000, 500)
    assert view.idle().row("s0").free_bandwidth == (1_000, 500)


def test_a_gang_that_grows_takes_the_difference() -> None:
    view = one_node()
    (held,) = candidates(view, naming(2, 300), limit=1).candidates
    view.take(held[0], 2)
    (grown,) = resized(view, naming(3, 300), held) or ()
    assert (grown.bandwidth, beside(grown, held[0]).bandwidth) == ((900, 0), (300, 0))
    assert resized(view, naming(4, 300), held) is None, "1,200 are more than there is"


def test_a_gang_that_names_bandwidth_is_not_placed_by_counts_of_devices() -> None:
    assert is_counted(gang(2))
    assert not is_counted(naming(2, 1))
