"""Passes over a real state fed by messages: preemptions, resumes of parked jobs, and effects of refusals."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from core.drive import GIB, Drive, job_of
from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.placement import candidates
from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import Locality, LocalityLevel, Role, TaskShape
from ganger.job_state import JobState
from ganger.v1 import scheduling_pb2
from ganger_master.core.answers import PlanAnswer
from ganger_master.core.commands import CancelJob, ProposePlan, ResumeJob, SuspendJob
from ganger_master.core.gang_model import Gang, ObservedPhase
from ganger_master.core.job_model import Capabilities, JobRecord, SuspendLevel
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.node_closures import can_leave
from ganger_master.core.plan_changes import Goal, Purpose, StartChange, SuspendChange
from ganger_master.core.settings import CoreSettings
from ganger_master.core.tenancy import Team
from ganger_master.planner.context import PlanDraft, capacity_of, context_of
from ganger_master.planner.gang_fitting import nodes_for
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.order_stage import plan_by
from ganger_master.planner.plan_pace import NONE_EXCLUDED, NOTED_S, ExcludedJobs, RefusalBackoff
from ganger_master.policies import policy_named
from ganger_master.policies.fairness import TeamUse
from ganger_master.policies.orders import WEEK_S
from ganger_master.rpc.planner_messages import live_job_from_wire, live_job_to_wire
from kit.clusters import cluster, gang, idle_row, server
from msgspec.structs import replace

NO_QUOTAS: dict[str, int] = {}
NO_TEAMS: dict[str, Team] = {}
NOTHING_CLOSED: dict[int, frozenset[str]] = {}


class Planned(Drive):
    """A state that a planner looks after."""

    def __init__(
        self,
        nodes: int = 1,
        policy: str = "las",
        quotas: Mapping[str, int] = NO_QUOTAS,
        teams: Mapping[str, Team] = NO_TEAMS,
    ) -> None:
        super().__init__(nodes, CoreSettings(policy=policy, quota_devices=quotas, teams=teams))
        self.policy = policy_named(policy)

    def as_received(self, job: JobRecord) -> tuple[JobRecord, Gang | None]:
        message = scheduling_pb2.LiveJob()
        live_job_to_wire(job, self.state.gangs.get(job.epoch), message)
        told, gang = live_job_from_wire(scheduling_pb2.LiveJob.FromString(message.SerializeToString()))
        assert (told.shape, told.capabilities, told.spec.priority) == (job.shape, job.capabilities, job.spec.priority)
        assert (can_leave(told), told.time_limit_s) == (can_leave(job), job.time_limit_s)
        clocks = ("create_time", "pending_since", "start_time", "run_s", "running_since")
        assert [round(getattr(told, name) - getattr(job, name), 9) for name in clocks] == [0.0] * len(clocks)
        return told, gang

    def found(
        self,
        kept_out: ExcludedJobs = NONE_EXCLUDED,
        may_stop: bool = True,
        closed: Mapping[int, frozenset[str]] = NOTHING_CLOSED,
    ) -> PlanDraft:
        settings = self.state.settings
        teams = TeamUse(settings.teams, settings.usage_half_life_s) if settings.teams else None
        table = LiveTable(limits=self.state.limits, teams=teams)
        for job in self.state.jobs.values():
            table.put(*self.as_received(job))
        table.close(closed)
        view = self.state.view.copy()
        rows = [replace(row, version=0) for row in view.rows()]
        room = CapacityIndex(view)
        found = plan_by(context_of(self.policy, table, room, self.now, may_preempt=may_stop, excluded=kept_out))
        assert rows == [replace(row, version=0) for row in view.rows()], "the view is left as it was"
        return found

    def proposed(self, kept_out: ExcludedJobs = NONE_EXCLUDED) -> list[tuple[str, int]]:
        """What a pass proposes, all of which must be approved."""
        changes = self.found(kept_out).changes
        answer = self.step(ProposePlan(changes))
        assert isinstance(answer, PlanAnswer)
        assert all(verdict.approved for verdict in answer.verdicts), answer
        return [(change.kind, change.number) for change in changes]

    def running(self, spec: JobSpec, seconds: float = 10.0, user: str = "") -> int:
        """A job that the planner started so long ago."""
        number = self.submit(spec, user)
        assert ("START", number) in self.proposed()
        self.runs(number)
        self.now += seconds
        return number

    def rests(self, number: int) -> None:
        """Its daemons have done what was wanted of it."""
        epoch = self.job(number).epoch
        gang = self.state.gangs[epoch]
        self.seen(number, epoch, ObservedPhase.PARKED, stop_step=5)
        if gang.park_level is SuspendLevel.CHECKPOINT:
            for node in gang.nodes:
                self.seen_without(node, number)


def test_the_job_with_most_attained_service_is_preempted_for_a_new_one_which_then_starts() -> None:
    drive = Planned()
    old, young = drive.running(job_of(2), seconds=50.0), drive.running(job_of(2))
    new = drive.submit(job_of(1))
    assert drive.found(may_stop=False).changes == ()
    assert drive.proposed() == [("SUSPEND", old)]
    assert drive.proposed() == [], "it has been told already"
    drive.rests(old)
    assert drive.job(old).state is JobState.PENDING
    assert drive.proposed() == [("START", new)]
    assert drive.found().line.tolist() == [old]
    assert drive.found().leaves_waiting
    assert drive.job(young).preemptions == 0


def test_a_job_preempted_for_others_waits_until_the_next_preemption_is_allowed() -> None:
    drive = Planned(policy="ganger-alone")
    large = drive.running(job_of(4), seconds=50_000.0)
    small = drive.submit(job_of(1))
    resting = drive.found().displaced
    assert resting == {large}
    assert drive.proposed() == [("SUSPEND", large)]
    drive.rests(large)
    assert drive.found(NONE_EXCLUDED.resting(resting), may_stop=False).changes[0].number == small
    assert drive.proposed() == [("START", small)]
    drive.step(CancelJob(small))
    drive.seen_without("n1", small)
    found = drive.found(NONE_EXCLUDED.resting(resting), may_stop=False)
    assert (found.changes, found.line.tolist()) == ((), [large]), "it waits in line"
    (newcomer, change) = (
        drive.submit(job_of(1)),
        drive.found(NONE_EXCLUDED.resting(resting), may_stop=False).changes[0],
    )
    assert (change.kind, change.number) == ("START", newcomer), "which fits at once"
    drive.step(CancelJob(newcomer))
    assert drive.proposed() == [("START", large)]


def test_under_other_orders_no_job_waits_after_a_preemption() -> None:
    drive = Planned()
    large = drive.running(job_of(4), seconds=50.0)
    drive.submit(job_of(1))
    found = drive.found()
    assert [change.number for change in found.changes] == [large]
    assert not found.displaced


def test_a_job_that_holds_needed_cores_is_preempted_though_its_devices_are_not_needed() -> None:
    drive = Planned()
    one = JobSpec(("train",), (Role("worker", 1, TaskShape(1, 8_000, GIB)),))
    old, others = drive.running(one, seconds=50.0), drive.running(job_of(1), seconds=20.0)
    # Counts for two devices that it does not get, so that not all can stay.
    hopeless = drive.submit(replace(job_of(2), priority=1))
    drive.state.put_job(replace(drive.job(hopeless), spec=replace(drive.job(hopeless).spec, device_type="another")))
    drive.submit(one)
    assert drive.proposed() == [("SUSPEND", old)]
    assert drive.job(others).state is JobState.HOLDING


def test_gangs_of_several_sizes_leave_one_node_for_a_large_one() -> None:
    drive = Planned()
    running = [drive.running(job_of(gpus)) for gpus in (2, 1, 1)]
    drive.submit(replace(job_of(4), priority=1))
    assert sorted(change.number for change in drive.found().changes) == running


def test_no_job_is_preempted_that_could_not_resume() -> None:
    drive = Planned()
    old = drive.running(job_of(4), seconds=50.0)
    drive.submit(job_of(1))
    known = Capabilities(pause=True, missing={"CHECKPOINT": "it has no state"}, known=True)
    drive.state.put_job(replace(drive.job(old), capabilities=known))
    assert drive.found().changes == ()
    drive.state.put_job(replace(drive.job(old), capabilities=Capabilities()))
    assert [change.kind for change in drive.found().changes] == ["SUSPEND"], "it may be able to: the master knows"


def test_a_job_suspended_by_its_user_is_left_out_and_resumes_in_place() -> None:
    drive = Planned()
    parked = drive.running(replace(job_of(2, memory=14 * GIB), priority=1))
    drive.step(SuspendJob(parked, SuspendLevel.OFFLOAD))
    drive.rests(parked)
    new = drive.submit(job_of(2, memory=14 * GIB))
    assert drive.found().line.tolist() == [new]
    drive.now += 30.0
    place = drive.state.gangs[drive.job(parked).epoch].claims
    drive.step(ResumeJob(parked))
    # What it keeps is its own: there would be no memory for it a second time.
    assert sorted(drive.proposed()) == [("START", parked), ("START", new)]
    assert drive.state.gangs[drive.job(parked).epoch].claims == place


def test_a_wish_is_kept_to_while_the_patience_lasts_and_not_longer() -> None:
    drive = Planned()
    drive.running(job_of(1))
    drive.state.view.give(drive.state.gangs[1].claims[0])
    drive.state.view.take(replace(drive.state.gangs[1].claims[0], device_mask=0b0001, millicores=(2000, 0)))
    picky = drive.submit(replace(job_of(3), locality=Locality(wish=LocalityLevel.SOCKET, patience_s=60.0)))
    assert drive.found().changes == ()
    drive.now += 61.0
    (change,) = drive.found().changes
    assert (change.kind, change.number) == ("START", picky)


def test_what_is_kept_out_leaves_its_place_to_others() -> None:
    drive = Planned(nodes=2)
    first, second = drive.submit(job_of(4)), drive.submit(job_of(4))
    third = drive.submit(job_of(4))
    found = drive.found(ExcludedJobs(not_started={first}))
    assert [change.number for change in found.changes] == [second, third]
    assert found.line.tolist() == [first, second, third]
    (taken,) = [change for change in drive.found().changes if change.number == first]
    closed = {first: frozenset({taken.claims[0].node})}
    (elsewhere,) = [change for change in drive.found(closed=closed).changes if change.number == first]
    assert elsewhere.claims[0].node != taken.claims[0].node
    assert first not in [one.number for one in drive.found(closed={first: frozenset({"n1", "n2"})}).changes]


def test_a_job_that_must_not_be_preempted_stays_though_others_rank_first() -> None:
    drive = Planned()
    old = drive.running(job_of(4), seconds=50.0)
    drive.submit(job_of(1))
    assert drive.found(ExcludedJobs(not_stopped={old})).changes == ()
    assert [change.number for change in drive.found().changes] == [old]


def test_a_job_that_fits_nowhere_blocks_no_other_job_from_free_devices() -> None:
    drive = Planned()
    drive.running(job_of(1))
    hopeless = drive.submit(replace(job_of(4), priority=1))
    other = drive.submit(job_of(1))
    # As if the only server with its type of device had left.
    drive.state.put_job(replace(drive.job(hopeless), spec=replace(drive.job(hopeless).spec, device_type="another")))
    refused = RefusalBackoff()
    for may_stop in (True, False):
        found = drive.found(refused.at(drive.now), may_stop)
        assert (found.changes, found.unplaced) == ((), {hopeless})
        refused.note_unplaced(found.unplaced, may_stop, drive.now + NOTED_S)
        assert [change.number for change in drive.found(refused.at(drive.now), may_stop).changes] == [other]
        drive.now += 5.0
    assert drive.found(may_stop=False).unplaced == set(), "it is not known that stopping others would not help"


@pytest.mark.parametrize(
    "policy", ["fifo-backfill+best-fit", "fifo-backfill+proportional", "tetris", "tetris-cos", "las"]
)
def test_a_gang_that_waits_too_long_for_one_node_has_what_gets_free_kept_for_it(policy: str) -> None:
    drive = Planned(nodes=2, policy=policy)
    drive.running(job_of(3))
    drive.running(job_of(3))
    for number in drive.state.jobs.live:
        # No job can be preempted for it.
        drive.state.put_job(replace(drive.job(number), capabilities=Capabilities(known=True)))
    wide = drive.submit(replace(job_of(2), locality=Locality(widest=LocalityLevel.NODE)))
    small = drive.submit(replace(job_of(1), preemptible=False))
    assert [change.number for change in drive.found().changes] == [small]
    drive.now += WEEK_S
    found = drive.found()
    assert (found.changes, found.line.tolist()) == ((), [wide, small])
    assert found.unplaced == frozenset(), "a planner that left it out for a while would let others pass"
    # As if the nodes on which two could be had left: no job waits for devices that will not come.
    closed = {wide: frozenset({"n1", "n2"})}
    assert [change.number for change in drive.found(closed=closed).changes] == [small]


def test_a_gang_that_waits_too_long_has_nothing_kept_where_it_could_not_be() -> None:
    view = cluster(2, server(device_type="A100"))
    view.put_configuration_set(server(device_type="V100"))
    view.put(idle_row("other", server(device_type="V100")))
    assert nodes_for(view, gang(4, device_type="V100")) == {"other"}
    assert nodes_for(view, gang(4)) == nodes_for(view, gang(0, device_type="V100")) == {"s0", "s1", "other"}


def test_devices_are_counted_where_gangs_can_have_them() -> None:
    drive = Planned(nodes=2)
    held = drive.running(job_of(2))
    drive.running(job_of(1))

    def gpus() -> int:
        table = LiveTable()
        for job in drive.state.jobs.values():
            table.put(*drive.as_received(job))
        return capacity_of(drive.state.view, table).gpus

    assert gpus() == 8
    drive.step(SuspendJob(held, SuspendLevel.PAUSE))
    drive.rests(held)
    assert gpus() == 6, "what a user's paused job holds is for no other job"
    for name in ("n1", "n2"):
        drive.state.view.set_available(name, False)
    assert gpus() == 1


# what is remembered of refusals

STOP, START = SuspendChange(1, 1), StartChange(2, 1, ())


def test_refusals_stand_for_seconds_and_what_a_fresh_view_cures_is_not_noted() -> None:
    refused = RefusalBackoff()
    refused.note(START, [Refusal(Reason.STALE_REVISION)], 10.0)
    assert refused.at(10.0) is NONE_EXCLUDED
    assert refused.next_s == float("inf")
    refused.note(STOP, [Refusal(Reason.LEVEL_UNAVAILABLE)], 10.0)
    refused.note(START, [Refusal(Reason.QUOTA)], 12.0)
    assert (refused.at(12.0).not_stopped, refused.at(12.0).not_started) == ({1}, {2})
    assert refused.next_s == 15.0
    assert (refused.at(15.0).not_stopped, refused.at(15.0).not_started) == (set(), {2})
    refused.forget(2)
    assert refused.at(15.0) is NONE_EXCLUDED


def test_nodes_that_are_closed_to_a_job_add_up() -> None:
    refused = RefusalBackoff()
    for node in ("n1", "n2"):
        refused.note(START, [Refusal(Reason.STORAGE_NOT_SHARED, node=node)], 10.0)
    assert refused.at(900.0) is NONE_EXCLUDED
    assert refused.closed_nodes == {2: {"n1", "n2"}}
    assert refused.next_s == 910.0
    refused.at(911.0)
    assert refused.closed_nodes == {}


@pytest.mark.parametrize(
    ("helped", "not_started", "not_stopped"), [("jobs/7", {7}, set()), ("", set(), {1})], ids=["in vain", "not so"]
)
def test_room_that_is_made_in_vain_is_noted_for_the_job_that_was_to_have_it(
    helped: str, not_started: set[int], not_stopped: set[int]
) -> None:
    refused = RefusalBackoff()
    stop = SuspendChange(1, 1, purpose=Purpose(Goal.HOLE, 7))
    refused.note(stop, [Refusal(Reason.NODE_RESERVED, node="n1", job=helped)], 10.0)
    assert (refused.at(12.0).not_started, refused.at(12.0).not_stopped) == (not_started, not_stopped)


def test_a_node_on_which_launches_failed_is_looked_at_again_soon() -> None:
    refused = RefusalBackoff()
    refused.note(START, [Refusal(Reason.LAUNCH_FAILED, node="n1")], 10.0)
    refused.at(20.0)
    assert refused.closed_nodes == {2: {"n1"}}
    refused.at(41.0)
    assert refused.closed_nodes == {}


def test_a_planner_is_told_the_size_that_a_job_has_or_is_bound_to() -> None:
    drive = Planned()
    number = drive.submit(replace(job_of(2), gpus_min=1, gpus_max=4))
    (claims, *_) = candidates(
        drive.state.view, replace(job_of(2), roles=job_of(3).roles).shape(GIB + GIB // 10)
    ).candidates
    drive.step(ProposePlan((StartChange(number, drive.job(number).revision, claims),)))
    drive.runs(number)
    told, gang = drive.as_received(drive.job(number))
    assert gang is not None
    assert (told.gpus, gang.devices, told.spec.gpus_max) == (3, 3, 4)
    table = LiveTable()
    table.put(told, gang)
    assert table.held_gpus == 3
    drive.step(ProposePlan((SuspendChange(number, drive.job(number).revision, level=SuspendLevel.OFFLOAD),)))
    drive.rests(number)
    assert drive.as_received(drive.job(number))[0].gpus == 3
