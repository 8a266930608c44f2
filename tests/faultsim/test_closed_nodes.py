"""A job to which a reservation or its partition closes nodes evicts no other job, keeps no place, and starts at once
when they open. In virtual time: the real core, scheduler and loop of a live planner, whose daemons are modelled."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from core.drive import job_of
from faultsim.fault_cluster import FaultCluster
from faultsim.test_stories import SERVER, phase
from ganger_master.core.answers import Done, PlanAnswer
from ganger_master.core.commands import (
    CordonNode,
    DeleteReservation,
    ProposePlan,
    ReserveNodes,
    UncordonNode,
)
from ganger_master.core.gang_model import GangPhase
from ganger_master.core.job_rules import may_never_start
from ganger_master.core.job_spec import Agent, JobSpec
from ganger_master.core.node_model import Reservation
from ganger_master.core.settings import CoreSettings
from ganger_master.core.tenancy import Partition
from ganger_master.planner.context import ClusterChange, Plan, PlannerSettings, PlanVerdict, ProgressReports
from ganger_master.planner.loop import PlannerLoop, live_loop
from ganger_master.planner.plan_pace import PlanPace
from ganger_master.planner.rate_registry import ProgressReport, RateRegistry
from ganger_master.policies import policy_named
from msgspec.structs import replace

POLICIES = ("las", "tiresias", "srtf", "gandiva", "las+synergy-tune", "optimus", "ganger", "fifo+best-fit", "tetris")
EVERY_S = 20.0
LOOK_S = 0.25
HOURS_S = 7_200.0
NO_PARTITIONS: Mapping[str, Partition] = {}


class Planned:
    """Two nodes of four GPUs, and the planner of a policy."""

    def __init__(self, policy: str, partitions: Mapping[str, Partition] = NO_PARTITIONS) -> None:
        settings = CoreSettings(policy=policy, partitions=partitions)
        self.cluster = FaultCluster(1, [("n1", SERVER), ("n2", SERVER)], settings)
        # A job that came later is believed to be shorter.
        oracle = PlannerSettings(PlanPace(EVERY_S), oracle=lambda numbers: 1e6 / numbers)
        of = policy_named(policy)
        is_foretold = of.order.knows_durations
        self.loop = PlannerLoop(of, oracle) if is_foretold else live_loop(of, EVERY_S, RateRegistry(), None)
        self.plans: list[Plan] = []
        self.kept: set[int] = set()
        self.is_whole = True
        self.cluster.run_for(5.0)
        self.plan()

    def plan(self) -> None:
        state, now = self.cluster.state, self.cluster.engine.now
        jobs = [
            (job, state.gangs.get(job.epoch), 0) for job in state.jobs.values() if may_never_start(state, job) is None
        ]
        reservations = tuple(state.reservations.values())
        draining = tuple(state.nodes.draining)
        change = ClusterChange(
            state.view, jobs, is_whole=self.is_whole, draining=draining, reservations=reservations, quantum_s=30.0
        )
        self.loop.observe(change, now)
        self.is_whole = False
        steps = {gang.uid: gang.step for gang in self.cluster.physics.gangs.values()}
        reports = {job.number: ProgressReport(steps[job.uid], now) for job, *_ in jobs if steps.get(job.uid)}
        self.loop.observe(ProgressReports(reports), now)
        plan, _ = self.loop.step(now)
        if plan is not None:
            self.plans.append(plan)
            answer = self.cluster.ask(ProposePlan(plan.changes, kept_places=plan.kept_places, findings=plan.findings))
            assert isinstance(answer, PlanAnswer)
            self.kept.update(state.queue.kept_by_plan)
            self.loop.observe(PlanVerdict(answer.verdicts), self.cluster.engine.now)
        self.cluster.engine.after(LOOK_S, self.plan)

    def submit(self, spec: JobSpec, user: str) -> int:
        submission = self.cluster.submit(replace(spec, command=("train", "1000000")), user)
        assert self.cluster.run_until(lambda: submission.number > 0, 10.0)
        return submission.number

    def running(self, spec: JobSpec, user: str) -> int:
        number = self.submit(spec, user)
        assert self.cluster.run_until(lambda: self.phase(number) is GangPhase.RUNNING, 30.0)
        return number

    def phase(self, number: int) -> GangPhase | None:
        return phase(self.cluster, number)

    def node(self, number: int) -> tuple[str, ...]:
        state = self.cluster.state
        return state.gangs[state.jobs[number].epoch].nodes

    @property
    def reserved(self) -> Reservation:
        return Reservation(
            "upgrade", ("n1", "n2"), self.cluster.engine.now + HOURS_S, self.cluster.engine.now + 2 * HOURS_S
        )


@pytest.mark.parametrize("closed_by", ["reservation", "partition"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_job_that_may_go_nowhere_stops_no_job_keeps_no_place_and_starts_once_it_may(
    policy: str, closed_by: str
) -> None:
    partitions = {"a": Partition(("n1",)), "b": Partition(("n2",), default=True)} if closed_by == "partition" else {}
    drive = Planned(policy, partitions)
    cluster = drive.cluster
    inside = {"partition": "a"} if partitions else {}
    victim = drive.running(job_of(4), "ann")
    cluster.run_for(100.0)
    if partitions:
        cluster.ask(CordonNode("n1", "disks", "olga"))
    else:
        assert isinstance(cluster.ask(ReserveNodes(drive.reserved, "olga")), Done)
    late = drive.submit(replace(job_of(4), agent=Agent.NONE, **inside), "bob")
    before = cluster.state.jobs[victim]
    drive.plans.clear()
    cluster.run_for(100.0)
    assert [change for plan in drive.plans for change in plan.changes] == []
    assert (drive.phase(late), drive.kept) == (None, set())
    after = cluster.state.jobs[victim]
    assert (after.epoch, after.preemptions) == (before.epoch, before.preemptions)
    if partitions:
        cluster.ask(UncordonNode("n1", "olga"))
    else:
        cluster.ask(DeleteReservation("upgrade", "olga"))
    assert cluster.run_until(lambda: drive.phase(late) is GangPhase.RUNNING, 10.0)
    assert cluster.state.jobs[victim].epoch == before.epoch


@pytest.mark.parametrize("policy", POLICIES)
def test_in_a_full_cluster_no_job_is_stopped_for_one_that_may_go_nowhere(policy: str) -> None:
    drive = Planned(policy)
    cluster = drive.cluster
    victims = [drive.running(job_of(4), "ann") for _ in range(2)]
    cluster.run_for(60.0)
    assert isinstance(cluster.ask(ReserveNodes(drive.reserved, "olga")), Done)
    late = drive.submit(replace(job_of(4), agent=Agent.NONE), "bob")
    drive.plans.clear()
    cluster.run_for(100.0)
    assert [change for plan in drive.plans for change in plan.changes] == []
    assert (drive.phase(late), drive.kept) == (None, set())
    assert [drive.phase(number) for number in victims] == [GangPhase.RUNNING] * 2


# `tiresias` stops no job before it has received 3,200 GPU-seconds.
@pytest.mark.parametrize(("policy", "ran_s"), [("las", 60.0), ("tiresias", 900.0), ("srtf", 60.0)])
def test_only_a_job_on_an_open_node_makes_way_for_one_to_which_a_node_is_closed(policy: str, ran_s: float) -> None:
    drive = Planned(policy)
    cluster = drive.cluster
    victims = [drive.running(job_of(4), "ann") for _ in range(2)]
    cluster.run_for(ran_s)
    nodes = drive.node(victims[0])
    assert isinstance(cluster.ask(ReserveNodes(replace(drive.reserved, nodes=nodes), "olga")), Done)
    late = drive.submit(replace(job_of(4), agent=Agent.NONE), "bob")
    assert cluster.run_until(lambda: drive.phase(late) is GangPhase.RUNNING, 100.0)
    assert drive.node(late) != nodes
    assert [cluster.state.jobs[number].preemptions for number in victims] == [0, 1]


@pytest.mark.parametrize("gpus", [(4, 4), (8,)])
@pytest.mark.parametrize("policy", POLICIES)
def test_jobs_leave_nodes_that_are_all_reserved_and_go_on_afterwards(policy: str, gpus: tuple[int, ...]) -> None:
    drive = Planned(policy)
    cluster = drive.cluster
    numbers = [drive.running(job_of(count), "ann") for count in gpus]
    cluster.run_for(60.0)
    now = cluster.engine.now
    reserved = replace(drive.reserved, start=now + 60.0, end=now + 120.0, lead_s=60.0)
    assert isinstance(cluster.ask(ReserveNodes(reserved, "olga")), Done)
    cluster.run_for(60.0)
    assert not any(cluster.state.gangs.places_on[node] for node in ("n1", "n2"))
    cluster.run_for(60.0)
    assert cluster.run_until(lambda: {drive.phase(number) for number in numbers} == {GangPhase.RUNNING}, 100.0)
