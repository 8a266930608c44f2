"""Jobs on the same devices, and a pass that stops jobs: they count once, stay together, and go together."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from core.drive import GIB
from core.test_colocation import Packing, small
from ganger.cluster.resources import Locality, LocalityLevel
from ganger_master.core.commands import CancelJob
from ganger_master.core.model import Capabilities, JobSpec, JobState
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.order_stage import _as_one
from ganger_master.planner.terms import capacity_of
from hypothesis import given
from hypothesis import strategies as st
from kit.facts import facts_of
from msgspec.structs import replace
from planner.test_passes import Planned


class Paired(Packing, Planned):
    """Nodes of four devices, which several gangs may be on, under an order that stops who has attained most."""

    def __init__(self, nodes: int = 1) -> None:
        Planned.__init__(self, nodes, "las+packs")

    def ends(self, number: int) -> None:
        (node,) = self.state.gangs[self.job(number).epoch].nodes
        self.step(CancelJob(number))
        self.seen_without(node, number)

    def table(self) -> LiveTable:
        table = LiveTable()
        for job in self.state.jobs.values():
            table.put(*self.as_told(job))
        return table

    def pair(self, spec: JobSpec) -> tuple[int, int]:
        """Two that run on the same devices."""
        host = self.running(spec)
        guest = self.submit(spec)
        assert self.pack(guest, host) is None
        self.runs(guest)
        self.now += 10.0
        return host, guest


def of(gpus: int, **more: object) -> JobSpec:
    return replace(small(gpus), locality=Locality(LocalityLevel.NODE), **more)


def mates(drive: Paired) -> dict[int, tuple[int, ...]]:
    return dict(drive.table().mates)


def test_those_on_the_same_devices_are_mates_and_nobody_else() -> None:
    drive = Paired()
    pair = drive.pair(of(2))
    alone = drive.running(of(1))
    assert mates(drive) == dict.fromkeys(pair, pair)
    drive.ends(pair[1])
    assert mates(drive) == {}
    assert drive.state.gangs[drive.job(alone).epoch].claims[0].shared_mask == 0


def test_mates_that_a_table_keeps_are_those_that_a_new_one_finds() -> None:
    drive, kept = Paired(2), LiveTable()

    def told() -> dict[int, tuple[int, ...]]:
        for job in drive.state.jobs.values():
            kept.put(*drive.as_told(job))
        known = dict(kept.mates)
        rows, facts = kept.facts(drive.now)
        firsts = [known[number][0] if number in known else -1 for number in facts.number.tolist()]
        assert kept.units(rows).tolist() == [first if first < 0 else kept.row(first) for first in firsts]
        assert known == mates(drive)
        return known

    assert told() == {}
    first, second = drive.pair(of(2)), drive.pair(of(2))
    assert told() == {**dict.fromkeys(first, first), **dict.fromkeys(second, second)}
    drive.ends(first[1])
    assert told() == dict.fromkeys(second, second)
    third = drive.pair(of(1))
    assert told() == {**dict.fromkeys(second, second), **dict.fromkeys(third, third)}


def test_those_who_share_devices_are_stopped_together_for_one_who_goes_first() -> None:
    drive = Paired()
    pair = drive.pair(of(4))
    new = drive.submit(of(4))
    assert sorted(drive.proposed()) == [("SUSPEND", number) for number in pair]
    drive.rests(pair[0])
    assert drive.proposed() == [], "the other one is still there"
    drive.rests(pair[1])
    assert drive.proposed() == [("START", new)]


def test_devices_that_two_share_count_once() -> None:
    drive = Paired()
    drive.pair(of(2))
    drive.running(of(2))
    # Six are asked for on four devices, and nobody need go for one who comes after all of them.
    drive.submit(of(2, priority=-1))
    assert drive.proposed() == []


def test_the_first_of_them_in_line_speaks_for_both() -> None:
    drive = Paired()
    host = drive.running(of(2), seconds=500.0)
    other = drive.running(of(2), seconds=100.0)
    guest = drive.submit(of(2))
    assert drive.pack(guest, host) is None
    drive.runs(guest)
    drive.submit(of(2))
    # By itself the host, which has attained most of all, would have to go.
    assert drive.proposed() == [("SUSPEND", other)]


@given(
    st.lists(st.tuples(st.sampled_from([-1, -1, 0, 3, 5]), st.integers(1, 8), st.booleans()), max_size=12), st.randoms()
)
def test_those_who_share_devices_are_made_one_as_if_looked_at_one_by_one(
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


def test_the_cluster_is_no_larger_for_those_who_share_devices() -> None:
    drive = Paired()
    first, last = drive.running(of(1), seconds=9000.0), drive.running(of(1), seconds=500.0)
    drive.pair(of(2))
    table = drive.table()
    assert capacity_of(drive.state.view, table).gpus == 4
    drive.submit(of(1))
    # The pair has attained less than either; who has most of all goes, and need not be looked for by holes.
    assert drive.proposed() == [("SUSPEND", first)]
    assert drive.job(last).state is JobState.HOLDING


@pytest.mark.parametrize("may_stop", [True, False], ids=["the one alone goes", "the one alone may not be stopped"])
def test_of_two_holes_that_of_one_is_cheaper_than_that_of_two(may_stop: bool) -> None:
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


def test_who_could_not_come_back_keeps_who_is_on_its_devices() -> None:
    drive = Paired()
    host = drive.running(of(4))
    guest = drive.submit(of(4))
    assert drive.pack(guest, host) is None
    drive.runs(guest)
    known = Capabilities(pause=True, missing={"CHECKPOINT": "it has no state"}, known=True)
    drive.state.put_job(replace(drive.job(guest), capabilities=known))
    drive.submit(of(4, priority=1))
    assert drive.proposed() == []


def test_a_job_leaves_memory_for_one_who_may_come_to_its_devices_unless_it_says_what_it_needs() -> None:
    drive = Paired()
    whole = drive.state.view.memory[0]
    unsaid, said, limited = [
        drive.running(spec)
        for spec in (
            of(1, roles=unnamed(1)),
            of(1),
            of(1, roles=unnamed(1), time_limit_seconds=600.0),
        )
    ]

    def memory(number: int) -> int:
        return drive.state.gangs[drive.job(number).epoch].claims[0].memory_bytes

    assert memory(said) == 4 * GIB
    # Whose time is limited shares with nobody.
    assert memory(unsaid) == memory(limited) // 2
    assert whole // 8 >= memory(unsaid) > whole // 10


def unnamed(gpus: int) -> tuple[object, ...]:
    (role,) = small(gpus).roles
    return (replace(role, shape=replace(role.shape, memory_bytes=0)),)
