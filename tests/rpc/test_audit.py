"""The audit log names each call that changes something, each reading of a log, and each caller that was refused."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from ganger.v1 import job_pb2, job_service_pb2, node_pb2
from ganger.wire import revocation
from ganger.wire.channels import open_aio_channel
from ganger.wire.endpoints import Endpoint
from ganger.wire.revocation import REVOKED
from ganger_master.rpc import audit
from ganger_master.rpc.audit import AuditLog, AuditRecord
from ganger_master.rpc.log_proxy import LogProxy
from rpc.certified import CertifiedMaster, serving_certified
from rpc.kit import WAIT_S, until


def records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / audit.FILE).read_text().splitlines()]


def said(directory: Path) -> list[tuple[str, str, str, str]]:
    return [(one["caller"], one["method"], one["subject"], one["result"]) for one in records(directory)]


async def tried(call: Any) -> None:
    try:
        await (anext(aiter(call)) if hasattr(call, "__aiter__") else call)
    except grpc.RpcError:
        pass


def test_what_callers_change_and_are_refused_is_recorded_and_what_they_read_is_not(tmp_path: Path) -> None:
    async def story(certified: CertifiedMaster) -> None:
        ann, bob, olga = (
            certified.calls(*identity) for identity in (("user", "ann"), ("user", "bob"), ("operator", "olga"))
        )
        job = (await ann.submit()).name
        await ann.jobs.GetJob(job_service_pb2.GetJobRequest(name=job))
        await tried(ann.jobs.ValidateSubmission(job_service_pb2.ValidateSubmissionRequest()))
        await tried(bob.jobs.CancelJob(job_service_pb2.CancelJobRequest(name=job)))
        await tried(bob.nodes.DrainNode(node_pb2.DrainNodeRequest(name="nodes/n1")))
        await tried(bob.jobs.ReadLog(job_service_pb2.ReadLogRequest(name=job)))
        await olga.jobs.CancelJob(job_service_pb2.CancelJobRequest(name=job))
        await tried(olga.nodes.CordonNode(node_pb2.CordonNodeRequest(name="nodes/none")))
        await certified.with_token().nodes.GetCluster(node_pb2.GetClusterRequest())
        wrong = Endpoint(certified.master.local_address, "wrong")
        async with open_aio_channel(wrong) as channel:
            await tried(channel.unary_unary("/ganger.v1.NodeService/GetCluster")(b""))
        assert said(tmp_path / "state") == [
            ("user/ann", "CreateJob", job, "OK"),
            ("user/bob", "CancelJob", job, "JOB_NOT_YOURS"),
            ("user/bob", "DrainNode", "nodes/n1", "ROLE_NOT_PERMITTED"),
            ("user/bob", "ReadLog", job, "JOB_NOT_YOURS"),
            ("operator/olga", "CancelJob", job, "OK"),
            ("operator/olga", "CordonNode", "nodes/none", "NODE_NOT_FOUND"),
            ("", "GetCluster", "", "TOKEN_INVALID"),
        ]
        assert {one["source"] for one in records(tmp_path / "state")} == {"127.0.0.1"}

    run(tmp_path, story)


def test_a_revoked_certificate_is_recorded_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revocation, "_LOOK_S", 0.0)

    async def story(certified: CertifiedMaster) -> None:
        master, stolen = certified.authority.issue("master", "m"), certified.authority.issue("operator", "olga")
        (master / REVOKED).write_bytes(certified.authority.revoke(stolen))
        await tried(certified.calls("operator", "olga").nodes.GetCluster(node_pb2.GetClusterRequest()))
        assert said(tmp_path / "state") == [("operator/olga", "GetCluster", "", "CERTIFICATE_REVOKED")]

    run(tmp_path, story)


def test_a_flood_of_refused_callers_does_not_push_out_what_others_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "_FAILED_BURST", 3.0)
    monkeypatch.setattr(audit, "_FAILED_RATE", 1e-9)

    async def story(certified: CertifiedMaster) -> None:
        bob = certified.calls("user", "bob")
        for _ in range(10):
            await tried(bob.nodes.DrainNode(node_pb2.DrainNodeRequest(name="nodes/n1")))
        job = (await bob.submit()).name
        found = records(tmp_path / "state")
        assert [one["method"] for one in found] == ["DrainNode"] * 3 + ["CreateJob"]
        assert (found[-1]["subject"], found[-1]["left_out"]) == (job, 7)

    run(tmp_path, story)


def test_a_user_above_its_limit_does_not_push_out_what_others_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "_FAILED_BURST", 3.0)
    monkeypatch.setattr(audit, "_FAILED_RATE", 1e-9)

    async def story(certified: CertifiedMaster) -> None:
        bob, ann = certified.calls("user", "bob"), certified.calls("user", "ann")
        for _ in range(30):
            await tried(bob.jobs.CancelJob(job_service_pb2.CancelJobRequest(name="jobs/none")))
        job = (await ann.submit()).name
        found = records(tmp_path / "state")
        assert [one["caller"] for one in found] == ["user/bob"] * 3 + ["user/ann"]
        assert (found[-1]["subject"], found[-1]["left_out"]) == (job, 27)

    run(tmp_path, story, changes_per_user=1)


def test_a_call_is_recorded_although_the_caller_hangs_up_before_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(certified: CertifiedMaster) -> None:
        ann = certified.calls("user", "ann")
        job = (await ann.submit()).name
        done, submit = asyncio.Event(), certified.master.writer.submit

        async def without_an_end(command: Any) -> None:
            await submit(command)
            done.set()
            await asyncio.Event().wait()

        call = job_service_pb2.CancelJobRequest(name=job)
        with monkeypatch.context() as patch:
            patch.setattr(certified.master.writer, "submit", without_an_end)
            asked = ann.jobs.CancelJob(call)
            await asyncio.wait(
                {asyncio.ensure_future(asked.code()), asyncio.ensure_future(done.wait())},
                timeout=WAIT_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            asked.cancel()
        await until(lambda: len(records(tmp_path / "state")) == 2)
        found = await ann.jobs.GetJob(job_service_pb2.GetJobRequest(name=job))
        assert found.state == job_pb2.Job.STATE_CANCELLED
        assert said(tmp_path / "state")[1:] == [("user/ann", "CancelJob", job, "CANCELLED")]

    run(tmp_path, story)


def test_the_reading_of_a_log_is_recorded_although_the_reader_hangs_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read(*_: Any, **__: Any) -> AsyncIterator[job_service_pb2.LogChunk]:
        yield job_service_pb2.LogChunk(data=b"secret")
        await asyncio.Event().wait()

    monkeypatch.setattr(LogProxy, "read", read)

    async def story(certified: CertifiedMaster) -> None:
        ann = certified.calls("user", "ann")
        job = (await ann.submit()).name
        call = ann.jobs.ReadLog(job_service_pb2.ReadLogRequest(name=job, follow=True))
        assert (await call.read()).data == b"secret"
        call.cancel()
        await until(lambda: len(records(tmp_path / "state")) == 2)
        assert said(tmp_path / "state")[1:] == [("user/ann", "ReadLog", job, "CANCELLED")]

    run(tmp_path, story)


def test_a_reader_of_a_log_that_hangs_up_while_more_is_sent_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generator that sends is closed late then, by the collector of garbage, and the call is gone: whatever asks
    that for its caller ends the process."""

    async def read(*_: Any, **__: Any) -> AsyncIterator[job_service_pb2.LogChunk]:
        while True:
            yield job_service_pb2.LogChunk(data=b"x" * 70_000)

    monkeypatch.setattr(LogProxy, "read", read)

    def are_recorded(directory: Path) -> bool:
        gc.collect()
        return [one[1:] for one in said(directory)].count(("ReadLog", "jobs/1", "CANCELLED")) == 20

    async def story(certified: CertifiedMaster) -> None:
        ann = certified.calls("user", "ann")
        job = (await ann.submit()).name
        for _ in range(20):
            call = ann.jobs.ReadLog(job_service_pb2.ReadLogRequest(name=job, follow=True))
            await call.read()
            call.cancel()
        await until(lambda: are_recorded(tmp_path / "state"))
        assert {one["source"] for one in records(tmp_path / "state")} == {"127.0.0.1"}

    run(tmp_path, story)


