"""Co-location under an order that preempts jobs: when it is tried, for how many jobs, and how it ends."""

from __future__ import annotations

import dataclasses
import math

import pytest
from core.drive import GIB
from core.test_colocation import Packing as Drive
from core.test_colocation import small
from ganger.cluster.capacity_index import CapacityIndex
from ganger.v1 import scheduling_pb2
from ganger_master.core.commands import CancelJob
from ganger_master.core.gang_model import ObservedPhase
from ganger_master.core.job_model import Capabilities, SuspendLevel
from ganger_master.core.plan_changes import TrialFinding
from ganger_master.planner.colocations import with_refusals
from ganger_master.planner.context import PlanContext, PlannerSettings, context_of
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.plan_pace import NONE_EXCLUDED, ExcludedJobs, PlanPace
from ganger_master.planner.rate_registry import JobRates
from ganger_master.planner.sharing_under_order import OrderColocation, plan_under_order
from ganger_master.policies import policy_named
from ganger_master.policies.orders import Capacity
from ganger_master.policies.trials import LEAST_SPEED
from ganger_master.rpc.planner_messages import live_job_from_wire, live_job_to_wire
from msgspec.structs import replace
from planner.test_packs_pass import SLOWER, STEADY
from planner.test_packs_pass import Seen as Measured

POLICY = policy_named("las+best-fit+packs")
EVERY_S = 300.0
LONG_S = 2 * EVERY_S


class Colocated(Drive):
    """Running jobs of one device each on a node of four, which the stage co-locates."""

    def __init__(self, jobs: int = 2) -> None:
        super().__init__()
        self.running = [self.run(small()) for _ in range(jobs)]
        self.packing = OrderColocation()
        self.found: tuple[TrialFinding, ...] = ()

    def wait_for(self, gpus: int, seconds: float = LONG_S + 1.0) -> int:
        """Submit a job and let it be pending for this time."""
        number = self.submit(small(gpus))
        self.now += seconds
        return number

    def table(self) -> LiveTable:
        table = LiveTable()
        for job in self.state.jobs.values():
            message = scheduling_pb2.LiveJob()
            live_job_to_wire(job, self.state.gangs.get(job.epoch), message)
            table.put(*live_job_from_wire(scheduling_pb2.LiveJob.FromString(message.SerializeToString())))
        return table

    def context(
        self, seen: JobRates | None = None, kept_out: ExcludedJobs = NONE_EXCLUDED, gpus: int = 32
    ) -> PlanContext:
        settings = PlannerSettings(PlanPace(EVERY_S), capacity=Capacity(gpus, math.inf, math.inf, 4))
        rates, room = seen or Measured(), CapacityIndex(self.state.view.copy())
        return context_of(POLICY, self.table(), room, self.now, settings=settings, rates=rates, excluded=kept_out)

    def plan(self, seen: JobRates | None = None, kept_out: ExcludedJobs = NONE_EXCLUDED) -> list[tuple[str, int]]:
        """Return the kinds and jobs of the changes that the master has approved."""
        before = self.packing
        changes, self.packing, self.found = plan_under_order(before, self.context(seen, kept_out))
        answers = self.propose(*changes) if changes else []
        refused = {change.number for change, refusal in zip(changes, answers, strict=True) if refusal is not None}
        colocations = with_refusals(before.colocations, self.packing.colocations, refused)
        self.packing = dataclasses.replace(self.packing, colocations=colocations)
        return sorted((change.kind, change.number) for change in changes if change.number not in refused)

    def move_in(self, number: int) -> None:
        source, destination = self.job(number).epoch, self.job(number).next_epoch
        self.seen(number, destination, ObservedPhase.PREPARED)
        self.seen(number, source, ObservedPhase.PARKED, stop_step=7)
        self.seen(number, destination, ObservedPhase.READY, stop_step=7)
        self.runs(number)
        self.observe("n1", *self.others("n1", source))

    def together(self, rates: tuple[float, ...]) -> Measured:
        (colocation,) = self.packing.colocations.present
        host, guest = colocation.numbers
        return Measured(dict.fromkeys((host, guest), rates), {host: frozenset({guest}), guest: frozenset({host})})

    def kept(self) -> tuple[int, int]:
        """Return host and guest of a co-location whose trial is kept."""
        self.plan()
        (colocation,) = self.packing.colocations.present
        host, guest = colocation.numbers
        self.move_in(guest)
        assert self.plan(self.together(SLOWER)) == []
        assert [one.kept for one in self.found] == [True, True]
        return host, guest


