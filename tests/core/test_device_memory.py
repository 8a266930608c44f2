"""Device memory that parked jobs keep is counted in the node state, verdicts and `why`, and after a restart."""

from __future__ import annotations

import pytest
from core.drive import GIB, SERVER, Drive, job_of
from faultsim.state_invariants import violations
from ganger.cluster.refusals import Reason
from ganger_master.core.answers import Approved, Refused, Rejected
from ganger_master.core.commands import CancelJob, ResumeJob, SubmitJob, SuspendJob
from ganger_master.core.explain import explain
from ganger_master.core.gang_model import ObservedPhase
from ganger_master.core.job_model import Capabilities, SuspendLevel
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state_image import restored
from ganger_master.rpc.job_messages import job_to_wire
from msgspec.structs import replace

MIB = 1 << 20


def parked(drive: Drive, gpus: int, level: SuspendLevel, step: int = 40) -> int:
    """A job that rests where it ran."""
    number = drive.submit(job_of(gpus))
    epoch = drive.start(number)
    drive.runs(number)
    drive.step(SuspendJob(number, level))
    drive.seen(number, epoch, ObservedPhase.PARKED, step)
    assert drive.job(number).suspended_level is level or level is SuspendLevel.CHECKPOINT
    return number


def kept_on(drive: Drive, node: str = "n1") -> tuple[int, ...]:
    return drive.state.view.row(node).parked_bytes


def drive_with_residue(size: int, settings: CoreSettings | None = None) -> Drive:
    drive = Drive(1, settings)
    drive.residue_bytes = size
    return drive


def test_more_than_a_device_has_is_refused_at_submission_with_the_most_there_is() -> None:
    drive = Drive(1)
    answer = drive.step(SubmitJob(replace(job_of(1), gpu_memory_bytes=2 * GIB), "uid", ""))
    assert isinstance(answer, Refused)
    assert answer.reason == "GANG_IMPOSSIBLE"
    assert answer.message == "no device has so much memory (2G needed, 1G at most)"
    assert dict(answer.metadata) == {"needed_bytes": str(2 * GIB), "largest_bytes": str(GIB)}


@pytest.mark.parametrize(
    ("level", "free", "kept"),
    [
        (SuspendLevel.PAUSE, 0b1100, ()),
        (SuspendLevel.OFFLOAD, 0b1111, (300 * MIB, 300 * MIB, 0, 0)),
        (SuspendLevel.CHECKPOINT, 0b1100, ()),
    ],
)
def test_pause_holds_the_devices_offload_keeps_what_was_measured_checkpoint_nothing(
    level: SuspendLevel, free: int, kept: tuple[int, ...]
) -> None:
    drive = drive_with_residue(300 * MIB)
    number = parked(drive, 2, level)
    assert (drive.state.view.row("n1").free_mask, kept_on(drive)) == (free, kept)
    if level is SuspendLevel.CHECKPOINT:
        drive.seen_without("n1", number)
        assert (drive.state.view.row("n1").free_mask, kept_on(drive)) == (0b1111, ())


def test_a_job_is_refused_devices_that_lack_memory_told_whose_it_is_and_starts_once_that_is_gone() -> None:
    drive = drive_with_residue(300 * MIB)
    first = parked(drive, 4, SuspendLevel.OFFLOAD)
    second = drive.submit(job_of(4))
    claims = drive.state.gangs[drive.job(first).epoch].claims
    answer = drive.request(second, claims)
    assert isinstance(answer, Rejected)
    assert answer.refusals[0].reason is Reason.DEVICE_MEMORY
    assert answer.refusals[0].figures == {"needed_bytes": GIB, "free_bytes": GIB - 300 * MIB, "conflicting": 4}
    (blocker,) = explain(drive.state, second, drive.now).blockers
    assert (blocker.reason, blocker.node, blocker.job) == (Reason.DEVICE_MEMORY, "n1", f"jobs/{first}")
    assert "1G needed" in blocker.message
    drive.step(CancelJob(first))
    drive.seen_without("n1", first)
    assert kept_on(drive) == ()
    assert isinstance(drive.request(second, *drive.places(second)), Approved)


def test_a_job_that_parks_deeper_makes_room() -> None:
    drive = drive_with_residue(300 * MIB)
    first = parked(drive, 4, SuspendLevel.OFFLOAD)
    second = drive.submit(job_of(4))
    assert not drive.places(second)
    drive.step(SuspendJob(first, SuspendLevel.CHECKPOINT))
    drive.seen(first, drive.job(first).epoch, ObservedPhase.PARKED, 40)
    drive.seen_without("n1", first)
    assert drive.places(second)


