"""Of several masters clients call the one that leads, and leave one alone that does not answer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from ganger.v1 import scheduling_pb2
from ganger.v1.scheduling_pb2_grpc import SchedulingServiceStub
from ganger.wire import endpoints, errors
from ganger.wire.channels import may_repeat, open_channel
from ganger.wire.endpoints import Endpoint, EndpointError, MasterList, find_endpoint, next_master

A, B, C = Endpoint("127.0.0.1:1"), Endpoint("127.0.0.1:2"), Endpoint("127.0.0.1:3")


@pytest.fixture(autouse=True)
def _no_cluster_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("GANGER_MASTER", "GANGER_TOKEN", "GANGER_TLS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("current", "unreachable", "leader", "expected"),
    [
        (0, set(), None, 1),
        (2, set(), None, 0),
        (1, set(), 0, 0),
        (1, set(), 2, 2),
        (1, {0}, 0, 2),
        (1, {0, 2}, 0, 1),
        (0, {0}, None, 1),
        (0, {0, 1}, None, 2),
        (1, {0, 1, 2}, None, 2),
        (1, set(), 1, 2),
    ],
    ids=[
        "the-next",
        "the-first-after-the-last",
        "the-leader-before",
        "the-leader-after",
        "not-a-leader-that-hangs",
        "the-stand-by-again-if-only-it-answers",
        "after-one-that-hangs",
        "after-two-that-hang",
        "in-turn-if-none-answers",
        "not-a-stand-by-that-names-itself",
    ],
)
def test_next_master(current: int, unreachable: set[int], leader: int | None, expected: int) -> None:
    assert next_master(3, current, unreachable, leader) == expected


def test_no_master_of_a_list_of_one_is_left_out() -> None:
    assert next_master(1, 0, {0}) == 0


def masters(clock: list[float]) -> MasterList:
    return MasterList((A.address, B.address, C.address), clock=lambda: clock[0])


def test_a_list_goes_to_the_leader_that_a_stand_by_names() -> None:
    found = masters([0.0])
    assert found.endpoint() == A
    found.note(A, C.address, has_answered=True)
    assert found.endpoint() == C
    assert found.endpoint().masters is found


def test_a_master_that_did_not_answer_is_left_alone_for_two_seconds() -> None:
    clock = [0.0]
    found = masters(clock)
    found.note(A, has_answered=False)
    found.note(B, A.address, has_answered=True)
    assert found.endpoint() == C
    clock[0] = 2.5
    found.note(C, A.address, has_answered=True)
    assert found.endpoint() == A


def test_of_calls_that_fail_together_one_chooses_the_next_master() -> None:
    found = masters([0.0])
    for _ in range(3):
        found.note(A, has_answered=False)
    assert found.endpoint() == B


def test_a_list_is_named_as_one_master_is(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = f"{A.address}, {B.address}"
    assert find_endpoint(listed) == A
    assert find_endpoint(listed, "/certs") == Endpoint(A.address, tls="/certs")
    monkeypatch.setenv("GANGER_MASTER", listed)
    first, second = find_endpoint(), find_endpoint()
    assert first.masters is not None
    assert first.masters is second.masters
    assert find_endpoint(A.address).masters is None


def test_a_list_with_a_gap_is_refused() -> None:
    with pytest.raises(EndpointError, match="not a list of masters"):
        find_endpoint(f"{A.address},,{B.address}")


def test_a_list_may_be_longer_than_the_name_of_a_file() -> None:
    found = find_endpoint(",".join(f"127.0.0.1:{port}" for port in range(1, 100)))
    assert found == A
    assert found.masters is not None


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("http://h:1", "'http://h:1' is not an address: give HOST:PORT, without http://"),
        ("127.0.0.1:1,http://h:2", "'http://h:2' is not an address: give HOST:PORT, without http://"),
        ("127.0.0.1:1,/no/such/directory", "'/no/such/directory', in the list of masters, is neither HOST:PORT nor a"),
        ("127.0.0.1:1,m2.lab", "'m2.lab', in the list of masters, is neither HOST:PORT nor a directory that is there"),
    ],
)
def test_a_part_of_a_list_that_names_no_master_is_refused_by_name(named: str, told: str) -> None:
    with pytest.raises(EndpointError) as refused:
        find_endpoint(named)
    assert str(refused.value).startswith(told)
    assert refused.value.found


@pytest.mark.parametrize("named", ["~no-such-user/a", "~no-such-user/a,~no-such-user/b"])
def test_a_home_directory_that_is_not_known_is_refused(named: str) -> None:
    with pytest.raises(EndpointError, match="no-such-user"):
        find_endpoint(named)


def test_a_directory_with_a_comma_in_its_name_is_no_list(tmp_path: Path) -> None:
    directory = tmp_path / "a,b"
    directory.mkdir()
    endpoints.write_endpoint(directory, A.address, None)
    assert find_endpoint(str(directory)) == A
    assert find_endpoint(str(directory)).masters is None


def test_masters_of_a_list_of_directories_have_their_own_addresses_and_tokens(tmp_path: Path) -> None:
    listed = f"{tmp_path / 'a'},{tmp_path / 'b'}"
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with pytest.raises(EndpointError, match="no master has written") as caught:
        find_endpoint(listed)
    assert not caught.value.found
    token, path = endpoints.ensure_token(tmp_path / "b")
    endpoints.write_endpoint(tmp_path / "b", B.address, path)
    found = find_endpoint(listed)
    assert found == Endpoint(B.address, token)
    assert found.masters is not None
    endpoints.write_endpoint(tmp_path / "a", A.address, None)
    found.masters.note(found, has_answered=False)
    assert find_endpoint(listed) == A


@pytest.mark.parametrize(
    ("error", "idempotent", "other"),
    [
        (errors.NotLeader("stands by"), True, True),
        (errors.LeaseLost("expired"), True, False),
        (errors.NotReady("starting"), True, False),
        (errors.Unreachable("cut"), True, False),
        (errors.DeadlineExceeded("late"), False, False),
        (errors.JobNotFound("none"), False, False),
    ],
)
def test_only_what_no_master_can_have_done_is_repeated_unless_twice_is_once(
    error: errors.ApiError, idempotent: bool, other: bool
) -> None:
    assert may_repeat(error, is_idempotent=True) is idempotent
    assert may_repeat(error, is_idempotent=False) is other


def test_a_stub_of_the_scheduling_service_streams_to_one_of_a_list() -> None:
    def answer(batch: Any) -> Any:
        return scheduling_pb2.Verdicts(verdicts=[scheduling_pb2.Verdict(job=one.job) for one in batch.requests])

    method = grpc.stream_stream_rpc_method_handler(
        lambda requests, context: (answer(one) for one in requests),
        scheduling_pb2.GangRequests.FromString,
        scheduling_pb2.Verdicts.SerializeToString,
    )
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("ganger.v1.SchedulingService", {"RequestGangs": method})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with open_channel(find_endpoint(f"127.0.0.1:{port},{A.address}")) as channel:
            stub: Any = SchedulingServiceStub(channel)
            batch = scheduling_pb2.GangRequests(requests=[scheduling_pb2.GangRequest(job="jobs/7")])
            answers = list(stub.RequestGangs(iter([batch])))
    finally:
        server.stop(None)
    assert [verdict.job for one in answers for verdict in one.verdicts] == ["jobs/7"]
