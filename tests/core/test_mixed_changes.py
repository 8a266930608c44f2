"""Co-locations, moves and resizes that meet, as found by tests/faultsim/test_sharing_storms.py. (1 s)"""

from __future__ import annotations

import pytest
from core.drive import GIB, SERVER, job_of
from core.elastic_worlds import World, elastic
from core.test_colocation import Packing
from core.test_refused_suspends import FULL
from core.test_time_slices import Turns
from ganger.cluster.placement import resized
from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import Claim
from ganger.job_state import JobState
from ganger_master.core.answers import Refused, SessionAnswer
from ganger_master.core.commands import (
    DrainNode,
    KeepPlace,
    OpenSession,
    ProposePlan,
    ResizeJob,
    ResumeJob,
    RetuneJob,
    SuspendJob,
)
from ganger_master.core.gang_model import GangPhase, ObservedPhase, Outcome, OutcomeKind
from ganger_master.core.job_model import SuspendLevel
from ganger_master.core.plan_changes import (
    CoresChange,
    MoveChange,
    ResizeChange,
    ResumeChange,
    StartChange,
    SuspendChange,
)
from msgspec.structs import replace


class Mixed(World, Packing):
    """Elastic jobs on nodes whose devices may be shared."""

    def claims(self, number: int, gpus: int, shares: bool = False) -> tuple[Claim, ...]:
        """Those of another size."""
        job = self.job(number)
        shape = job.spec.shape(job.arena_bytes_per_device, job.used_device_bytes, gpus)
        found = resized(self.state.view, shape, self.state.gangs[job.epoch].claims)
        assert found is not None
        return tuple(replace(claim, shared_mask=claim.device_mask if shares else 0) for claim in found)


class PackingTurns(World, Turns):
    """On nodes whose devices may also be shared at once."""

    def join(self, node: str) -> None:
        capabilities = {"rotation": "yes", "packing": "yes"}
        answer = self.step(OpenSession(node, f"machine-{node}", SERVER, capabilities=capabilities))
        assert isinstance(answer, SessionAnswer)
        self.sessions[node] = answer.session
        self.observe(node, version=0)


def reason_of(refusal: Refusal | None) -> Reason | None:
    return None if refusal is None else refusal.reason


@pytest.mark.parametrize("gpus", [1, 3])
def test_a_world_of_another_size_shares_no_devices_whether_the_old_one_runs_or_rests(gpus: int) -> None:
    drive = Mixed()
    number = drive.running(elastic(2, 1, 4))
    claims = drive.claims(number, gpus, shares=True)
    assert reason_of(drive.propose(drive.change(ResizeChange, number, claims))[0]) is Reason.NOT_SUPPORTED
    drive.step(SuspendJob(number, SuspendLevel.OFFLOAD))
    drive.seen(number, drive.job(number).epoch, ObservedPhase.PARKED, 40)
    drive.step(ResumeJob(number))
    assert reason_of(drive.propose(drive.change(StartChange, number, claims))[0]) is Reason.NOT_SUPPORTED
    alone = drive.claims(number, gpus)
    assert drive.propose(drive.change(StartChange, number, alone)) == [None]


def test_no_job_is_colocated_with_one_between_two_worlds_until_the_old_one_has_left() -> None:
    drive = Mixed()
    number, guest = drive.running(elastic(1, 1, 4)), drive.submit(elastic(1, 1, 1))
    source = drive.job(number).epoch
    drive.step(ResizeJob(number, 2))
    destination = drive.job(number).next_epoch
    assert reason_of(drive.pack(guest, number)) is Reason.GPUS
    drive.seen(number, destination, ObservedPhase.PREPARED)
    drive.seen(number, source, ObservedPhase.PARKED, 40)
    drive.seen(number, destination, ObservedPhase.READY, 40)
    assert drive.job(number).epoch == destination
    both = elastic(2, 2, 2)
    guest = drive.submit(both)
    assert reason_of(drive.pack(guest, number)) is Reason.GPUS
    drive.runs(number)
    drive.gone(number, source)
    assert drive.pack(guest, number) is None


def test_no_job_is_colocated_with_one_that_the_same_plan_resizes() -> None:
    drive = Mixed()
    number, guest = drive.running(elastic(1, 1, 4)), drive.submit(elastic(1, 1, 1))
    resize = drive.change(ResizeChange, number, drive.claims(number, 2))
    join = drive.change(StartChange, guest, drive.beside(guest, number))
    first, second = drive.propose(resize, join)
    assert (first, reason_of(second)) == (None, Reason.STALE_REVISION)


def turning(drive: Turns) -> tuple[int, int]:
    """Start two time-sliced jobs on two devices."""
    return drive.share(2)


def test_no_job_is_colocated_with_time_sliced_ones() -> None:
    drive = PackingTurns()
    host, _ = turning(drive)
    guest = drive.submit(job_of(2))
    claims = tuple(replace(claim, shared_mask=claim.device_mask) for claim in drive.place(guest, host))
    refusal = drive.propose(StartChange(guest, drive.job(guest).revision, claims))[0]
    assert reason_of(refusal) is Reason.GPUS


def test_a_time_sliced_job_that_is_being_parked_may_resume_in_the_plan_that_starts_another() -> None:
    drive = PackingTurns()
    host, guest = turning(drive)
    other = drive.submit(job_of(1))
    assert drive.propose(SuspendChange(host, drive.job(host).revision, level=SuspendLevel.OFFLOAD)) == [None]
    resume = ResumeChange(host, drive.job(host).revision)
    start = StartChange(other, drive.job(other).revision, drive.places(other)[0])
    assert drive.propose(resume, start) == [None, None]
    assert {drive.job(number).state for number in (host, guest, other)} == {JobState.HOLDING}


