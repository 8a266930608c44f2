"""The SDK against a server: pages, streams that break, errors with reasons, and the token."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from ganger.array_spec import make_array
from ganger.cli.main import run
from ganger.client import Client
from ganger.job import JobFailedError, JobState
from ganger.v1 import array_pb2, job_pb2
from ganger.wire import errors
from ganger.wire.endpoints import Endpoint, ensure_token, read_endpoint, write_endpoint
from kit.canned import CannedMaster


@pytest.fixture
def master(tmp_path: Path) -> Iterator[CannedMaster]:
    with CannedMaster(tmp_path) as master:
        yield master


@pytest.fixture
def client(master: CannedMaster) -> Iterator[Client]:
    with Client(str(master.directory), patience_s=5) as client:
        yield client


def test_what_the_documentation_says_of_python_needs_no_other_import() -> None:
    script = (
        "import ganger\n"
        "assert ganger.array_spec.make_array({'command': ['x'], 'array': {'indices': '0-3'}}) is not None\n"
        "assert issubclass(ganger.ApiError, Exception)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.usefixtures("scripts")
def test_a_submission_carries_spec_and_request_id(client: Client, master: CannedMaster) -> None:
    job = client.submit(["python", "train.py"], gpus=2, name="digits")
    assert (job.name, job.id, job.state) == ("jobs/1", 1, JobState.PENDING)
    request = master.requests[0]
    assert request.spec.roles[0].tasks == 2
    assert len(request.request_id) == 36


def test_an_update_carries_what_is_to_be_otherwise_and_no_more(client: Client, master: CannedMaster) -> None:
    job = client.submit("true")
    job.update(priority=0, time="never", cpus_per_gpu="auto", tolerance="node")
    request = master.requests[-1]
    assert (request.name, len(request.request_id)) == ("jobs/1", 36)
    assert [field.name for field, _ in request.update.ListFields()] == [
        "priority",
        "time_limit",
        "locality",
        "millicores_per_gpu",
    ]
    assert (request.update.priority, request.update.time_limit.seconds, request.update.millicores_per_gpu) == (0, 0, 0)
    client.update(1, time="1h", name="b", memory="2G", gpu_type="a100", request_id="r")
    request = master.requests[-1]
    assert (request.request_id, request.update.time_limit.seconds, request.update.display_name) == ("r", 3_600, "b")
    assert (request.update.memory_bytes, request.update.device_type) == (2 << 30, "a100")


def test_all_that_is_wrong_with_an_update_is_said_before_it_is_sent(client: Client, master: CannedMaster) -> None:
    with pytest.raises(errors.SpecInvalid) as wrong:
        client.update(1, priority="high", memory="much", gpus=4)
    assert {violation.field for violation in wrong.value.violations} == {"priority", "memory", "gpus"}
    with pytest.raises(errors.SpecInvalid, match="say what to change"):
        client.update(1)
    assert not master.requests


def test_lists_are_fetched_page_by_page_and_no_further(client: Client, master: CannedMaster) -> None:
    for _ in range(5):
        client.submit("true")
    assert [job.name for job in client.list_jobs()] == [f"jobs/{number}" for number in range(1, 6)]
    master.requests.clear()
    assert len(list(client.list_jobs(limit=2))) == 2
    assert len(master.requests) == 1


def test_errors_have_their_class_reason_and_message(client: Client, master: CannedMaster) -> None:
    with pytest.raises(errors.JobNotFound, match="there is no jobs/7"):
        client.job(7)
    master.failing = errors.SpecInvalid("bad", violations=[errors.Violation("spec.command", "missing")])
    with pytest.raises(errors.SpecInvalid) as caught:
        client.submit("true")
    assert caught.value.violations == (errors.Violation("spec.command", "missing"),)


def test_a_bug_of_the_server_is_a_number_and_nothing_else(client: Client, master: CannedMaster) -> None:
    master.failing = RuntimeError("password=secret")
    with pytest.raises(errors.Internal) as caught:
        client.get_job(1)
    assert "secret" not in str(caught.value)
    assert caught.value.metadata["id"] in str(caught.value)


def test_calls_without_the_token_are_rejected(master: CannedMaster) -> None:
    address = read_endpoint(master.directory).address
    for token in ("", "wrong"):
        with Client(Endpoint(address, token)) as stranger, pytest.raises(errors.TokenInvalid):
            stranger.get_cluster()
        with Client(Endpoint(address, token)) as stranger, pytest.raises(errors.TokenInvalid):
            list(stranger.read_log(1))


@pytest.mark.parametrize("size_bytes", [600 << 10, 5 << 20])
def test_a_message_too_large_is_refused_before_it_is_sent(
    client: Client, master: CannedMaster, size_bytes: int
) -> None:
    spec = job_pb2.JobSpec(environment={"LARGE": "x" * size_bytes})
    for submitted in (client.submit_spec, client.validate):
        with pytest.raises(errors.MessageTooLarge, match="files"):
            submitted(spec)
    assert not master.requests


def test_a_message_too_large_is_refused_by_the_server_too(master: CannedMaster) -> None:
    from ganger.v1.job_service_pb2 import CreateJobRequest
    from ganger.v1.job_service_pb2_grpc import JobServiceStub
    from ganger.wire.channels import open_channel

    unbounded = (("grpc.max_send_message_length", -1),)
    with open_channel(read_endpoint(master.directory), unbounded) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            JobServiceStub(channel).CreateJob(CreateJobRequest(request_id="x" * (5 << 20)))
        assert errors.reason_of(caught.value) == "MESSAGE_TOO_LARGE"


def test_a_log_goes_on_where_the_stream_broke(client: Client, master: CannedMaster) -> None:
    job = client.submit("true")
    master.logs[0] = bytes(range(100))
    master.jobs[job.name].state = job_pb2.Job.STATE_SUCCEEDED
    chunks = job.logs(follow=True)
    first = next(chunks)
    master.failing = errors.NotReady("stopping")
    assert first + b"".join(chunks) == master.logs[0]


def test_a_master_that_comes_back_at_another_address_is_found_again(tmp_path: Path) -> None:
    for name in ("known", "other"):
        (tmp_path / name).mkdir()
    with CannedMaster(tmp_path / "known") as first:
        first.logs = {0: b"0123456789abcdef"}
        with Client(str(first.directory)) as before:
            before.submit("true")
        client, follower = Client(str(first.directory)), Client(str(first.directory), patience_s=20)
        assert client.get_job(1).name == "jobs/1"
    with CannedMaster(tmp_path / "other") as second, client, follower:
        second.jobs, second.logs = first.jobs, first.logs
        second.jobs["jobs/1"].state = job_pb2.Job.STATE_SUCCEEDED
        token_file = ensure_token(second.directory)[1]
        write_endpoint(first.directory, read_endpoint(second.directory).address, token_file)
        with pytest.raises(errors.Unreachable, match=str(first.directory)):
            client.get_job(1)
        assert client.get_job(1).name == "jobs/1"
        assert b"".join(chunk.data for chunk in follower.read_log(1, follow=True)) == first.logs[0]


def test_a_log_is_read_from_the_end(client: Client, master: CannedMaster) -> None:
    job = client.submit("true")
    master.logs[0] = b"0123456789" * 3
    assert b"".join(job.logs(offset=-5)) == b"56789"
    with pytest.raises(errors.OffsetBeyondEnd):
        list(job.logs(offset=99))


def test_waiting_ends_with_the_job_and_says_how(client: Client, master: CannedMaster) -> None:
    job = client.submit("true")
    with pytest.raises(TimeoutError, match="PENDING"):
        job.wait(timeout_s=0.01)
    message = master.jobs[job.name]
    message.state = job_pb2.Job.STATE_FAILED
    message.failure.reason, message.failure.message = "EXIT", "rank 0 exited with code 3"
    with pytest.raises(JobFailedError, match="EXIT"):
        job.wait(timeout_s=5)
    assert job.wait(check=False) is JobState.FAILED


def test_an_unreachable_master_is_reported_with_its_address(tmp_path: Path) -> None:
    absent = Endpoint(f"unix:{tmp_path}/absent")
    with Client(absent) as client, pytest.raises(errors.Unreachable, match="ganger up"):
        client.get_cluster()


def test_a_suspend_names_its_level(client: Client, master: CannedMaster) -> None:
    job = client.submit("true")
    job.suspend("offload")
    assert master.requests[-1].level == job_pb2.SUSPEND_LEVEL_OFFLOAD
    with pytest.raises(ValueError, match="checkpoint"):
        job.suspend("sleep")


class DyingMaster(CannedMaster):
    """Goes away once it has accepted a submission, before it answers."""

    async def CreateJob(self, request: Any, context: Any) -> job_pb2.Job:  # noqa: N802
        await super().CreateJob(request, context)
        return await self._gone()

    async def CreateArray(self, request: Any, context: Any) -> array_pb2.Array:  # noqa: N802
        await super().CreateArray(request, context)
        return await self._gone()

    async def _gone(self) -> Any:
        self.stopping = asyncio.create_task(self._server.stop(0))
        await asyncio.Event().wait()


@pytest.mark.parametrize("is_array", [False, True])
def test_a_submission_whose_answer_is_lost_names_the_request_id_that_repeats_it(tmp_path: Path, is_array: bool) -> None:
    with DyingMaster(tmp_path) as master, Client(str(tmp_path)) as client:
        array = make_array({"command": ["true"], "array": {"indices": "0-3"}})
        submit = partial(client.submit_array, array) if is_array else partial(client.submit, ["true"])
        with pytest.raises(errors.Unreachable) as lost:
            submit()
        (request,) = master.requests
    assert f"--request-id {request.request_id}" in str(lost.value)
    assert lost.value.metadata["request_id"] == request.request_id
    assert "whether the submission was accepted is not known" in str(lost.value)


def test_submit_ends_with_code_5_and_the_flag_that_repeats_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with DyingMaster(tmp_path) as master:
        assert run(["--master", str(tmp_path), "submit", "--", "true"]) == 5
        (request,) = master.requests
    told = capsys.readouterr()
    assert told.out == ""
    assert f"repeat the same command with --request-id {request.request_id}" in told.err


def test_no_request_id_is_offered_for_a_submission_that_is_refused(client: Client, master: CannedMaster) -> None:
    master.failing = errors.QueueFull("full")
    with pytest.raises(errors.QueueFull) as refused:
        client.submit("true")
    assert "request-id" not in str(refused.value)
