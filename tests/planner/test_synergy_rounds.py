"""Rounds of Synergy's tunings at the pace of a live planner: one plan gives each gang its cores, its memory and its
place; what it stops starts again in its new place; and no job is below its share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest
from core.drive import GIB, job_of
from ganger.cluster.resources import Locality, LocalityLevel, Role, TaskShape
from ganger.job_state import JobState
from ganger_master.core.answers import PlanAnswer
from ganger_master.core.commands import CancelJob, CordonNode, ProposePlan
from ganger_master.core.gang_model import GangIntent, ObservedPhase
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.node_model import Reservation
from ganger_master.planner.context import ClusterChange, PlannerSettings, PlanVerdict
from ganger_master.planner.loop import PlannerLoop
from ganger_master.planner.plan_pace import PlanPace
from ganger_master.planner.rate_registry import JobRates
from ganger_master.policies import live_policy_named
from ganger_master.policies.tunings import Known, Profiles
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from planner.test_passes import Planned

EVERY_S = 300.0
CORES = np.arange(1.0, 17.0)


class Measured(JobRates):
    """Rates that are known already: in proportion to the cores for each GPU, up to so many by job number."""

    def __init__(self, uses: Mapping[int, float]) -> None:
        self._uses = uses

    @property
    def known(self) -> Known:
        uses = np.array([self._uses[number] for number in sorted(self._uses)] or [1.0])
        rates = np.minimum(CORES, uses[:, None])[:, :, None]
        at = {number: place for place, number in enumerate(sorted(self._uses))}
        return Known(
            Profiles(CORES, np.ones(1), rates),
            lambda numbers: np.array([at.get(number, -1) for number in numbers.tolist()], np.int64),
            knows_memory=False,
        )


class Rounds(Planned):
    """A cluster of nodes with 4 GPUs and 16 cores, and the loop of a live planner."""

    def __init__(self, policy: str, nodes: int = 1) -> None:
        super().__init__(nodes, policy)
        self.uses: dict[int, float] = {}
        pace = PlanPace(EVERY_S, least_rest_s=0.0, least_alone_s=0.0)
        self.loop = PlannerLoop(live_policy_named(policy), PlannerSettings(pace), Measured(self.uses))

    def add(self, gpus: int = 1, uses: float | None = None, **fields: object) -> int:
        spec = JobSpec(("train",), (Role("worker", gpus, TaskShape(1)),), gpu_memory_bytes=GIB, **fields)  # type: ignore[arg-type]
        number = self.submit(spec)
        if uses is not None:
            self.uses[number] = uses
        return number

    def plans(self) -> list[tuple[str, int]]:
        """Propose what is due now; every change must be approved."""
        jobs = [(*self.as_received(job), 0) for job in self.state.jobs.values()]
        view = self.state.view.copy()
        self.loop.observe(ClusterChange(view, jobs, is_whole=True), self.now)
        plan, _ = self.loop.step(self.now)
        if plan is None:
            return []
        answer = self.step(ProposePlan(plan.changes))
        assert isinstance(answer, PlanAnswer)
        assert all(verdict.approved for verdict in answer.verdicts), answer
        self.loop.observe(PlanVerdict(answer.verdicts), self.now)
        return [(change.kind, change.number) for change in plan.changes]

    def all_begin(self) -> None:
        """Every gang that is to run steps."""
        for node in self.sessions:
            gangs = [gang for gang in self.on(node) if gang.intent is GangIntent.RUN]
            self.observe(node, *[self.report(gang, ObservedPhase.RUNNING) for gang in gangs])
        self.now += 10.0

    def place(self, number: int) -> tuple[str, float]:
        """Node, and cores for each GPU there."""
        (claim,) = self.state.gangs[self.job(number).epoch].claims
        return claim.node, sum(claim.millicores) / 1000 / claim.device_mask.bit_count()

    @property
    def running(self) -> list[int]:
        return [number for number, job in self.state.jobs.items() if job.epoch and job.state is JobState.HOLDING]


@pytest.mark.parametrize("tuning", ["synergy-greedy", "synergy-tune", "synergy-opt"])
def test_one_plan_gives_all_jobs_their_places_with_the_cores_that_they_use(tuning: str) -> None:
    drive = Rounds(f"las+{tuning}", nodes=2)
    hungry = [drive.add(uses=7.0) for _ in range(4)]
    modest = [drive.add(uses=1.0) for _ in range(4)]
    assert sorted(drive.plans()) == [("START", number) for number in (*hungry, *modest)]
    assert [drive.place(number)[1] for number in (*hungry, *modest)] == [7.0] * 4 + [1.0] * 4
    assert Counter(drive.place(number)[0] for number in hungry) == {"n1": 2, "n2": 2}, "three would lack cores"


# By tuning: how many of three jobs that use 7 cores and one that uses 1 run on 4 GPUs with 16 cores; the least that one
# of the first has. Greedy gives whole demands only, in order.
CROWDED = {"synergy-greedy": (3, 7.0), "synergy-tune": (4, 4.0), "synergy-opt": (4, 4.0)}


@pytest.mark.parametrize("tuning", CROWDED)
def test_where_cores_are_short_greedy_lets_jobs_wait_and_the_others_none(tuning: str) -> None:
    drive = Rounds(f"las+{tuning}")
    hungry, modest = [drive.add(uses=7.0) for _ in range(3)], drive.add(uses=1.0)
    drive.plans()
    cores = [drive.place(number)[1] for number in hungry if number in drive.running]
    assert (len(drive.running), min(cores)) == CROWDED[tuning]
    assert drive.place(modest)[1] == 1.0


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([1, 1, 2, 4]), st.sampled_from([None, 1.0, 3.0, 6.0, 12.0])), min_size=1, max_size=8
    ),
    st.sampled_from(["las+synergy-tune", "las+synergy-opt", "fifo+synergy-greedy"]),
)
def test_no_job_of_a_round_is_slower_than_with_its_share(jobs: list[tuple[int, float | None]], policy: str) -> None:
    drive = Rounds(policy, nodes=2)
    for gpus, uses in jobs:
        drive.add(gpus, uses)
    drive.plans()
    assert drive.running
    for number in drive.running:
        for claim in drive.state.gangs[drive.job(number).epoch].claims:
            cores = sum(claim.millicores) / 1000 / claim.device_mask.bit_count()
            assert cores >= min(4.0, drive.uses.get(number, 4.0)) - 0.001


def two_apart(policy: str, left: int = 2, **fields: object) -> tuple[Rounds, list[int]]:
    """So many jobs of one GPU on each of two nodes, whose other GPUs are free."""
    drive = Rounds(policy, nodes=2)
    small = [drive.add(**fields) for _ in range(8)]  # type: ignore[arg-type]
    drive.plans()
    drive.all_begin()
    by_node: dict[str, list[int]] = {}
    for number in small:
        by_node.setdefault(drive.place(number)[0], []).append(number)
    for number in [one for numbers in by_node.values() for one in numbers[left:]]:
        node = drive.place(number)[0]
        drive.step(CancelJob(number))
        drive.seen_without(node, number)
    return drive, [one for numbers in by_node.values() for one in numbers[:left]]


@pytest.mark.parametrize("policy", ["las+synergy-tune", "las+synergy-greedy", "fifo+synergy-opt"])
def test_a_round_restarts_jobs_so_that_a_gang_fits_and_later_plans_put_all_where_it_says(policy: str) -> None:
    drive, small = two_apart(policy)
    drive.plans()
    gang = drive.add(4, locality=Locality(LocalityLevel.NODE))
    assert drive.plans() == [], "the next round is not due"
    drive.now += EVERY_S
    moved = [number for kind, number in drive.plans() if kind == "SUSPEND"]
    assert len(moved) == 2
    assert set(moved) < set(small)
    newcomer = drive.add()
    assert drive.plans() == [], "two jobs are on their way, and what is free is theirs"
    for number in moved:
        drive.rests(number)
    changes = drive.plans()
    assert sorted(changes) == sorted([("START", gang), *[("START", number) for number in moved]])
    nodes = Counter(drive.place(number)[0] for number in small)
    assert sorted(nodes.values()) == [4]
    assert drive.place(gang)[0] not in nodes
    drive.all_begin()
    assert drive.plans() == []
    drive.step(CancelJob(gang))
    drive.seen_without(drive.place(gang)[0] if gang in drive.running else "n1", gang)
    assert ("START", newcomer) in drive.plans(), "between rounds jobs start where they fit"


def test_no_job_is_restarted_for_a_tighter_packing_alone() -> None:
    drive, _ = two_apart("las+synergy-tune")
    drive.now += EVERY_S
    assert drive.plans() == []


def exchanged(drive: Rounds, jobs: list[int]) -> tuple[set[int], set[int]]:
    """Let the jobs on n1 use many cores and the others few, and make the next round. Return the jobs that were on n1,
    and those that the round restarted."""
    first = {number for number in jobs if drive.place(number)[0] == "n1"}
    drive.uses |= {number: 7.0 if number in first else 1.0 for number in jobs}
    drive.now += EVERY_S
    moved = {number for kind, number in drive.plans() if kind == "SUSPEND"}
    for number in sorted(moved):
        drive.rests(number)
    drive.plans()
    return first, moved


def test_jobs_are_restarted_where_together_they_are_faster() -> None:
    drive = Rounds("las+synergy-tune", nodes=2)
    jobs = [drive.add() for _ in range(8)]
    drive.plans()
    drive.all_begin()
    first, moved = exchanged(drive, jobs)
    assert (len(moved & first), len(moved - first)) == (2, 2)
    assert {drive.place(number)[1] for number in first} == {7.0}


def test_a_running_job_that_cannot_be_packed_keeps_its_place() -> None:
    drive, _ = two_apart("las+synergy-tune")
    large = replace(job_of(1, memory=30 * GIB), preemptible=True)
    fixed = drive.submit(large)
    assert ("START", fixed) in drive.plans()
    drive.all_begin()
    before = drive.place(fixed)
    gang = drive.add(3, locality=Locality(LocalityLevel.NODE))
    drive.now += EVERY_S
    moved = [number for kind, number in drive.plans() if kind == "SUSPEND"]
    assert moved
    assert fixed not in moved
    for number in moved:
        drive.rests(number)
    drive.plans()
    assert drive.place(fixed) == before
    assert gang in drive.running


def test_a_node_that_is_removed_during_a_round_ends_the_wait_for_its_places() -> None:
    drive, _ = two_apart("las+synergy-tune")
    drive.plans()
    gang = drive.add(4, locality=Locality(LocalityLevel.NODE))
    drive.now += EVERY_S
    moved = [number for kind, number in drive.plans() if kind == "SUSPEND"]
    (emptied,) = {drive.place(number)[0] for number in moved}
    for number in moved:
        drive.rests(number)
    view = drive.state.view.copy()
    view.remove(emptied)
    jobs = [(*drive.as_received(job), 0) for job in drive.state.jobs.values()]
    drive.loop.observe(ClusterChange(view, jobs, is_whole=True), drive.now)
    plan, _ = drive.loop.step(drive.now)
    assert plan is None or gang not in [change.number for change in plan.changes]


@pytest.mark.parametrize("pending", [0, 1])
@pytest.mark.parametrize("policy", ["las+synergy-tune", "las+synergy-greedy", "fifo+synergy-opt"])
def test_while_no_node_takes_jobs_a_round_changes_nothing(policy: str, pending: int) -> None:
    drive, _ = two_apart(policy)
    drive.plans()
    drive.all_begin()
    for node in ("n1", "n2"):
        drive.step(CordonNode(node, "disks"))
    for _ in range(pending):
        drive.add()
    drive.now += EVERY_S
    assert drive.plans() == []


def test_a_reservation_that_begins_during_a_round_ends_the_wait_for_places_on_its_nodes() -> None:
    drive, _ = two_apart("las+synergy-tune")
    drive.plans()
    gang = drive.add(4, locality=Locality(LocalityLevel.NODE))
    drive.now += EVERY_S
    moved = [number for kind, number in drive.plans() if kind == "SUSPEND"]
    (emptied,) = {drive.place(number)[0] for number in moved}
    for number in moved:
        drive.rests(number)
    reserved = Reservation("paper", (emptied,), drive.now - 1.0, drive.now + 60.0, ("ann",))
    jobs = [(*drive.as_received(job), 0) for job in drive.state.jobs.values()]
    drive.loop.observe(ClusterChange(drive.state.view.copy(), jobs, is_whole=True, reservations=(reserved,)), drive.now)
    plan, _ = drive.loop.step(drive.now)
    assert plan is None or gang not in [change.number for change in plan.changes]


# Jobs that the packing cannot place, as it splits gangs by single GPUs: of two roles; on two nodes; of wider tasks.
UNPACKABLE = {
    "roles": ({"roles": (Role("worker", 2, TaskShape(1)), Role("server", 1, TaskShape(0, 0, GIB)))}, 2),
    "nodes": ({"roles": (Role("worker", 2, TaskShape(1)),), "nodes": 2}, 1),
    "wide tasks": ({"roles": (Role("worker", 2, TaskShape(2)),)}, 0),
    "a whole node": ({"roles": (Role("worker", 1, TaskShape(4)),)}, 2),
}


@pytest.mark.parametrize(("fields", "restarts"), UNPACKABLE.values(), ids=list(UNPACKABLE))
@pytest.mark.parametrize("policy", ["las+synergy-tune", "las+synergy-greedy", "fifo+synergy-opt"])
def test_a_round_has_a_place_for_a_job_that_cannot_be_packed_and_packs_the_others_around_it(
    policy: str, fields: dict[str, object], restarts: int
) -> None:
    drive, small = two_apart(policy)
    drive.plans()
    odd = drive.submit(JobSpec(("train",), gpu_memory_bytes=GIB, **fields))  # type: ignore[arg-type]
    others = [drive.add(2, locality=Locality(LocalityLevel.NODE))] if drive.job(odd).gpus == 2 else []
    drive.now += EVERY_S
    moved = [number for kind, number in drive.plans() if kind == "SUSPEND"]
    assert len(moved) <= restarts
    for number in moved:
        drive.rests(number)
    drive.plans()
    waiting = {*small, odd, *others}.difference(drive.running)
    assert odd not in waiting
    # It gives whole demands only, and the server has some of a node's memory.
    assert len(waiting) <= (policy == "las+synergy-greedy")


def test_a_job_that_fits_nowhere_keeps_no_round_from_the_others() -> None:
    # One job on each node is never stopped.
    drive, fixed = two_apart("las+synergy-tune", 1, preemptible=False)
    jobs = [drive.add() for _ in range(6)]
    drive.now += EVERY_S
    drive.plans()
    drive.all_begin()
    odd = drive.submit(JobSpec(("train",), (Role("worker", 1, TaskShape(4)),), gpu_memory_bytes=GIB))
    first, moved = exchanged(drive, jobs)
    assert (len(moved & first), len(moved - first)) == (1, 1)
    assert drive.running == sorted([*fixed, *jobs])
    assert drive.job(odd).state is JobState.PENDING


def test_a_round_is_made_however_many_jobs_that_fit_nowhere_go_first() -> None:
    # One job on each node is never stopped.
    drive, fixed = two_apart("fifo+synergy-tune", 1, preemptible=False)
    spec = JobSpec(("train",), (Role("worker", 1, TaskShape(4)),), gpu_memory_bytes=GIB)
    for _ in range(1100):
        drive.submit(spec)
    job = drive.add()
    drive.now += EVERY_S
    assert drive.plans() == [("START", job)]
    assert drive.running == sorted([*fixed, job])
