"""Co-location: a plan puts a gang on devices of another where both may be and both fit; the last one frees them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from core.drive import GIB, SERVER, Drive, job_of
from faultsim.state_invariants import violations
from ganger.cluster.claims import resplit_cores
from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import Claim
from ganger.job_state import JobState
from ganger_master.core import colocation
from ganger_master.core.answers import PlanAnswer, Refused, SessionAnswer
from ganger_master.core.commands import CancelJob, OpenSession, ProposePlan, ResumeJob
from ganger_master.core.gang_model import GangIntent, ObservedPhase
from ganger_master.core.job_model import SuspendLevel
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.plan_changes import (
    CoresChange,
    MoveChange,
    PlanChange,
    ResumeChange,
    StartChange,
    SuspendChange,
)
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state_image import restored
from msgspec.structs import replace

HALF = GIB * 4 // 10


class Packing(Drive):
    """Nodes whose daemons let gangs share devices."""

    def join(self, node: str) -> None:
        answer = self.step(OpenSession(node, f"machine-{node}", SERVER, capabilities={"packing": "yes"}))
        assert isinstance(answer, SessionAnswer)
        self.sessions[node] = answer.session
        self.observe(node, version=0)

    def run(self, spec: JobSpec) -> int:
        number = self.submit(spec)
        self.start(number)
        self.runs(number)
        return number

    def beside(self, guest: int, host: int) -> tuple[Claim, ...]:
        """The host's devices for the guest, with cores and memory of its own."""
        claims = []
        view = self.state.view
        for claim in self.state.gangs[self.job(host).epoch].claims:
            free = view.millicores[view.slots[claim.node]]
            cores = resplit_cores((0,) * len(free), free, 2_000 * claim.device_mask.bit_count())
            arena = claim.device_mask.bit_count() * self.job(guest).arena_bytes_per_device
            claims.append(replace(claim, millicores=cores, arena_bytes=arena, shared_mask=claim.device_mask))
        return tuple(claims)

    def propose(self, *changes: PlanChange) -> list[Refusal | None]:
        answer = self.step(ProposePlan(changes))
        assert isinstance(answer, PlanAnswer)
        return [None if one.approved else one.refusals[0] for one in answer.verdicts]

    def change(
        self, kind: Callable[..., PlanChange], number: int, *claims: tuple[Claim, ...], **fields: object
    ) -> PlanChange:
        return kind(number, self.job(number).revision, *claims, **fields)

    def pack(self, guest: int, host: int) -> Refusal | None:
        return self.propose(self.change(StartChange, guest, self.beside(guest, host)))[0]


def small(gpus: int = 1, needs: int = HALF) -> JobSpec:
    return replace(job_of(gpus), gpu_memory_bytes=needs)


@pytest.fixture
def drive() -> Packing:
    return Packing()


def test_two_gangs_share_a_device_if_a_plan_says_so_and_both_fit(drive: Packing) -> None:
    host = drive.run(small())
    guest = drive.submit(small())
    assert drive.pack(guest, host) is None
    row = drive.state.rows["n1"]
    assert row.free_mask.bit_count() == 3
    assert sorted(row.device_rows) == [0, 0, 0, 2]
    assert drive.state.nodes.free_devices == 3
    drive.runs(guest)
    assert drive.job(guest).state is JobState.HOLDING


def test_the_daemon_of_a_joined_gang_and_the_explanation_get_the_colocated_jobs(drive: Packing) -> None:
    host = drive.run(small())
    before = drive.state.gangs[drive.job(host).epoch]
    guest = drive.submit(small())
    assert drive.pack(guest, host) is None
    wanted = {gang.job: gang for gang in drive.state.desired.of("n1").gangs}
    mask = before.claims[0].device_mask
    assert wanted[host].claim.shared_mask == wanted[guest].claim.shared_mask == mask
    assert wanted[host].master_sequence > before.master_sequence
    assert wanted[host].intent is GangIntent.RUN
    assert colocation.beside(drive.state, drive.state.gangs[drive.job(host).epoch]) == (guest,)
    assert colocation.beside(drive.state, drive.state.gangs[drive.job(guest).epoch]) == (host,)


