"""The migration pass on a real state fed by messages: for which jobs, when it is worth it, and what
becomes of it when something else happens meanwhile. (4 s)"""

from __future__ import annotations

import dataclasses

import pytest
from core.drive import GIB, job_of
from ganger.cluster.capacity_index import CapacityIndex, Trial
from ganger.cluster.resources import Locality, LocalityLevel
from ganger_master.core.answers import PlanAnswer
from ganger_master.core.commands import CancelJob, DrainNode, ProposePlan, SuspendJob
from ganger_master.core.explain import kept_for, making_room_for
from ganger_master.core.gang_model import ObservedPhase
from ganger_master.core.job_model import SuspendLevel
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.plan_changes import Goal, MoveChange, PlanChange, SuspendChange, TrialFinding
from ganger_master.core.tenancy import PartitionTerms
from ganger_master.estimators.speed import LocalityPoint
from ganger_master.planner.context import ClusterChange, PlanDraft, context_of
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.migrate_stage import moves_no_job, plan_moves
from ganger_master.planner.migration_outcomes import MigrationOutcomes
from ganger_master.planner.migration_plans import LONGEST_S, MigrationContext, MigrationMemory
from ganger_master.planner.plan import plan
from ganger_master.planner.plan_pace import NONE_EXCLUDED, ExcludedJobs
from ganger_master.planner.rate_registry import JobRates
from ganger_master.policies.make_room import Displacement, RoomPlan
from msgspec.structs import replace
from planner.test_passes import Planned

TOGETHER = Locality(LocalityLevel.NODE)


def together(gpus: int, **more: object) -> JobSpec:
    return replace(job_of(gpus, memory=GIB), locality=TOGETHER, **more)


class Rates(JobRates):
    """Steps a second of every window of a job, by number."""

    def __init__(self) -> None:
        self.rates: dict[int, float] = {}
        self.windows = 8
        self.crowds: dict[int, tuple[int, dict[int, tuple[float, ...]]]] = {}

    def present(self, number: int) -> tuple[float, ...]:
        rate = self.rates.get(number, 0.0)
        # They scatter a little.
        return tuple([rate * (1.0 + 0.01 * (at % 3 - 1)) for at in range(self.windows)]) if rate else ()

    def signature(self, number: int) -> str:
        return "alike"

    def interference(self, number: int) -> tuple[int, dict[int, tuple[float, ...]]]:
        return self.crowds.get(number, (0, {}))

    @property
    def compared(self) -> list[int]:
        return [number for number, (_, by_load) in self.crowds.items() if len(by_load) > 1]


