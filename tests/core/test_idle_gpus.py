"""Jobs that do not use their GPUs are reported, and parked where they can be stopped wherever they are."""

from __future__ import annotations

import dataclasses
import math

import pytest
from core.drive import ALL_LEVELS, GIB, SERVER, Drive, job_of
from ganger.cluster.resources import Role, TaskShape
from ganger.history import HistoryEvent, sentence
from ganger.job_state import JobState
from ganger_master.core.answers import Approved, SessionAnswer
from ganger_master.core.commands import Answer, ObservedGang, OpenSession, ResumeJob, SuspendJob, Tick
from ganger_master.core.explain import explain
from ganger_master.core.gang_model import Gang, GangPhase, ObservedPhase
from ganger_master.core.idle_gpus import park_times
from ganger_master.core.job_model import Capabilities, SuspendLevel
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state_image import restored
from ganger_master.core.tenancy import Partition
from msgspec.structs import replace

ANYWHERE = replace(ALL_LEVELS, offload_by="in place, by the GPU driver")
PARKS = CoreSettings(lost_after_s=None, idle_warning_s=100.0, idle_park_s=300.0)


def gang_of(drive: Drive, number: int) -> Gang:
    return drive.state.gangs[drive.job(number).epoch]


def part(drive: Drive, number: int, idle: bool, can: Capabilities = ANYWHERE) -> ObservedGang:
    said = drive.report(gang_of(drive, number), ObservedPhase.RUNNING)
    return replace(said, devices_idle=idle, capabilities=can)


def report(drive: Drive, number: int, *idle: bool, can: Capabilities = ANYWHERE) -> None:
    """Each of the job's nodes reports whether its part uses no device."""
    for node, is_idle in zip(gang_of(drive, number).nodes, idle, strict=True):
        drive.observe(node, part(drive, number, is_idle, can))


def running(drive: Drive, gpus: int = 1, can: Capabilities = ANYWHERE, preemptible: bool = True) -> int:
    number = drive.submit(replace(job_of(gpus), preemptible=preemptible))
    drive.start(number)
    drive.runs(number)
    report(drive, number, *[False for _ in gang_of(drive, number).nodes], can=can)
    return number


def wait(drive: Drive, seconds: float) -> None:
    """All nodes that have a session call at the end of this time."""
    drive.now += seconds
    for name, node in list(drive.state.nodes.items()):
        if node.session:
            drive.step(Answer(name, node.session))
    drive.step(Tick())


def kinds(drive: Drive, number: int) -> list[str]:
    return [row.kind for row in drive.history if row.subject == f"jobs/{number}" and row.kind.startswith("gpus_")]


def texts(drive: Drive, number: int) -> list[str]:
    """What `ganger history` prints of its use of GPUs, and of its suspends."""
    rows = [row for row in drive.history if row.subject == f"jobs/{number}"]
    wanted = ("gpus_idle", "gpus_used", "suspend_ordered")
    return [sentence(HistoryEvent(r.time, r.kind, r.cause, r.message, r.figures)) for r in rows if r.kind in wanted]


@pytest.mark.parametrize(
    ("settings", "can", "preemptible", "parked_after", "refusal"),
    [
        (PARKS, ANYWHERE, True, 300.0, ""),
        (dataclasses.replace(PARKS, idle_park_s=None), ANYWHERE, True, None, ""),
        (PARKS, ANYWHERE, False, None, "it may not be preempted"),
        (PARKS, ALL_LEVELS, True, None, "it stops between two steps only, and makes none"),
        (PARKS, Capabilities(pause=True, known=True), True, None, "does not offer OFFLOAD"),
        (PARKS, Capabilities(), True, None, "does not offer OFFLOAD: it has not reported what it can do yet"),
    ],
)
def test_a_job_that_uses_no_gpu_is_parked_only_if_the_settings_and_the_job_allow_it(
    settings: CoreSettings, can: Capabilities, preemptible: bool, parked_after: float | None, refusal: str
) -> None:
    drive = Drive(settings=settings)
    number = drive.submit(replace(job_of(1), preemptible=preemptible))
    drive.start(number)
    drive.observe("n1", part(drive, number, False, can))
    drive.observe("n1", part(drive, number, True, can))
    idle = gang_of(drive, number).idle
    assert idle is not None
    assert idle.since == pytest.approx(drive.now - 100.0), "the daemon has waited for so long"
    assert idle.park_time == pytest.approx(0.0 if parked_after is None else idle.since + parked_after)
    assert refusal in idle.park_refusal
    assert bool(idle.park_refusal) == bool(refusal)
    wait(drive, 1_000.0)
    assert (drive.job(number).state is JobState.SUSPENDED) == (parked_after is not None)
    assert kinds(drive, number) == ["gpus_idle"]


