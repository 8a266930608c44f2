"""Co-located jobs under plans that preempt: their devices count once, and they stay or are preempted as one unit."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from core.drive import GIB
from core.test_colocation import Packing, small
from ganger.cluster.resources import Locality, LocalityLevel
from ganger.job_state import JobState
from ganger_master.core.commands import CancelJob
from ganger_master.core.job_model import Capabilities
from ganger_master.core.job_spec import JobSpec
from ganger_master.planner.context import capacity_of
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.plan import _as_one
from hypothesis import given
from hypothesis import strategies as st
from kit.facts import facts_of
from msgspec.structs import replace
from planner.test_passes import Planned


class Paired(Packing, Planned):
    """Nodes of four devices with co-located gangs, under an order that preempts jobs with the most attained service."""

    def __init__(self, nodes: int = 1) -> None:
        Planned.__init__(self, nodes, "las+packs")

    def ends(self, number: int) -> None:
        (node,) = self.state.gangs[self.job(number).epoch].nodes
        self.step(CancelJob(number))
        self.seen_without(node, number)

    def table(self) -> LiveTable:
        table = LiveTable()
        for job in self.state.jobs.values():
            table.put(*self.as_received(job))
        return table

    def pair(self, spec: JobSpec) -> tuple[int, int]:
        """Start two jobs on the same devices."""
        host = self.running(spec)
        guest = self.submit(spec)
        assert self.pack(guest, host) is None
        self.runs(guest)
        self.now += 10.0
        return host, guest


def of(gpus: int, **more: object) -> JobSpec:
    return replace(small(gpus), locality=Locality(LocalityLevel.NODE), **more)


def co_located(drive: Paired) -> dict[int, tuple[int, ...]]:
    return dict(drive.table().groups.co_located)


def test_jobs_on_the_same_devices_are_mates_and_other_jobs_are_not() -> None:
    drive = Paired()
    pair = drive.pair(of(2))
    alone = drive.running(of(1))
    assert co_located(drive) == dict.fromkeys(pair, pair)
    drive.ends(pair[1])
    assert co_located(drive) == {}
    assert drive.state.gangs[drive.job(alone).epoch].claims[0].shared_mask == 0


def test_mates_in_an_updated_table_equal_those_in_a_new_one() -> None:
    drive, kept = Paired(2), LiveTable()

    def updated() -> dict[int, tuple[int, ...]]:
        for job in drive.state.jobs.values():
            kept.put(*drive.as_received(job))
        found = dict(kept.groups.co_located)
        rows, facts = kept.facts(drive.now)
        firsts = [found[number][0] if number in found else -1 for number in facts.number.tolist()]
        assert kept.groups.units[rows].tolist() == [first if first < 0 else kept.row(first) for first in firsts]
        assert found == co_located(drive)
        return found

    assert updated() == {}
    first, second = drive.pair(of(2)), drive.pair(of(2))
    assert updated() == {**dict.fromkeys(first, first), **dict.fromkeys(second, second)}
    drive.ends(first[1])
    assert updated() == dict.fromkeys(second, second)
    third = drive.pair(of(1))
    assert updated() == {**dict.fromkeys(second, second), **dict.fromkeys(third, third)}


def test_co_located_jobs_are_preempted_together_for_a_job_of_higher_rank() -> None:
    drive = Paired()
    pair = drive.pair(of(4))
    new = drive.submit(of(4))
    assert sorted(drive.proposed()) == [("SUSPEND", number) for number in pair]
    drive.rests(pair[0])
    assert drive.proposed() == [], "the other job still holds the devices"
    drive.rests(pair[1])
    assert drive.proposed() == [("START", new)]


def test_shared_devices_count_once() -> None:
    drive = Paired()
    drive.pair(of(2))
    drive.running(of(2))
    # Six devices are requested on four, yet no job is preempted for one of lower rank.
    drive.submit(of(2, priority=-1))
    assert drive.proposed() == []


def test_the_higher_ranked_of_two_co_located_jobs_sets_the_rank_of_both() -> None:
    drive = Paired()
    host = drive.running(of(2), seconds=500.0)
    other = drive.running(of(2), seconds=100.0)
    guest = drive.submit(of(2))
    assert drive.pack(guest, host) is None
    drive.runs(guest)
    drive.submit(of(2))
    # Alone the host would be preempted, since it has the most attained service.
    assert drive.proposed() == [("SUSPEND", other)]


@given(
    st.lists(st.tuples(st.sampled_from([-1, -1, 0, 3, 5]), st.integers(1, 8), st.booleans()), max_size=12), st.randoms()
)
def test_merging_co_located_jobs_at_once_equals_merging_them_one_by_one(
    live: list[tuple[int, int, bool]], random: Random
) -> None:
    facts = facts_of(*[{"number": n, "gpus": gpus, "is_preemptible": may} for n, (_, gpus, may) in enumerate(live)])
    line = random.sample(range(len(live)), len(live))
    units = [unit for unit, _, _ in live]
    found, leader = _as_one(facts, np.array(line, np.int64), np.array(units, np.int64))
    leads, gpus, may_be_stopped = list(range(len(live))), [gpus for _, gpus, _ in live], [may for *_, may in live]
    first: dict[int, int] = {}
    for at in line:
        if units[at] >= 0:
            leads[at] = first.setdefault(units[at], at)
        if leads[at] != at:
            gpus[at] = 0
            may_be_stopped[leads[at]] &= may_be_stopped[at]
    assert leader.tolist() == leads
    assert found.gpus.tolist() == gpus
    assert found.is_preemptible.tolist() == [may_be_stopped[at] for at in leads]


def test_shared_devices_do_not_add_to_the_capacity_of_the_cluster() -> None:
    drive = Paired()
    first, last = drive.running(of(1), seconds=9000.0), drive.running(of(1), seconds=500.0)
    drive.pair(of(2))
    table = drive.table()
    assert capacity_of(drive.state.view, table).gpus == 4
    drive.submit(of(1))
    # The pair has less attained service than either. The job with the most is preempted, without a make-room search.
    assert drive.proposed() == [("SUSPEND", first)]
    assert drive.job(last).state is JobState.HOLDING


@pytest.mark.parametrize("may_stop", [True, False], ids=["preemptible", "not preemptible"])
def test_preempting_one_job_is_cheaper_than_preempting_two(may_stop: bool) -> None:
    drive = Paired(nodes=2)
    filler = drive.running(of(3))
    pair = drive.pair(of(1))
    large = drive.running(of(3, priority=1))
    single = drive.running(of(1, preemptible=may_stop))
    nodes = {number: drive.state.gangs[drive.job(number).epoch].nodes[0] for number in (filler, large, single, *pair)}
    assert nodes[pair[0]] != nodes[single]
    for number in (filler, large):
        drive.ends(number)
    drive.submit(of(4, priority=2))
    stopped = [single] if may_stop else list(pair)
    assert sorted(drive.proposed()) == [("SUSPEND", number) for number in stopped]


def test_a_job_that_cannot_be_restored_protects_the_jobs_on_its_devices() -> None:
    drive = Paired()
    host = drive.running(of(4))
    guest = drive.submit(of(4))
    assert drive.pack(guest, host) is None
    drive.runs(guest)
    known = Capabilities(pause=True, missing={"CHECKPOINT": "it has no state"}, known=True)
    drive.state.put_job(replace(drive.job(guest), capabilities=known))
    drive.submit(of(4, priority=1))
    assert drive.proposed() == []


def test_a_job_that_names_no_host_memory_leaves_half_for_a_later_guest() -> None:
    drive = Paired()
    whole = drive.state.view.memory[0]
    unnamed_memory, named_memory, limited = [
        drive.running(spec)
        for spec in (
            of(1, roles=unnamed(1)),
            of(1),
            of(1, roles=unnamed(1), time_limit_s=600.0),
        )
    ]

    def memory(number: int) -> int:
        return drive.state.gangs[drive.job(number).epoch].claims[0].memory_bytes

    assert memory(named_memory) == 4 * GIB
    # A job with a time limit is never co-located.
    assert memory(unnamed_memory) == memory(limited) // 2
    assert whole // 8 >= memory(unnamed_memory) > whole // 10


def unnamed(gpus: int) -> tuple[object, ...]:
    (role,) = small(gpus).roles
    return (replace(role, shape=replace(role.shape, memory_bytes=0)),)