class Moved(Planned):
    """A state that a planner looks after which moves jobs."""

    def __init__(self, nodes: int = 2, policy: str = "fifo-backfill+first-fit+defrag") -> None:
        super().__init__(nodes, policy)
        self.moving = MigrationMemory()
        self.again_s = float("inf")
        self.findings: tuple[TrialFinding, ...] = ()
        self.rates = Rates()
        self.per_hour: float | None = None

    def found(self, kept_out: ExcludedJobs = NONE_EXCLUDED, may_stop: bool = False) -> PlanDraft:
        table = LiveTable()
        for job in self.state.jobs.values():
            table.put(*self.as_received(job))
        view = self.state.view.copy()
        rows = [replace(row, version=0) for row in view.rows()]
        draining = tuple(self.state.nodes.draining)
        context = context_of(
            self.policy,
            table,
            CapacityIndex(view),
            self.now,
            order=self.policy.order,
            cluster=ClusterChange(view, draining=draining, moves_per_hour=self.per_hour),
            rates=self.rates,
            may_preempt=may_stop,
            excluded=kept_out,
        )
        is_idle = moves_no_job(self.moving, context)
        found, self.moving, self.findings, self.again_s = plan_moves(plan, context, self.moving)
        if is_idle and not may_stop:
            assert (found.changes, self.findings, self.moving.plans) == ((), (), ())
        twins = [plan_moves(plan, replace(context, is_news=is_news), self.moving) for is_news in (True, False)]
        assert [twin[0].changes for twin in twins] == [twins[0][0].changes] * 2, "without news it is the same"
        assert [twin[1].plans for twin in twins] == [twins[0][1].plans] * 2
        assert rows == [replace(row, version=0) for row in view.rows()], "the view is left as it was"
        return found

    def proposed(self, kept_out: ExcludedJobs = NONE_EXCLUDED) -> list[tuple[str, int]]:
        found = self.found(kept_out)
        answer = self.step(ProposePlan(found.changes, kept_places=self.moving.kept_places, findings=self.findings))
        assert isinstance(answer, PlanAnswer)
        assert all(verdict.approved for verdict in answer.verdicts), answer
        return [(change.kind, change.number) for change in found.changes]

    def moves(self, number: int) -> None:
        """A move that was begun comes to its end."""
        source, destination = self.job(number).epoch, self.job(number).next_epoch
        if self.state.gangs[source].phase != "PARKED":
            self.seen(number, destination, ObservedPhase.PREPARED)
            self.seen(number, source, ObservedPhase.PARKED, 40)
        self.seen(number, destination, ObservedPhase.READY, self.state.gangs[source].stop_step or 40)
        self.seen(number, destination, ObservedPhase.RUNNING)
        for node in self.state.gangs[source].nodes:
            rest = [gang for gang in self.on(node) if gang.epoch != source]
            reports = [self.reported(gang, node) or self.report(gang, ObservedPhase.STARTING) for gang in rest]
            self.observe(node, *reports)

    def node_of(self, number: int) -> str:
        (claim,) = self.state.gangs[self.job(number).epoch].claims
        return claim.node

    def ends(self, number: int) -> None:
        node = self.node_of(number)
        self.step(CancelJob(number))
        self.seen_without(node, number)


def fragmented(**more: object) -> tuple[Moved, list[int]]:
    """Two nodes of four devices with a job of one device on each, and with `more` in the spec."""
    drive = Moved()
    jobs = [drive.running(together(1, **more)), drive.running(together(3)), drive.running(together(1, **more))]
    drive.running(together(3))
    drive.ends(2)
    drive.ends(4)
    small = [jobs[0], jobs[2]]
    assert [drive.node_of(number) for number in small] == ["n1", "n2"]
    return drive, small


def test_a_hole_is_made_once_the_gang_has_waited_as_long_as_it_costs_and_is_kept_for_it() -> None:
    drive, small = fragmented()
    large = drive.submit(together(4))
    assert drive.found().changes == ()
    # So much of four devices for the pause of one; and it is told when to look again.
    pause = 4 * (drive.again_s - drive.job(large).pending_since)
    assert 0.3 <= pause <= 1.5
    drive.now = drive.again_s
    ((kind, moved),) = drive.proposed()
    assert (kind, moved in small) == ("MOVE", True)
    node = drive.node_of(moved)
    assert [one.number for one in making_room_for(drive.state, large)] == [moved]
    assert kept_for(drive.state, large) == (node,)
    drive.seen(moved, drive.job(moved).next_epoch, ObservedPhase.PREPARED)
    # A new job may have what is left, but not the kept place.
    other = drive.submit(together(3))
    assert drive.proposed() == []
    least = drive.submit(together(1))
    assert drive.proposed() == [("START", least)]
    assert drive.node_of(least) != node
    drive.runs(least)
    drive.moves(moved)
    assert drive.proposed() == [("START", large)]
    assert drive.node_of(large) == node
    assert drive.proposed() == []
    assert drive.moving.plans == ()
    assert drive.job(other).state == "PENDING"


@pytest.mark.parametrize("kept", [{"movable": False}, {"preemptible": False}, {"priority": 1}])
def test_a_job_that_may_not_be_moved_stays(kept: dict[str, object]) -> None:
    drive, _ = fragmented(**kept)
    drive.submit(together(4))
    drive.now += 1_000.0
    assert drive.proposed() == []


