"""Launches that fail by no fault of the command: the job goes elsewhere, and the node reports it."""

from __future__ import annotations

import pytest
from core.drive import Drive, job_of
from ganger.cluster.refusals import Reason
from ganger.job_state import JobState
from ganger_master.core.answers import Approved, Rejected
from ganger_master.core.commands import CordonNode, DeclareLost, ObservedGang, UncordonNode
from ganger_master.core.explain import explain
from ganger_master.core.gang_model import ObservedPhase, Outcome, OutcomeKind
from ganger_master.core.node_faults import visible_to
from ganger_master.core.settings import CoreSettings
from msgspec.structs import replace


class Launching(Drive):
    def ask_for(self, number: int, node: str) -> Reason | None:
        """Why the job may not have the node; None if it may, and has it now."""
        (place,) = [claims for claims in self.places(number) if claims[0].node == node]
        answer = self.request(number, place)
        if isinstance(answer, Rejected):
            return answer.refusals[0].reason
        assert isinstance(answer, Approved)
        return None

    def ended(self, number: int, kind: OutcomeKind = OutcomeKind.LAUNCH_FAILED, exit_code: int = 0) -> ObservedGang:
        ended = self.report(self.state.gangs[self.job(number).epoch], ObservedPhase.ENDED)
        return replace(ended, outcome=Outcome(kind, exit_code, message="No space left on device"))

    def fails(self, number: int, node: str, exit_code: int = 0) -> None:
        """It gets the node, and cannot be launched there."""
        assert self.ask_for(number, node) is None
        self.observe(node, self.ended(number, exit_code=exit_code))
        self.observe(node)


def test_the_node_is_closed_to_the_job_and_to_no_other() -> None:
    drive = Launching(nodes=2)
    number, other = drive.submit(job_of(4)), drive.submit(job_of(4))
    drive.fails(number, "n1")
    assert drive.job(number).state is JobState.PENDING
    assert drive.ask_for(number, "n1") is Reason.LAUNCH_FAILED
    assert drive.ask_for(other, "n1") is None
    assert drive.ask_for(number, "n2") is None


def test_while_the_other_nodes_are_busy_the_job_waits_for_them_and_why_says_so() -> None:
    drive = Launching(nodes=2)
    number = drive.submit(job_of(4))
    drive.fails(number, "n1")
    drive.start(drive.submit(replace(job_of(4), priority=1)))
    (blocker, *_) = explain(drive.state, number, drive.now).blockers
    assert blocker.reason is Reason.LAUNCH_FAILED
    said = "jobs/1: No space left on device; it waits for another node, or for `ganger uncordon n1`, on n1"
    assert blocker.message.endswith(said)


