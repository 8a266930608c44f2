"""The same report twice changes nothing, and a restart from what is durable gives the same elements."""

from __future__ import annotations

import msgspec
from ganger.cluster.resources import Role, TaskShape
from ganger.cluster.topology import parse_topology
from ganger_master.core import machine
from ganger_master.core.answers import Done, JobAnswer, Refused, SessionAnswer
from ganger_master.core.commands import Observe, OpenSession, SubmitJob
from ganger_master.core.events import ELEMENT_TYPES, Effects
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state import State
from ganger_master.core.state_image import restored

SERVER = parse_topology("2x2", name="v4")
SPEC = JobSpec(("train",), (Role("worker", 1, TaskShape(1)),))


def joined() -> tuple[State, str]:
    state = State(CoreSettings(), 0.0)
    answer = machine.step(state, OpenSession("n1", "m1", SERVER), 1.0).answer
    assert isinstance(answer, SessionAnswer)
    assert machine.step(state, Observe("n1", answer.session, 1, 0), 2.0).answer == Done()
    return state, answer.session


def test_the_same_report_twice_changes_nothing() -> None:
    state, session = joined()
    state.take_changes()
    step = machine.step(state, Observe("n1", session, 1, 0), 3.0)
    assert not state.take_changes()
    assert step.effects == Effects()


def test_a_report_of_a_void_session_is_refused() -> None:
    state, _ = joined()
    answer = machine.step(state, Observe("n1", "n1-0", 9, 0), 3.0).answer
    assert isinstance(answer, Refused)
    assert answer.reason == "SESSION_SUPERSEDED"


def test_a_request_id_gives_the_first_answer_again_and_never_another_job() -> None:
    state, _ = joined()
    first = machine.step(state, SubmitJob(SPEC, "u1", "ann", "r1"), 3.0).answer
    assert machine.step(state, SubmitJob(SPEC, "u2", "ann", "r1"), 4.0).answer == first == JobAnswer(1)
    other = JobSpec(("other",), SPEC.roles)
    answer = machine.step(state, SubmitJob(other, "u3", "ann", "r1"), 5.0).answer
    assert isinstance(answer, Refused)
    assert answer.reason == "REQUEST_REUSED"


def test_each_user_has_request_ids_of_its_own() -> None:
    state, _ = joined()
    other = JobSpec(("other",), SPEC.roles)
    assert machine.step(state, SubmitJob(SPEC, "u1", "ann", "nightly"), 3.0).answer == JobAnswer(1)
    assert machine.step(state, SubmitJob(other, "u2", "bob", "nightly"), 4.0).answer == JobAnswer(2)
    state = restored(CoreSettings(), state.take_changes().puts.values(), 5.0)
    assert machine.step(state, SubmitJob(SPEC, "u3", "ann", "nightly"), 5.0).answer == JobAnswer(1)
    assert machine.step(state, SubmitJob(other, "u4", "bob", "nightly"), 5.0).answer == JobAnswer(2)


def test_all_violations_of_a_spec_are_reported_at_once() -> None:
    state, _ = joined()
    bad = JobSpec((), (), working_directory="here", priority=5_000, weight=0.0, least_decrease=1.5)
    answer = machine.step(state, SubmitJob(bad, "u1"), 3.0).answer
    assert isinstance(answer, Refused)
    paths = {path for path, _ in answer.violations}
    assert paths == {
        "spec.command",
        "spec.roles",
        "spec.working_directory",
        "spec.priority",
        "spec.weight",
        "spec.convergence.least_decrease",
    }


def test_a_gang_no_cluster_could_hold_is_refused_with_the_largest_that_fits() -> None:
    state, _ = joined()
    answer = machine.step(state, SubmitJob(JobSpec(("train",), (Role("worker", 5, TaskShape(1)),)), "u1"), 3.0).answer
    assert isinstance(answer, Refused)
    assert answer.reason == "GANG_IMPOSSIBLE"
    assert answer.metadata["largest"] == "4"


def test_a_restart_keeps_every_element_and_takes_no_verdicts_before_the_first_report() -> None:
    state, _ = joined()
    machine.step(state, SubmitJob(SPEC, "u1"), 3.0)
    puts = state.take_changes().puts
    elements = [
        msgspec.json.decode(msgspec.json.encode(element), type=ELEMENT_TYPES[kind])
        for (kind, _), element in puts.items()
    ]
    again = restored(CoreSettings(), elements, 10.0)
    assert again.jobs == state.jobs
    assert again.counters.next_job == 2
    assert not again.rows["n1"].available
    assert again.nodes["n1"].session == ""