def test_no_jobs_are_co_located_before_a_job_has_been_pending_for_long() -> None:
    drive = Colocated()
    assert drive.plan() == [], "no job is pending"
    drive.wait_for(4, LONG_S - 1.0)
    assert drive.plan() == []
    drive.now += 2.0
    assert [kind for kind, _ in drive.plan()] == ["CORES", "MOVE"]


@pytest.mark.parametrize(("gpus", "colocations"), [(1, 1), (2, 2), (4, 2)])
def test_only_as_many_jobs_are_co_located_as_free_the_missing_devices(gpus: int, colocations: int) -> None:
    drive = Colocated(jobs=4)
    drive.wait_for(gpus)
    assert sum(kind == "MOVE" for kind, _ in drive.plan()) == colocations


def test_no_jobs_are_co_located_for_a_job_that_fits_on_free_devices() -> None:
    drive = Colocated(jobs=3)
    drive.wait_for(1)
    assert drive.plan() == []


def test_a_guest_that_is_too_slow_is_parked_at_checkpoint_and_queued() -> None:
    drive = Colocated()
    drive.wait_for(4)
    drive.plan()
    (colocation,) = drive.packing.colocations.present
    drive.move_in(colocation.guest)
    slow = tuple(0.9 * LEAST_SPEED * rate for rate in STEADY)
    assert drive.plan(drive.together(slow)) == [("SUSPEND", colocation.guest)]
    assert [one.kept for one in drive.found] == [False, False]
    assert drive.packing.colocations.present == ()
    assert drive.packing.colocations.on_trial == frozenset(), "its host is not under trial any more"
    gang = drive.state.gangs[drive.job(colocation.guest).epoch]
    assert gang.park_level is SuspendLevel.CHECKPOINT
    drive.now += LONG_S
    assert drive.plan() == [("CORES", colocation.numbers[0])], "the same pair is not tried again at once"


def test_when_the_queue_is_empty_a_guest_moves_to_its_own_devices_and_its_host_regains_its_cores() -> None:
    drive = Colocated()
    waiting = drive.wait_for(4)
    before = drive.state.gangs[drive.job(drive.running[0]).epoch].claims[0].millicores
    host, guest = drive.kept()
    assert drive.plan(drive.together(SLOWER)) == [], "a job is pending"
    drive.step(CancelJob(waiting))
    assert drive.plan(drive.together(SLOWER)) == [("MOVE", guest)]
    assert drive.packing.colocations.present == ()
    drive.move_in(guest)
    places = [drive.state.gangs[drive.job(number).epoch].claims[0] for number in (host, guest)]
    assert places[0].device_mask & places[1].device_mask == 0
    assert [place.shared_mask for place in places] == [0, 0]
    assert drive.packing.next_pass_s(drive.table(), EVERY_S) < float("inf"), "the host still has half of its cores"
    assert drive.plan() == [("CORES", host)]
    drive.plan()
    assert drive.packing.next_pass_s(drive.table(), EVERY_S) == float("inf")
    assert sum(drive.state.gangs[drive.job(host).epoch].claims[0].millicores) == sum(before)


def test_jobs_stay_co_located_while_no_device_is_free_although_the_queue_is_empty() -> None:
    drive = Colocated()
    waiting = drive.wait_for(4)
    drive.kept()
    drive.step(CancelJob(waiting))
    drive.run(small(3))
    assert drive.plan(drive.together(SLOWER)) == []
    assert len(drive.packing.colocations.present) == 1


def test_a_job_with_a_time_limit_is_not_co_located() -> None:
    drive = Colocated()
    job = drive.job(drive.running[0])
    drive.state.put_job(replace(job, spec=replace(job.spec, time_limit_s=3600.0)))
    drive.wait_for(4)
    assert drive.plan() == []


@pytest.mark.parametrize(("can", "colocations"), [("CHECKPOINT", 1), ("OFFLOAD", 0)])
def test_a_job_may_be_co_located_if_it_can_be_parked_at_checkpoint(can: str, colocations: int) -> None:
    drive = Colocated()
    known = Capabilities(pause=True, offload=can == "OFFLOAD", checkpoint=can == "CHECKPOINT", known=True)
    drive.state.put_job(replace(drive.job(drive.running[0]), capabilities=known))
    drive.wait_for(4)
    assert sum(kind == "MOVE" for kind, _ in drive.plan()) == colocations


def test_a_rejected_migration_does_not_count_as_a_trial() -> None:
    drive = Colocated()
    drive.wait_for(4)
    before = drive.packing
    changes, packing, _ = plan_under_order(before, drive.context())
    (moved,) = [change.number for change in changes if change.kind == "MOVE"]
    assert with_refusals(before.colocations, packing.colocations, frozenset({moved})).present == ()
    assert len(with_refusals(before.colocations, packing.colocations, frozenset()).present) == 1