def test_a_costly_migration_is_made_for_a_job_that_has_waited_long_enough() -> None:
    drive, small = fragmented()
    for number in small:
        drive.state.put_job(replace(drive.job(number), move_pause_s=80.0))
    large = drive.submit(together(4))
    drive.now += 15.0
    assert drive.proposed() == []
    assert drive.again_s == pytest.approx(drive.job(large).pending_since + 20.0)
    drive.now += 6.0
    assert [kind for kind, _ in drive.proposed()] == ["MOVE"]


def test_when_the_gang_is_gone_no_other_job_moves_for_it() -> None:
    drive, _ = fragmented()
    large = drive.submit(together(4))
    drive.now += 10.0
    ((_, moved),) = drive.proposed()
    drive.step(CancelJob(large))
    drive.moves(moved)
    assert drive.proposed() == []
    assert (drive.moving.plans, drive.state.queue.kept_by_plan) == ((), {})


def test_an_errand_whose_place_is_taken_is_given_up_and_another_found() -> None:
    drive, small = fragmented()
    large = drive.submit(together(4))
    drive.now += 10.0
    ((_, moved),) = drive.proposed()
    other = next(number for number in small if number != moved)
    # Its user moves no job, but stops the job that was to be left alone: it is gone from its node.
    drive.ends(other)
    drive.moves(moved)
    assert ("START", large) in drive.proposed()


def test_a_job_that_goes_elsewhere_ends_the_migration_plan_for_all() -> None:
    drive, _ = fragmented()
    drive.submit(together(4))
    drive.now += 10.0
    ((_, moved),) = drive.proposed()
    drive.now += LONGEST_S
    drive.found()
    assert drive.moving.plans == ()
    assert drive.job(moved).next_epoch, "what was begun goes on"


def full(priority: int = 0) -> tuple[Moved, list[int]]:
    """Two full nodes of four, on each one job of less priority than the others."""
    drive = Moved()
    numbers = [
        drive.running(together(1, priority=priority - 1 if number % 4 == 0 else priority)) for number in range(8)
    ]
    for number in numbers:
        # Memory for their state was reserved once their daemons told of it.
        assert drive.state.gangs[drive.job(number).epoch].claims[0].arena_bytes
    return drive, numbers


def test_on_a_full_cluster_the_gang_swaps_with_lower_ranked_jobs_through_host_memory() -> None:
    drive, numbers = full()
    low = [numbers[0], numbers[4]]
    large = drive.submit(together(2))
    assert sorted(drive.proposed()) == [("SUSPEND", number) for number in low]
    assert {drive.state.gangs[drive.job(number).epoch].park_level for number in low} == {SuspendLevel.OFFLOAD}
    assert sorted(one.number for one in making_room_for(drive.state, large)) == low
    for number in low:
        drive.rests(number)
    ((kind, moved),) = drive.proposed()
    assert (kind, moved not in low) == ("MOVE", True)
    drive.moves(moved)
    assert drive.proposed() == [("START", large)]
    # A parked job loses nothing, and resumes where it fits: one where it was, one elsewhere.
    assert drive.proposed() == []
    drive.runs(large)
    ended = next(n for n in numbers if n not in (*low, moved) and drive.node_of(n) == drive.node_of(large))
    drive.ends(ended)
    ((kind, back),) = drive.proposed()
    assert (kind, back in low) == ("MOVE", True)


def test_no_job_is_parked_for_a_gang_of_no_higher_priority() -> None:
    drive, _ = full()
    drive.submit(together(2, priority=-1))
    drive.now += 1_000.0
    assert drive.proposed() == []


def test_a_parked_job_resumes_in_its_place_once_that_is_free() -> None:
    drive, _ = full()
    large = drive.submit(together(1))
    ((_, rests),) = drive.proposed()
    drive.rests(rests)
    assert drive.proposed() == [("START", large)]
    drive.runs(large)
    drive.ends(large)
    assert drive.proposed() == [("RESUME", rests)]


def test_a_job_suspended_by_its_user_on_its_way_stays_suspended() -> None:
    drive, _ = fragmented()
    drive.submit(together(4))
    drive.now += 10.0
    ((_, moved),) = drive.proposed()
    drive.moves(moved)
    drive.step(SuspendJob(moved, SuspendLevel.OFFLOAD))
    drive.rests(moved)
    assert all(number != moved for _, number in drive.proposed())


