"""A master behind certificates: each role does what is for it, a user reaches the own jobs, a daemon its own node."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from ganger.agent.v1 import agent_pb2, peer_pb2, peer_pb2_grpc
from ganger.client import Client
from ganger.scheduling.host import SchedulerHost
from ganger.v1 import array_pb2, job_pb2, job_service_pb2, node_pb2, resources_pb2, scheduling_pb2
from ganger.wire import errors, revocation
from ganger.wire.channels import open_aio_channel
from ganger.wire.endpoints import Endpoint, read_endpoint
from ganger.wire.errors import from_rpc_error
from ganger.wire.methods import METHODS, CallerIdentity, CallerRole
from ganger.wire.revocation import REVOKED, Revocations
from ganger.wire.servers import bind, make_server
from ganger.wire.tls import read_files, server_credentials
from ganger_master.app import Master, StartError
from ganger_master.config import Config
from kit.certified import Authority
from rpc.certified import CertifiedMaster, serving_certified
from rpc.kit import Served, Speaker, spec_of

PEERS = "/ganger.agent.v1.PeerService/"
DESCRIPTORS = {
    f"/{service.full_name}/{method.name}": method
    for file in (job_service_pb2, scheduling_pb2, node_pb2, agent_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


def told(tmp_path: Path, story: Callable[[CertifiedMaster], Awaitable[None]], policy: str = "fifo") -> None:
    async def run() -> None:
        async with serving_certified(tmp_path, policy) as certified:
            await story(certified)

    asyncio.run(run())


async def reason(call: Any) -> str:
    """Of the refusal; empty if there was none."""
    try:
        await (anext(aiter(call)) if hasattr(call, "__aiter__") else call)
    except (grpc.RpcError, StopAsyncIteration) as error:
        return from_rpc_error(error).reason if isinstance(error, grpc.RpcError) else ""
    finally:
        if hasattr(call, "cancel"):
            call.cancel()
    return ""


async def nothing() -> AsyncIterator[bytes]:
    return
    yield b""


def empty_call(channel: grpc.aio.Channel, method: str) -> Any:
    """Of any method: a message without fields, or none where many may come."""
    descriptor = DESCRIPTORS[method]
    request = nothing() if descriptor.client_streaming else b""
    kinds = (
        (channel.unary_unary, channel.unary_stream),
        (channel.stream_unary, channel.stream_stream),
    )
    return kinds[descriptor.client_streaming][descriptor.server_streaming](method)(request, timeout=5.0)


@pytest.mark.parametrize("role", list(CallerRole))
def test_a_call_that_is_not_for_the_role_is_refused(tmp_path: Path, role: CallerRole) -> None:
    async def story(certified: CertifiedMaster) -> None:
        caller = certified.calls(role, "x")
        for method in DESCRIPTORS:
            if role not in METHODS[method].roles:
                assert await reason(empty_call(caller.channel, method)) == "ROLE_NOT_PERMITTED", method

    told(tmp_path, story)


@pytest.mark.parametrize("role", list(CallerRole))
def test_a_call_that_is_for_the_role_is_answered(tmp_path: Path, role: CallerRole) -> None:
    async def story(certified: CertifiedMaster) -> None:
        caller = certified.calls(role, "x")
        for method, descriptor in DESCRIPTORS.items():
            if role in METHODS[method].roles and not descriptor.server_streaming:
                assert await reason(empty_call(caller.channel, method)) != "ROLE_NOT_PERMITTED", method

    told(tmp_path, story)


def test_the_user_of_a_job_is_the_name_in_the_certificate(tmp_path: Path) -> None:
    async def story(certified: CertifiedMaster) -> None:
        job = await certified.calls("user", "ann").submit()
        assert job.user == "ann"
        assert (await certified.calls("operator", "olga").submit()).user == "olga"

    told(tmp_path, story)


def changes_of(served: Served, job: str) -> dict[str, Any]:
    """Calls that a user makes for own jobs only, one of each."""
    jobs, scheduling = served.jobs, served.scheduling
    return {
        "Suspend": jobs.SuspendJob(job_service_pb2.SuspendJobRequest(name=job)),
        "Resume": jobs.ResumeJob(job_service_pb2.ResumeJobRequest(name=job)),
        "Move": jobs.MoveJob(job_service_pb2.MoveJobRequest(name=job)),
        "Retune": jobs.RetuneJob(job_service_pb2.RetuneJobRequest(name=job, is_repin=True)),
        "Update": jobs.UpdateJob(job_service_pb2.UpdateJobRequest(name=job)),
        "Resize": jobs.ResizeJob(job_service_pb2.ResizeJobRequest(name=job, gpus=2)),
        "ReadLog": jobs.ReadLog(job_service_pb2.ReadLogRequest(name=job)),
        "GetSeries": jobs.GetSeries(job_service_pb2.GetSeriesRequest(name=job)),
        "Explain": jobs.ExplainJob(job_service_pb2.ExplainJobRequest(name=job)),
        "ListEvents": jobs.ListEvents(job_service_pb2.ListEventsRequest(subject=job)),
        "WatchLeases": scheduling.WatchLeases(scheduling_pb2.WatchLeasesRequest(scheduler="s", jobs=[job])),
        "RequestGang": scheduling.RequestGang(scheduling_pb2.GangRequest(job=job)),
        "RequestGangs": scheduling.RequestGangs(
            iter([scheduling_pb2.GangRequests(requests=[scheduling_pb2.GangRequest(job=job)])])
        ),
        "Release": scheduling.ReleaseGang(scheduling_pb2.ReleaseGangRequest(job=job, epoch=1)),
        "Plan": scheduling.ProposePlan(
            scheduling_pb2.Plan(changes=[scheduling_pb2.Change(job=job, suspend=scheduling_pb2.SuspendChange())])
        ),
        "WatchProgress": scheduling.WatchProgress(scheduling_pb2.WatchProgressRequest(jobs=[job])),
        "Cancel": jobs.CancelJob(job_service_pb2.CancelJobRequest(name=job)),
    }


def test_another_users_job_is_out_of_reach(tmp_path: Path) -> None:
    async def story(certified: CertifiedMaster) -> None:
        job = await certified.calls("user", "ann").submit()
        calls = changes_of(certified.calls("user", "bob"), job.name)
        assert {name: await reason(call) for name, call in calls.items()} == dict.fromkeys(calls, "JOB_NOT_YOURS")
        assert (
            await certified.calls("user", "ann").jobs.GetJob(job_service_pb2.GetJobRequest(name=job.name))
        ).state == (job_pb2.Job.STATE_PENDING)

    told(tmp_path, story)


@pytest.mark.parametrize(("role", "name"), [("user", "ann"), ("operator", "olga")])
def test_a_caller_of_the_right_role_reaches_it(tmp_path: Path, role: str, name: str) -> None:
    async def story(certified: CertifiedMaster) -> None:
        job = await certified.calls("user", "ann").submit()
        caller = certified.calls(role, name)
        cancelled = await caller.jobs.CancelJob(job_service_pb2.CancelJobRequest(name=job.name))
        assert cancelled.state == job_pb2.Job.STATE_CANCELLED
        events = (await caller.jobs.ListEvents(job_service_pb2.ListEventsRequest(subject=job.name))).events
        assert events[-1].cause == f"user:{name}"

    told(tmp_path, story)


def test_a_refusal_names_the_owner_and_the_users_that_may(tmp_path: Path) -> None:
    async def story(certified: CertifiedMaster) -> None:
        await certified.calls("user", "ann").submit()
        with pytest.raises(grpc.RpcError) as refused:
            await certified.calls("user", "bob").jobs.CancelJob(job_service_pb2.CancelJobRequest(name="jobs/1"))
        error = from_rpc_error(refused.value)
        assert error.code is grpc.StatusCode.PERMISSION_DENIED
        assert error.message == ("jobs/1 is ann's: only that user and operators may do this; the caller is user 'bob'")

    told(tmp_path, story)


def test_of_anothers_job_only_what_stands_in_any_queue_is_seen(tmp_path: Path) -> None:
    async def story(certified: CertifiedMaster) -> None:
        ann, bob = certified.calls("user", "ann"), certified.calls("user", "bob")
        await ann.submit(spec_of(2, "train", environment={"SECRET": "s"}, labels={"a": "b"}))
        (listed,) = (await bob.jobs.ListJobs(job_service_pb2.ListJobsRequest())).jobs
        shown = await bob.jobs.GetJob(job_service_pb2.GetJobRequest(name="jobs/1"))
        watched = await anext(aiter(bob.jobs.WatchJob(job_service_pb2.WatchJobRequest(name="jobs/1"))))
        for seen in (listed, shown, watched):
            assert (seen.name, seen.user, seen.spec.display_name) == ("jobs/1", "ann", "train")
            assert seen.spec.roles[0].tasks == 2
            for field in ("command", "working_directory", "environment", "labels"):
                assert not getattr(seen.spec, field), field
        own = await ann.jobs.GetJob(job_service_pb2.GetJobRequest(name="jobs/1"))
        assert (dict(own.spec.environment), list(own.spec.command)) == ({"SECRET": "s"}, ["python", "train.py"])

    told(tmp_path, story)


@pytest.mark.parametrize(("role", "name"), [("user", "bob"), ("scheduler", "ann"), ("planner", "ann")])
def test_a_caller_that_places_jobs_cannot_read_what_they_run(tmp_path: Path, role: str, name: str) -> None:
    async def story(certified: CertifiedMaster) -> None:
        await certified.calls("user", "ann").submit(spec_of(environment={"SECRET": "s"}))
        seen = await certified.calls(role, name).jobs.GetJob(job_service_pb2.GetJobRequest(name="jobs/1"))
        assert (seen.user, list(seen.spec.command), dict(seen.spec.environment)) == ("ann", [], {})

    told(tmp_path, story)


def test_an_array_is_its_users(tmp_path: Path) -> None:
    async def story(certified: CertifiedMaster) -> None:
        ann, bob = certified.calls("user", "ann"), certified.calls("user", "bob")
        spec = spec_of()
        spec.command[:] = ["python", "{lr}"]
        members = [array_pb2.ArrayMember(index=i, parameters={"lr": f"0.{i}"}) for i in range(2)]
        array = await ann.jobs.CreateArray(
            job_service_pb2.CreateArrayRequest(spec=spec, members=members, request_id="r")
        )
        assert array.user == "ann"
        cancel = job_service_pb2.CancelArrayRequest(name=array.name)
        assert await reason(bob.jobs.CancelArray(cancel)) == "JOB_NOT_YOURS"
        update = job_service_pb2.UpdateArrayRequest(name=array.name, update=job_service_pb2.JobUpdate(priority=1))
        assert await reason(bob.jobs.UpdateArray(update)) == "JOB_NOT_YOURS"
        assert (await ann.jobs.UpdateArray(update)).updated == 2
        history = job_service_pb2.ListEventsRequest(subject=array.name)
        assert await reason(bob.jobs.ListEvents(history)) == "JOB_NOT_YOURS"
        jobs = (await bob.jobs.ListJobs(job_service_pb2.ListJobsRequest(array=array.name))).jobs
        assert [job.array.member.index for job in jobs] == [1, 0]
        assert not any(job.array.member.parameters for job in jobs)
        assert (await bob.jobs.GetArray(job_service_pb2.GetArrayRequest(name=array.name))).size == 2
        assert await reason(ann.jobs.CancelArray(cancel)) == ""

    told(tmp_path, story)


def test_the_history_of_everything_leaves_others_jobs_out(tmp_path: Path) -> None:
    async def story(certified: CertifiedMaster) -> None:
        await certified.calls("user", "ann").submit()
        await certified.calls("user", "bob").submit()
        await Speaker(certified.calls("daemon", "n1"), "n1").join()

        def subjects(directory: Path) -> set[str]:
            with Client(Endpoint(certified.master.address, tls=str(directory))) as client:
                return {event.subject for event in client.list_events(limit=None)}

        bob, olga = (certified.authority.issue(*name) for name in (("user", "bob"), ("operator", "olga")))
        assert {"jobs/1", "jobs/2", "nodes/n1"} <= await asyncio.to_thread(subjects, olga)
        assert {"jobs/2", "nodes/n1"} <= (seen := await asyncio.to_thread(subjects, bob))
        assert "jobs/1" not in seen

    told(tmp_path, story)


def test_a_user_reads_no_history_of_a_job_without_a_known_owner(tmp_path: Path) -> None:
    async def story(certified: CertifiedMaster) -> None:
        for subject in ("jobs/7", "arrays/7", "jobs/x", "jobs/" + "9" * 5_000):
            request = job_service_pb2.ListEventsRequest(subject=subject)
            assert not (await certified.calls("user", "bob").jobs.ListEvents(request)).events

    told(tmp_path, story)


def test_a_daemon_speaks_for_its_own_node_only(tmp_path: Path) -> None:
    async def story(certified: CertifiedMaster) -> None:
        own = Speaker(certified.calls("daemon", "n1"), "n1")
        await own.join()
        other = Speaker(certified.calls("daemon", "n2"), "n2")
        await other.join()
        thief = Speaker(certified.calls("daemon", "n2"), "n1")
        assert await reason(thief.open()) == "NODE_NOT_YOURS"
        # Nor by a session that it heard of.
        thief.session = own.session
        assert await reason(thief.reconcile([])) == "NODE_NOT_YOURS"

        async def reports() -> AsyncIterator[agent_pb2.ProgressReport]:
            yield agent_pb2.ProgressReport(session=own.session)

        assert await reason(thief.served.agents.ReportProgress(reports())) == "NODE_NOT_YOURS"
        await own.reconcile([])

    told(tmp_path, story)


@pytest.mark.parametrize(
    "report",
    [
        agent_pb2.ReconcileRequest(device_faults={(1 << 32) - 1: "broken"}),
        agent_pb2.ReconcileRequest(device_warnings={(1 << 32) - 1: "too hot"}),
        agent_pb2.ReconcileRequest(
            gangs=[
                agent_pb2.ObservedGang(job_uid="u", epoch=1, order=agent_pb2.OrderKey(master_sequence=(1 << 64) - 1))
            ]
        ),
    ],
)
def test_numbers_that_no_node_has_are_refused(tmp_path: Path, report: agent_pb2.ReconcileRequest) -> None:
    async def story(certified: CertifiedMaster) -> None:
        node = Speaker(certified.calls("daemon", "n1"), "n1")
        await node.join()
        report.session, report.changed, report.observation = node.session, True, 9
        assert await reason(node.served.agents.Reconcile(report, timeout=20.0)) == "REQUEST_INVALID"

    told(tmp_path, story)


def test_a_users_own_scheduler_has_own_jobs_and_takes_nobodys_stream(tmp_path: Path) -> None:
    async def story(certified: CertifiedMaster) -> None:
        await Speaker(certified.calls("daemon", "n1"), "n1").join()
        host = certified.calls("scheduler", "h").scheduling.WatchLeases(
            scheduling_pb2.WatchLeasesRequest(scheduler="host")
        )
        ann = certified.calls("user", "ann")
        everybodys = scheduling_pb2.WatchLeasesRequest(scheduler="host")
        assert await reason(ann.scheduling.WatchLeases(everybodys)) == "REQUEST_INVALID"
        assert await reason(ann.scheduling.WatchProgress(scheduling_pb2.WatchProgressRequest())) == "REQUEST_INVALID"
        whole = scheduling_pb2.Plan(line=scheduling_pb2.Line(jobs=[]))
        assert await reason(ann.scheduling.ProposePlan(whole)) == "PLAN_INVALID"
        job = await ann.submit(spec_of(scheduler="m:C"))
        mine = ann.scheduling.WatchLeases(scheduling_pb2.WatchLeasesRequest(scheduler="host", jobs=[job.name]))
        assert [lease.job for lease in (await asyncio.wait_for(anext(aiter(mine)), 10.0)).leases] == [job.name]
        # The host still has its own stream, although that one has its name.
        other = await certified.calls("user", "bob").submit()
        assert [lease.job for lease in (await asyncio.wait_for(anext(aiter(host)), 10.0)).leases] == [other.name]
        mine.cancel()
        host.cancel()

    told(tmp_path, story)


def starting(job: job_pb2.Job, shared_mask: int = 0) -> scheduling_pb2.Plan:
    claim = resources_pb2.Claim(node="nodes/n1", device_mask=1, shared_mask=shared_mask, tasks=[1])
    start = scheduling_pb2.StartChange(claims=[claim])
    return scheduling_pb2.Plan(changes=[scheduling_pb2.Change(job=job.name, revision=job.revision, start=start)])


def test_a_users_plan_puts_no_job_onto_gpus_of_another_user(tmp_path: Path) -> None:
    async def story(certified: CertifiedMaster) -> None:
        node = Speaker(certified.calls("daemon", "n1"), "n1")
        await node.join()
        gang = await placed(certified, node)
        for user, told_why in (("bob", "JOB_NOT_YOURS"), ("ann", "")):
            caller = certified.calls("user", user)
            mask = gang.claim.device_mask
            assert await reason(caller.scheduling.ProposePlan(starting(await caller.submit(), mask))) == told_why

    told(tmp_path, story)


def test_what_a_users_plan_does_is_told_as_that_users(tmp_path: Path) -> None:
    async def story(certified: CertifiedMaster) -> None:
        node = Speaker(certified.calls("daemon", "n1"), "n1")
        await node.join()
        gang = await placed(certified, node)
        ann = certified.calls("user", "ann")
        job = await ann.submit()
        plan = starting(job)
        (claim,) = plan.changes[0].start.claims
        claim.CopyFrom(gang.claim)
        claim.device_mask = gang.claim.device_mask << 1
        (verdict,) = (await ann.scheduling.ProposePlan(plan)).verdicts
        assert verdict.approved, verdict
        events = (await ann.jobs.ListEvents(job_service_pb2.ListEventsRequest(subject=job.name))).events
        assert (events[-1].kind, events[-1].cause) == ("gang_approved", "user:ann")

    told(tmp_path, story)


def test_where_the_planner_places_all_jobs_a_user_starts_none(tmp_path: Path) -> None:
    async def story(certified: CertifiedMaster) -> None:
        ann = certified.calls("user", "ann")
        job = await ann.submit()
        with pytest.raises(grpc.RpcError) as refused:
            await ann.scheduling.ProposePlan(starting(job))
        assert from_rpc_error(refused.value).message == (
            "policy edf: only the cluster's planner starts and time-slices jobs, not a user's plan"
        )
        assert await reason(certified.calls("planner", "p").scheduling.ProposePlan(starting(job))) == ""

    told(tmp_path, story, "edf")


async def placed(certified: CertifiedMaster, node: Speaker) -> agent_pb2.DesiredGang:
    """A job of ann's, on the node, by a job scheduler that has nothing but a certificate."""
    own = str(certified.authority.issue("scheduler", "h"))
    host = asyncio.create_task(SchedulerHost(lambda: Endpoint(certified.master.address, tls=own)).run())
    poll = asyncio.ensure_future(node.reconcile(max_wait_seconds=30.0))
    await certified.calls("user", "ann").submit()
    (gang,) = (await poll).gangs
    host.cancel()
    await asyncio.gather(host, return_exceptions=True)
    return gang