def test_passes_are_frequent_during_a_trial_and_absent_without_jobs_to_co_locate() -> None:
    drive = Colocated()
    assert drive.packing.next_pass_s(drive.table(), EVERY_S) == float("inf")
    drive.wait_for(4)
    assert drive.packing.next_pass_s(drive.table(), EVERY_S) < drive.now
    drive.plan()
    assert drive.packing.next_pass_s(drive.table(), EVERY_S) == drive.packing.last_pass_s + 60.0
    (colocation,) = drive.packing.colocations.present
    drive.move_in(colocation.guest)
    drive.plan(drive.together(SLOWER))
    assert drive.packing.next_pass_s(drive.table(), EVERY_S) == drive.packing.last_pass_s + 600.0, "it changed nothing"


def test_a_guest_keeps_the_host_memory_that_it_runs_with() -> None:
    drive = Colocated(jobs=1)
    (role,) = small().roles
    unnamed = replace(small(), roles=(replace(role, shape=replace(role.shape, memory_bytes=0)),))
    guest = drive.run(unnamed)
    before = drive.state.gangs[drive.job(guest).epoch].claims[0].memory_bytes
    assert before > 4 * GIB, "more than the host's"
    drive.wait_for(4)
    moved = [number for kind, number in drive.plan() if kind == "MOVE"]
    (claim,) = drive.state.gangs[drive.job(moved[0]).next_epoch].claims
    held = drive.state.gangs[drive.job(moved[0]).epoch].claims[0].memory_bytes
    assert claim.memory_bytes == held


def test_no_jobs_are_co_located_for_a_job_that_no_free_device_would_start() -> None:
    for spec in (replace(small(4), device_type="another"), small(40)):
        drive = Colocated()
        number = drive.submit(small(4))
        drive.state.put_job(replace(drive.job(number), spec=spec))
        drive.now += 2 * LONG_S
        assert drive.plan() == []
    drive = Colocated()
    refused = drive.wait_for(4)
    assert drive.plan(kept_out=ExcludedJobs(not_started=frozenset({refused}))) == []
    assert drive.plan() != []


def test_no_job_is_co_located_for_a_lower_priority_or_with_a_job_of_another_priority() -> None:
    drive = Colocated()
    for number in drive.running:
        drive.state.put_job(replace(drive.job(number), spec=replace(drive.job(number).spec, priority=10)))
    drive.wait_for(4)
    assert drive.plan() == []
    last = drive.running[-1]
    drive.state.put_job(replace(drive.job(last), spec=replace(drive.job(last).spec, priority=0)))
    assert drive.plan() == []
    drive.state.put_job(replace(drive.job(drive.running[0]), spec=replace(drive.job(last).spec, priority=0)))
    assert drive.plan() != []


def test_a_co_location_ends_when_one_of_its_jobs_gets_a_time_limit() -> None:
    drive = Colocated()
    drive.wait_for(4)
    host, guest = drive.kept()
    drive.state.put_job(replace(drive.job(host), spec=replace(drive.job(host).spec, time_limit_s=3600.0)))
    assert drive.plan(drive.together(SLOWER)) == [("SUSPEND", guest)]


def test_a_co_location_that_would_be_rejected_again_counts_as_failed() -> None:
    drive = Colocated(jobs=4)
    drive.wait_for(1)
    changes, packing, _ = plan_under_order(drive.packing, drive.context(gpus=8))
    (moved,) = [change.number for change in changes if change.kind == "MOVE"]
    refused = frozenset({moved})
    for_now, for_long = (
        dataclasses.replace(
            packing, colocations=with_refusals(drive.packing.colocations, packing.colocations, refused, barred)
        )
        for barred in (frozenset[int](), refused)
    )
    (tried,) = packing.colocations.present
    assert not for_now.colocations.failed.holds(tried.proposal.pair, drive.now)
    assert for_long.colocations.failed.holds(tried.proposal.pair, drive.now)
    assert for_long.colocations.present == ()


def test_no_job_migrates_to_an_unavailable_node() -> None:
    drive = Colocated()
    drive.wait_for(4)
    context = drive.context()
    view = context.room.view
    view.available[view.slots["n1"]] = False
    changes, packing, _ = plan_under_order(drive.packing, context)
    assert changes == ()
    assert packing.colocations.present == ()


def test_passes_keep_a_least_interval_however_often_plans_are_made() -> None:
    drive = Colocated()
    drive.wait_for(4)
    drive.plan()
    assert drive.packing.next_pass_s(drive.table(), 0.0) > drive.packing.last_pass_s
