"""Which jobs are time-sliced together, over a real state fed by messages: every proposed change is approved."""

from __future__ import annotations

from typing import Any

import pytest
from core.drive import GIB, SERVER, Drive, job_of
from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.claims import split_cores
from ganger.cluster.refusals import Reason
from ganger.cluster.resources import Claim, ConfigurationSet
from ganger.job_state import JobState
from ganger.v1 import scheduling_pb2
from ganger_master.core.answers import JobAnswer, PlanAnswer, SessionAnswer
from ganger_master.core.commands import (
    CancelJob,
    CordonNode,
    Observe,
    ObservedGang,
    ObservedSlices,
    OpenSession,
    ProposePlan,
    ResumeJob,
    SuspendJob,
    UncordonNode,
)
from ganger_master.core.explain import explain, reported_blockers
from ganger_master.core.gang_model import GangIntent, ObservedPhase
from ganger_master.core.job_model import Capabilities, SuspendLevel
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.plan_changes import Goal, PlanChange, StartChange, SuspendChange
from ganger_master.core.settings import CoreSettings
from ganger_master.planner import matrices, sharing_stage
from ganger_master.planner.context import ClusterChange, context_of
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.plan_pace import NONE_EXCLUDED, ExcludedJobs
from ganger_master.planner.sharing_stage import plan_matrices
from ganger_master.planner.timeslice_shares import NOTHING, Fairness, SlicedJob, rows_of
from ganger_master.policies import policy_named
from ganger_master.rpc import planner_messages
from ganger_master.rpc.planner_messages import live_job_from_wire, live_job_to_wire
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

POLICY = policy_named("gandiva")


class Sharing(Drive):
    """Nodes whose daemons switch rows, and make each new matrix the active one at once, unless they are slow."""

    is_slow = False

    def __init__(self, nodes: int = 1) -> None:
        super().__init__(nodes, CoreSettings(policy="gandiva"))

    def join(self, node: str, server: ConfigurationSet = SERVER) -> None:
        answer = self.step(OpenSession(node, f"machine-{node}", server, capabilities={"rotation": "yes"}))
        assert isinstance(answer, SessionAnswer)
        self.sessions[node] = answer.session
        self.observe(node, version=0)

    def observe(self, node: str, *gangs: ObservedGang, version: int | None = None) -> object:  # type: ignore[override]
        self.observations += 1
        desired = self.state.desired.of(node)
        applied = desired.version if version is None else version
        late = 1 if self.is_slow else 0
        rows = tuple(
            [ObservedSlices(rows.node_set, rows.matrix.version - late, rows.matrix.version) for rows in desired.rows]
        )
        command = Observe(node, self.sessions[node], self.observations, applied, gangs, storage_proved=True, rows=rows)
        return self.step(command)

    def others(self, node: str, epoch: int) -> list[ObservedGang]:
        found = [gang for gang in self.on(node) if gang.epoch != epoch]
        return [self.reported(gang, node) or self.report(gang, ObservedPhase.STARTING) for gang in found]

    def plan(
        self, quantum_s: float | None = 60.0, kept_out: ExcludedJobs = NONE_EXCLUDED, fairness: Fairness = NOTHING
    ) -> tuple[PlanChange, ...]:
        table = LiveTable()
        for job in self.state.jobs.values():
            message = scheduling_pb2.LiveJob()
            live_job_to_wire(job, self.state.gangs.get(job.epoch), message)
            table.put(*live_job_from_wire(message))
        view = self.state.view.copy()
        rows = [replace(row, version=0) for row in view.rows()]
        changing = [one.number for one in self.state.gangs.sets.values() if one.coming is not None]
        cluster = ClusterChange(view, changing=frozenset(changing))
        context = context_of(POLICY, table, CapacityIndex(view), self.now, cluster=cluster, excluded=kept_out)
        found = plan_matrices(context, quantum_s, fairness=fairness)
        assert rows == [replace(row, version=0) for row in view.rows()], "the view is left as it was"
        return found.changes

    def go_on(self) -> list[str]:
        """Proposes what a pass finds, and lets what starts run."""
        changes = self.plan()
        told = scheduling_pb2.Plan(changes=[planner_messages.change_to_wire(change) for change in changes])
        answer = self.step(ProposePlan(planner_messages.plan_from_wire(told).changes))
        assert isinstance(answer, PlanAnswer)
        assert all(verdict.approved for verdict in answer.verdicts), answer
        for change in changes:
            if change.kind in ("START", "ROW", "RESUME"):
                self.runs(change.number)
        return sorted(change.kind for change in changes)

    def submitted(self, *specs: JobSpec) -> list[int]:
        return [self.submit(spec) for spec in specs]

    @property
    def rows(self) -> list[list[int]]:
        """Of the only node set, by job."""
        (node_set,) = self.state.gangs.sets.values()
        return [[self.state.gangs[epoch].job for epoch in row] for row in node_set.newest.rows]