def test_a_node_is_drained_by_moves_also_where_others_have_to_make_room() -> None:
    """The gang of two finds no room beside gangs of one, unless one of these goes to the third node."""
    drive = Moved(nodes=3)
    pair = drive.running(together(2))
    rest = drive.running(together(2))
    others = [drive.running(together(1)) for _ in range(7)]
    third = [number for number in others if drive.node_of(number) == "n3"]
    assert len(third) == 3
    drive.ends(next(number for number in others if drive.node_of(number) == "n2"))
    assert drive.state.nodes.free_devices == 2
    drive.step(DrainNode("n1", "new disk"))
    changes = drive.proposed()
    assert [kind for kind, _ in changes] == ["MOVE"]
    assert changes[0][1] in others
    drive.moves(changes[0][1])
    # Where there is room now the master moves them by itself.
    (drained,) = [number for number in (pair, rest) if drive.job(number).next_epoch]
    assert drive.proposed() == []
    drive.moves(drained)
    # The other fits nowhere, whatever jobs move: it is parked on storage.
    left = next(number for number in (pair, rest) if number != drained)
    assert drive.proposed() == [("SUSPEND", left)]
    assert drive.state.gangs[drive.job(left).epoch].park_level is SuspendLevel.CHECKPOINT


@pytest.mark.parametrize(
    ("terms", "changes"),
    [(PartitionTerms("batch"), ["SUSPEND"]), (PartitionTerms("batch", preemptible=False), [])],
    ids=["of a preemptible partition", "of one that is not"],
)
def test_off_a_drained_node_no_job_is_suspended_that_plans_may_not_suspend(
    terms: PartitionTerms, changes: list[str]
) -> None:
    drive = Moved(nodes=1)
    number = drive.running(together(2))
    drive.state.put_job(replace(drive.job(number), partition=terms))
    drive.step(DrainNode("n1", "new disk"))
    assert [kind for kind, _ in drive.proposed()] == changes


def test_a_job_that_plans_may_not_suspend_is_not_parked_on_its_way() -> None:
    """Two gangs change places. One of them would rest in host memory meanwhile."""
    drive = Moved()
    jobs = [drive.running(together(4)) for _ in range(2)]
    drive.proposed()
    for is_preemptible in (False, True):
        for number in jobs:
            job = drive.job(number)
            drive.state.put_job(replace(job, partition=PartitionTerms("batch", preemptible=is_preemptible)))
        assert [change.kind for change in exchanged(drive, jobs)] == ["SUSPEND"] * is_preemptible


def exchanged(drive: Moved, numbers: list[int]) -> list[PlanChange]:
    """Return the first changes of a plan by which two gangs change places."""
    table = LiveTable()
    for job in drive.state.jobs.values():
        table.put(*drive.as_received(job))
    room = CapacityIndex(drive.state.view.copy())
    context = context_of(drive.policy, table, room, drive.now, rates=drive.rates)
    migration = MigrationContext(context, Trial(room), makes_room=True)
    one, other = (migration.gangs[number][2] for number in numbers)
    moves = (Displacement(one, other.claims), Displacement(other, one.claims))
    migration.begin(Goal.LOCALITY, RoomPlan((), moves))
    return migration.changes


def test_no_job_leaves_a_drained_node_while_another_moves_out_of_its_host_memory() -> None:
    """It does not run, and is on its way all the same: there may be room once it has arrived."""
    drive = Moved(nodes=2)
    goes, stays, third = [drive.running(together(2)) for _ in range(3)]
    assert [drive.node_of(number) for number in (goes, stays, third)] == ["n1", "n1", "n2"]
    rest = SuspendChange(goes, drive.job(goes).revision, level=SuspendLevel.OFFLOAD)
    drive.step(ProposePlan((rest,)))
    drive.rests(goes)
    (claim,) = drive.state.gangs[drive.job(third).epoch].claims
    there = replace(claim, device_mask=0b1111 & ~claim.device_mask)
    drive.step(ProposePlan((MoveChange(goes, drive.job(goes).revision, (there,)),)))
    assert drive.job(goes).next_epoch
    drive.step(DrainNode("n1", "new disk"))
    assert drive.proposed() == []
    drive.moves(goes)
    assert drive.proposed() == [("SUSPEND", stays)]