def run(tmp_path: Path, story: Any, **more: int) -> None:
    async def inside() -> None:
        async with serving_certified(tmp_path, **more) as certified:
            await story(certified)

    asyncio.run(inside())


def record(number: int) -> AuditRecord:
    return AuditRecord("2026-01-01T00:00:00.000+00:00", "user/ann", "10.0.0.1", "CreateJob", f"jobs/{number}", "OK")


def subjects(path: Path) -> list[str]:
    return [json.loads(line)["subject"] for line in path.read_text().splitlines()]


def test_a_large_file_is_followed_by_another_and_the_oldest_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "_LARGEST_BYTES", 300)
    monkeypatch.setattr(audit, "_FORMER_FILES", 2)
    kept = AuditLog(tmp_path / audit.FILE)
    for number in range(4):
        kept.append(record(number))
    kept.close()
    again = AuditLog(tmp_path / audit.FILE)
    for number in range(4, 8):
        again.append(record(number))
    again.close()
    files = {path.name: subjects(path) for path in tmp_path.iterdir()}
    assert files == {
        audit.FILE: ["jobs/6", "jobs/7"],
        f"{audit.FILE}.1": ["jobs/4", "jobs/5"],
        f"{audit.FILE}.2": ["jobs/2", "jobs/3"],
    }
    assert (tmp_path / audit.FILE).stat().st_mode & 0o777 == 0o600


def test_a_record_that_cannot_be_written_is_reported_once_and_holds_nothing_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        full = AuditLog(Path("/dev/full"))
        full.append(record(1))
        full.append(record(2))
        full.close()
    assert [one.message for one in caplog.records] == ["audit log not written"]


def test_records_go_on_in_the_same_file_where_no_other_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(audit, "_LARGEST_BYTES", 300)
    monkeypatch.setattr(audit, "_FORMER_FILES", 1)
    (tmp_path / f"{audit.FILE}.1" / "in the way").mkdir(parents=True)
    kept = AuditLog(tmp_path / audit.FILE)
    for number in range(5):
        kept.append(record(number))
    kept.close()
    assert subjects(tmp_path / audit.FILE) == [f"jobs/{number}" for number in range(5)]
    assert "audit log not rotated" in caplog.messages


def test_a_record_that_a_full_disk_cuts_short_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = AuditLog(tmp_path / audit.FILE)
    kept.append(record(1))
    with monkeypatch.context() as patch:
        write = os.write
        patch.setattr(os, "write", lambda file, content: write(file, content[:20]))
        kept.append(record(2))
    kept.append(record(3))
    kept.close()
    assert subjects(tmp_path / audit.FILE) == ["jobs/1", "jobs/3"]
