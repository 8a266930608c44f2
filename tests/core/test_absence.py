"""A gang that a report omits is gone only if the desired state that its daemon has applied contained it."""

from __future__ import annotations

from core.drive import SERVER, Drive, job_of
from ganger.job_state import JobState
from ganger_master.core import machine
from ganger_master.core.commands import MoveJob, OpenSession
from ganger_master.core.gang_model import GangIntent, GangPhase, ObservedPhase


def test_a_daemon_that_has_not_received_a_gang_does_not_end_it() -> None:
    drive = Drive()
    number = drive.submit(job_of(1))
    before = drive.state.desired.of("n1").version
    epoch = drive.start(number)
    for _ in range(3):
        drive.observe("n1", version=before)
    assert drive.job(number).epoch == epoch
    assert drive.job(number).preemptions == 0


def test_a_daemon_busy_with_the_first_of_two_gangs_does_not_end_the_second() -> None:
    drive = Drive()
    first, second = drive.submit(job_of(1)), drive.submit(job_of(1))
    drive.start(first)
    before = drive.state.desired.of("n1").version
    epoch = drive.start(second)
    gang = drive.state.gangs[drive.job(first).epoch]
    drive.observe("n1", drive.report(gang, ObservedPhase.STARTING), version=before)
    assert drive.job(second).epoch == epoch
    assert drive.job(first).epoch == gang.epoch


def test_a_restarted_daemon_that_has_applied_nothing_yet_ends_nothing() -> None:
    drive = Drive()
    number = drive.submit(job_of(1))
    epoch = drive.start(number)
    drive.runs(number)
    drive.join("n1")
    assert drive.job(number).epoch == epoch
    assert drive.state.gangs[epoch].phase is GangPhase.RUNNING
    drive.runs(number)
    assert drive.job(number).preemptions == 0


def test_a_gang_missing_from_a_report_of_its_version_is_gone_and_starts_again_under_a_new_epoch() -> None:
    drive = Drive()
    number = drive.submit(job_of(1))
    epoch = drive.start(number)
    drive.runs(number)
    drive.join("n1")
    drive.observe("n1")
    assert drive.job(number).state is JobState.PENDING
    assert drive.job(number).preemptions == 1
    assert drive.start(number) > epoch


def test_a_late_report_of_an_older_version_aborts_no_move() -> None:
    drive = Drive(2)
    number = drive.submit(job_of(2))
    source = drive.start(number)
    drive.runs(number)
    other = next(node for node in ("n1", "n2") if node not in drive.state.gangs[source].nodes)
    before = drive.state.desired.of(other).version
    drive.step(MoveJob(number, (other,)))
    destination = drive.job(number).next_epoch
    drive.observe(other, version=before)
    assert drive.job(number).next_epoch == destination
    drive.observe(other)
    assert drive.job(number).next_epoch == 0
    assert drive.state.gangs[source].intent is GangIntent.RUN


def test_a_node_that_has_lost_all_its_gangs_gets_no_spec_of_launched_ones() -> None:
    drive = Drive()
    number = drive.submit(job_of(1))
    drive.start(number)
    drive.runs(number)
    # what the shell may tell a node is what it was last given
    opened = machine.step(drive.state, OpenSession("n1", "machine-n1", SERVER), drive.now)
    assert opened.effects.nodes == ("n1",)
    assert [gang.needs_spec for gang in drive.state.desired.of("n1").gangs] == [False]


def test_a_daemon_that_restarts_while_a_gang_waits_for_its_slice_gets_its_whole_order() -> None:
    drive = Drive()
    number = drive.submit(job_of(1))
    epoch = drive.start(number)
    # known to the daemon that dies, and not launched
    drive.seen(number, epoch, ObservedPhase.STARTING)
    machine.step(drive.state, OpenSession("n1", "machine-n1", SERVER), drive.now)
    assert [gang.needs_spec for gang in drive.state.desired.of("n1").gangs] == [True]
