"""Jobs that have never run get time slices beside running jobs, then wait in the queue. Every change is approved."""

from __future__ import annotations

import pytest
from core.drive import GIB, SERVER, job_of
from ganger.cluster.capacity_index import CapacityIndex
from ganger.job_state import JobState
from ganger_master.core.answers import PlanAnswer
from ganger_master.core.commands import CancelJob, ProposePlan
from ganger_master.core.gang_model import ObservedPhase
from ganger_master.core.job_model import Capabilities
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.plan_changes import StartChange
from ganger_master.planner.context import ClusterChange, PlanContext, PlanDraft, context_of
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.sharing_under_order import NewcomerStage
from ganger_master.policies import policy_named
from msgspec.structs import replace
from planner.test_matrices import Sharing

QUANTUM_S = 60.0
POLICY = policy_named("tiresias+slices")
WITHOUT_STORAGE = Capabilities(known=True, pause=True, offload=True)


def light(gpus: int) -> JobSpec:
    return job_of(gpus, memory=GIB)


class Queued(Sharing):
    """A cluster whose planner serves newcomers after an order that has nothing to do."""

    on_trial = frozenset[int]()
    # The job whose programs take long to start.
    starting = 0

    def __init__(self, nodes: int = 1) -> None:
        super().__init__(nodes)
        self.stage = NewcomerStage()

    def context(self, draft: PlanDraft | None = None) -> PlanContext:
        table = LiveTable()
        for job in self.state.jobs.values():
            table.put(job, self.state.gangs.get(job.epoch))
        view = self.state.view.copy()
        changing = frozenset([one.number for one in self.state.gangs.sets.values() if one.coming is not None])
        cluster = ClusterChange(view, quantum_s=QUANTUM_S, changing=changing)
        context = context_of(POLICY, table, CapacityIndex(view), self.now, cluster=cluster, on_trial=self.on_trial)
        if draft is not None:
            context.draft = draft
        return context

    def serve(self) -> list[tuple[str, int]]:
        """Return what the stage proposes now, which is approved; what starts runs."""
        context = self.context()
        self.stage.plan(context)
        answer = self.step(ProposePlan(context.draft.changes))
        assert isinstance(answer, PlanAnswer)
        assert all(verdict.approved for verdict in answer.verdicts), answer
        for change in context.draft.changes:
            if change.kind == "ROW" and change.number != self.starting:
                self.runs(change.number)
        return sorted((change.kind, change.number) for change in context.draft.changes)

    def offer(self, capabilities: Capabilities, *numbers: int) -> None:
        """The daemon reports what these jobs offer."""
        able = {self.job(number).epoch for number in numbers}
        reports = [self.report(gang, ObservedPhase.RUNNING) for gang in self.on("n1")]
        self.observe("n1", *[replace(one, capabilities=capabilities) if one.epoch in able else one for one in reports])

    def rests(self, number: int) -> None:
        """It has been suspended on storage."""
        self.seen(number, self.job(number).epoch, ObservedPhase.PARKED, stop_step=5)
        self.seen_without("n1", number)

    def started(self, spec: JobSpec) -> int:
        number = self.submit(spec)
        (claims, *_) = self.places(number)
        answer = self.step(ProposePlan((StartChange(number, self.job(number).revision, claims),)))
        assert isinstance(answer, PlanAnswer)
        assert answer.verdicts[0].approved, answer
        self.runs(number)
        return number


def in_slices() -> tuple[Queued, int, int]:
    """A job that runs on all devices, and a newcomer that has just joined it."""
    drive = Queued()
    host = drive.started(light(4))
    newcomer = drive.submit(light(2))
    drive.now += QUANTUM_S
    assert drive.serve() == [("ROW", host), ("ROW", newcomer)]
    return drive, host, newcomer


def test_a_newcomer_joins_a_running_job_once_it_has_waited_for_a_quantum() -> None:
    drive = Queued()
    host = drive.started(light(4))
    newcomer = drive.submit(light(2))
    drive.now += QUANTUM_S - 1.0
    context = drive.context()
    drive.stage.plan(context)
    assert context.draft.changes == ()
    assert context.again_s == pytest.approx(drive.now + QUANTUM_S / 4), "it comes back without any event"
    drive.now = context.again_s
    assert drive.serve() == [("ROW", host), ("ROW", newcomer)]
    assert drive.job(newcomer).state is JobState.HOLDING


def test_it_leaves_after_two_slices_of_its_own_and_then_waits_in_the_queue() -> None:
    drive, host, newcomer = in_slices()
    drive.now += 4 * QUANTUM_S - 1.0
    assert drive.serve() == []
    drive.now += 1.0
    assert drive.serve() == [("SUSPEND", newcomer)]
    drive.rests(newcomer)
    assert drive.job(newcomer).state is JobState.PENDING
    assert not drive.state.gangs[drive.job(host).epoch].node_set
    drive.now += 100 * QUANTUM_S
    assert drive.serve() == [], "it is no newcomer any more"


def test_where_it_cannot_be_suspended_the_job_that_it_came_to_is() -> None:
    drive, host, newcomer = in_slices()
    drive.offer(WITHOUT_STORAGE, newcomer)
    drive.now += 4 * QUANTUM_S
    assert drive.serve() == [("SUSPEND", host)]