def test_of_two_planners_the_second_finds_what_the_first_began() -> None:
    drive, _ = fragmented()
    large = drive.submit(together(4))
    drive.now += 10.0
    ((_, moved),) = drive.proposed()
    drive.moving = MigrationMemory()
    assert drive.proposed() == []
    drive.moves(moved)
    assert drive.proposed() == [("START", large)]


def between(*gpus: int) -> tuple[Moved, int, list[int]]:
    """A pair lies on two full nodes beside gangs of so many devices; others like it were slower so."""
    drive = Moved()
    others = [drive.running(together(count)) for count in gpus]
    pair = drive.running(replace(job_of(2, memory=GIB), locality=Locality(LocalityLevel.CLUSTER)), seconds=1_000.0)
    assert len(drive.state.gangs[drive.job(pair).epoch].claims) == 2
    drive.rates.rates[pair] = 10.0
    seen = (LocalityPoint(2, 2, 0.6, LocalityLevel.CLUSTER), LocalityPoint(2, 1, 0.95, LocalityLevel.SOCKET))
    drive.moving = MigrationMemory(outcomes=MigrationOutcomes(points={"alike": seen}))
    return drive, pair, others


def apart() -> tuple[Moved, int]:
    """A pair lies on two nodes, each of which has room for both by now."""
    drive, pair, others = between(3, 3)
    for number in others:
        drive.ends(number)
    drive.runs(pair)
    return drive, pair


def move_closer(drive: Moved, pair: int) -> None:
    assert drive.proposed() == [("MOVE", pair)]
    drive.moves(pair)


def test_a_pair_that_lies_apart_is_moved_closer_and_stays_if_it_is_faster() -> None:
    drive, pair = apart()
    move_closer(drive, pair)
    assert len(drive.state.gangs[drive.job(pair).epoch].claims) == 1
    drive.rates.rates[pair] = 14.0
    drive.now += 60.0
    assert drive.proposed() == []
    (finding,) = drive.findings
    assert (finding.number, finding.goal, finding.kept) == (pair, Goal.LOCALITY, True)
    assert finding.gain == pytest.approx(1.4, rel=0.02)
    (told,) = [one for one in drive.history if one.kind == "change_kept"]
    assert told.figures["goal"] == "LOCALITY"
    # What was learned of it is known of all like it: two points say so now.
    assert 0.6 < drive.moving.outcomes.locality("alike").relative_speed(2, 2, LocalityLevel.CLUSTER) < 0.75


def test_a_pair_that_is_no_faster_together_is_not_tried_again_nor_are_others_like_it() -> None:
    drive, pair = apart()
    move_closer(drive, pair)
    drive.now += 60.0
    drive.rates.windows = 64
    assert drive.proposed() == []
    (finding,) = drive.findings
    assert not finding.kept
    assert finding.gain == pytest.approx(1.0, rel=0.01)
    node = drive.node_of(pair)
    assert finding.detail == "64 windows leave that open; it stays: the way back would take more than it saves"
    assert drive.moving.outcomes.failed.holds(("alike", frozenset([node])), drive.now)
    assert drive.moving.outcomes.locality("alike").relative_speed(2, 2, LocalityLevel.CLUSTER) > 0.75


def test_a_pair_of_which_too_little_is_left_stays_apart() -> None:
    drive, pair = apart()
    drive.state.put_job(replace(drive.job(pair), move_pause_s=500.0))
    assert drive.proposed() == []


def test_a_pair_that_lies_apart_is_looked_at_again_once_a_move_would_pay_though_nothing_happens() -> None:
    drive, pair = apart()
    drive.state.put_job(replace(drive.job(pair), move_pause_s=500.0))
    assert drive.proposed() == []
    assert drive.now < drive.again_s < float("inf")
    drive.now = drive.again_s
    assert drive.proposed() == [("MOVE", pair)]


