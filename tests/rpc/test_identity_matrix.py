"""Every method of the master by every identity: one table, so that a change of what a caller may do is a change of it.

The methods come from the protos. The request of each names ann's job or array, the node n1 or its session.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from ganger.agent.v1 import agent_pb2
from ganger.v1 import array_pb2, job_service_pb2, node_pb2, scheduling_pb2
from ganger.wire import revocation
from ganger.wire.channels import open_aio_channel
from ganger.wire.endpoints import Endpoint
from ganger.wire.errors import from_rpc_error
from ganger.wire.revocation import REVOKED
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from kit.certified import Authority
from rpc.certified import CertifiedMaster, serving_certified
from rpc.kit import Speaker, spec_of

# "+": answered, or refused for another reason than the caller. "R": not for this role. "J": not its job. "N": not its
# node. "T": not the token. "V": revoked. "X", "W": the access token has ended, is revoked. "-": no connection.
LETTERS = {
    "ROLE_NOT_PERMITTED": "R", "JOB_NOT_YOURS": "J", "NODE_NOT_YOURS": "N", "TOKEN_INVALID": "T",
    "CERTIFICATE_REVOKED": "V", "UNREACHABLE": "-", "TOKEN_EXPIRED": "X", "TOKEN_REVOKED": "W",
}  # fmt: skip
# A call that is held for so long has let the caller in. A refusal may take longer, on a machine that is busy.
HELD_S = 0.3
REFUSED_S = 20.0

Caller = Callable[[CertifiedMaster, Path], Any]


def _certified(role: str, name: str) -> Caller:
    return lambda certified, _: certified.calls(role, name).channel


def _other_authority(certified: CertifiedMaster, directory: Path) -> Any:
    return certified.calls("operator", "olga", Authority(directory, "other")).channel


def _expired(certified: CertifiedMaster, _: Path) -> Any:
    ended = certified.authority.issue("operator", "olga", days=-60.0 / 86_400.0, to="ended")
    return certified.with_certificate(ended).channel


def _revoked(certified: CertifiedMaster, _: Path) -> Any:
    stolen = certified.authority.issue("operator", "stolen")
    list_of = certified.authority.revoke(stolen)
    (certified.authority.issue("master", "m") / REVOKED).write_bytes(list_of)
    return certified.with_certificate(stolen).channel


def _local(token: str) -> Caller:
    def channel(certified: CertifiedMaster, _: Path) -> Any:
        endpoint = Endpoint(certified.master.local_address, token or certified.master.token)
        return certified.over(open_aio_channel(endpoint, (("grpc.enable_retries", 0),))).channel

    return channel


def _without_certificate(certified: CertifiedMaster, _: Path) -> Any:
    endpoint = Endpoint(certified.master.address, certified.master.token)
    return certified.over(open_aio_channel(endpoint, (("grpc.enable_retries", 0),))).channel


def _with_access_token(kind: str) -> Caller:
    """`kind`: of `access_tokens`."""
    return lambda certified, _: certified.with_access_token(certified.access_tokens[kind]).channel


IDENTITIES: dict[str, Caller] = {
    "none": _without_certificate,
    "other authority": _other_authority,
    "expired": _expired,
    "revoked": _revoked,
    "wrong token": _local("wrong"),
    "token": _local(""),
    "ann": _certified("user", "ann"),
    "bob": _certified("user", "bob"),
    "operator": _certified("operator", "olga"),
    "daemon n1": _certified("daemon", "n1"),
    "daemon n2": _certified("daemon", "n2"),
    "scheduler": _certified("scheduler", "s"),
    "planner": _certified("planner", "p"),
    "master": _certified("master", "m"),
    "no access token": _with_access_token("none"),
    "token as access token": _with_access_token("of the master"),
    "access token of ann": _with_access_token("ann"),
    "expired access token": _with_access_token("expired"),
    "revoked access token": _with_access_token("revoked"),
}

DESCRIPTORS = {
    f"/{service.full_name}/{method.name}": method
    for file in (job_service_pb2, scheduling_pb2, node_pb2, agent_pb2, health_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
# Columns as in IDENTITIES.
TABLE = """
/ganger.v1.JobService/CreateJob                ---VT++++RRRRRTT+XW
/ganger.v1.JobService/ValidateSubmission       ---VT++++RRRRRTT+XW
/ganger.v1.JobService/GetJob                   ---VT++++RR++RTT+XW
/ganger.v1.JobService/ListJobs                 ---VT++++RR++RTT+XW
/ganger.v1.JobService/WatchJob                 ---VT++++RR++RTT+XW
/ganger.v1.JobService/CancelJob                ---VT++J+RRRRRTT+XW
/ganger.v1.JobService/UpdateJob                ---VT++J+RRRRRTT+XW
/ganger.v1.JobService/SuspendJob               ---VT++J+RRRRRTT+XW
/ganger.v1.JobService/ResumeJob                ---VT++J+RRRRRTT+XW
/ganger.v1.JobService/MoveJob                  ---VT++J+RRRRRTT+XW
/ganger.v1.JobService/RetuneJob                ---VT++J+RRRRRTT+XW
/ganger.v1.JobService/ResizeJob                ---VT++J+RRRRRTT+XW
/ganger.v1.JobService/ReadLog                  ---VT++J+RRRRRTT+XW
/ganger.v1.JobService/GetSeries                ---VT++J+RRRRRTT+XW
/ganger.v1.JobService/ExplainJob               ---VT++J+RR++RTT+XW
/ganger.v1.JobService/ListEvents               ---VT++J+RR++RTT+XW
/ganger.v1.JobService/CreateArray              ---VT++++RRRRRTT+XW
/ganger.v1.JobService/GetArray                 ---VT++++RR++RTT+XW
/ganger.v1.JobService/ListArrays               ---VT++++RR++RTT+XW
/ganger.v1.JobService/CancelArray              ---VT++J+RRRRRTT+XW
/ganger.v1.JobService/UpdateArray              ---VT++J+RRRRRTT+XW
/ganger.v1.JobService/GetUsage                 ---VT++++RR++RTT+XW
/ganger.v1.SchedulingService/GetView           ---VT++++RR++RTT+XW
/ganger.v1.SchedulingService/WatchView         ---VT++++RR++RTT+XW
/ganger.v1.SchedulingService/WatchLeases       ---VT++J+RR+RRTT+XW
/ganger.v1.SchedulingService/WatchTurns        ---VT++J+RR+RRTT+XW
/ganger.v1.SchedulingService/RequestGang       ---VT++J+RR+RRTT+XW
/ganger.v1.SchedulingService/RequestGangs      ---VT++J+RR+RRTT+XW
/ganger.v1.SchedulingService/ReleaseGang       ---VT++J+RR+RRTT+XW
/ganger.v1.SchedulingService/ProposePlan       ---VT++++RR++RTT+XW
/ganger.v1.SchedulingService/WatchCluster      ---VT+RR+RRR+RTTRXW
/ganger.v1.SchedulingService/WatchProgress     ---VT++J+RR++RTT+XW
/ganger.v1.NodeService/ListNodes               ---VT++++RR++RTT+XW
/ganger.v1.NodeService/GetNode                 ---VT++++RR++RTT+XW
/ganger.v1.NodeService/DrainNode               ---VT+RR+RRRRRTTRXW
/ganger.v1.NodeService/CordonNode              ---VT+RR+RRRRRTTRXW
/ganger.v1.NodeService/UncordonNode            ---VT+RR+RRRRRTTRXW
/ganger.v1.NodeService/DeclareNodeLost         ---VT+RR+RRRRRTTRXW
/ganger.v1.NodeService/RemoveNode              ---VT+RR+RRRRRTTRXW
/ganger.v1.NodeService/ListPartitions          ---VT++++RR++RTT+XW
/ganger.v1.NodeService/CreateReservation       ---VT+RR+RRRRRTTRXW
/ganger.v1.NodeService/ListReservations        ---VT++++RR++RTT+XW
/ganger.v1.NodeService/UpdateReservation       ---VT+RR+RRRRRTTRXW
/ganger.v1.NodeService/DeleteReservation       ---VT+RR+RRRRRTTRXW
/ganger.v1.NodeService/GetCluster              ---VT++++++++RTT+XW
/ganger.v1.NodeService/RecordDecisions         ---VT+RR+RRRRRTTRXW
/ganger.v1.NodeService/ListQuarantinedGangs    ---VT+RR+RRRRRTTRXW
/ganger.v1.NodeService/EndQuarantinedGang      ---VT+RR+RRRRRTTRXW
/ganger.v1.NodeService/AdoptQuarantinedGang    ---VT+RR+RRRRRTTRXW
/ganger.v1.NodeService/SettleRestore           ---VT+RR+RRRRRTTRXW
/ganger.v1.NodeService/CreateToken             ---VT+RR+RRRRRTTRXW
/ganger.v1.NodeService/ListTokens              ---VT+RR+RRRRRTTRXW
/ganger.v1.NodeService/RevokeToken             ---VT+RR+RRRRRTTRXW
/ganger.agent.v1.AgentService/CreateSession    ---VTRRRR+NRRRTTRXW
/ganger.agent.v1.AgentService/Reconcile        ---VTRRRR+NRRRTTRXW
/ganger.agent.v1.AgentService/ReportProgress   ---VTRRRR+NRRRTTRXW
/ganger.agent.v1.AgentService/RenewCertificate ---VTRRRR++RRRTTRXW
/grpc.health.v1.Health/Check                   ---+++++++++++TT+XW
/grpc.health.v1.Health/List                    ---+++++++++++TT+XW
/grpc.health.v1.Health/Watch                   ---+++++++++++TT+XW
"""


def test_the_table_has_every_method_and_every_identity() -> None:
    assert set(expected()) == set(DESCRIPTORS)
    assert {len(letters) for letters in expected().values()} == {len(IDENTITIES)}


@pytest.mark.parametrize("identity", list(IDENTITIES))
def test_an_identity_may_call_what_the_table_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, identity: str
) -> None:
    monkeypatch.setattr(revocation, "_LOOK_S", 0.0)
    column = list(IDENTITIES).index(identity)

    async def story() -> None:
        async with serving_certified(tmp_path) as certified:
            node = Speaker(certified.calls("daemon", "n1"), "n1")
            await node.join()
            ann = certified.calls("user", "ann")
            names = {"job": (await ann.submit()).name, "node": "nodes/n1", "session": node.session}
            members = [array_pb2.ArrayMember(index=index) for index in range(2)]
            array = job_service_pb2.CreateArrayRequest(spec=spec_of(), members=members, request_id="a")
            names["array"] = (await ann.jobs.CreateArray(array)).name
            await certified.make_access_tokens("ann")
            channel = IDENTITIES[identity](certified, tmp_path)
            wanted = {method: letters[column] for method, letters in expected().items()}
            found = {
                method: await letter(channel, method, names, HELD_S if wanted[method] == "+" else REFUSED_S)
                for method in DESCRIPTORS
            }
        assert found == wanted

    asyncio.run(story())


def expected() -> dict[str, str]:
    rows = ((line.split()[0], line.split()[1]) for line in TABLE.strip().splitlines())
    return dict(rows)


async def letter(channel: grpc.aio.Channel, method: str, names: dict[str, str], held_s: float) -> str:
    """Return the letter of a call's answer. `held_s`: seconds after which a call without an answer was let in."""
    descriptor = DESCRIPTORS[method]
    request: Any = request_of(descriptor, names).SerializeToString()
    if descriptor.client_streaming:
        request = once(request)
    kinds = ((channel.unary_unary, channel.unary_stream), (channel.stream_unary, channel.stream_stream))
    call: Any = kinds[descriptor.client_streaming][descriptor.server_streaming](method)(request, timeout=20.0)
    try:
        async with asyncio.timeout(held_s):
            if descriptor.server_streaming:
                async for _ in call:
                    break
            else:
                await call
    except TimeoutError:
        return "+"
    except grpc.RpcError as error:
        return LETTERS.get(from_rpc_error(error).reason, "+")
    finally:
        call.cancel()
    return "+"


async def once(request: bytes) -> AsyncIterator[bytes]:
    yield request


def request_of(descriptor: Any, names: dict[str, str]) -> Message:
    request = GetMessageClass(descriptor.input_type)()
    fields = request.DESCRIPTOR.fields_by_name
    kind = "array" if "Array" in descriptor.name else "node" if "Node" in descriptor.full_name else "job"
    given = {"name": names[kind], "job": names["job"], "node": names["node"], "session": names["session"]}
    given |= {"subject": names["job"], "scheduler": "s"}
    for field, value in given.items():
        if field in fields and fields[field].type == fields[field].TYPE_STRING and not fields[field].is_repeated:
            setattr(request, field, value)
    for field in (one for one in fields.values() if one.is_repeated):
        if field.name == "jobs":
            request.jobs.append(names["job"])  # type: ignore[attr-defined]
        elif "job" not in fields and field.message_type is not None and "job" in field.message_type.fields_by_name:
            getattr(request, field.name).add(job=names["job"])
    if "spec" in fields:
        request.spec.CopyFrom(spec_of())  # type: ignore[attr-defined]
    return request