def test_a_job_that_finds_no_free_devices_is_time_sliced_with_a_running_one() -> None:
    drive = Sharing()
    first, second = drive.submitted(job_of(4), job_of(4))
    assert drive.go_on() == ["START"]
    assert drive.go_on() == ["ROW", "ROW"]
    assert drive.rows == [[first], [second]]
    assert drive.plan() == ()


def test_of_more_pending_jobs_than_a_plan_considers_the_first_start_at_once_and_the_others_with_the_next_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sharing_stage, "_WAITING_MOST", 2)
    drive = Sharing()
    first, second, third = drive.submitted(job_of(1), job_of(1), job_of(1))
    assert [change.number for change in drive.plan()] == [first, second]
    assert drive.go_on() == ["START", "START"]
    assert [change.number for change in drive.plan()] == [third]


def test_a_job_joins_a_changing_time_slice_group_once_the_change_is_done() -> None:
    drive = Sharing()
    drive.submitted(job_of(4, GIB), job_of(4, GIB))
    drive.go_on()
    drive.go_on()
    drive.is_slow = True
    drive.submit(job_of(4, GIB))
    assert drive.go_on() == ["ROW"] * 3
    drive.submit(job_of(4, GIB))
    assert drive.plan() == ()
    drive.is_slow = False
    drive.runs(1)
    assert drive.go_on() == ["ROW"] * 4


def test_without_a_quantum_no_job_is_time_sliced() -> None:
    drive = Sharing()
    drive.submitted(job_of(4), job_of(4))
    assert drive.go_on() == ["START"]
    assert drive.plan(quantum_s=None) == ()


def test_six_on_four_take_turns_and_no_device_idles_in_any_row() -> None:
    drive = Sharing()
    numbers = drive.submitted(*[job_of(1, GIB)] * 6)
    drive.go_on()
    drive.go_on()
    assert {number for row in drive.rows for number in row} >= {numbers[4], numbers[5]}
    masks = {number: drive.state.gangs[drive.job(number).epoch].claims[0].device_mask for number in numbers}
    shared = masks[numbers[4]] | masks[numbers[5]]
    assert shared.bit_count() == 2, "the two that came last are on devices of two others"
    for row in drive.rows:
        assert sum(masks[number] for number in row) == shared
    assert drive.state.rows["n1"].free_mask == 0


@pytest.mark.parametrize(
    "waiting",
    [
        (),
        (replace(job_of(1), time_limit_s=60.0),),
        (replace(job_of(1), preemptible=False), replace(job_of(1), priority=-1)),
    ],
    ids=["no job", "one with a time limit", "one that is not to be suspended and one of lower priority"],
)
def test_a_job_behind_its_share_moves_to_one_ahead_whatever_jobs_wait_in_vain(waiting: tuple[JobSpec, ...]) -> None:
    drive = Sharing()
    numbers = drive.submitted(*[job_of(1, GIB)] * 6)
    drive.go_on()
    drive.go_on()
    drive.submitted(*waiting)
    masks = {number: drive.state.gangs[drive.job(number).epoch].claims[0].device_mask for number in numbers}
    alone = {number for number, mask in masks.items() if list(masks.values()).count(mask) == 1}
    behind_s = {number: -200.0 if number in alone else 100.0 for number in numbers}
    drive.now += 1_000.0
    fairness = Fairness(behind_s=behind_s, since_s=dict.fromkeys(numbers, 0.0))
    changes = drive.plan(fairness=fairness)
    gone = {change.number: change.claims[0].device_mask for change in changes if change.purpose.goal is Goal.FAIRNESS}
    assert len(gone) == 2, changes
    assert set(gone.values()) == {masks[number] for number in alone}


