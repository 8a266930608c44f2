"""Certificates are used when they do, and what is wrong with them otherwise is said in one sentence."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from ganger.wire.certificate_authority import CertificateError, issue, make_authority, renew
from ganger.wire.channels import DaemonChannels, open_channel
from ganger.wire.endpoints import Endpoint, EndpointError, check_dial_address, check_listen_address, find_endpoint
from ganger.wire.methods import CallerIdentity, CallerRole
from ganger.wire.revocation import Revocations
from ganger.wire.servers import bind, make_server
from ganger.wire.tls import (
    AUTHORITY,
    CERTIFICATE,
    KEY,
    Renewed,
    check_directory,
    read_files,
    server_credentials,
    tell_end,
    trouble_with,
)
from kit.certified import Authority

# Ended a minute ago: certificates begin five minutes before they are made.
ENDED = -60.0 / 86_400.0


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_a_certificate_is_checked_by_shaking_hands_with_itself(authority: Authority) -> None:
    for role in CallerRole:
        assert check_directory(authority.issue(role, "x")) == CallerIdentity(role, "x")


def test_a_certificate_says_role_name_and_hosts_and_for_how_long(authority: Authority) -> None:
    directory = authority.issue("daemon", "n1", ("n1.lab", "10.0.0.7", "fd00::7"), days=2)
    made = x509.load_pem_x509_certificate((directory / CERTIFICATE).read_bytes())
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["ganger://daemon/n1"]
    served = ["n1.lab.daemon.ganger", "10.0.0.7.daemon.ganger", "fd00-0000-0000-0000-0000-0000-0000-0007.daemon.ganger"]
    assert names.get_values_for_type(x509.DNSName) == ["n1.lab", *served]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7", "fd00::7"]
    assert timedelta(hours=47) < made.not_valid_after_utc - datetime.now(UTC) < timedelta(hours=49)


def test_keys_are_their_owners_alone(authority: Authority, tmp_path: Path) -> None:
    for key in (authority.issue("user", "ann") / KEY, tmp_path / "authority" / "ca-key.pem"):
        assert key.stat().st_mode & 0o777 == 0o600


def test_nothing_is_written_over(authority: Authority, tmp_path: Path) -> None:
    key = (tmp_path / "authority" / "ca-key.pem").read_bytes()
    with pytest.raises(CertificateError, match="is there already"):
        make_authority(tmp_path / "authority")
    assert (tmp_path / "authority" / "ca-key.pem").read_bytes() == key
    out = authority.issue("user", "ann")
    with pytest.raises(CertificateError, match="is there already"):
        issue(tmp_path / "authority", CallerIdentity(CallerRole.USER, "ann"), (), 1.0, out)


@pytest.mark.parametrize(
    ("role", "hosts", "days", "said"),
    [
        (CallerRole.DAEMON, (), 1.0, "name the host"),
        (CallerRole.USER, ("n1",), 1.0, "leave --host out"),
        (CallerRole.DAEMON, ("n1:7070",), 1.0, "leave the port out"),
        (CallerRole.DAEMON, ("a b",), 1.0, "neither a host name nor an IP address"),
        (CallerRole.USER, (), 9_999.0, "take fewer --days"),
    ],
)
def test_what_cannot_be_issued_is_said(
    authority: Authority, tmp_path: Path, role: CallerRole, hosts: tuple[str, ...], days: float, said: str
) -> None:
    with pytest.raises(CertificateError, match=said):
        issue(tmp_path / "authority", CallerIdentity(role, "x"), hosts, days, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_authority_is_reported_with_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match="`ganger certs init"):
        issue(tmp_path, CallerIdentity(CallerRole.USER, "x"), (), 1.0, tmp_path / "out")


def encrypted(directory: Path) -> None:
    key = serialization.load_pem_private_key((directory / KEY).read_bytes(), None)
    words = serialization.BestAvailableEncryption(b"secret")
    (directory / KEY).write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, words)
    )


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda d: (d / KEY).unlink(), "there is no .*key.pem"),
        (lambda d: (d / CERTIFICATE).unlink(), "there is no .*cert.pem"),
        (lambda d: (d / AUTHORITY).unlink(), "there is no .*ca.pem"),
        (lambda d: (d / KEY).chmod(0o644), r"can be read by others \(mode 0644\): chmod 600"),
        (lambda d: (d / KEY).chmod(0o640), r"can be read by others \(mode 0640\)"),
        (lambda d: (d / CERTIFICATE).write_text(""), "cert.pem is empty"),
        (lambda d: (d / KEY).write_text("not a key"), "key.pem holds no key"),
        (lambda d: (d / CERTIFICATE).write_text("no certificate"), "cannot read .*cert.pem and .*key.pem"),
        (lambda d: (d / AUTHORITY).write_text("ä"), "ca.pem holds no certificate"),
        (encrypted, "is encrypted"),
    ],
)
def test_what_is_wrong_with_files_is_said(authority: Authority, spoil: Callable[[Path], None], said: str) -> None:
    directory = authority.issue("user", "ann")
    spoil(directory)
    with pytest.raises(EndpointError, match=said):
        check_directory(directory)


def test_a_key_of_another_certificate_is_said(authority: Authority) -> None:
    ann, bob = authority.issue("user", "ann"), authority.issue("user", "bob")
    (ann / KEY).write_bytes((bob / KEY).read_bytes())
    with pytest.raises(EndpointError, match=r"key\.pem is not the key of .*cert\.pem"):
        check_directory(ann)


def test_an_expired_certificate_is_said_with_its_day(authority: Authority) -> None:
    with pytest.raises(EndpointError, match=rf"cert\.pem expired on {datetime.now(UTC):%Y-%m}"):
        check_directory(authority.issue("user", "ann", days=ENDED))


def test_a_certificate_of_another_authority_is_said(authority: Authority, tmp_path: Path) -> None:
    ann, other = authority.issue("user", "ann"), Authority(tmp_path, "other").issue("user", "ann")
    (ann / AUTHORITY).write_bytes((other / AUTHORITY).read_bytes())
    with pytest.raises(EndpointError, match=r"cert\.pem was not made by the authority in .*ca\.pem"):
        check_directory(ann)


def test_a_certificate_of_another_role_is_said(authority: Authority) -> None:
    with pytest.raises(EndpointError, match=r"is the certificate of user 'ann'.*--role master"):
        check_directory(authority.issue("user", "ann"), (CallerRole.MASTER,))


@pytest.mark.parametrize(("days", "level"), [(3.0, "WARNING"), (300.0, "INFO")])
def test_the_end_of_a_certificate_is_told_in_time(
    authority: Authority, caplog: pytest.LogCaptureFixture, days: float, level: str
) -> None:
    caplog.set_level("INFO")
    tell_end(authority.issue("master", "m", days=days))
    (said,) = caplog.records
    assert (said.levelname, said.until[:4]) == (level, f"{datetime.now(UTC) + timedelta(days=days):%Y}")  # type: ignore[attr-defined]


def test_secrets_are_not_shown(authority: Authority) -> None:
    assert b"PRIVATE" not in repr(read_files(authority.issue("user", "ann"))).encode()


def test_an_address_is_dialled_with_the_certificate_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GANGER_TLS", "/certs")
    assert find_endpoint("m.lab:7070") == Endpoint("m.lab:7070", tls="/certs")
    assert find_endpoint("m.lab:7070", "/others") == Endpoint("m.lab:7070", tls="/others")
    assert find_endpoint("unix:/run/m") == Endpoint("unix:/run/m")


def test_other_machines_need_certificates_at_both_ends() -> None:
    for check in (check_dial_address, check_listen_address):
        with pytest.raises(EndpointError, match=r"without (a certificate|certificates)"):
            check("10.0.0.7:7070")
    check_dial_address("10.0.0.7:7070", has_certificate=True)
    check_listen_address("10.0.0.7:7070", has_certificates=True)


def trouble_of(directory: Path) -> Callable[[str], str]:
    return lambda address: trouble_with(Endpoint(address, tls=str(directory)))


def served(certificate: Path, story: Callable[[str], str]) -> str:
    """What `story` says of a server with this certificate; it blocks, so it has a thread."""

    async def run() -> str:
        server = make_server(revocations=Revocations.beside(certificate))
        address = bind(server, "127.0.0.1:0", server_credentials(certificate))
        await server.start()
        try:
            return await asyncio.to_thread(story, address)
        finally:
            await server.stop(None)

    return asyncio.run(run())


def replaced(directory: Path, by: Path) -> None:
    """Exchange all files, one after the other, as a copy from another machine does."""
    for name in (KEY, CERTIFICATE, AUTHORITY):
        (directory / name).write_bytes((by / name).read_bytes())


def test_a_server_shows_renewed_files_and_takes_callers_of_a_new_authority_without_a_restart(
    authority: Authority, tmp_path: Path
) -> None:
    certificate, ann = authority.issue("master", "m"), authority.issue("user", "ann")
    other = Authority(tmp_path, "other")
    new, bob = other.issue("master", "m"), other.issue("user", "bob")

    def story(address: str) -> str:
        before = [trouble_of(ann)(address), trouble_of(bob)(address)]
        replaced(certificate, new)
        after = [trouble_of(ann)(address), trouble_of(bob)(address)]
        return str([not trouble for trouble in (*before, *after)])

    assert served(certificate, story) == "[True, False, False, True]"


def test_files_that_cannot_be_used_leave_the_former_ones_in_use_and_are_logged(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, ann = authority.issue("master", "m"), authority.issue("user", "ann")
    other = authority.issue("master", "other")
    whole = (certificate / KEY).read_bytes()

    def story(address: str) -> str:
        (certificate / KEY).write_bytes((other / KEY).read_bytes())
        half = trouble_of(ann)(address)
        (certificate / KEY).write_bytes(whole)
        return f"{half}|{trouble_of(ann)(address)}"

    assert served(certificate, story) == "|"
    (said,) = [one for one in caplog.records if one.message == "certificate not renewed"]
    assert "is not the key of" in said.error  # type: ignore[attr-defined]


def test_what_is_made_of_files_is_made_anew_when_they_change_only(authority: Authority) -> None:
    directory = authority.issue("daemon", "n1")
    made: list[bytes] = []

    def make(of: Path) -> bytes:
        made.append(read_files(of).certificate)
        return made[-1]

    renewed = Renewed(directory, make)
    assert [renewed.current(), renewed.current()] == [made[0]] * 2
    replaced(directory, authority.issue("daemon", "n1", to="next"))
    assert renewed.current() == (directory / CERTIFICATE).read_bytes() != made[0]
    renewed.current()
    assert len(made) == 2


@pytest.mark.parametrize(("role", "name"), [("daemon", "n2"), ("user", "n1"), ("master", "n1")])
def test_the_certificate_of_another_party_is_not_taken(
    authority: Authority, caplog: pytest.LogCaptureFixture, role: str, name: str
) -> None:
    directory = authority.issue("daemon", "n1")
    renewed = Renewed(directory, read_files)
    first = renewed.current()
    replaced(directory, authority.issue(role, name))
    assert renewed.current() is first
    (said,) = [one for one in caplog.records if one.message == "certificate not renewed"]
    assert f"is of {role} '{name}' now, and this is daemon 'n1'" in said.error  # type: ignore[attr-defined]


def test_files_are_looked_at_again_once_their_rights_are_mended(authority: Authority) -> None:
    directory, other = authority.issue("daemon", "n1"), authority.issue("daemon", "n1", to="next")
    renewed = Renewed(directory, read_files)
    first = renewed.current()
    replaced(directory, other)
    (directory / KEY).chmod(0o644)
    assert renewed.current() is first
    (directory / KEY).chmod(0o600)
    assert renewed.current().certificate == (other / CERTIFICATE).read_bytes()


def test_channels_to_daemons_show_a_renewed_certificate_and_keep_their_number(authority: Authority) -> None:
    master = authority.issue("master", "m")

    async def story() -> None:
        channels = DaemonChannels("", str(master), most=2)
        first, second = channels.get("127.0.0.1:1"), channels.get("127.0.0.1:2")
        assert channels.get("127.0.0.1:1") is first
        whole = (master / KEY).read_bytes()
        (master / KEY).write_bytes((authority.issue("master", "m", to="next") / KEY).read_bytes())
        assert channels.get("127.0.0.1:1") is first, "files that do not go together are not used"
        (master / KEY).write_bytes(whole)
        replaced(master, authority.issue("master", "m", to="next"))
        renewed = channels.get("127.0.0.1:1")
        assert renewed is not first
        channels.get("127.0.0.1:3")
        assert channels.get("127.0.0.1:1") is renewed
        assert channels.get("127.0.0.1:2") is not second
        await channels.close()

    asyncio.run(story())


def test_a_renewed_certificate_is_that_of_the_same_party_for_longer(authority: Authority, tmp_path: Path) -> None:
    directory = authority.issue("daemon", "n1", ("n1.lab", "10.0.0.7"), days=1)
    key = (directory / KEY).read_bytes()
    identity, end = renew(tmp_path / "authority", directory, 20.0)
    assert identity == check_directory(directory) == CallerIdentity(CallerRole.DAEMON, "n1")
    assert end - datetime.now(UTC) > timedelta(days=19)
    assert key != (directory / KEY).read_bytes()
    assert (directory / KEY).stat().st_mode & 0o777 == 0o600
    names = x509.load_pem_x509_certificate((directory / CERTIFICATE).read_bytes()).extensions
    found = names.get_extension_for_class(x509.SubjectAlternativeName).value
    assert found.get_values_for_type(x509.DNSName) == ["n1.lab", "n1.lab.daemon.ganger", "10.0.0.7.daemon.ganger"]
    assert sorted(path.name for path in directory.iterdir()) == [AUTHORITY, CERTIFICATE, KEY]


def test_nothing_is_renewed_without_a_certificate_or_its_authority(authority: Authority, tmp_path: Path) -> None:
    directory = authority.issue("user", "ann")
    content = (directory / CERTIFICATE).read_bytes()
    with pytest.raises(
        CertificateError, match=r"no authority in .*: name the directory of the one that made .*cert\.pem"
    ):
        renew(tmp_path / "none", directory, 1.0)
    assert (directory / CERTIFICATE).read_bytes() == content
    with pytest.raises(CertificateError, match=r"cannot read .*cert\.pem"):
        renew(tmp_path / "authority", tmp_path / "empty", 1.0)
    Authority(tmp_path, "other")
    with pytest.raises(CertificateError, match="was made by another authority"):
        renew(tmp_path / "other", directory, 1.0)
    assert (directory / CERTIFICATE).read_bytes() == content
    (directory / CERTIFICATE).write_text("no certificate")
    with pytest.raises(CertificateError, match="is no certificate of a cluster"):
        renew(tmp_path / "authority", directory, 1.0)


def test_nothing_is_wrong_where_nothing_is(authority: Authority) -> None:
    ann = authority.issue("user", "ann")
    assert served(authority.issue("master", "m"), trouble_of(ann)) == ""


def test_a_server_that_is_not_there_is_no_trouble_with_certificates(authority: Authority) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    assert trouble_of(authority.issue("user", "ann"))(address) == ""


def test_a_server_of_another_name_is_said(authority: Authority) -> None:
    ann = authority.issue("user", "ann")
    said = served(authority.issue("master", "m", ("m.lab",)), trouble_of(ann))
    assert "does not name the host 127.0.0.1: issue it with --host 127.0.0.1" in said


@pytest.mark.parametrize(
    ("role", "other"), [(CallerRole.MASTER, CallerRole.DAEMON), (CallerRole.DAEMON, CallerRole.MASTER)]
)
def test_clients_reject_a_server_of_another_role_at_the_same_host(
    authority: Authority, role: CallerRole, other: CallerRole
) -> None:
    ann = str(authority.issue("user", "ann"))

    def answer(address: str, wanted: CallerRole) -> str:
        with open_channel(Endpoint(address, tls=ann), role=wanted) as channel:
            try:
                channel.unary_unary("/ganger.v1.JobService/GetJob")(b"", timeout=10.0)
            except grpc.RpcError as error:
                return str(error.code().name)  # type: ignore[attr-defined]
        return "OK"

    def story(address: str) -> str:
        asked = [answer(address, wanted) for wanted in (role, other)]
        troubles = [trouble_with(Endpoint(address, tls=ann), wanted) for wanted in (role, other)]
        return f"{asked} {'|'.join(troubles)}"

    # it is there, and knows no such method
    said = served(authority.issue(role, "x"), story)
    assert said == f"['UNIMPLEMENTED', 'UNAVAILABLE'] |what answers there is {role} 'x', and no {other}"


def test_a_certificate_without_the_role_of_its_host_is_reported(authority: Authority) -> None:
    directory = authority.issue("master", "m", ("m.lab", "10.0.0.7"))
    authority.leave_out(directory, "10.0.0.7.master.ganger")
    with pytest.raises(EndpointError, match=r"10\.0\.0\.7 as the host of a master.*ganger certs issue"):
        check_directory(directory)


def test_a_server_whose_certificate_has_ended_is_said(authority: Authority) -> None:
    ann = authority.issue("user", "ann")
    said = served(authority.issue("master", "m", days=ENDED), trouble_of(ann))
    assert "its certificate has expired" in said


def test_a_user_is_no_server(authority: Authority) -> None:
    ann = authority.issue("user", "ann")
    assert "not that of a server" in served(ann, trouble_of(ann))


def test_a_server_of_another_authority_is_said(authority: Authority, tmp_path: Path) -> None:
    ann = authority.issue("user", "ann")
    other = Authority(tmp_path, "other").issue("master", "m")
    assert "was not made by the authority" in served(other, trouble_of(ann))


def test_a_server_that_does_not_take_ours_is_said(authority: Authority, tmp_path: Path) -> None:
    """Its certificate is good, but it trusts another authority than that of ours."""
    server, other = authority.issue("master", "m"), Authority(tmp_path, "other")
    ann = other.issue("user", "ann")
    own = (ann / AUTHORITY).read_bytes()
    (ann / AUTHORITY).write_bytes(own + (server / AUTHORITY).read_bytes())
    assert "does not accept" in served(server, trouble_of(ann))


def test_a_server_without_tls_is_said(authority: Authority) -> None:
    ann = authority.issue("user", "ann")
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert "speaks no TLS" in trouble_of(ann)(f"127.0.0.1:{listening.getsockname()[1]}")
        thread.join()
