"""Every method of every service has a deadline and a word on repetition."""

from __future__ import annotations

import json

from ganger.agent.v1 import agent_pb2, peer_pb2
from ganger.v1 import job_service_pb2, node_pb2, scheduling_pb2
from ganger.wire.methods import METHODS, deadline_s, retry_service_config

FILES = (job_service_pb2, scheduling_pb2, node_pb2, agent_pb2, peer_pb2)
SERVICES = [service for file in FILES for service in file.DESCRIPTOR.services_by_name.values()]


def test_the_table_names_exactly_the_methods_of_the_services() -> None:
    there = {f"/{service.full_name}/{method.name}" for service in SERVICES for method in service.methods}
    assert {path for path in METHODS if not path.startswith("/grpc.")} == there


def repeated() -> set[str]:
    names = json.loads(retry_service_config())["methodConfig"][0]["name"]
    return {f"/{name['service']}/{name['method']}" for name in names}


def test_only_idempotent_methods_are_repeated() -> None:
    assert "/ganger.v1.JobService/CreateJob" in repeated()
    assert "/ganger.v1.JobService/MoveJob" not in repeated()
    assert "/ganger.v1.SchedulingService/RequestGang" not in repeated()


def test_no_stream_is_repeated() -> None:
    streams = {
        f"/{service.full_name}/{method.name}"
        for service in SERVICES
        for method in service.methods
        if method.client_streaming or method.server_streaming
    }
    assert {path for path, method in METHODS.items() if method.is_stream and not path.startswith("/grpc.")} == streams
    assert not repeated() & streams


def test_an_unknown_method_has_a_deadline_too() -> None:
    assert deadline_s("/some.Service/Method") == 10.0