def test_a_matrix_is_named_after_one_of_its_jobs_so_that_no_pack_of_the_same_pass_has_its_name() -> None:
    drive = Sharing(2)
    drive.submitted(*[job_of(4)] * 4)
    drive.go_on()
    changes = drive.plan()
    groups = {change.together: {one.number for one in changes if one.together == change.together} for change in changes}
    assert sorted(len(group) for group in groups.values()) == [2, 2]
    assert all(name in group for name, group in groups.items())


def test_the_next_one_to_come_goes_where_the_fewest_are() -> None:
    drive = Sharing()
    drive.submitted(*[job_of(2, GIB)] * 5)
    for _ in range(5):
        drive.go_on()
    assert sorted(drive.state.rows["n1"].device_rows) == [2, 2, 3, 3]


def test_where_one_joins_no_more_places_are_weighed_in_full_than_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Sharing(4)
    drive.submitted(*[job_of(1, GIB)] * 16)
    drive.go_on()
    drive.submit(job_of(1, GIB))
    asked = []

    def counted(*args: Any) -> tuple[int, ...] | None:
        asked.append(args)
        return split_cores(*args)

    monkeypatch.setattr(matrices, "split_cores", counted)
    assert drive.go_on() == ["ROW", "ROW"]
    assert len(asked) == 1


def test_of_places_alike_the_one_is_taken_where_the_fewest_lose_turns() -> None:
    """One of one device, of the first, and one of three: the new job needs three."""
    drive = Sharing()
    one, other = drive.submitted(job_of(1, GIB), job_of(3, GIB))
    drive.go_on()
    third = drive.submit(job_of(3, GIB))
    drive.go_on()
    assert drive.rows == [[other], [third]]
    assert not drive.state.gangs[drive.job(one).epoch].node_set


def test_a_time_sliced_job_moves_to_devices_that_become_free() -> None:
    drive = Sharing()
    one, other, third = drive.submitted(*[job_of(2, GIB)] * 3)
    drive.go_on()
    drive.go_on()
    on = drive.state.gangs[drive.job(third).epoch].claims[0].device_mask
    alone = next(n for n in (one, other) if drive.state.gangs[drive.job(n).epoch].claims[0].device_mask != on)
    drive.step(CancelJob(alone))
    drive.seen_without("n1", alone)
    (change,) = drive.plan()
    assert change.kind == "MOVE"
    assert drive.go_on() == ["MOVE"]
    number, source = change.number, drive.job(change.number).epoch
    assert drive.plan() == (), "the job that it leaves has its devices soon"
    drive.seen(number, drive.job(number).next_epoch, ObservedPhase.PREPARED)
    drive.seen(number, source, ObservedPhase.PARKED, 5)
    assert drive.state.gangs.sets == {}
    drive.seen(number, drive.job(number).next_epoch, ObservedPhase.READY, 5)
    assert drive.job(number).epoch != source
    assert drive.plan() == ()


def test_a_parked_job_without_free_devices_is_time_sliced_where_it_was() -> None:
    drive = Sharing()
    one, other = drive.submitted(*[job_of(4, GIB)] * 2)
    drive.go_on()
    revision = drive.job(one).revision
    drive.step(ProposePlan((SuspendChange(one, revision, level=SuspendLevel.OFFLOAD),)))
    drive.seen(one, drive.job(one).epoch, ObservedPhase.PARKED, 5)
    (place, *_) = drive.places(other)
    drive.step(ProposePlan((StartChange(other, drive.job(other).revision, place),)))
    drive.runs(other)
    assert drive.go_on() == ["ROW", "ROW"]
    assert drive.rows == [[other], [one]]
    assert drive.job(one).state is JobState.HOLDING