def test_room_that_comes_free_just_after_a_look_is_found_though_nothing_happens_then() -> None:
    drive, pair, others = between(3, 3)
    looked_s = drive.now
    assert drive.proposed() == []
    assert drive.again_s == float("inf"), "it has run for so long that time changes nothing"
    drive.now += 10.0
    for number in others:
        drive.ends(number)
    drive.runs(pair)
    assert drive.proposed() == []
    assert drive.again_s == looked_s + 30.0
    drive.now = drive.again_s
    assert drive.proposed() == [("MOVE", pair)]


def test_a_job_moved_just_now_is_considered_again_once_it_may_move_without_any_event() -> None:
    drive, pair = apart()
    moved_s = drive.now - 100.0
    drive.moving = dataclasses.replace(drive.moving, moved_at={pair: moved_s})
    assert drive.proposed() == []
    assert drive.again_s == moved_s + 600.0
    drive.now = drive.again_s
    assert drive.proposed() == [("MOVE", pair)]


def test_once_as_many_were_moved_in_an_hour_as_may_be_the_next_one_is_though_nothing_happens() -> None:
    drive, pair = apart()
    drive.per_hour = 0.5
    moved_s = drive.now - 100.0
    drive.moving = dataclasses.replace(drive.moving, moved_at={99: moved_s})
    assert drive.proposed() == []
    assert drive.again_s == moved_s + 3600.0
    drive.now = drive.again_s
    assert drive.proposed() == [("MOVE", pair)]


def resting_on_its_way() -> tuple[Moved, int]:
    """A pair goes to one node, where it has a device already, by way of host memory."""
    drive, pair, (_, leaves, _) = between(2, 1, 3)
    drive.ends(leaves)
    drive.runs(pair)
    assert drive.proposed() == [("SUSPEND", pair)]
    drive.rests(pair)
    del drive.rates.rates[pair]
    return drive, pair


def test_a_job_parked_on_its_way_is_judged_by_its_rate_before_that() -> None:
    drive, pair = resting_on_its_way()
    assert drive.proposed() == [("MOVE", pair)]
    drive.moves(pair)
    assert len(drive.state.gangs[drive.job(pair).epoch].claims) == 1
    drive.rates.rates[pair] = 14.0
    drive.now += 60.0
    assert drive.proposed() == []
    (finding,) = drive.findings
    assert (finding.number, finding.goal, finding.kept) == (pair, Goal.LOCALITY, True)
    assert finding.gain == pytest.approx(1.4, rel=0.02)
    assert len(drive.moving.outcomes.points["alike"]) == 3


def test_a_job_that_did_not_move_after_all_is_not_judged() -> None:
    drive, pair = resting_on_its_way()
    assert drive.moving.outcomes.trials.keys() == {pair}
    drive.moving = dataclasses.replace(drive.moving, plans=())
    assert drive.proposed() == [("RESUME", pair)]
    drive.runs(pair)
    drive.rates.rates[pair] = 10.0
    drive.now += 20.0
    assert drive.proposed() == []
    assert drive.findings == ()
    assert drive.moving.outcomes.trials == {}


def slower_together() -> tuple[Moved, int, tuple[str, ...]]:
    """A pair that was moved closer and is half as fast there: the nodes where it was."""
    drive, pair = apart()
    source = drive.state.gangs[drive.job(pair).epoch].nodes
    move_closer(drive, pair)
    drive.rates.rates[pair] = 5.0
    drive.now += 60.0
    return drive, pair, source


def test_a_move_that_did_not_help_is_undone_and_not_made_again() -> None:
    drive, pair, source = slower_together()
    assert drive.proposed() == [("MOVE", pair)]
    (finding,) = drive.findings
    assert (finding.kept, finding.detail) == (False, f"it goes back to {' '.join(source)}")
    (told,) = [one for one in drive.history if one.kind == "change_undone"]
    assert told.figures["detail"] == finding.detail
    gang = drive.state.gangs[drive.job(pair).next_epoch]
    assert gang.nodes == source
    assert gang.purpose.goal is Goal.UNDO
    # By what is left at half the pace.
    assert gang.purpose.saved > 0.0
    drive.moves(pair)
    drive.rates.rates[pair] = 10.0
    for _ in range(5):
        drive.now += 700.0
        assert drive.proposed() == []
    assert drive.moving.outcomes.pending_reverts == {}