@pytest.mark.parametrize("gpus", [4, 8])
def test_a_node_that_it_cannot_do_without_stays_open_and_its_attempts_are_counted(gpus: int) -> None:
    drive = Launching(nodes=gpus // 4, settings=CoreSettings(launch_failures_allowed=2))
    number = drive.submit(job_of(gpus))
    for _ in range(3):
        drive.start(number)
        drive.observe("n1", drive.ended(number))
        for node in drive.state.nodes:
            drive.observe(node)
    failure = drive.job(number).failure
    assert failure is not None
    assert failure.reason == "LAUNCH_FAILED"


@pytest.mark.parametrize("kind", [OutcomeKind.UNKNOWN, OutcomeKind.YIELDED, OutcomeKind.FENCED])
def test_ends_without_a_reason_before_a_step_count_as_failed_launches(kind: OutcomeKind) -> None:
    drive = Launching(settings=CoreSettings(launch_failures_allowed=2))
    number = drive.submit(job_of(4))

    def begins_and_ends(*, steps: bool = False) -> None:
        drive.start(number)
        if steps:
            drive.runs(number)
        drive.observe("n1", drive.ended(number, kind))
        drive.observe("n1")

    begins_and_ends()
    begins_and_ends()
    # By now it can do something, whatever ends it.
    for _ in range(4):
        begins_and_ends(steps=True)
    assert drive.job(number).state is JobState.PENDING
    begins_and_ends()
    begins_and_ends()
    begins_and_ends()
    assert drive.job(number).state is JobState.FAILED


def test_starts_on_nodes_that_are_lost_are_no_failures() -> None:
    drive = Launching(settings=CoreSettings(launch_failures_allowed=2))
    number = drive.submit(job_of(4))
    for _ in range(4):
        drive.start(number)
        drive.now += drive.state.settings.session_alive_s
        drive.step(DeclareLost("n1"))
        drive.join("n1")
        drive.observe("n1")
    assert (drive.job(number).state, drive.job(number).launch_failures) == (JobState.PENDING, 0)


def test_nodes_that_do_not_serve_are_no_other_place() -> None:
    drive = Launching(nodes=2)
    number = drive.submit(job_of(4))
    drive.fails(number, "n1")
    drive.step(CordonNode("n2", "being cleaned"))
    assert drive.ask_for(number, "n1") is None


def test_a_node_counts_failed_launches_in_a_row_and_names_the_last() -> None:
    drive = Launching()
    first, second = drive.submit(job_of(4)), drive.submit(job_of(4))
    for number in (first, second):
        drive.fails(number, "n1")
    node = drive.state.nodes["n1"]
    assert (node.launch_failures, node.launch_failure) == (2, f"jobs/{second}: No space left on device")
    assert node.takes_gangs, "a job that can be launched nowhere must not empty the cluster"


def test_a_gang_that_steps_on_a_closed_node_opens_it_again() -> None:
    drive = Launching(nodes=2)
    number, other = drive.submit(job_of(2)), drive.submit(job_of(2))
    drive.fails(number, "n1")
    drive.ask_for(other, "n1")
    assert drive.ask_for(number, "n1") is Reason.LAUNCH_FAILED
    drive.runs(other)
    assert drive.state.nodes["n1"].launch_failures == 0
    assert drive.ask_for(number, "n1") is None
    drive.runs(number)
    assert drive.job(number).launch_failed_on == ()


@pytest.mark.parametrize(("kind", "exit_code"), [(OutcomeKind.DONE, 0), (OutcomeKind.FAILED, 3)])
def test_a_command_that_ends_on_a_closed_node_before_a_step_opens_it_again(kind: OutcomeKind, exit_code: int) -> None:
    drive = Launching(nodes=2)
    number, other = drive.submit(job_of(4)), drive.submit(job_of(4))
    drive.fails(number, "n1")
    drive.ask_for(other, "n1")
    drive.observe("n1", drive.ended(other, kind, exit_code))
    assert drive.state.nodes["n1"].launch_failures == 0


def test_an_operator_opens_it_again() -> None:
    drive = Launching(nodes=2)
    number = drive.submit(job_of(4))
    drive.fails(number, "n1")
    drive.step(UncordonNode("n1"))
    assert drive.ask_for(number, "n1") is None


def test_a_daemon_that_begins_anew_opens_it_again() -> None:
    drive = Launching(nodes=2)
    number = drive.submit(job_of(4))
    drive.fails(number, "n1")
    drive.join("n1")
    assert drive.ask_for(number, "n1") is None


def test_of_a_gang_over_two_nodes_only_the_one_that_failed_is_blamed() -> None:
    drive = Launching(nodes=2)
    number = drive.submit(job_of(8))
    drive.start(number)
    drive.observe("n2", drive.ended(number))
    drive.observe("n1", drive.ended(number, OutcomeKind.STOPPED))
    assert drive.job(number).launch_failed_on == ("n2",)
    assert [drive.state.nodes[name].launch_failures for name in ("n1", "n2")] == [0, 1]


def test_a_command_that_cannot_be_executed_is_no_fault_of_the_node() -> None:
    drive = Launching()
    number = drive.submit(job_of(4))
    drive.fails(number, "n1", exit_code=127)
    assert drive.job(number).state is JobState.FAILED
    assert drive.state.nodes["n1"].launch_failures == 0


def test_the_message_of_a_failed_launch_is_shown_to_the_user_of_that_job_alone() -> None:
    drive = Launching(nodes=2)
    anns, bobs = drive.submit(job_of(4), "ann"), drive.submit(job_of(4), "bob")
    drive.fails(anns, "n1")
    drive.fails(bobs, "n1")
    drive.observe("n1")
    said = drive.state.nodes["n1"].launch_failure
    assert said == f"jobs/{bobs}: No space left on device"
    assert visible_to(drive.state.jobs, said, "bob") == said
    for_ann = visible_to(drive.state.jobs, said, "ann")
    assert for_ann == f"jobs/{bobs}: its user and operators see why"
    assert visible_to(drive.state.jobs, "jobs/4711: /home/carl", "ann") == "jobs/4711: its user and operators see why"
    assert visible_to(drive.state.jobs, "", "ann") == ""
    for number, shown in ((anns, for_ann), (bobs, said)):
        (refusal,) = [
            one for one in explain(drive.state, number, drive.now).blockers if one.reason is Reason.LAUNCH_FAILED
        ]
        assert shown in refusal.message