def _resting(drive: Sharing, level: SuspendLevel, gpus: int = 4) -> tuple[int, list[int]]:
    """One job that a user has suspended, and two that run in turns on its devices meanwhile."""
    (one,) = drive.submitted(job_of(gpus, GIB))
    drive.go_on()
    assert drive.step(SuspendJob(one, level)) == JobAnswer(one)
    drive.seen(one, drive.job(one).epoch, ObservedPhase.PARKED, 5)
    if level is SuspendLevel.CHECKPOINT:
        drive.seen_without("n1", one)
    others = drive.submitted(job_of(gpus, GIB), job_of(gpus, GIB))
    for _ in range(4):
        drive.go_on()
    return one, others


@pytest.mark.parametrize("level", [SuspendLevel.PAUSE, SuspendLevel.OFFLOAD, SuspendLevel.CHECKPOINT])
def test_a_job_that_its_user_resumes_runs_within_one_pass_beside_jobs_that_came_meanwhile(level: SuspendLevel) -> None:
    drive = Sharing()
    one, others = _resting(drive, level)
    assert drive.step(ResumeJob(one)) == JobAnswer(one)
    drive.go_on()
    assert drive.job(one).state is JobState.HOLDING
    assert drive.state.gangs[drive.job(one).epoch].intent is GangIntent.RUN
    for _ in range(3):
        drive.go_on()
    if level is not SuspendLevel.PAUSE:
        assert {number for row in drive.rows for number in row} == {one, *others}