def test_where_neither_can_be_suspended_they_go_on_in_slices() -> None:
    drive, host, newcomer = in_slices()
    drive.offer(WITHOUT_STORAGE, host, newcomer)
    drive.now += 4 * QUANTUM_S
    assert drive.serve() == []


def test_a_running_job_has_one_newcomer_beside_it_at_most() -> None:
    drive, _, _ = in_slices()
    # The two devices that are left to the host alone.
    second, third = drive.submit(light(2)), drive.submit(light(2))
    drive.now += QUANTUM_S
    assert ("ROW", second) in drive.serve()
    drive.now += QUANTUM_S
    assert drive.serve() == []
    assert drive.job(third).state is JobState.PENDING


def test_a_job_that_has_just_started_is_left_alone() -> None:
    drive = Queued()
    newcomer = drive.submit(light(2))
    drive.now += QUANTUM_S - 1.0
    host = drive.started(light(4))
    drive.now += 1.0
    assert drive.serve() == []
    drive.now += QUANTUM_S
    assert drive.serve() == [("ROW", newcomer), ("ROW", host)]


def test_a_newcomer_that_accepts_several_types_is_on_one_of_them_whatever_its_host_is_on() -> None:
    drive = Queued()
    drive.join("n2", replace(SERVER, name="other", device_type="other"))
    for kind in ("virtual", "other"):
        drive.started(replace(light(2), device_type=kind))
    host = drive.started(light(4))
    assert {claim.node for claim in drive.state.gangs[drive.job(host).epoch].claims} == {"n1", "n2"}
    newcomer = drive.submit(replace(light(4), device_type="other,virtual"))
    drive.now += QUANTUM_S
    assert ("ROW", newcomer) in drive.serve()
    assert len(drive.state.gangs[drive.job(newcomer).epoch].claims) == 1


def test_a_newcomer_has_its_slices_from_its_start_on_however_long_that_takes() -> None:
    drive = Queued()
    host = drive.started(light(4))
    newcomer = drive.submit(light(2))
    drive.now += QUANTUM_S
    drive.starting = newcomer
    assert drive.serve() == [("ROW", host), ("ROW", newcomer)]
    drive.now += 10 * QUANTUM_S
    assert drive.serve() == [], "it still starts, and its host keeps its devices"
    drive.runs(newcomer)
    assert drive.serve() == []
    drive.now += 4 * QUANTUM_S
    assert drive.serve() == [("SUSPEND", newcomer)]


def test_a_newcomer_takes_no_free_devices_which_the_order_may_keep_for_others() -> None:
    drive = Queued()
    drive.started(light(2))
    drive.submit(light(4))
    newcomer = drive.submit(light(2))
    drive.now += QUANTUM_S
    assert ("ROW", newcomer) in drive.serve()
    (claim,) = drive.state.gangs[drive.job(newcomer).epoch].claims
    assert claim.device_mask == 0b0011, "beside the running job"


def test_a_newcomer_beside_two_jobs_leaves_and_both_stay() -> None:
    drive = Queued()
    hosts = drive.started(light(2)), drive.started(light(2))
    drive.now += 100 * QUANTUM_S
    newcomer = drive.submit(light(4))
    drive.now += QUANTUM_S
    assert drive.serve() == [("ROW", number) for number in (*hosts, newcomer)]
    assert drive.serve() == []
    drive.now += 4 * QUANTUM_S
    assert drive.serve() == [("SUSPEND", newcomer)]


def test_a_newcomer_that_stays_leaves_another_one_of_its_host_alone() -> None:
    drive, host, first = in_slices()
    second = drive.submit(light(2))
    drive.now += QUANTUM_S
    assert ("ROW", second) in drive.serve()
    drive.offer(WITHOUT_STORAGE, first)
    drive.now += 3 * QUANTUM_S
    assert drive.serve() == [("SUSPEND", host)]


def test_a_job_under_measurement_is_no_host_and_stays_in_its_slices() -> None:
    drive = Queued()
    one, other = drive.started(light(2)), drive.started(light(2))
    drive.submit(light(2))
    drive.now += QUANTUM_S
    assert ("ROW", one) in drive.serve()
    last = drive.submit(light(2))
    drive.now += QUANTUM_S
    drive.on_trial = frozenset([other])
    assert drive.serve() == []
    drive.now += QUANTUM_S / 2
    drive.on_trial = frozenset([one])
    assert {("ROW", one), ("ROW", other), ("ROW", last)} <= set(drive.serve())


def test_it_plans_only_where_the_order_has_nothing_to_change() -> None:
    drive = Queued()
    host = drive.started(light(2))
    drive.submit(light(4))
    drive.now += QUANTUM_S
    start = StartChange(host, drive.job(host).revision, ())
    context = drive.context(PlanDraft((start,)))
    drive.stage.plan(context)
    assert context.draft.changes == (start,)


def test_without_newcomers_and_guests_it_asks_for_no_plan() -> None:
    drive = Queued()
    drive.started(light(4))
    assert drive.stage.is_idle(drive.context())
    newcomer = drive.submit(light(2))
    assert not drive.stage.is_idle(drive.context())
    drive.step(CancelJob(newcomer))
    assert drive.stage.is_idle(drive.context())