def test_a_job_scheduler_cannot_put_its_job_on_devices_of_another(drive: Packing) -> None:
    host = drive.run(small())
    guest = drive.submit(small())
    answer = drive.request(guest, drive.beside(guest, host))
    assert isinstance(answer, Refused)
    assert answer.reason == "NOT_SUPPORTED"


def test_a_claim_on_a_held_device_without_a_shared_mark_is_refused(drive: Packing) -> None:
    host = drive.run(small())
    guest = drive.submit(small())
    alone = tuple(replace(claim, shared_mask=0) for claim in drive.beside(guest, host))
    refusal = drive.propose(drive.change(StartChange, guest, alone))[0]
    assert refusal is not None
    assert refusal.reason is Reason.GPUS
    assert refusal.figures["conflicting"] == 1


def test_a_job_that_does_not_fit_into_device_memory_is_refused_with_the_number(drive: Packing) -> None:
    host = drive.run(small(needs=GIB * 6 // 10))
    refusal = drive.pack(drive.submit(small()), host)
    assert refusal is not None
    assert refusal.reason is Reason.DEVICE_MEMORY
    # 0.95 of the device less what the host needs.
    assert refusal.figures["free_bytes"] == int(0.95 * GIB) - GIB * 6 // 10
    assert refusal.figures["needed_bytes"] == HALF


def test_what_parked_gangs_keep_of_the_device_counts(drive: Packing) -> None:
    parked = drive.run(small())
    drive.residue_bytes = GIB // 5
    assert drive.propose(drive.change(SuspendChange, parked, level=SuspendLevel.OFFLOAD)) == [None]
    drive.seen(parked, drive.job(parked).epoch, ObservedPhase.PARKED, stop_step=3)
    host = drive.submit(small())
    here = tuple(replace(claim, parked_bytes=()) for claim in drive.state.gangs[drive.job(parked).epoch].claims)
    assert drive.propose(drive.change(StartChange, host, here)) == [None]
    drive.runs(host)
    refusal = drive.pack(drive.submit(small()), host)
    assert refusal is not None
    assert refusal.figures["free_bytes"] == int(0.95 * GIB) - HALF - GIB // 5


def test_no_job_joins_one_whose_memory_use_is_unknown(drive: Packing) -> None:
    host = drive.run(small(needs=0))
    refusal = drive.pack(drive.submit(small()), host)
    assert refusal is not None
    assert refusal.reason is Reason.GPUS
    known = drive.run(small())
    refusal = drive.pack(drive.submit(small(needs=0)), known)
    assert refusal is not None
    assert refusal.reason is Reason.DEVICE_MEMORY


@pytest.mark.parametrize("fixed", ["host", "guest"])
def test_a_job_that_must_not_be_suspended_shares_no_device(drive: Packing, fixed: str) -> None:
    host = drive.run(replace(small(), preemptible=fixed != "host"))
    refusal = drive.pack(drive.submit(replace(small(), preemptible=fixed != "guest")), host)
    assert refusal is not None
    assert refusal.reason is (Reason.GPUS if fixed == "host" else Reason.WRONG_STATE)


def test_a_daemon_that_cannot_says_so() -> None:
    drive = Packing()
    Drive.join(drive, "n2")
    first = drive.run(small(4))
    second = drive.run(small(4))
    on = {drive.state.gangs[drive.job(number).epoch].nodes[0]: number for number in (first, second)}
    refusal = drive.pack(drive.submit(small(4)), on["n2"])
    assert refusal is not None
    assert refusal.reason is Reason.NOT_SUPPORTED
    assert refusal.node == "n2"


@pytest.mark.parametrize("first", ["host", "guest"])
def test_the_device_is_free_when_the_last_of_them_has_gone(drive: Packing, first: str) -> None:
    host = drive.run(small())
    guest = drive.submit(small())
    assert drive.pack(guest, host) is None
    drive.runs(guest)
    for number, free in ((host, 3), (guest, 4)) if first == "host" else ((guest, 3), (host, 4)):
        drive.step(CancelJob(number))
        drive.seen_without("n1", number)
        assert drive.state.nodes.free_devices == free


def test_the_remaining_gang_has_its_device_alone_again_and_loses_the_mark(drive: Packing) -> None:
    host = drive.run(small(needs=GIB // 4))
    guests = [drive.submit(small(needs=GIB // 4)) for _ in range(2)]
    for guest in guests:
        assert drive.pack(guest, host) is None
        drive.runs(guest)

    def mark() -> int:
        (claim,) = drive.state.gangs[drive.job(host).epoch].claims
        return claim.shared_mask

    assert mark()
    # A parked gang may come back to it.
    assert drive.propose(drive.change(SuspendChange, guests[0], level=SuspendLevel.OFFLOAD)) == [None]
    drive.seen(guests[0], drive.job(guests[0]).epoch, ObservedPhase.PARKED, stop_step=3)
    for guest, is_shared in ((guests[1], True), (guests[0], False)):
        drive.step(CancelJob(guest))
        drive.seen_without("n1", guest)
        assert bool(mark()) is is_shared


def test_a_third_joins_while_memory_lasts(drive: Packing) -> None:
    host = drive.run(small(needs=GIB // 4))
    for _ in range(2):
        guest = drive.submit(small(needs=GIB // 4))
        assert drive.pack(guest, host) is None
    refusal = drive.pack(drive.submit(small(needs=GIB // 4)), host)
    assert refusal is not None
    assert refusal.reason is Reason.DEVICE_MEMORY


def test_two_that_would_join_in_one_plan_are_judged_one_after_the_other(drive: Packing) -> None:
    host = drive.run(small())
    guests = [drive.submit(small()), drive.submit(small())]
    first, second = drive.propose(*(drive.change(StartChange, guest, drive.beside(guest, host)) for guest in guests))
    assert first is None
    assert second is not None
    assert second.reason is Reason.STALE_REVISION
    # Its revision rose as it was joined: plans made for it alone are outdated.
    assert drive.propose(SuspendChange(host, drive.job(host).revision - 1))[0] is not None


def test_a_running_job_moves_in_with_another_and_out_again(drive: Packing) -> None:
    host, guest = drive.run(small()), drive.run(small())
    drive.now += 1.0
    assert drive.propose(drive.change(MoveChange, guest, drive.beside(guest, host))) == [None]
    assert drive.state.nodes.free_devices == 2
    source, destination = drive.job(guest).epoch, drive.job(guest).next_epoch
    drive.seen(guest, destination, ObservedPhase.PREPARED)
    drive.seen(guest, source, ObservedPhase.PARKED, stop_step=7)
    drive.seen(guest, destination, ObservedPhase.READY, stop_step=7)
    assert drive.job(guest).epoch == destination
    drive.seen(guest, destination, ObservedPhase.RUNNING)
    drive.observe("n1", *drive.others("n1", source))
    assert drive.state.nodes.free_devices == 3
    out = drive.places(guest)[0]
    assert drive.propose(drive.change(MoveChange, guest, out)) == [None]


def test_a_host_that_was_parked_beside_others_gives_cores_to_the_next_job_of_the_same_plan(drive: Packing) -> None:
    host, first = drive.run(small(needs=GIB // 4)), drive.submit(small(needs=GIB // 4))
    assert drive.pack(first, host) is None
    drive.runs(first)
    # It may come back, so the host keeps its mark.
    assert drive.propose(drive.change(SuspendChange, first, level=SuspendLevel.OFFLOAD)) == [None]
    drive.seen(first, drive.job(first).epoch, ObservedPhase.PARKED, stop_step=3)
    guest = drive.run(small(needs=GIB // 4))
    (held,) = drive.state.gangs[drive.job(host).epoch].claims
    assert held.shared_mask
    halved = replace(held, millicores=tuple([cores // 2 for cores in held.millicores]))
    gives = drive.change(CoresChange, host, (halved,), together=guest)
    comes = drive.change(MoveChange, guest, drive.beside(guest, host), together=guest)
    assert drive.propose(gives, comes) == [None, None]


def test_a_job_refused_for_fewer_cores_than_it_needs_gets_the_missing_amount(drive: Packing) -> None:
    host, guest = drive.run(small(needs=GIB * 6 // 10)), drive.run(small())
    (there,) = drive.beside(guest, host)
    fewer = replace(there, millicores=tuple([cores // 2 for cores in there.millicores]))
    refusal = drive.propose(drive.change(MoveChange, guest, (fewer,)))[0]
    assert refusal is not None
    assert refusal.reason is Reason.DEVICE_MEMORY


def test_a_pack_outlives_the_master(drive: Packing) -> None:
    host = drive.run(small())
    guest = drive.submit(small())
    assert drive.pack(guest, host) is None
    state = drive.state
    elements = [
        *state.nodes.configuration_sets.values(),
        *state.nodes.values(),
        *state.jobs.values(),
        *state.gangs.values(),
    ]
    again = restored(CoreSettings(), [*elements, state.counters], drive.now)
    assert violations(again) == []
    assert again.rows["n1"].device_rows == state.rows["n1"].device_rows


def test_a_parked_colocated_job_resumes_beside_its_partner_and_no_other_job(drive: Packing) -> None:
    host = drive.run(small())
    guest = drive.submit(small())
    assert drive.pack(guest, host) is None
    drive.runs(guest)
    for number in (guest, host):
        assert drive.propose(drive.change(SuspendChange, number, level=SuspendLevel.OFFLOAD)) == [None]
        drive.seen(number, drive.job(number).epoch, ObservedPhase.PARKED, stop_step=5)
    assert drive.state.nodes.free_devices == 4
    assert drive.propose(drive.change(ResumeChange, host)) == [None]
    assert drive.propose(drive.change(ResumeChange, guest)) == [None]
    assert drive.state.nodes.free_devices == 3
    for number in (host, guest):
        drive.runs(number)
        assert drive.propose(drive.change(SuspendChange, number, level=SuspendLevel.OFFLOAD)) == [None]
        drive.seen(number, drive.job(number).epoch, ObservedPhase.PARKED, stop_step=6)
    stranger = drive.submit(small())
    here = tuple(replace(claim, shared_mask=0) for claim in drive.state.gangs[drive.job(host).epoch].claims)
    assert drive.propose(drive.change(StartChange, stranger, here)) == [None]
    drive.runs(stranger)
    refusal = drive.propose(drive.change(ResumeChange, host))[0]
    assert refusal is not None
    assert refusal.reason is Reason.GPUS


def test_a_job_that_a_plan_has_parked_moves_and_goes_on(drive: Packing) -> None:
    number = drive.run(small())
    assert drive.propose(drive.change(SuspendChange, number, level=SuspendLevel.OFFLOAD)) == [None]
    source = drive.job(number).epoch
    drive.seen(number, source, ObservedPhase.PARKED, stop_step=5)
    mine = drive.state.gangs[source].claims[0].device_mask
    elsewhere = tuple(
        replace(claim, device_mask=0b1111 & ~mine & -(0b1111 & ~mine)) for claim in drive.state.gangs[source].claims
    )
    assert drive.propose(drive.change(MoveChange, number, elsewhere)) == [None]
    drive.seen(number, drive.job(number).next_epoch, ObservedPhase.READY, stop_step=5)
    drive.runs(number)
    assert drive.job(number).state is JobState.HOLDING
    assert drive.state.gangs[drive.job(number).epoch].claims == elsewhere
    assert drive.step(ResumeJob(number)) is not None