def test_a_job_whose_peak_was_measured_needs_as_much_as_that() -> None:
    drive = drive_with_residue(300 * MIB)
    spec = replace(job_of(4), gpu_memory_bytes=0)
    other = drive.submit(spec)
    epoch = drive.start(other)
    report = drive.report(drive.state.gangs[epoch], ObservedPhase.RUNNING)
    # Rounded up, or of a virtual device, a peak may be more than there is.
    drive.observe("n1", replace(report, peak_device_bytes=GIB + 64 * MIB))
    assert drive.job(other).peak_device_bytes == GIB + 64 * MIB
    assert drive.job(other).shape.device_memory_bytes == GIB
    drive.step(SuspendJob(other, SuspendLevel.OFFLOAD))
    drive.seen(other, epoch, ObservedPhase.PARKED, 40)
    # A job of unknown memory use takes what is left.
    unknown = drive.submit(spec)
    later = drive.start(unknown)
    report = drive.report(drive.state.gangs[later], ObservedPhase.RUNNING)
    drive.observe("n1", *drive.others("n1", later), replace(report, peak_device_bytes=MIB))
    drive.step(SuspendJob(unknown, SuspendLevel.OFFLOAD))
    drive.seen(unknown, later, ObservedPhase.PARKED, 40)
    assert kept_on(drive) == (600 * MIB,) * 4
    drive.step(ResumeJob(other))
    assert [one.reason for one in explain(drive.state, other, drive.now).blockers] == [Reason.DEVICE_MEMORY]
    drive.step(CancelJob(unknown))
    drive.seen_without("n1", unknown)
    # Beside its own it may go on.
    answer = drive.request(other, drive.state.gangs[epoch].claims)
    assert isinstance(answer, Approved)
    assert (answer.epoch, kept_on(drive)) == (epoch, ())


@pytest.mark.parametrize(
    ("said", "declared", "kept"),
    [
        ((), GIB, 200 * MIB),
        ((), 100 * MIB, 100 * MIB),
        ((), 0, 200 * MIB),
        ((1, 2), GIB, 200 * MIB),
        ((0, 0, 0, 0), GIB, 0),
        ((7, 7, 7, 7), GIB, 7),
        # More than a device has, as only a broken daemon reports.
        ((5 * GIB,) * 4, GIB, GIB),
    ],
)
def test_an_unmeasured_residue_is_presumed_but_never_above_what_the_job_may_use(
    said: tuple[int, ...], declared: int, kept: int
) -> None:
    drive = Drive(1, CoreSettings(residue_bytes=200 * MIB))
    number = drive.submit(replace(job_of(2), gpu_memory_bytes=declared))
    epoch = drive.start(number)
    drive.runs(number)
    offered = Capabilities(pause=True, offload=True, checkpoint=True, known=True)
    report = drive.report(drive.state.gangs[epoch], ObservedPhase.RUNNING)
    drive.observe("n1", replace(report, capabilities=offered, peak_device_bytes=MIB))
    drive.step(SuspendJob(number, SuspendLevel.OFFLOAD))
    report = drive.report(drive.state.gangs[epoch], ObservedPhase.PARKED, 40)
    drive.observe("n1", replace(report, residue_bytes=said))
    mask = drive.state.gangs[epoch].claims[0].device_mask
    assert mask.bit_count() == 2
    expected = tuple(kept if mask >> device & 1 else 0 for device in range(SERVER.devices))
    assert kept_on(drive) == (expected if kept else ())


def test_the_residue_measured_when_a_gang_was_parked_stands_despite_later_reports() -> None:
    drive = drive_with_residue(300 * MIB)
    number = parked(drive, 4, SuspendLevel.OFFLOAD)
    drive.start(drive.submit(replace(job_of(4), gpu_memory_bytes=GIB - 300 * MIB)))
    drive.residue_bytes = 500 * MIB
    drive.seen(number, drive.job(number).epoch, ObservedPhase.PARKED, 40)
    assert kept_on(drive) == (300 * MIB,) * 4


def test_a_failed_checkpoint_leaves_a_parked_job_with_what_it_kept() -> None:
    drive = drive_with_residue(300 * MIB)
    number = parked(drive, 4, SuspendLevel.OFFLOAD)
    epoch = drive.job(number).epoch
    drive.step(SuspendJob(number, SuspendLevel.CHECKPOINT))
    drive.residue_bytes = 500 * MIB
    report = drive.report(drive.state.gangs[epoch], ObservedPhase.PARKED, 40)
    drive.observe("n1", replace(report, level=SuspendLevel.OFFLOAD, trouble="STORAGE_FULL: no space"))
    drive.seen(number, epoch, ObservedPhase.PARKED, 40)
    assert drive.job(number).suspended_level is SuspendLevel.OFFLOAD
    assert kept_on(drive) == (300 * MIB,) * 4


def test_a_restarted_master_counts_the_same() -> None:
    drive = drive_with_residue(300 * MIB)
    number = parked(drive, 2, SuspendLevel.OFFLOAD)
    waiting = drive.submit(job_of(4))
    before = drive.state.rows["n1"]
    elements = list(drive.state.take_changes().puts.values())
    drive.state = restored(drive.state.settings, elements, drive.now)
    assert replace(drive.state.rows["n1"], available=True) == before
    assert violations(drive.state) == []
    drive.join("n1")
    assert drive.state.rows["n1"].parked_bytes == before.parked_bytes
    drive.seen(number, drive.job(number).epoch, ObservedPhase.PARKED, 40)
    assert drive.state.rows["n1"] == before
    (blocker,) = explain(drive.state, waiting, drive.now).blockers
    assert (blocker.reason, blocker.job) == (Reason.DEVICE_MEMORY, f"jobs/{number}")