def test_a_revoked_certificate_calls_nothing_and_its_open_streams_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(revocation, "_LOOK_S", 0.0)

    async def story(certified: CertifiedMaster) -> None:
        ann, bob = certified.calls("user", "ann"), certified.calls("user", "bob")
        watch = ann.scheduling.WatchView(scheduling_pb2.WatchViewRequest())
        verdicts = ann.scheduling.RequestGangs()
        answers = aiter(verdicts)
        await anext(aiter(watch))
        job = await ann.submit()
        request = scheduling_pb2.GangRequests(requests=[scheduling_pb2.GangRequest(job=job.name)])
        await verdicts.write(request)
        assert (await anext(answers)).verdicts
        list_of = certified.authority.revoke(certified.authority.issue("user", "ann"))
        (certified.authority.issue("master", "m") / REVOKED).write_bytes(list_of)
        assert await reason(ann.jobs.ListJobs(job_service_pb2.ListJobsRequest())) == "CERTIFICATE_REVOKED"
        await verdicts.write(request)
        assert await reason_at_end(answers) == "CERTIFICATE_REVOKED"
        # It ends with the next message.
        await bob.submit()
        node = Speaker(certified.calls("daemon", "n1"), "n1")
        await node.join()
        assert await reason_at_end(watch) == "CERTIFICATE_REVOKED"
        assert await reason(bob.jobs.ListJobs(job_service_pb2.ListJobsRequest())) == ""
        answer = await node.reconcile(max_wait_seconds=0.1)
        assert answer.revocation_list == list_of

    told(tmp_path, story)


