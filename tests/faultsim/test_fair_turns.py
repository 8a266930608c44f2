"""In virtual time: the real core, planner and rotation, until all jobs have had the same time on devices."""

from __future__ import annotations

import math

from faultsim.fault_cluster import FaultCluster
from faultsim.rows_of_daemons import DaemonTurns
from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.resources import Role, TaskShape
from ganger.cluster.topology import parse_topology
from ganger.job_state import JobState
from ganger.v1 import scheduling_pb2
from ganger_master.core.commands import DrainNode, ProposePlan, UncordonNode
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.settings import CoreSettings
from ganger_master.planner.context import ClusterChange, PlannerSettings, context_of
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.migrate_stage import plan_moves
from ganger_master.planner.migration_plans import MigrationMemory
from ganger_master.planner.rate_registry import ProgressReport, RateRegistry
from ganger_master.planner.sharing_stage import NOTHING, plan_shared
from ganger_master.policies import policy_named
from ganger_master.policies.orders import Capacity
from ganger_master.rpc.planner_messages import live_job_from_wire, live_job_to_wire

_GIB = 1 << 30
SERVER = parse_topology("2x2", name="v4", millicores=16_000, memory_bytes=64 * _GIB, device_memory_bytes=2 * _GIB)
QUANTUM_S, PASS_S = 20.0, 4.0
POLICY = policy_named("gandiva")


class Shared:
    """A cluster without faults, and the planner of `gandiva`, which hears of steps once a second."""

    def __init__(self, nodes: int, seed: int = 1) -> None:
        self.cluster = FaultCluster(seed, [], CoreSettings(policy="gandiva"), step_seconds=0.5)
        turns: dict[str, DaemonTurns] = {}
        for number in range(1, nodes + 1):
            self.cluster.add_node(f"n{number}", SERVER, {"rotation": "yes"}, lambda one: DaemonTurns(one, turns))
        self.cluster.run_for(5.0)
        self.remembered = NOTHING
        self.moving = MigrationMemory()
        self.rates = RateRegistry()
        self.steps: dict[int, int] = {}
        self.cluster.engine.after(PASS_S, self._plan)
        self.cluster.engine.after(1.0, self._listen)

    def submit(self, jobs: int, movable: bool = True, weight: float = 1.0) -> None:
        shape = (Role("worker", 1, TaskShape(1, 1_000, _GIB)),)
        for _ in range(jobs):
            spec = JobSpec(("train", "1000000"), shape, gpu_memory_bytes=_GIB, movable=movable, weight=weight)
            self.cluster.submit(spec)

    def received(self) -> dict[int, int]:
        """Steps done, by job."""
        jobs, gangs = self.cluster.state.jobs, self.cluster.physics.gangs.values()
        return {n: max([gang.step for gang in gangs if gang.uid == job.uid], default=0) for n, job in jobs.items()}

    def figures(self, kind: str) -> list[dict[str, str]]:
        return [dict(row.figures) for row in self.cluster.master.history if row.kind == kind]

    def _listen(self) -> None:
        for number, step in self.received().items():
            if step != self.steps.get(number):
                self.steps[number] = step
                now = self.cluster.engine.now
                self.rates.record(number, ProgressReport(step, now), now)
        self.cluster.engine.after(1.0, self._listen)

    def _plan(self) -> None:
        state, now, before = self.cluster.state, self.cluster.engine.now, self.remembered
        table = LiveTable()
        for job in state.jobs.values():
            message = scheduling_pb2.LiveJob()
            live_job_to_wire(job, state.gangs.get(job.epoch), message)
            told, gang = live_job_from_wire(message)
            table.put(told, gang)
            self.rates.put(told, gang, 0, now)
        view = state.view.copy()
        context = context_of(
            POLICY,
            table,
            CapacityIndex(view),
            now,
            settings=PlannerSettings(capacity=Capacity(4 * len(state.nodes), math.inf, math.inf, 4), look_s=QUANTUM_S),
            cluster=ClusterChange(view, draining=tuple(state.nodes.draining)),
            rates=self.rates,
            may_preempt=False,
        )
        found, self.remembered, _ = plan_shared(context, before, QUANTUM_S)
        if not found.changes:
            moved, self.moving, _, _ = plan_moves(lambda _, found=found: found, context, self.moving, makes_room=False)
            found = moved
        if found.changes:
            answer = self.cluster.ask(ProposePlan(found.changes))
            refused = {one.number for one in answer.verdicts if not one.approved}  # type: ignore[union-attr]
            self.remembered = self.remembered.without(before, refused)
        self.cluster.engine.after(PASS_S, self._plan)


