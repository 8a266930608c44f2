"""A client of several masters calls the one that leads, also after another one has taken over."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ganger.cli.main import run
from ganger.client import Client
from ganger.v1 import job_pb2, job_service_pb2
from ganger.wire import errors
from ganger.wire.endpoints import read_endpoint
from kit.canned import CannedMaster


class ListedMaster(CannedMaster):
    """A master that leads or stands by. `leader`: the directory of the one that it names; None while it leads."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        super().__init__(directory)
        self.leader: Path | None = None

    def _taken(self, request: Any) -> None:
        super()._taken(request)
        if self.leader is not None:
            raise errors.NotLeader("this master stands by", leader=read_endpoint(self.leader).address)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[ListedMaster, ListedMaster]]:
    """The first one stands by, the second one leads."""
    with ListedMaster(tmp_path / "a") as first, ListedMaster(tmp_path / "b") as second:
        first.leader = second.directory
        yield first, second


def listed(*masters: CannedMaster) -> str:
    return ",".join(str(master.directory) for master in masters)


def test_a_submission_reaches_the_leader_wherever_it_is_listed(pair: tuple[ListedMaster, ListedMaster]) -> None:
    first, second = pair
    with Client(listed(first, second)) as client:
        assert client.submit("true").name == "jobs/1"
    assert (len(first.requests), len(second.requests)) == (1, 1)
    assert first.jobs == {}


def test_a_client_follows_the_leader_and_asks_the_stand_by_no_more(pair: tuple[ListedMaster, ListedMaster]) -> None:
    first, second = pair
    with Client(listed(first, second)) as client:
        client.submit("true")
        first.jobs = second.jobs
        first.leader, second.leader = None, first.directory
        before = len(second.requests)
        for _ in range(3):
            assert client.get_job(1).name == "jobs/1"
        assert len(second.requests) == before + 1


def test_a_submission_waits_for_a_stand_by_to_lead(pair: tuple[ListedMaster, ListedMaster]) -> None:
    first, second = pair
    second.leader = first.directory

    def lead() -> None:
        first.leader = None

    threading.Timer(0.5, lead).start()
    with Client(listed(first, second)) as client:
        client.submit("true")
    ids = {request.request_id for request in (*first.requests, *second.requests)}
    assert len(ids) == 1
    assert len(first.jobs) == 1
    assert second.jobs == {}


def test_a_stream_goes_on_at_the_new_leader(pair: tuple[ListedMaster, ListedMaster]) -> None:
    first, second = pair
    with Client(listed(first, second), patience_s=10.0) as client:
        client.submit("true")
        watched = client.watch_job(1)
        assert next(watched).state == job_pb2.Job.STATE_PENDING
        first.jobs["jobs/1"] = job_pb2.Job(name="jobs/1", state=job_pb2.Job.STATE_SUCCEEDED, revision=2)
        first.leader, second.leader = None, first.directory
        assert next(watched).state == job_pb2.Job.STATE_SUCCEEDED


def test_a_log_is_read_of_the_leader_wherever_it_is_listed(pair: tuple[ListedMaster, ListedMaster]) -> None:
    first, second = pair
    second.logs[0] = b"step 1\n"
    with Client(listed(first, second), patience_s=10.0) as client:
        assert [chunk.data for chunk in client.read_log(1)] == [b"step 1\n"]


class LosingMaster(ListedMaster):
    """Goes away with the answer of a submission."""

    async def CreateJob(self, request: Any, context: Any) -> job_pb2.Job:  # noqa: N802
        await super().CreateJob(request, context)
        self.stopping = asyncio.create_task(self._server.stop(0))
        await asyncio.Event().wait()
        raise AssertionError


def test_a_submission_whose_answer_is_lost_is_repeated_with_its_request_id(tmp_path: Path) -> None:
    with LosingMaster(tmp_path / "a") as first, ListedMaster(tmp_path / "b") as second:
        with Client(listed(first, second)) as client:
            client.submit("true")
        assert [one.request_id for one in first.requests] == [one.request_id for one in second.requests]


def test_an_order_that_may_have_been_taken_is_not_repeated(tmp_path: Path) -> None:
    class Mover(ListedMaster):
        async def MoveJob(self, request: Any, context: Any) -> job_pb2.Job:  # noqa: N802
            self._taken(request)
            self.stopping = asyncio.create_task(self._server.stop(0))
            await asyncio.Event().wait()
            raise AssertionError

    with Mover(tmp_path / "a") as first, Mover(tmp_path / "b") as second:
        with Client(listed(first, second)) as client, pytest.raises(errors.Unreachable):
            client.move_job(1)
        assert second.requests == []


def test_an_order_is_not_repeated_after_the_loss_of_the_lease_and_the_next_call_goes_to_the_leader(
    tmp_path: Path,
) -> None:
    class Mover(ListedMaster):
        async def MoveJob(self, request: Any, context: Any) -> job_pb2.Job:  # noqa: N802
            self._taken(request)
            raise errors.LeaseLost("lost", leader=read_endpoint(second.directory).address)

    with Mover(tmp_path / "a") as first, Mover(tmp_path / "b") as second:
        second.jobs["jobs/1"] = job_pb2.Job(name="jobs/1")
        with Client(listed(first, second)) as client:
            with pytest.raises(errors.LeaseLost):
                client.move_job(1)
            assert second.requests == []
            assert client.get_job(1).name == "jobs/1"


def test_without_a_leader_a_call_ends_at_its_deadline_with_the_reason(
    pair: tuple[ListedMaster, ListedMaster],
) -> None:
    first, second = pair
    second.leader = first.directory
    with Client(listed(first, second)) as client:
        began = time.monotonic()
        with pytest.raises(errors.NotLeader, match="stands by"):
            client._call(
                lambda request: client._jobs.GetJob(request, timeout=0.5), job_service_pb2.GetJobRequest(name="jobs/1")
            )
        assert time.monotonic() - began < 5.0


def test_a_command_takes_a_list_of_masters(
    pair: tuple[ListedMaster, ListedMaster], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = pair
    assert run(["--master", listed(first, second), "submit", "--", "true"]) == 0
    assert run(["--master", str(first.directory), "submit", "--", "true"]) == 5
    refused = capsys.readouterr().err
    assert "this master stands by" in refused
    assert "name all masters" in refused
    assert "is not known" not in refused
