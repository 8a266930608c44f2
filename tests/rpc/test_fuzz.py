"""Every message to every method is answered, or refused with a reason; none ends in an internal error."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from ganger.agent.v1 import agent_pb2
from ganger.v1 import job_service_pb2, node_pb2, scheduling_pb2
from ganger.wire.channels import MAX_MESSAGE_BYTES
from ganger.wire.errors import from_rpc_error
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rpc.kit import Speaker, serving, spec_of
from rpc.test_agent_and_scheduling_service import approved, claim

METHODS = {
    f"/{service.full_name}/{method.name}": method
    for file in (job_service_pb2, scheduling_pb2, node_pb2, agent_pb2, health_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
F = FieldDescriptor
INTEGERS = {
    **dict.fromkeys((F.TYPE_INT32, F.TYPE_SINT32, F.TYPE_SFIXED32), (-(1 << 31), (1 << 31) - 1)),
    **dict.fromkeys((F.TYPE_INT64, F.TYPE_SINT64, F.TYPE_SFIXED64), (-(1 << 63), (1 << 63) - 1)),
    **dict.fromkeys((F.TYPE_UINT32, F.TYPE_FIXED32), (0, (1 << 32) - 1)),
    **dict.fromkeys((F.TYPE_UINT64, F.TYPE_FIXED64), (0, (1 << 64) - 1)),
}
# Names of what there is and is not, and texts that mean something somewhere.
TEXTS = [
    *(
        "jobs/1",
        "jobs/2",
        "jobs/999999999999999999",
        "arrays/3",
        "arrays/1",
        "nodes/n1",
        "nodes/n2",
        "nodeSets/1",
        "GPUS",
    ),
    *("", "\0", "\x1b[2J", "../../etc", "x" * 5_000, "\N{GRINNING FACE}", "module:Class", "/tmp", "DANGLING", "loss"),
]


def texts() -> st.SearchStrategy[str]:
    return st.sampled_from(TEXTS) | st.text(max_size=8)


def scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.type in INTEGERS:
        least, most = INTEGERS[field.type]
        return st.sampled_from([least, most, 0, 1, 2]) | st.integers(least, most)
    if field.type in (F.TYPE_DOUBLE, F.TYPE_FLOAT):
        return (
            st.floats(width=32) | st.sampled_from([0.0, 1e300]) if field.type == F.TYPE_DOUBLE else st.floats(width=32)
        )
    if field.type == F.TYPE_BOOL:
        return st.booleans()
    if field.type == F.TYPE_ENUM:
        assert field.enum_type is not None
        return st.sampled_from([*(value.number for value in field.enum_type.values), 99, -1])
    return texts() if field.type == F.TYPE_STRING else st.binary(max_size=8)


@st.composite
def messages(draw: st.DrawFn, kind: Descriptor, depth: int = 0) -> Message:
    """Any message of a kind; of a well-known one mostly what it may hold, for the rest cannot be sent."""
    message = GetMessageClass(kind)()
    for field in kind.fields:
        if field.containing_oneof is not None and message.WhichOneof(field.containing_oneof.name):
            continue
        if depth > 4 or not draw(st.booleans()):
            continue
        value = getattr(message, field.name)
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            entries = draw(st.lists(messages(inner, depth + 1), max_size=2))
            for entry in entries:
                if inner.fields_by_name["value"].message_type is not None:
                    value[entry.key].CopyFrom(entry.value)  # type: ignore[attr-defined]
                else:
                    value[entry.key] = entry.value  # type: ignore[attr-defined]
        elif inner is not None and field.is_repeated:
            value.extend(draw(st.lists(messages(inner, depth + 1), max_size=3)))
        elif inner is not None:
            value.CopyFrom(draw(messages(inner, depth + 1)))
        elif field.is_repeated:
            value.extend(draw(st.lists(scalars(field), max_size=3)))
        else:
            setattr(message, field.name, draw(scalars(field)))
    return message


@dataclass
class Running:
    """A master of a thread of its own, with a node, two jobs and an array."""

    address: str
    token: str
    session: str


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory: Path = tmp_path_factory.mktemp("fuzz")
    loop, ready = asyncio.new_event_loop(), threading.Event()
    made: list[Running] = []
    over = asyncio.Event()

    async def serve() -> None:
        async with serving(directory, quantum_s=None) as served:
            node = Speaker(served, "n1")
            await node.join()
            for _ in range(2):
                await served.submit(spec_of())
            request = job_service_pb2.CreateArrayRequest(spec=spec_of())
            request.members.add(index=0)
            await served.jobs.CreateArray(request)
            made.append(Running(served.master.address, served.master.token, node.session))
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert ready.wait(30.0)
    yield made[0]
    loop.call_soon_threadsafe(over.set)
    thread.join(30.0)
    loop.close()


def code_of(channel: grpc.Channel, path: str, request: Message, metadata: tuple[tuple[str, str], ...]) -> str:
    method = METHODS[path]
    raw = request.SerializeToString()
    kind = "stream_" if method.client_streaming else "unary_"
    call = getattr(channel, kind + ("stream" if method.server_streaming else "unary"))(path)
    try:
        answer = call(iter([raw]) if method.client_streaming else raw, timeout=5.0, metadata=metadata)
        if method.server_streaming:
            # The first answer, if one comes soon: others wait for news.
            timer = threading.Timer(0.05, answer.cancel)
            timer.start()
            try:
                next(iter(answer), None)
            finally:
                timer.cancel()
                answer.cancel()
    except grpc.RpcError as error:
        return f"{error.code().name}: {error.details()}"  # type: ignore[attr-defined]
    return "OK"


# A recording lasts as long as it was asked for; a removed node is missing to all that follows.
UNTRIED = {"/ganger.v1.NodeService/RecordDecisions"}


@pytest.mark.parametrize("path", sorted(METHODS.keys() - UNTRIED))
def test_no_message_of_any_method_ends_in_an_internal_error(running: Running, path: str) -> None:
    metadata = (("authorization", f"Bearer {running.token}"),)
    options = (("grpc.enable_retries", 0), ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES))

    @settings(
        max_examples=40, derandomize=True, deadline=None, database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
    )  # fmt: skip
    @given(messages(METHODS[path].input_type))
    def tried(request: Message) -> None:
        if "session" in request.DESCRIPTOR.fields_by_name:
            request.session = running.session  # type: ignore[attr-defined]
        if "max_wait" in request.DESCRIPTOR.fields_by_name:
            request.max_wait.seconds, request.max_wait.nanos = 0, 1  # type: ignore[attr-defined]
        code = code_of(channel, path, request, metadata)
        assert not code.startswith(("INTERNAL", "UNKNOWN", "DEADLINE_EXCEEDED")), f"{code}\n{request}"

    with grpc.insecure_channel(running.address, options) as channel:
        tried()


@pytest.mark.parametrize("path", sorted(METHODS))
def test_a_call_without_a_token_is_refused_or_answered(running: Running, path: str) -> None:
    with grpc.insecure_channel(running.address) as channel:
        code = code_of(channel, path, GetMessageClass(METHODS[path].input_type)(), ())
    if path.startswith("/grpc.health.v1.Health/"):
        assert code.startswith(("OK", "CANCELLED", "UNIMPLEMENTED")), code
    else:
        assert code.startswith("UNAUTHENTICATED"), code


def test_numbers_of_a_daemon_beyond_all_measure_break_no_answer(tmp_path: Path) -> None:
    most = (1 << 64) - 1

    async def story() -> None:
        async with serving(tmp_path) as served:
            node = Speaker(served, "n1")
            await node.join()
            host = served.scheduling.WatchLeases(scheduling_pb2.WatchLeasesRequest(scheduler="host"))
            await served.submit(spec_of(gpu_memory_bytes=1 << 20))
            assert (await approved(served, host, claim("n1"))).HasField("approved")
            host.cancel()
            (gang,) = (await node.reconcile([])).gangs
            for phase in (agent_pb2.ObservedGang.PHASE_RUNNING, agent_pb2.ObservedGang.PHASE_ENDED):
                seen = agent_pb2.ObservedGang(
                    job=gang.job, job_uid=gang.job_uid, epoch=gang.epoch, order=gang.order, phase=phase,
                    stop_step=most, peak_device_bytes=most, arena_bytes=most, residue_bytes=[most] * 100,
                    threads=(1 << 32) - 1, repin_done=most, cores=["x" * 100_000], trouble="x" * 100_000,
                    ranks=[agent_pb2.ObservedRank(pid=(1 << 32) - 1, start_ticks=most)],
                )  # fmt: skip
                seen.checkpoint.step = seen.checkpoint.size_bytes = most
                seen.checkpoint.epoch = gang.epoch
                seen.progress.step = seen.progress.samples = most
                seen.outcome.message = "x" * 100_000
                await node.reconcile([seen])
                name = job_service_pb2.GetJobRequest(name=gang.job)
                assert (await served.jobs.GetJob(name)).ByteSize() < 20_000
                await served.jobs.ListJobs(job_service_pb2.ListJobsRequest())
                await served.jobs.ExplainJob(job_service_pb2.ExplainJobRequest(name=gang.job))
                await served.jobs.ListEvents(job_service_pb2.ListEventsRequest())
                await served.nodes.ListNodes(node_pb2.ListNodesRequest())
                await served.scheduling.GetView(scheduling_pb2.GetViewRequest())
                watch = served.scheduling.WatchCluster(scheduling_pb2.WatchClusterRequest())
                # After its end too: how it ended is not known, so the job is pending again.
                assert [job.job for job in (await watch.read()).jobs] == [gang.job]
                watch.cancel()

    asyncio.run(story())


def test_a_gang_that_needs_more_than_a_number_can_hold_is_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            await Speaker(served, "n1").join()
            spec = spec_of(gpu_memory_bytes=1 << 50)
            spec.roles[0].tasks, spec.roles[0].shape.gpus = 10_000, 64
            with pytest.raises(grpc.RpcError) as refused:
                await served.submit(spec)
            assert from_rpc_error(refused.value).reason == "GANG_IMPOSSIBLE"

    asyncio.run(story())
