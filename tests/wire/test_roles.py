"""Every method of every service names the roles that may call it, and no other role may."""

from __future__ import annotations

import pytest
from ganger.agent.v1 import agent_pb2, peer_pb2
from ganger.v1 import job_service_pb2, node_pb2, scheduling_pb2
from ganger.wire import methods
from ganger.wire.errors import CertificateInvalid, RoleNotPermitted, from_status, to_status
from ganger.wire.methods import (
    LOCAL,
    CallerIdentity,
    CallerRole,
    check_call,
    check_local_call,
    identity_of,
    is_name,
)
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

FILES = (job_service_pb2, scheduling_pb2, node_pb2, agent_pb2, peer_pb2, health_pb2, reflection_pb2)
METHODS = {
    f"/{service.full_name}/{method.name}"
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
JOBS, NODES, AGENTS, PEERS = (
    "/ganger.v1.JobService",
    "/ganger.v1.NodeService",
    "/ganger.agent.v1.AgentService",
    "/ganger.agent.v1.PeerService",
)
ROLES = {path: method.roles for path, method in methods.METHODS.items()}
ANN = CallerIdentity(CallerRole.USER, "ann")


def test_the_table_names_exactly_the_methods_of_the_services() -> None:
    assert set(ROLES) == METHODS


@pytest.mark.parametrize("method", sorted(ROLES))
def test_a_method_is_for_its_roles_and_for_no_other(method: str) -> None:
    assert ROLES[method], "a method that no role may call"
    for role in CallerRole:
        caller = CallerIdentity(role, "x")
        if role in ROLES[method]:
            check_call(method, caller)
        else:
            with pytest.raises(RoleNotPermitted):
                check_call(method, caller)


# What a leaked certificate of each kind is worth, and what it is not.
@pytest.mark.parametrize(
    ("role", "method"),
    [
        (CallerRole.USER, f"{NODES}/DrainNode"),
        (CallerRole.USER, f"{NODES}/RecordDecisions"),
        (CallerRole.USER, "/ganger.v1.SchedulingService/WatchCluster"),
        (CallerRole.USER, f"{AGENTS}/CreateSession"),
        (CallerRole.USER, f"{PEERS}/ReadLog"),
        (CallerRole.DAEMON, f"{JOBS}/CreateJob"),
        (CallerRole.DAEMON, f"{JOBS}/GetJob"),
        (CallerRole.DAEMON, f"{JOBS}/ReadLog"),
        (CallerRole.DAEMON, f"{NODES}/DrainNode"),
        (CallerRole.SCHEDULER, f"{JOBS}/CancelJob"),
        (CallerRole.PLANNER, f"{JOBS}/CreateJob"),
        (CallerRole.MASTER, f"{JOBS}/CreateJob"),
        (CallerRole.OPERATOR, f"{AGENTS}/Reconcile"),
        (CallerRole.OPERATOR, f"{PEERS}/SwitchRow"),
    ],
)
def test_what_a_role_never_may(role: CallerRole, method: str) -> None:
    assert role not in ROLES[method]


def test_a_refusal_names_the_permitted_role() -> None:
    with pytest.raises(RoleNotPermitted, match=r"DrainNode is for operators; the caller is user 'ann'") as it:
        check_call(f"{NODES}/DrainNode", ANN)
    heard = from_status(to_status(it.value))
    assert (heard.reason, heard.metadata) == (
        "ROLE_NOT_PERMITTED",
        {"method": "DrainNode", "permitted": "operator", "role": "user", "name": "ann"},
    )


def test_a_refusal_names_all_permitted_roles() -> None:
    with pytest.raises(RoleNotPermitted, match=r"ListJobs is for users, operators, schedulers and planners; "):
        check_call(f"{JOBS}/ListJobs", CallerIdentity(CallerRole.MASTER, "m"))


def test_no_role_may_call_a_method_that_is_not_in_the_table() -> None:
    with pytest.raises(RoleNotPermitted, match="is for no role"):
        check_call("/some.Service/Method", CallerIdentity(CallerRole.OPERATOR, "o"))


def test_the_token_does_for_all_but_what_daemons_say() -> None:
    for method, roles in ROLES.items():
        if roles & LOCAL:
            check_local_call(method)
        else:
            assert method.startswith((AGENTS, PEERS))
            with pytest.raises(RoleNotPermitted, match="come with a certificate"):
                check_local_call(method)


@pytest.mark.parametrize(
    "identity",
    [ANN, CallerIdentity(CallerRole.DAEMON, "n-1.rack_2"), CallerIdentity(CallerRole.USER, "ann@lab.example")],
)
def test_a_certificate_names_its_holder(identity: CallerIdentity) -> None:
    assert identity_of(["https://elsewhere", identity.uri, "spiffe://lab/ann"]) == identity


@pytest.mark.parametrize(
    ("uris", "said"),
    [
        ([], "names no role"),
        (["spiffe://lab/ann"], "names no role"),
        (["ganger://user/ann", "ganger://operator/ann"], "names 2 roles"),
        (["ganger://admin/ann"], "one of the roles"),
        (["ganger://user"], "ganger://ROLE/NAME"),
        (["ganger://user/"], "ganger://ROLE/NAME"),
        (["ganger://user/ann/bob"], "ganger://ROLE/NAME"),
        (["ganger://User/ann"], "one of the roles"),
        (["ganger://user/a b"], "ganger://ROLE/NAME"),
        ([f"ganger://user/{'a' * 64}"], "ganger://ROLE/NAME"),
    ],
)
def test_a_certificate_without_an_identity_is_refused(uris: list[str], said: str) -> None:
    with pytest.raises(CertificateInvalid, match=said):
        identity_of(uris)


def test_names_begin_and_end_with_a_letter_or_digit() -> None:
    assert [is_name(name) for name in ("a", "a-b", "-a", "a.", "ä", "a/b", "")] == [True, True, *[False] * 5]