async def reason_at_end(call: Any) -> str:
    """Read a stream to its end; of the refusal there, if there is one."""
    async with asyncio.timeout(20.0):
        try:
            async for _ in call:
                pass
        except grpc.RpcError as error:
            return from_rpc_error(error).reason
    return ""


def test_a_master_does_not_start_with_a_list_of_revoked_certificates_that_it_cannot_use(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate = authority.issue("master", "m")
    (certificate / REVOKED).write_text("nonsense")

    async def start() -> None:
        await Master(Config(state_dir=tmp_path / "state", listen="127.0.0.1:0", tls=certificate)).start()

    with pytest.raises(StartError, match=r"cannot use .*revoked.pem: it is no list"):
        asyncio.run(start())


def test_job_schedulers_of_another_machine_place_everybodys_jobs(tmp_path: Path) -> None:
    async def story(certified: CertifiedMaster) -> None:
        node = Speaker(certified.calls("daemon", "n1"), "n1")
        await node.join()
        gang = await placed(certified, node)
        assert (gang.job, gang.user) == ("jobs/1", "ann")

    told(tmp_path, story)


def test_a_caller_with_the_token_may_call_what_is_for_the_masters_machine(tmp_path: Path) -> None:
    async def story(certified: CertifiedMaster) -> None:
        found = await asyncio.to_thread(read_endpoint, tmp_path / "state")
        assert found == Endpoint(certified.master.local_address, certified.master.token)
        local = certified.with_token()
        await certified.calls("user", "ann").submit()
        assert await reason(local.jobs.CancelJob(job_service_pb2.CancelJobRequest(name="jobs/1"))) == ""
        assert await reason(local.nodes.GetCluster(node_pb2.GetClusterRequest())) == ""
        assert await reason(local.scheduling.WatchCluster(scheduling_pb2.WatchClusterRequest())) == ""
        # A daemon on the master's machine has a certificate too.
        assert await reason(Speaker(local, "n1").open()) == "ROLE_NOT_PERMITTED"
        stranger = certified.over(open_aio_channel(Endpoint(certified.master.local_address, "wrong")))
        assert await reason(stranger.nodes.GetCluster(node_pb2.GetClusterRequest())) == "TOKEN_INVALID"

    told(tmp_path, story)


def test_no_caller_is_accepted_without_a_certificate_of_the_authority(tmp_path: Path) -> None:
    async def story(certified: CertifiedMaster) -> None:
        master, authority = certified.master, read_files(certified.authority.issue("user", "ann")).authority
        target = f"dns:///{master.address}"
        anonymous = grpc.ssl_channel_credentials(authority)
        stranger = read_files(Authority(tmp_path, "other").issue("operator", "olga"))
        other = grpc.ssl_channel_credentials(authority, stranger.key, stranger.certificate)
        for channel in (
            grpc.aio.insecure_channel(target),
            grpc.aio.secure_channel(target, anonymous),
            grpc.aio.secure_channel(target, other),
        ):
            call = certified.over(channel).nodes.GetCluster(node_pb2.GetClusterRequest(), timeout=5.0)
            assert await reason(call) == "UNREACHABLE"
        # The token is no help there.
        call = certified.over(grpc.aio.insecure_channel(target)).nodes.GetCluster(
            node_pb2.GetClusterRequest(), timeout=5.0, metadata=(("authorization", f"Bearer {master.token}"),)
        )
        assert await reason(call) == "UNREACHABLE"

    told(tmp_path, story)


@pytest.mark.parametrize(
    "uris",
    [
        (),
        ("ganger://operator/olga", "ganger://user/olga"),
        ("ganger://operator/olga\0",),
        ("ganger://operator/olga\0.elsewhere",),
        ("ganger://Operator/olga",),
        ("GANGER://operator/olga",),
        ("ganger://operator/%6flga",),
        ("ganger://operator/olga/x",),
        ("ganger://operator/olga?x",),
        ("ganger://operator/olga\n",),
    ],
)
def test_a_certificate_without_a_name_is_refused(tmp_path: Path, uris: tuple[str, ...]) -> None:
    async def story(certified: CertifiedMaster) -> None:
        odd = certified.authority.issue_with(uris, CallerIdentity(CallerRole.USER, "x"))
        assert await reason(certified.with_certificate(odd).nodes.GetCluster(node_pb2.GetClusterRequest())) == (
            "CERTIFICATE_INVALID"
        )

    told(tmp_path, story)


def test_a_client_says_what_is_wrong_with_its_certificate(tmp_path: Path) -> None:
    async def story(certified: CertifiedMaster) -> None:
        def asked(directory: Path) -> str:
            with Client(Endpoint(certified.master.address, tls=str(directory))) as client:
                try:
                    return client.get_cluster().version
                except errors.CertificateInvalid as error:
                    return error.message

        ended = certified.authority.issue("user", "ann", days=-60.0 / 86_400.0)
        assert "cert.pem expired on" in await asyncio.to_thread(asked, ended)
        other = Authority(tmp_path, "other").issue("user", "ann")
        assert "was not made by the authority in" in await asyncio.to_thread(asked, other)
        good = certified.authority.issue("user", "bob")
        assert "cert.pem" not in await asyncio.to_thread(asked, good)

    told(tmp_path, story)


class OneLine(peer_pb2_grpc.PeerServiceServicer):
    async def ReadLog(  # noqa: N802 - as in the proto
        self, request: peer_pb2.ReadPeerLogRequest, context: Any
    ) -> AsyncIterator[job_service_pb2.LogChunk]:
        data = b"a line\n"[request.offset :] if request.offset < 7 else b""
        if request.offset > 7:
            raise errors.OffsetBeyondEnd("nothing there", end=7)
        yield job_service_pb2.LogChunk(offset=request.offset, data=data)


def test_logs_come_from_daemons_to_their_user_through_the_master_only(tmp_path: Path) -> None:
    async def story(certified: CertifiedMaster) -> None:
        directory = certified.authority.issue("daemon", "n1")
        server = make_server(revocations=Revocations.beside(directory))
        peer_pb2_grpc.add_PeerServiceServicer_to_server(OneLine(), server)
        address = bind(server, "127.0.0.1:0", server_credentials(directory))
        await server.start()
        try:
            node = Speaker(certified.calls("daemon", "n1"), "n1", peer_address=address)
            await node.join()
            await placed(certified, node)
            ann = certified.calls("user", "ann")
            chunks = [chunk async for chunk in ann.jobs.ReadLog(job_service_pb2.ReadLogRequest(name="jobs/1"))]
            assert b"".join(chunk.data for chunk in chunks) == b"a line\n"
            own = certified.authority.issue("user", "ann")
            stub: Any = peer_pb2_grpc.PeerServiceStub(
                certified.over(open_aio_channel(Endpoint(address, tls=str(own)), role=CallerRole.DAEMON)).channel
            )
            assert await reason(stub.ReadLog(peer_pb2.ReadPeerLogRequest(job_uid="x"))) == "ROLE_NOT_PERMITTED"
        finally:
            await server.stop(None)

    told(tmp_path, story)


def test_a_daemon_whose_certificate_has_ended_is_named_where_its_logs_are_missed(tmp_path: Path) -> None:
    async def story(certified: CertifiedMaster) -> None:
        ended = certified.authority.issue("daemon", "n1", days=-60.0 / 86_400.0, to="ended")
        server = make_server(revocations=Revocations.beside(ended))
        address = bind(server, "127.0.0.1:0", server_credentials(ended))
        await server.start()
        try:
            node = Speaker(certified.calls("daemon", "n1"), "n1", peer_address=address)
            await node.join()
            await placed(certified, node)
            ann = certified.calls("user", "ann")
            with pytest.raises(grpc.RpcError) as missed:
                async for _ in ann.jobs.ReadLog(job_service_pb2.ReadLogRequest(name="jobs/1")):
                    pass
            error = from_rpc_error(missed.value)
            assert error.reason == "NODE_SILENT"
            assert "may be on nodes/n1: its certificate has expired" in error.message
        finally:
            await server.stop(None)

    told(tmp_path, story)


def test_progress_of_anothers_job_says_how_far_it_is_and_not_how_well_it_does() -> None:
    from ganger_master.rpc.access import outline

    progress = job_pb2.Progress(step=7, loss=0.25, metrics=[job_pb2.Metric(name="accuracy", value=0.5)])
    seen = outline(job_pb2.Job(name="jobs/1", progress=progress, trouble="t", end_reason="r")).progress
    assert seen.step == 7
    assert math.isnan(seen.loss)
    assert not seen.metrics