def test_a_job_is_warned_parked_at_offload_and_continues_when_it_is_resumed() -> None:
    drive = Drive(settings=PARKS)
    number = running(drive)
    report(drive, number, True)
    assert list(park_times(drive.state)) == [pytest.approx(drive.now + 200.0)]
    wait(drive, 199.0)
    assert drive.job(number).state is JobState.HOLDING
    wait(drive, 1.0)
    gang = gang_of(drive, number)
    assert (drive.job(number).state, gang.park_level) == (JobState.SUSPENDED, SuspendLevel.OFFLOAD)
    drive.seen(number, gang.epoch, ObservedPhase.PARKED)
    assert drive.state.view.row("n1").free_mask == 0b1111, "its GPU is free for other jobs"
    assert gang_of(drive, number).idle is not None, "why it is suspended is still shown"
    drive.step(ResumeJob(number))
    assert isinstance(drive.request(number, gang_of(drive, number).claims), Approved)
    assert gang_of(drive, number).idle is None
    drive.runs(number)
    wait(drive, 1_000.0)
    assert drive.job(number).state is JobState.HOLDING, "the time begins anew"
    assert texts(drive, number) == [
        "has not used its GPU for 1m 40s, and makes no step: it will be suspended in 3m 20s unless it does",
        "ordered to stop at offload, because it did not use its GPUs (for 5m)",
    ]


def test_a_job_that_uses_its_gpu_again_in_time_is_not_parked() -> None:
    drive = Drive(settings=PARKS)
    number = running(drive)
    report(drive, number, True)
    wait(drive, 150.0)
    report(drive, number, False)
    wait(drive, 1_000.0)
    assert drive.job(number).state is JobState.HOLDING
    assert texts(drive, number)[1] == "uses its GPU again, after 4m 10s"


def test_a_gang_is_idle_once_the_last_of_its_parts_is() -> None:
    drive = Drive(2, PARKS)
    number = running(drive, 8)
    report(drive, number, True, False)
    assert gang_of(drive, number).idle is None
    wait(drive, 500.0)
    report(drive, number, True, True)
    idle = gang_of(drive, number).idle
    assert idle is not None
    assert idle.since == pytest.approx(drive.now - 100.0)
    assert kinds(drive, number) == ["gpus_idle"]


def test_a_job_that_its_user_suspends_is_not_shown_as_parked_for_its_gpus() -> None:
    drive = Drive(settings=PARKS)
    number = running(drive)
    report(drive, number, True)
    drive.step(SuspendJob(number, SuspendLevel.OFFLOAD))
    assert gang_of(drive, number).idle is None
    wait(drive, 1_000.0)
    assert gang_of(drive, number).phase is GangPhase.STOPPING
    assert kinds(drive, number) == ["gpus_idle"]


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_master_that_starts_again_parks_a_job_only_once_its_nodes_report_that_it_is_still_idle(is_idle: bool) -> None:
    drive = Drive(2, PARKS)
    number = running(drive, 8)
    report(drive, number, True, True)
    announced = list(park_times(drive.state))
    drive.state = restored(PARKS, list(drive.state.take_changes().puts.values()), drive.now)
    wait(drive, 1_000.0)
    assert drive.job(number).state is JobState.HOLDING, "it may have used its GPUs meanwhile"
    assert not list(park_times(drive.state)), "the master does not look in vain"
    for node in ("n1", "n2"):
        answer = drive.step(OpenSession(node, f"machine-{node}", SERVER, peer_address=f"{node}:1"))
        assert isinstance(answer, SessionAnswer)
        drive.sessions[node] = answer.session
        drive.observe(node, part(drive, number, is_idle))
    assert list(park_times(drive.state)) == (announced if is_idle else [])
    wait(drive, 0.0)
    assert (drive.job(number).state is JobState.SUSPENDED) == is_idle


