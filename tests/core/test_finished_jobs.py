"""Of jobs that ended long ago only the request ids are kept: memory is bounded, and no request is accepted twice."""

from __future__ import annotations

import pytest
from core.drive import Drive, job_of
from ganger_master.core.answers import JobAnswer, Refused
from ganger_master.core.commands import CancelJob, DeclareLost, SubmitJob, Tick
from ganger_master.core.job_model import Request
from ganger_master.core.node_model import Element
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state_image import restored

FEW = CoreSettings(finished_jobs_limit=3, former_requests_limit=5)
DAY = 24 * 3600.0


def ended(drive: Drive, count: int) -> list[int]:
    """Numbers of jobs that were submitted under the ids id-1, id-2, ... and cancelled."""
    numbers = []
    for _ in range(count):
        name = f"id-{drive.state.counters.next_job}"
        answer = drive.step(SubmitJob(job_of(1), f"uid-{name}", "ann", name))
        assert isinstance(answer, JobAnswer)
        drive.step(CancelJob(answer.number))
        numbers.append(answer.number)
    return numbers


def again(drive: Drive, request_id: str) -> int | str:
    """Repeat a submission; return its job's number, or why it is refused."""
    answer = drive.step(SubmitJob(job_of(1), "another-uid", "ann", request_id))
    assert isinstance(answer, JobAnswer | Refused)
    return answer.number if isinstance(answer, JobAnswer) else f"{answer.reason} {answer.metadata['job']}"


def stored(drive: Drive, before: dict[tuple[str, str], Element]) -> dict[tuple[str, str], Element]:
    """What a store holds once it has taken the changes."""
    changes = drive.state.take_changes()
    return {key: value for key, value in {**before, **changes.puts}.items() if key not in changes.removes}


def test_the_last_to_end_are_kept_and_the_ids_of_the_others_are_never_accepted_twice() -> None:
    drive = Drive(settings=FEW)
    live = drive.submit(job_of(1))
    assert ended(drive, 5) == [2, 3, 4, 5, 6]
    assert sorted(drive.state.jobs) == [live, 4, 5, 6]
    assert again(drive, "id-6") == 6
    assert again(drive, "id-2") == "REQUEST_REUSED jobs/2"
    drive.now += DAY
    assert again(drive, "id-2") == 7


def test_request_ids_of_forgotten_jobs_survive_a_restart_and_expire_after_a_day() -> None:
    drive = Drive(settings=FEW)
    ended(drive, 2)
    drive.now += DAY / 2
    ended(drive, 3)
    store = stored(drive, {})
    assert {key for key in store if key[0] == "request"} == {("request", "1"), ("request", "2")}
    assert store["request", "1"] == Request(1, "id-1", store["request", "1"].time, "ann")  # type: ignore[union-attr]
    drive.state = restored(FEW, store.values(), drive.now)
    assert again(drive, "id-1") == "REQUEST_REUSED jobs/1"
    # In the order in which they ended, also after a restart.
    assert list(drive.state.jobs.finished) == [3, 4, 5]
    drive.now += DAY / 2
    drive.step(Tick())
    assert not drive.state.jobs.former
    assert not [key for key in stored(drive, store) if key[0] == "request"]


def test_an_id_of_a_forgotten_job_is_still_its_users() -> None:
    drive = Drive(settings=FEW)
    ended(drive, 5)
    assert again(drive, "id-1") == "REQUEST_REUSED jobs/1"
    answer = drive.step(SubmitJob(job_of(1), "of-bob", "bob", "id-1"))
    assert answer == JobAnswer(6)


def test_ids_are_bounded_too() -> None:
    drive = Drive(settings=FEW)
    ended(drive, 20)
    assert (len(drive.state.jobs), len(drive.state.jobs.former)) == (3, 5)
    kinds = [kind for kind, _ in stored(drive, {})]
    assert (kinds.count("job"), kinds.count("request")) == (3, 5)


def test_an_id_that_was_used_anew_after_its_day_is_that_of_the_later_job() -> None:
    drive = Drive(settings=FEW)
    ended(drive, 1)
    drive.now += DAY + 1.0
    later = again(drive, "id-1")
    assert later == 2
    ended(drive, 3)
    assert 1 not in drive.state.jobs
    assert again(drive, "id-1") == later
    drive.step(CancelJob(2))
    ended(drive, 3)
    assert again(drive, "id-1") == "REQUEST_REUSED jobs/2"
    assert ("request", "1") not in stored(drive, {})


@pytest.mark.parametrize("finishes", [4, 8])
def test_a_job_with_something_on_a_lost_node_stays(finishes: int) -> None:
    drive = Drive(nodes=1, settings=FEW)
    held = drive.submit(job_of(1))
    drive.start(held)
    drive.runs(held)
    drive.now += drive.state.settings.session_alive_s
    drive.step(DeclareLost("n1"))
    drive.step(CancelJob(held))
    ended(drive, finishes)
    assert held in drive.state.jobs
    assert len(drive.state.jobs.finished) == 3