def _resting_with_little(drive: Sharing, memory: int) -> int:
    """A job of four tasks that a user has suspended at OFFLOAD; of its memory it keeps a GiB."""
    one = drive.submit(job_of(4, memory // 4))
    drive.go_on()
    assert drive.step(SuspendJob(one, SuspendLevel.OFFLOAD)) == JobAnswer(one)
    gang = drive.state.gangs[drive.job(one).epoch]
    said = drive.report(gang, ObservedPhase.PARKED, 5)
    drive.observe("n1", *drive.others("n1", gang.epoch), replace(said, kept_memory_bytes=GIB))
    return one


def _free_memory(drive: Sharing) -> int:
    return drive.state.rows["n1"].free_memory_bytes


def test_a_job_that_came_later_gives_its_host_memory_to_a_resumed_one_and_waits() -> None:
    drive = Sharing()
    one = _resting_with_little(drive, 8 * GIB)
    (other,) = drive.submitted(job_of(4, 12 * GIB))
    drive.go_on()
    assert _free_memory(drive) < 7 * GIB
    drive.step(ResumeJob(one))
    (change,) = drive.plan()
    assert (change.kind, change.number, change.level) == ("SUSPEND", other, SuspendLevel.CHECKPOINT)
    assert (change.purpose.goal, change.purpose.job) == (Goal.HOLE, one)
    drive.go_on()
    (last,) = drive.submitted(job_of(4, 12 * GIB))
    assert drive.plan() == (), "the memory that is on its way suffices, and is for the resumed job"
    drive.seen_without("n1", other)
    assert drive.go_on() == ["START"]
    assert drive.state.gangs[drive.job(one).epoch].intent is GangIntent.RUN
    for _ in range(3):
        drive.go_on()
    assert {drive.job(other).state, drive.job(last).state} == {JobState.PENDING}


def test_of_the_jobs_that_came_later_only_so_many_give_their_memory_as_are_needed_and_the_last_first() -> None:
    drive = Sharing()
    one = _resting_with_little(drive, 8 * GIB)
    others = drive.submitted(job_of(2, 12 * GIB), job_of(2, 12 * GIB))
    drive.go_on()
    assert _free_memory(drive) < 7 * GIB
    drive.step(ResumeJob(one))
    assert [change.number for change in drive.plan()] == [others[1]]


def test_jobs_that_came_before_a_resumed_one_keep_their_host_memory() -> None:
    drive = Sharing()
    (first,) = drive.submitted(job_of(4, 12 * GIB))
    drive.go_on()
    assert drive.step(SuspendJob(first, SuspendLevel.CHECKPOINT)) == JobAnswer(first)
    drive.seen(first, drive.job(first).epoch, ObservedPhase.PARKED, 5)
    drive.seen_without("n1", first)
    one = _resting_with_little(drive, 8 * GIB)
    drive.step(ResumeJob(first))
    assert drive.go_on() == ["START"]
    drive.step(ResumeJob(one))
    assert drive.plan() == ()


def test_a_resumed_job_whose_memory_others_have_is_not_proposed_until_they_give_it_back() -> None:
    drive = Sharing()
    one = _resting_with_little(drive, 8 * GIB)
    (other,) = drive.submitted(job_of(4, 12 * GIB))
    drive.go_on()
    gang = drive.state.gangs[drive.job(other).epoch]
    said = replace(drive.report(gang, ObservedPhase.RUNNING), capabilities=Capabilities(offload=True, known=True))
    drive.observe("n1", *drive.others("n1", gang.epoch), said)
    assert _free_memory(drive) < 7 * GIB
    drive.step(ResumeJob(one))
    assert drive.plan() == (), "the other offers no checkpoint; the master would refuse the group in every pass"
    drive.step(CancelJob(other))
    drive.seen_without("n1", other)
    drive.go_on()
    assert drive.state.gangs[drive.job(one).epoch].intent is GangIntent.RUN


def test_why_names_the_host_memory_that_a_resumed_job_lacks_where_it_rests() -> None:
    drive = Sharing()
    one = _resting_with_little(drive, 8 * GIB)
    drive.submitted(job_of(4, 10 * GIB), job_of(4, GIB))
    drive.go_on()
    drive.go_on()
    assert drive.state.gangs.sets
    drive.step(ResumeJob(one))
    blockers = explain(drive.state, one, drive.now).blockers
    assert blockers[0].reason is Reason.MEMORY
    assert blockers[0].figures["needed_bytes"] > blockers[0].figures["free_bytes"] == _free_memory(drive)
    assert reported_blockers(drive.state, drive.job(one), drive.now)[0].reason is Reason.MEMORY


def test_a_job_that_joins_is_not_given_the_memory_that_a_resumed_job_takes_back() -> None:
    drive = Sharing()
    one = _resting_with_little(drive, 8 * GIB)
    (other,) = drive.submitted(job_of(4, GIB))
    drive.go_on()
    arena = sum(claim.arena_bytes for claim in drive.state.gangs[drive.job(other).epoch].claims)
    left = _free_memory(drive) - arena
    drive.step(ResumeJob(one))
    drive.submitted(job_of(4, (left - GIB) // 4))
    assert drive.go_on() == ["ROW", "ROW"]
    assert drive.rows == [[other], [one]]


def test_a_resumed_job_whose_devices_went_to_one_that_takes_no_turns_joins_others_elsewhere() -> None:
    drive = Sharing(2)
    (one,) = drive.submitted(job_of(4, GIB))
    drive.go_on()
    (home,) = drive.state.gangs[drive.job(one).epoch].nodes
    (other,) = {"n1", "n2"} - {home}
    drive.step(SuspendJob(one, SuspendLevel.OFFLOAD))
    drive.seen(one, drive.job(one).epoch, ObservedPhase.PARKED, 5)
    drive.step(CordonNode(other, "test"))
    drive.submitted(LIMITED)
    assert drive.go_on() == ["START"]
    drive.step(UncordonNode(other))
    drive.submitted(job_of(4, GIB))
    assert drive.go_on() == ["START"]
    drive.step(ResumeJob(one))
    assert drive.go_on() == ["ROW", "ROW"]
    assert drive.state.gangs[drive.job(one).next_epoch].nodes == (other,)
    assert drive.job(one).state is JobState.HOLDING


def test_a_parked_job_that_is_not_time_sliced_waits_for_its_own_devices_and_delays_no_other_job() -> None:
    drive = Sharing()
    one, other = drive.submitted(LIMITED, job_of(4, GIB))
    drive.go_on()
    drive.step(ProposePlan((SuspendChange(one, drive.job(one).revision, level=SuspendLevel.OFFLOAD),)))
    drive.seen(one, drive.job(one).epoch, ObservedPhase.PARKED, 5)
    (place, *_) = drive.places(other)
    drive.step(ProposePlan((StartChange(other, drive.job(other).revision, place),)))
    drive.runs(other)
    third = drive.submit(job_of(4, GIB))
    assert drive.go_on() == ["ROW", "ROW"]
    assert drive.rows == [[other], [third]]


def test_no_job_is_time_sliced_with_one_that_cannot_stop_or_has_another_priority() -> None:
    for spec in (
        replace(job_of(4), preemptible=False),
        replace(job_of(4), priority=1),
        replace(job_of(4), time_limit_s=60.0),
    ):
        drive = Sharing()
        drive.submitted(job_of(4), spec)
        number = drive.submit(job_of(4)) if spec.priority else 0
        drive.go_on()
        if not spec.priority:
            assert drive.plan() == ()
        else:
            assert {change.number for change in drive.plan()}.isdisjoint({2} - {number})


LIMITED = replace(job_of(4), time_limit_s=60.0)
OUTSTAYED = Capabilities(offload=True, known=True).without_turns("it did not stop at the end of its time slice")


@pytest.mark.parametrize("which", [0, 1], ids=["it runs, and no job joins it", "it waits"])
def test_a_job_that_did_not_stop_after_its_slice_has_devices_of_its_own(which: int) -> None:
    drive = Sharing()
    numbers = drive.submitted(job_of(4), job_of(4))
    drive.go_on()
    drive.state.put_job(replace(drive.job(numbers[which]), capabilities=OUTSTAYED))
    assert drive.plan() == ()


@pytest.mark.parametrize(
    ("spec", "capabilities", "why"),
    [
        (replace(job_of(4), preemptible=False), Capabilities(), "it is not to be suspended"),
        (LIMITED, Capabilities(), "it has a time limit, which goes on while it rests"),
        (job_of(4), OUTSTAYED, "it did not stop at the end of its time slice"),
    ],
)
def test_a_pending_job_reports_why_it_is_not_time_sliced_where_others_are(
    spec: JobSpec, capabilities: Capabilities, why: str
) -> None:
    drive = Sharing()
    drive.submitted(job_of(4), job_of(4))
    drive.go_on()
    drive.go_on()
    number = drive.submit(spec)
    drive.state.put_job(replace(drive.job(number), capabilities=capabilities))
    drive.state.queue.ranks[number] = 1
    lacks, told = reported_blockers(drive.state, drive.job(number), drive.now)
    assert (lacks.reason, lacks.figures) == (Reason.GPUS, {"needed": 4, "free": 0})
    assert told.reason is Reason.RANKED
    assert told.detail.endswith(f"; it is not time-sliced, because {why}")


def test_what_was_refused_is_not_asked_again_at_once() -> None:
    drive = Sharing()
    _, second = drive.submitted(job_of(4), job_of(4))
    drive.go_on()
    assert drive.plan(kept_out=ExcludedJobs(not_started=frozenset({second}))) == ()


def test_gangs_over_several_nodes_take_turns_with_each_other() -> None:
    drive = Sharing(2)
    first, second = drive.submitted(job_of(8, GIB), job_of(8, GIB))
    drive.go_on()
    assert drive.go_on() == ["ROW", "ROW"]
    (node_set,) = drive.state.gangs.sets.values()
    assert node_set.nodes == ("n1", "n2")
    assert drive.rows == [[first], [second]]


def counted(gangs: list[tuple[int, float]]) -> tuple[int, list[int]]:
    """(rows, in how many of them each is) of gangs of so many devices, as a mask, and such weights."""
    drive = Drive()
    sharers = []
    for mask, weight in gangs:
        job = drive.job(drive.submit(replace(job_of(1), weight=weight)))
        sharers.append(SlicedJob(job, None, (Claim("n1", mask, (0, 0), GIB, 0, (mask.bit_count(),)),)))
    rows = rows_of(sharers, {"n1": (6_000, 0)})
    return len(rows), [sum(one in row for row in rows) for one in sharers]


@pytest.mark.parametrize(
    ("weights", "turns"),
    [
        ([], []),
        ([1.0, 1.0, 1.0], [1, 1, 1]),
        ([0.5, 0.5], [1, 1]),
        ([2.0, 1.0], [2, 1]),
        ([3.0, 2.0, 2.0], [3, 2, 2]),
        ([1.0, 1.5], [2, 3]),
        ([100.0, 1.0], [11, 1]),
        ([1.0, 1.01], [1, 1]),
    ],
)
def test_a_weight_is_so_many_turns_of_a_cycle(weights: list[float], turns: list[int]) -> None:
    assert counted([(0b1, weight) for weight in weights]) == (sum(turns), turns)


def test_shares_on_a_device_are_as_the_weights_whatever_there_is_on_others() -> None:
    assert counted([(0b1, 1.0), (0b1, 1.0), (0b10, 1.0), (0b10, 2.0)]) == (6, [3, 3, 2, 4])
    assert counted([(0b1, 1.0)] * 3 + [(0b10, 1.0)] * 2) == (6, [2, 2, 2, 3, 3])
    assert counted([(0b1, 1.0), (0b10, 1.0), (0b1, 1.0)]) == (2, [1, 2, 1])


def test_a_job_that_needs_too_many_cores_has_slices_of_its_own() -> None:
    drive = Drive()
    jobs = [drive.job(drive.submit(job_of(1))) for _ in range(2)]
    sharers = [SlicedJob(job, None, (Claim("n1", 1 << at, (9_000, 0), GIB, 0, (1,)),)) for at, job in enumerate(jobs)]
    assert rows_of(sharers, {"n1": (6_000, 0)}) == [[sharers[0]], [sharers[1]]]


def test_a_job_of_twice_the_weight_gets_two_slices_of_three() -> None:
    drive = Sharing()
    heavy, light = drive.submitted(replace(job_of(4, GIB), weight=2.0), job_of(4, GIB))
    drive.go_on()
    assert drive.go_on() == ["ROW", "ROW"]
    assert sorted(drive.rows) == [[heavy], [heavy], [light]]


@given(st.lists(st.tuples(st.integers(1, 15), st.integers(1, 4)), min_size=1, max_size=6))
def test_slices_contain_every_job_and_no_device_or_core_twice(wanted: list[tuple[int, int]]) -> None:
    drive = Drive()
    jobs = [drive.job(drive.submit(job_of(1))) for _ in wanted]
    sharers = []
    for job, (mask, cores) in zip(jobs, wanted, strict=True):
        claims = (Claim("n1", mask, (cores * 1000, 0), GIB, 0, (mask.bit_count(),)),)
        sharers.append(SlicedJob(job, None, claims))
    rows = rows_of(sharers, {"n1": (6_000, 0)})
    assert {one.number for row in rows for one in row} == {one.number for one in sharers}
    for row in rows:
        assert len({one.number for one in row}) == len(row)
        assert sum(one.claims[0].device_mask.bit_count() for one in row) == len(set().union(*[o.devices for o in row]))
        assert sum(one.claims[0].millicores[0] for one in row) <= 6_000
    for row in rows:
        idle = [one for one in sharers if one not in row and not any(one.devices & other.devices for other in row)]
        cores = sum(one.claims[0].millicores[0] for one in row)
        assert all(cores + one.claims[0].millicores[0] > 6_000 for one in idle), "it could have run, too"