def test_a_job_on_a_silent_node_is_not_parked_before_the_node_has_called() -> None:
    drive = Drive(settings=dataclasses.replace(PARKS, lost_after_s=10_000.0))
    number = running(drive)
    report(drive, number, True)
    drive.now += 150.0
    drive.step(Tick())
    assert drive.state.nodes["n1"].silent
    drive.now += 150.0
    drive.step(Tick())
    assert drive.job(number).state is JobState.HOLDING
    assert not list(park_times(drive.state)), "the master does not look in vain"
    wait(drive, 0.0)
    assert drive.job(number).state is JobState.SUSPENDED


@pytest.mark.parametrize("set_by", [3_600.0, -3_600.0])
def test_a_job_is_parked_after_as_long_whatever_the_clock_is_set_to(set_by: float) -> None:
    drive = Drive(settings=PARKS)
    number = running(drive)
    report(drive, number, True)
    drive.now += set_by
    drive.step(Tick(set_by=set_by))
    report(drive, number, True)
    assert list(park_times(drive.state)) == [pytest.approx(drive.now + 200.0, abs=1.0)]
    wait(drive, 190.0)
    assert drive.job(number).state is JobState.HOLDING
    wait(drive, 11.0)
    assert drive.job(number).state is JobState.SUSPENDED


def test_a_partition_has_times_of_its_own() -> None:
    own = {"a": Partition(idle_park_s=60.0), "b": Partition(idle_warning_s=0.0), "c": Partition()}
    settings = dataclasses.replace(PARKS, partitions=own)
    assert [settings.idle_times_s(name) for name in "abc"] == [(100.0, 60.0), (math.inf, 300.0), (100.0, 300.0)]
    assert [settings.idle_after_s(name) for name in "abc"] == [60.0, 300.0, 100.0]
    assert CoreSettings(idle_warning_s=None).idle_after_s("") == 0.0


def test_daemons_watch_only_gangs_with_gpus() -> None:
    drive = Drive(settings=PARKS)
    running(drive)
    assert [gang.idle_after_s for gang in drive.state.desired.of("n1").gangs] == [100.0]
    without = drive.submit(JobSpec(("sleep",), (Role("worker", 1, TaskShape(0, 1_000, GIB)),)))
    drive.start(without)
    assert [gang.idle_after_s for gang in drive.state.desired.of("n1").gangs if gang.job == without] == [0.0]


def test_why_a_job_rests_is_still_shown_once_its_node_is_drained_and_it_is_on_storage() -> None:
    drive = Drive(settings=PARKS)
    number = running(drive)
    report(drive, number, True)
    wait(drive, 200.0)
    epoch = gang_of(drive, number).epoch
    drive.seen(number, epoch, ObservedPhase.PARKED)
    drive.step(SuspendJob(number, SuspendLevel.CHECKPOINT))
    assert gang_of(drive, number).idle is not None, "while it is saved"
    drive.seen(number, epoch, ObservedPhase.PARKED)
    drive.observe("n1")
    job = drive.job(number)
    assert (job.state, job.epoch) == (JobState.SUSPENDED, 0)
    assert "it was suspended because it did not use its GPUs" in explain(drive.state, number, drive.now).assumption
    drive.step(ResumeJob(number))
    assert drive.job(number).trouble == ""