def test_the_invariants_detect_a_device_that_is_given_twice() -> None:
    drive = drive_with_residue(300 * MIB)
    number = parked(drive, 4, SuspendLevel.OFFLOAD)
    other = drive.submit(replace(job_of(4), gpu_memory_bytes=GIB - 300 * MIB))
    drive.start(other)
    job = drive.job(other)
    drive.state.put_job(replace(job, spec=replace(job.spec, gpu_memory_bytes=GIB)))
    (broken,) = {text.replace(f"device {device}", "device D") for device in range(4) for text in violations(drive.state)
                 if f"device {device}" in text}  # fmt: skip
    assert broken == f"n1: device D has {GIB} bytes, {300 * MIB} are kept and jobs/{other} needs {GIB}"
    assert number != other


def test_a_parked_job_with_the_memory_that_the_first_of_a_strict_queue_lacks_resumes_before_it() -> None:
    drive = drive_with_residue(300 * MIB)
    resting = parked(drive, 4, SuspendLevel.OFFLOAD)
    first = drive.submit(replace(job_of(4), priority=5))
    assert isinstance(drive.request(first, blockers=True), Rejected)
    # No running job could free its devices, and the queue lets no job pass.
    drive.step(ResumeJob(resting))
    other = drive.submit(job_of(1))
    assert [drive.state.queue_rank(number) for number in (first, resting, other)] == [1, 2, 3]
    assert resting in drive.state.leases.turn_of
    assert other not in drive.state.leases.turn_of
    claims = drive.state.gangs[drive.job(resting).epoch].claims
    assert isinstance(drive.request(resting, claims), Approved)
    drive.step(CancelJob(resting))
    drive.seen_without("n1", resting)
    assert isinstance(drive.request(first, *drive.places(first)), Approved)


def test_a_parked_job_does_not_pass_jobs_that_lack_something_else() -> None:
    drive = drive_with_residue(0)
    resting = parked(drive, 2, SuspendLevel.OFFLOAD)
    running = drive.submit(job_of(1))
    drive.start(running)
    first = drive.submit(replace(job_of(4), priority=5))
    assert isinstance(drive.request(first, blockers=True), Rejected)
    drive.step(ResumeJob(resting))
    answer = drive.request(resting, *drive.places(resting))
    assert isinstance(answer, Rejected)
    assert answer.refusals[0].reason is Reason.PROTECTED


def test_what_a_job_keeps_itself_is_never_what_it_waits_for() -> None:
    drive = drive_with_residue(300 * MIB)
    resting = parked(drive, 4, SuspendLevel.OFFLOAD)
    drive.start(drive.submit(replace(job_of(1), gpu_memory_bytes=MIB)))
    drive.step(ResumeJob(resting))
    assert [one.reason for one in explain(drive.state, resting, drive.now).blockers] == [Reason.GPUS]


def test_arenas_of_gangs_that_report_their_peaks_at_once_fit_together() -> None:
    drive = Drive()
    numbers = [drive.submit(replace(job_of(1, 31 * GIB), gpu_memory_bytes=0)) for _ in range(2)]
    for number in numbers:
        drive.start(number)
    # Two GiB are left, and each wants more than one of them.
    told = [
        replace(drive.report(drive.state.gangs[drive.job(number).epoch], ObservedPhase.RUNNING), peak_device_bytes=GIB)
        for number in numbers
    ]
    drive.observe("n1", *told)
    arenas = [drive.state.gangs[drive.job(number).epoch].claims[0].arena_bytes for number in numbers]
    assert sorted(map(bool, arenas)) == [False, True]


def test_an_offload_that_no_host_memory_is_left_for_is_refused_and_not_offered() -> None:
    drive = Drive()
    number = drive.submit(replace(job_of(1, 64 * GIB), gpu_memory_bytes=0))
    gang = drive.state.gangs[drive.start(number)]

    def offers() -> bool:
        job = drive.job(number)
        return bool(job_to_wire(job, drive.state.gangs[job.epoch], None).capabilities.can_offload)

    drive.runs(number)
    assert offers(), "its size is not known yet"
    drive.observe("n1", replace(drive.report(gang, ObservedPhase.RUNNING), peak_device_bytes=10 * GIB))
    refused = drive.step(SuspendJob(number, SuspendLevel.OFFLOAD))
    why = "no host memory is left on nodes/n1 for the 11G that it has on GPUs: submit it with less --memory"
    assert isinstance(refused, Refused)
    assert why in str(refused)
    assert not offers()
    message = job_to_wire(drive.job(number), drive.state.gangs[gang.epoch], None)
    assert message.capabilities.missing["OFFLOAD"] == why
    # what it is suspended at without a wish is what it can do
    drive.step(SuspendJob(number, SuspendLevel.NONE))
    assert drive.state.gangs[gang.epoch].park_level is SuspendLevel.CHECKPOINT
