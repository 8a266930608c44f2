"""Clients find the master; servers listen only where they should."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest
from ganger.wire import endpoints
from ganger.wire.endpoints import Endpoint, EndpointError


@pytest.fixture(autouse=True)
def _no_cluster_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("GANGER_MASTER", "GANGER_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def written(directory: Path, address: str) -> str:
    token, path = endpoints.ensure_token(directory)
    endpoints.write_endpoint(directory, address, path)
    return token


@pytest.mark.parametrize(
    ("address", "named"),
    [
        ("0.0.0.0:7070", "{host}:7070"),
        ("[::]:7070", "{host}:7070"),
        ("m1.lab:7070", "m1.lab:7070"),
        ("unix:/run/a:7", "unix:/run/a:7"),
    ],
)
def test_a_server_at_all_addresses_is_named_by_its_machine(address: str, named: str) -> None:
    assert endpoints.address_for_clients(address) == named.format(host=socket.gethostname())


def test_a_directory_names_its_master(tmp_path: Path) -> None:
    token = written(tmp_path, "127.0.0.1:5")
    assert endpoints.find_endpoint(str(tmp_path)) == Endpoint("127.0.0.1:5", token)
    assert endpoints.find_endpoint(str(tmp_path / "endpoint.json")) == Endpoint("127.0.0.1:5", token)


def test_without_a_word_the_default_directory_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match="ganger up") as caught:
        endpoints.find_endpoint()
    assert not caught.value.found
    token = written(endpoints.default_state_directory(), "127.0.0.1:5")
    assert endpoints.find_endpoint().token == token
    monkeypatch.setenv("GANGER_MASTER", "127.0.0.1:6")
    assert endpoints.find_endpoint() == Endpoint("127.0.0.1:6", "")


def test_the_token_of_a_bare_address_is_found_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"unix:{tmp_path}/s"
    token = written(tmp_path, address)
    assert endpoints.find_endpoint(address).token == token
    monkeypatch.setenv("GANGER_TOKEN", "other")
    assert endpoints.find_endpoint(address).token == "other"


def test_the_token_is_private_and_stays_the_same(tmp_path: Path) -> None:
    token, path = endpoints.ensure_token(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert endpoints.ensure_token(tmp_path)[0] == token
    assert token not in repr(Endpoint("127.0.0.1:5", token))


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    _, path = endpoints.ensure_token(tmp_path)
    path.chmod(0o644)
    with pytest.raises(EndpointError, match="chmod 600"):
        endpoints.read_token(path)


@pytest.mark.parametrize("text", ["{", "[]", '{"address": 3}', "{}", '{"address": "x", "token_file": 1}'])
def test_a_broken_endpoint_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "endpoint.json").write_text(text)
    with pytest.raises(EndpointError, match="endpoint"):
        endpoints.read_endpoint(tmp_path)


def test_an_endpoint_file_of_another_user_is_a_matter_of_rights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(endpoints.CredentialError, match=r"cannot read .*endpoint.json: permission denied"):
        endpoints.read_endpoint(tmp_path)


@pytest.mark.parametrize("address", ["0.0.0.0:1", "10.0.0.1:1", "[::]:1", "example.org:1"])
def test_listening_to_the_network_is_refused_without_certificates(address: str) -> None:
    with pytest.raises(EndpointError, match="certificates"):
        endpoints.check_listen_address(address)
    endpoints.check_listen_address(address, has_certificates=True)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:1", "[::1]:1", "unix:/tmp/s"])
def test_listening_to_this_machine_is_allowed(address: str) -> None:
    endpoints.check_listen_address(address)


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("127.0.0.1:7071", "an IPv4 address without a port: 127.0.0.1;"),
        ("unix:/run/s", "an IPv4 address alone"),
        ("::1", "an IPv4 address alone"),
        ("", "an IPv4 address alone"),
        ("10.0.0.1", "without certificates"),
    ],
)
def test_a_daemon_listens_at_a_host_and_takes_no_other_form(host: str, reason: str) -> None:
    with pytest.raises(EndpointError, match=reason):
        endpoints.check_listen_host(host)
    endpoints.check_listen_host("localhost")


@pytest.mark.parametrize("address", ["unix:", "host", "127.0.0.1:99999", "unix:/" + "x" * 120])
def test_a_bad_address_is_refused_before_it_is_dialled(address: str) -> None:
    with pytest.raises(EndpointError):
        endpoints.check_address(address)


def test_a_dead_servers_socket_makes_way_and_a_living_ones_does_not(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        with pytest.raises(EndpointError, match="in use"):
            endpoints.prepare_socket(f"unix:{path}")
    endpoints.prepare_socket(f"unix:{path}")
    assert not path.exists()


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("mine")
    with pytest.raises(EndpointError, match="not a socket"):
        endpoints.prepare_socket(f"unix:{path}")
    assert path.read_text() == "mine"
    assert os.path.exists(path)