def test_a_resized_job_can_be_time_sliced_once_its_former_world_has_left() -> None:
    drive = PackingTurns()
    host = drive.running(elastic(1, 1, 4, GIB))
    source = drive.job(host).epoch
    drive.step(ResizeJob(host, 2))
    destination = drive.job(host).next_epoch
    drive.seen(host, source, ObservedPhase.PARKED, 40)
    drive.seen(host, destination, ObservedPhase.READY, 40)
    assert drive.job(host).epoch == destination
    guest = drive.submit(elastic(2, 2, 2, GIB))

    def take_turns() -> list[Reason | None]:
        rows = (drive.row(host, 0), drive.row(guest, 1, claims=drive.place(guest, host)))
        return [reason_of(refusal) for refusal in drive.propose(*rows)]

    assert Reason.WRONG_STATE in take_turns()
    drive.runs(host)
    drive.gone(host, source)
    assert take_turns() == [None, None]


def test_what_has_lost_a_part_has_no_other_cores_and_the_part_s_devices_are_free() -> None:
    drive = Mixed(2)
    number = drive.running(job_of(6, GIB))
    gang = drive.state.gangs[drive.job(number).epoch]
    node = gang.nodes[1]
    done = replace(drive.report(gang, ObservedPhase.ENDED), outcome=Outcome(OutcomeKind.DONE))
    drive.observe(node, *drive.others(node, gang.epoch), done)
    free = drive.state.rows[node].free_mask
    fewer = tuple(replace(claim, millicores=(1_000, 1_000)) for claim in gang.claims)
    assert reason_of(drive.propose(drive.change(CoresChange, number, fewer))[0]) is Reason.WRONG_STATE
    answer = drive.step(RetuneJob(number, 1_000))
    assert isinstance(answer, Refused)
    assert "a part of it has ended" in answer.message
    assert drive.state.rows[node].free_mask == free == 0b1111


def offloaded_and_waiting(drive: Mixed) -> tuple[int, int]:
    """A job that rests in host memory and waits to go on, and its epoch."""
    number = drive.running(job_of(2))
    epoch = drive.job(number).epoch
    drive.step(SuspendJob(number, SuspendLevel.OFFLOAD))
    drive.seen(number, epoch, ObservedPhase.PARKED, 7)
    drive.step(ResumeJob(number))
    assert drive.job(number).state is JobState.PENDING
    return number, epoch


def test_a_drain_saves_a_job_that_waits_to_resume_from_host_memory_and_it_waits_again() -> None:
    drive = Mixed()
    number, epoch = offloaded_and_waiting(drive)
    drive.step(DrainNode("n1", "a new fan"))
    assert drive.state.gangs[epoch].park_level is SuspendLevel.CHECKPOINT
    assert drive.job(number).state is JobState.HOLDING
    yielded = replace(drive.report(drive.state.gangs[epoch], ObservedPhase.ENDED), outcome=Outcome(OutcomeKind.YIELDED))
    drive.observe("n1", yielded)
    drive.observe("n1")
    assert (drive.job(number).state, drive.job(number).epoch) == (JobState.PENDING, 0)


def test_a_job_that_waits_in_host_memory_and_cannot_be_saved_still_waits() -> None:
    drive = Mixed()
    number, epoch = offloaded_and_waiting(drive)
    drive.step(DrainNode("n1", "a new fan"))
    gang = drive.state.gangs[epoch]
    report = drive.report(gang, ObservedPhase.PARKED, 7)
    drive.observe("n1", replace(report, level=SuspendLevel.OFFLOAD, trouble=FULL))
    job, gang = drive.job(number), drive.state.gangs[epoch]
    assert (job.state, job.trouble) == (JobState.PENDING, FULL)
    assert (gang.phase, gang.rested_level) == (GangPhase.PARKED, SuspendLevel.OFFLOAD)
    assert job.is_waiting


@pytest.mark.parametrize("kept_cores", [(1_000,), (1_000, 0)])
@pytest.mark.parametrize("cores", [(1_000,), (1_000, 0, 0), (4_000, 0)])
def test_claims_of_other_sockets_than_their_node_s_are_refused_and_none_of_them_is_kept(
    kept_cores: tuple[int, ...], cores: tuple[int, ...]
) -> None:
    drive = Mixed(2)
    number, other = drive.running(job_of(2)), drive.submit(job_of(4))
    kept = [Claim(node, 0b11, kept_cores, GIB, 0, (2,)) for node in ("n2", "nowhere")]
    drive.step(ProposePlan((), kept_places=(KeepPlace(other, tuple(kept)),)))
    (claim,) = drive.state.gangs[drive.job(number).epoch].claims
    refusal = drive.propose(drive.change(MoveChange, number, (replace(claim, node="n2", millicores=cores),)))[0]
    keeps, is_possible = len(kept_cores) == 2, len(cores) == 2
    wanted = (Reason.KEPT if keeps else None) if is_possible else Reason.CLAIM_MISMATCH
    assert reason_of(refusal) is wanted


def test_a_gang_of_which_a_node_was_removed_is_given_no_other_size() -> None:
    drive = Mixed(2)
    number = drive.running(elastic(1, 1, 4))
    gang, view = drive.state.gangs[drive.job(number).epoch], drive.state.view.copy()
    view.remove(gang.nodes[0])
    assert resized(view, drive.job(number).spec.shape(gpus=2), gang.claims) is None