def jain(values: list[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def over(drive: Shared, quanta: float) -> dict[int, int]:
    """Steps of each in a window of so many quanta."""
    before = drive.received()
    drive.cluster.run_for(quanta * QUANTUM_S)
    return {number: steps - before.get(number, 0) for number, steps in drive.received().items()}


def test_of_six_jobs_on_four_devices_all_have_the_same_time_in_the_end() -> None:
    """Gandiva's figure 9."""
    drive = Shared(1)
    drive.submit(6)
    drive.cluster.run_for(5 * QUANTUM_S)
    steps = over(drive, 40)
    assert jain([float(own) for own in steps.values()]) >= 0.99, steps
    assert {one["goal"] for one in drive.figures("move_begun")} == {"FAIRNESS"}
    assert not drive.figures("move_aborted")


def test_a_job_of_more_weight_has_more_time() -> None:
    drive = Shared(1)
    drive.submit(2, weight=1.5)
    drive.submit(4)
    drive.cluster.run_for(5 * QUANTUM_S)
    steps = over(drive, 40)
    jobs = drive.cluster.state.jobs
    assert jain([own / jobs[number].spec.weight for number, own in steps.items()]) >= 0.99, steps


def test_a_job_that_is_not_movable_stays_where_it_is() -> None:
    drive = Shared(1)
    drive.submit(6, movable=False)
    steps = over(drive, 15)
    assert drive.figures("move_begun") == []
    assert jain([float(own) for own in steps.values()]) < 0.95


def test_where_all_have_equal_neighbours_no_job_is_migrated() -> None:
    drive = Shared(1)
    drive.submit(8)
    steps = over(drive, 15)
    assert drive.figures("move_begun") == []
    assert jain([float(own) for own in steps.values()]) >= 0.99


def drained(nodes: int, jobs: int) -> Shared:
    drive = Shared(nodes)
    drive.submit(jobs)
    drive.cluster.run_for(3 * QUANTUM_S)
    drive.cluster.ask(DrainNode("n1", "a new fan"))
    assert drive.cluster.run_until(lambda: not drive.cluster.state.gangs.places_on.get("n1"), 30 * QUANTUM_S)
    return drive


def test_a_node_is_drained_of_time_sliced_jobs_and_no_job_is_restarted() -> None:
    drive = drained(nodes=2, jobs=9)
    state = drive.cluster.state
    assert sorted(state.jobs) == list(range(1, 10))
    assert all(state.gangs[job.epoch].nodes == ("n2",) for job in state.jobs.values())
    assert [job.preemptions + job.failures for job in state.jobs.values()] == [0] * 9
    steps = over(drive, 10)
    assert min(steps.values()) > 0


def test_a_time_sliced_job_without_another_place_is_saved_on_storage_and_resumes_once_there_is_room() -> None:
    drive = drained(nodes=1, jobs=6)
    state = drive.cluster.state
    saved = {number: job.checkpoint.step for number, job in state.jobs.items() if job.checkpoint is not None}
    assert sorted(saved) == list(range(1, 7))
    assert all(job.state is JobState.PENDING for job in state.jobs.values())
    drive.cluster.ask(UncordonNode("n1"))
    drive.cluster.run_for(10 * QUANTUM_S)
    assert all(step > saved[number] for number, step in drive.received().items())
    assert [job.failures for job in state.jobs.values()] == [0] * 6
