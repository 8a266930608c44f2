"""Gangs that take turns are packed where that pays and take turns again where it does not, over a real state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from core.drive import SERVER
from core.test_colocation import small
from ganger.cluster.capacity_index import CapacityIndex
from ganger.v1 import scheduling_pb2
from ganger_master.core.answers import PlanAnswer, SessionAnswer
from ganger_master.core.commands import CancelJob, OpenSession, ProposePlan
from ganger_master.core.gang_model import GangIntent, GangPhase, ObservedPhase
from ganger_master.core.plan_changes import PlanChange
from ganger_master.planner.colocations import with_refusals
from ganger_master.planner.context import PlanContext, PlannerSettings, context_of
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.rate_registry import JobRates
from ganger_master.planner.sharing_stage import NOTHING, follow, plan_shared
from ganger_master.policies.orders import Capacity
from ganger_master.rpc.planner_messages import live_job_from_wire, live_job_to_wire
from msgspec.structs import replace
from planner.test_matrices import POLICY, Sharing
from planner.test_packs_pass import HALF, SLOWER, STEADY

QUANTUM_S = 60.0


@dataclass
class Seen(JobRates):
    """Busy jobs use their device fully; all others a tenth of it."""

    busy: frozenset[int] = frozenset()
    now: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    co_located: Mapping[int, frozenset[int]] = field(default_factory=dict)

    def alone(self, number: int) -> tuple[float, ...]:
        return STEADY

    def present(self, number: int) -> tuple[float, ...]:
        return self.now.get(number, ())

    def neighbours(self, number: int) -> frozenset[int]:
        return self.co_located.get(number, frozenset())

    def utilisation(self, number: int) -> float:
        return 0.9 if number in self.busy else 0.1

    def signature(self, number: int) -> str:
        return f"model {number}"


class Anew(Seen):
    """No job was measured alone yet."""

    def alone(self, number: int) -> tuple[float, ...]:
        return ()


class InTurns(Sharing):
    """Five jobs of one device on four, so that two of them take turns: `pair`, the last one with another."""

    def __init__(self, jobs: int = 5) -> None:
        super().__init__()
        self.remembered = NOTHING
        self.seen_by = Seen(frozenset(range(100)))
        self.numbers = self.submitted(*[small()] * jobs)
        while not self.state.gangs.sets:
            self.passes()
        self.together = sorted({number for row in self.rows for number in row})

    def join(self, node: str) -> None:
        able = {"packing": "yes", "rotation": "yes"}
        answer = self.step(OpenSession(node, f"machine-{node}", SERVER, capabilities=able))
        assert isinstance(answer, SessionAnswer)
        self.sessions[node] = answer.session
        self.observe(node, version=0)

    def passes(self) -> list[tuple[str, int]]:
        """Propose a plan, all of which must be approved; started jobs run."""
        changes = self.asked()
        if changes:
            answer = self.step(ProposePlan(changes))
            assert isinstance(answer, PlanAnswer)
            assert all(verdict.approved for verdict in answer.verdicts), answer
        for change in changes:
            if change.kind in ("START", "ROW", "RESUME"):
                self.runs(change.number)
        return sorted((change.kind, change.number) for change in changes)

    def context(self, later_s: float = 0.0) -> PlanContext:
        return context_of(
            POLICY,
            self.table(),
            CapacityIndex(self.state.view.copy()),
            self.now + later_s,
            settings=PlannerSettings(capacity=Capacity(4, math.inf, math.inf, 4), look_s=QUANTUM_S),
            rates=self.seen_by,
        )

    def asked(self) -> tuple[PlanChange, ...]:
        found, self.remembered, _ = plan_shared(self.context(), self.remembered, QUANTUM_S)
        soon = found.next_change_s <= self.now + QUANTUM_S
        assert soon or not self.state.gangs.sets, "a time-sliced job is considered again"
        return found.changes

    def table(self) -> LiveTable:
        table = LiveTable()
        for job in self.state.jobs.values():
            message = scheduling_pb2.LiveJob()
            live_job_to_wire(job, self.state.gangs.get(job.epoch), message)
            table.put(*live_job_from_wire(message))
        return table

    def later(self) -> list[tuple[str, int]]:
        """The pass at the end of the quantum."""
        self.now += QUANTUM_S + 1.0
        return self.passes()

    def rests(self, number: int) -> None:
        self.seen(number, self.job(number).epoch, ObservedPhase.PARKED, 5)

    def moves_in(self, guest: int) -> None:
        self.seen(guest, self.job(guest).next_epoch, ObservedPhase.READY, 5)
        self.runs(guest)

    def beside_each_other(self, rates: tuple[float, ...]) -> Seen:
        one, other = self.together
        co_located = {one: frozenset({other}), other: frozenset({one})}
        return Seen(self.seen_by.busy, dict.fromkeys(self.together, rates), co_located)

    def devices(self, number: int) -> int:
        return self.state.gangs[self.job(number).epoch].claims[0].device_mask

    def packed(self) -> tuple[int, int]:
        """(host, guest) of a trial between two jobs that were time-sliced."""
        self.seen_by = Seen(frozenset(self.numbers) - {*self.together})
        ((kind, guest),) = self.later()
        assert kind == "SUSPEND"
        (host,) = {*self.together} - {guest}
        assert self.passes() == [], "it is on its way"
        self.rests(guest)
        assert self.state.gangs.sets == {}, "the host has its device to itself"
        assert self.passes() == [("CORES", host), ("MOVE", guest)]
        self.moves_in(guest)
        return host, guest


def test_two_that_take_turns_and_use_little_leave_them_and_run_at_once_on_that_device() -> None:
    drive = InTurns()
    host, guest = drive.packed()
    assert drive.devices(host) == drive.devices(guest)
    drive.seen_by = drive.beside_each_other(SLOWER)
    assert drive.later() == []
    assert [colocation.is_kept for colocation in drive.remembered.colocations.present] == [True]
    assert drive.later() == []
    assert drive.state.gangs.sets == {}


def test_where_it_does_not_pay_they_take_turns_again_each_with_all_of_its_cores() -> None:
    drive = InTurns()
    cores = drive.state.gangs[drive.job(drive.together[0]).epoch].claims[0].millicores
    host, guest = drive.packed()
    pair = drive.remembered.colocations.present[0].proposal.pair
    alone, drive.seen_by = drive.seen_by, drive.beside_each_other(HALF)
    assert drive.later() == [("SUSPEND", guest)]
    assert drive.passes() == []
    drive.rests(guest)
    drive.seen_by = alone
    assert drive.passes() == [("CORES", host)]
    assert drive.state.gangs[drive.job(host).epoch].claims[0].millicores == cores
    assert drive.passes() == sorted([("ROW", host), ("ROW", guest)])
    assert sorted(drive.rows) == sorted([[host], [guest]])
    assert drive.remembered.colocations.failed.holds(pair, drive.now + QUANTUM_S)


def test_a_job_time_sliced_with_others_is_host_to_no_guest() -> None:
    """Nine on four: three on a device, and no pair of them would have it to itself."""
    drive = InTurns(jobs=9)
    for _ in range(5):
        drive.passes()
    crowd = next(
        numbers
        for numbers in ([n for n in drive.numbers if drive.devices(n) == 1 << device] for device in range(4))
        if len(numbers) == 3
    )
    drive.seen_by = Seen(frozenset(drive.numbers) - {*crowd})
    assert drive.later() == []
    assert drive.remembered.colocations.leaving == ()


def test_a_guest_leaves_its_turns_for_a_host_with_a_device_of_its_own() -> None:
    drive = InTurns()
    one, other = drive.together
    free = [number for number in drive.numbers if number not in drive.together]
    light = {one, free[0]}
    drive.seen_by = Seen(frozenset(drive.numbers) - light)
    assert drive.later() == [("SUSPEND", one)]
    drive.rests(one)
    assert ("MOVE", one) in drive.passes()
    drive.moves_in(one)
    assert drive.devices(one) == drive.devices(free[0])
    assert not drive.state.gangs[drive.job(other).epoch].node_set, "the job that it left has its device to itself"


def test_where_turns_go_on_for_the_sake_of_others_the_host_rests_for_a_moment_too() -> None:
    drive = InTurns(jobs=6)
    drive.passes()
    by_device: dict[int, list[int]] = {}
    for number in drive.numbers:
        by_device.setdefault(drive.devices(number), []).append(number)
    pair = next(numbers for numbers in by_device.values() if len(numbers) == 2)
    drive.seen_by = Seen(frozenset(drive.numbers) - {*pair})
    ((kind, guest),) = drive.later()
    (host,) = {*pair} - {guest}
    assert kind == "SUSPEND"
    drive.rests(guest)
    assert drive.state.gangs[drive.job(host).epoch].node_set, "two others still take turns there"
    assert drive.passes() == [("SUSPEND", host)]
    drive.rests(host)
    assert drive.passes() == [("RESUME", host)]
    assert drive.passes() == [("CORES", host), ("MOVE", guest)]


@pytest.mark.parametrize("ended", ["host", "guest"])
def test_when_one_job_ends_on_the_way_the_other_stays_time_sliced(ended: str) -> None:
    drive = InTurns()
    drive.seen_by = Seen(frozenset(drive.numbers) - {*drive.together})
    ((_, guest),) = drive.later()
    (host,) = {*drive.together} - {guest}
    drive.rests(guest)
    drive.step(CancelJob(host if ended == "host" else guest))
    drive.passes()
    assert drive.remembered.colocations.leaving == ()
    assert drive.remembered.colocations.on_trial == set()


def test_a_refused_exit_from_time_slicing_is_not_repeated_at_once_and_no_job_waits_for_ever() -> None:
    drive = InTurns()
    drive.seen_by = Seen(frozenset(drive.numbers) - {*drive.together})
    drive.now += QUANTUM_S + 1.0
    before = drive.remembered
    (change,) = drive.asked()
    (leaving,) = drive.remembered.colocations.leaving
    drive.remembered = drive.remembered.without(before, {change.number})
    assert drive.remembered.colocations.leaving == ()
    assert drive.remembered.colocations.failed.holds(leaving.proposal.pair, drive.now + QUANTUM_S)
    late = drive.remembered.colocations
    assert with_refusals(late, late, {change.number}) == late


def test_no_job_on_its_way_is_waited_for_longer_than_any_copy_takes() -> None:
    drive = InTurns()
    drive.seen_by = Seen(frozenset(drive.numbers) - {*drive.together})
    drive.later()
    colocations = drive.remembered.colocations
    assert follow(colocations, drive.context(60.0))[1].leaving == colocations.leaving
    changes, after = follow(colocations, drive.context(300.0))
    assert (changes, after.leaving) == ((), ())


def test_a_host_that_moves_away_is_not_waited_for() -> None:
    drive = InTurns()
    drive.seen_by = Seen(frozenset(drive.numbers) - {*drive.together})
    ((_, guest),) = drive.later()
    drive.rests(guest)
    (host,) = {*drive.together} - {guest}
    table = drive.table()
    job, gang = drive.job(host), drive.state.gangs[drive.job(host).epoch]
    table.put(job, replace(gang, phase=GangPhase.MOVING))
    changes, after = follow(drive.remembered.colocations, replace(drive.context(), jobs=table))
    assert (changes, len(after.leaving)) == ((), 1)


def test_a_new_planner_time_slices_a_job_again_that_is_parked_on_its_way_into_a_co_location() -> None:
    drive = InTurns()
    drive.seen_by = Seen(frozenset(drive.numbers) - {*drive.together})
    ((_, guest),) = drive.later()
    drive.rests(guest)
    drive.remembered, drive.seen_by = NOTHING, Anew(frozenset(drive.numbers))
    drive.passes()
    gang = drive.state.gangs[drive.job(guest).epoch]
    assert gang.intent is GangIntent.RUN
    assert gang.node_set, "it takes turns with its host again"
    assert drive.devices(guest) == drive.devices(next(n for n in drive.together if n != guest))


def test_a_planner_that_is_started_anew_parts_a_pack_on_trial_and_its_host_has_all_of_its_cores_again() -> None:
    drive = InTurns()
    before = {number: drive.state.gangs[drive.job(number).epoch].claims[0].millicores for number in drive.together}
    host, guest = drive.packed()
    # Their rates alone are lost.
    co_located = {host: frozenset({guest}), guest: frozenset({host})}
    drive.remembered, drive.seen_by = NOTHING, Anew(frozenset(drive.numbers), {}, co_located)
    assert drive.later() == [("SUSPEND", guest)]
    drive.rests(guest)
    drive.seen_by = Anew(frozenset(drive.numbers))
    drive.later()
    drive.later()
    held = drive.state.gangs[drive.job(host).epoch].claims[0].millicores
    assert held == before[host]
    assert drive.state.gangs[drive.job(guest).epoch].node_set == drive.state.gangs[drive.job(host).epoch].node_set != 0