def test_a_job_that_cannot_return_at_once_returns_when_its_place_is_free_again() -> None:
    drive, pair, source = slower_together()
    taken = drive.submit(together(4))
    assert ("START", taken) in drive.proposed()
    drive.runs(taken)
    drive.now += 60.0
    assert drive.proposed() == []
    assert drive.moving.outcomes.pending_reverts.keys() == {pair}
    drive.ends(taken)
    assert drive.proposed() == [("MOVE", pair)]
    assert drive.state.gangs[drive.job(pair).next_epoch].nodes == source


def test_a_limit_of_zero_leaves_only_the_migrations_that_a_pending_job_needs() -> None:
    drive, pair = apart()
    drive.per_hour = 0.0
    assert drive.proposed() == []
    drive.now += 60.0
    drive.per_hour = 0.5
    # Of two nodes one in an hour.
    assert drive.proposed() == [("MOVE", pair)]
    drive, _ = fragmented()
    drive.per_hour = 0.0
    drive.submit(together(4))
    drive.now += 100.0
    assert [kind for kind, _ in drive.proposed()] == ["MOVE"]


def test_a_job_measured_slower_beside_others_moves_to_an_emptier_node() -> None:
    drive = Moved(nodes=2)
    slow = drive.running(together(1), seconds=600.0)
    other = drive.running(together(2), seconds=600.0)
    assert drive.node_of(slow) == drive.node_of(other)
    assert drive.proposed() == [], "nothing was measured"
    steady = (9.9, 10.0, 10.1, 10.0)
    drive.rates.crowds[slow] = 2, {0: steady, 2: tuple([0.7 * rate for rate in steady])}
    drive.rates.rates[slow] = 7.0
    assert drive.proposed() == [("MOVE", slow)]
    assert drive.state.gangs[drive.job(slow).next_epoch].purpose.goal is Goal.BALANCE
    drive.moves(slow)
    assert drive.node_of(slow) != drive.node_of(other)
    drive.rates.crowds[slow] = 0, drive.rates.crowds[slow][1]
    drive.rates.rates[slow] = 10.0
    drive.now += 60.0
    assert drive.proposed() == []
    (finding,) = drive.findings
    assert (finding.goal, finding.kept) == (Goal.BALANCE, True)


@pytest.mark.parametrize(
    ("gib", "level"), [(1, SuspendLevel.OFFLOAD), (8, SuspendLevel.CHECKPOINT), (0, SuspendLevel.CHECKPOINT)]
)
@pytest.mark.parametrize("policy", ["fifo+defrag", "fifo-backfill+defrag"])
def test_one_gang_rests_for_an_urgent_one_and_not_two_where_its_memory_is_in_the_way(
    policy: str, gib: int, level: SuspendLevel
) -> None:
    """Two gangs of two devices on a node of four, one of four on the other: what the last would keep of host memory at
    OFFLOAD leaves too little for a gang of four, which would be spread over both nodes for a second victim."""
    drive = Moved(2, policy)
    small = [drive.running(together(2, roles=job_of(2, gib * GIB).roles)) for _ in range(2)]
    large = drive.running(job_of(4, gib * GIB))
    urgent = drive.submit(replace(job_of(4, gib * GIB), priority=3))
    drive.now += 100.0
    (change,) = drive.found().changes
    assert (change.kind, change.number, change.level) == ("SUSPEND", large, level)
    assert drive.node_of(large) not in {drive.node_of(number) for number in small}
    ((waiting, hole),) = [(one.waiting, one.place) for one in drive.moving.plans]
    assert (waiting, [claim.node for claim in hole]) == (urgent, [drive.node_of(large)])
