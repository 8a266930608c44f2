"""`ganger certs` makes what the programs take, and says what it cannot make."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography import x509
from ganger.console import ExitCode
from ganger.v1 import node_pb2
from ganger.wire import certificate_authority, times
from ganger.wire.certificate_authority import revoke, serial_in
from ganger.wire.methods import CallerIdentity, CallerRole
from ganger.wire.revocation import REVOKED, Revocations
from ganger.wire.tls import check_directory
from kit.canned import Call, CannedMaster
from kit.shell import Done, Shell


def certs(*arguments: str) -> Done:
    return Shell("unused:1").try_("certs", *arguments)


@pytest.fixture
def authority(tmp_path: Path) -> str:
    assert certs("init", str(tmp_path / "ca")).code == ExitCode.OK
    return str(tmp_path / "ca")


@pytest.mark.parametrize(
    ("role", "name", "hosts"),
    [
        ("master", "m", ("m.lab", "10.0.0.1")),
        ("daemon", "n1", ("n1.lab",)),
        *((role, "x@lab", ()) for role in ("user", "operator", "scheduler", "planner")),
    ],
)
def test_a_certificate_of_each_role_is_issued(
    authority: str, tmp_path: Path, role: str, name: str, hosts: tuple[str, ...]
) -> None:
    words = [word for host in hosts for word in ("--host", host)]
    out = tmp_path / "out"
    done = certs("issue", authority, "--role", role, "--name", name, *words, "--out", str(out), "--days", "3")
    assert (done.code, done.err) == (ExitCode.OK, "")
    assert done.out.startswith(f"issued {out} to {role} {name!r}, until ")
    assert check_directory(out) == CallerIdentity(CallerRole(role), name)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--role", "user", "--name", "a b"), ExitCode.USAGE, "--name 'a b': letters, digits"),
        (("--role", "daemon", "--name", "n@1", "--host", "n1"), ExitCode.USAGE, "--name 'n@1': letters, digits"),
        (("--role", "root", "--name", "a"), ExitCode.USAGE, "'root' is not one of"),
        (("--role", "user", "--name", "a", "--days", "nan"), ExitCode.USAGE, "not a number"),
        (("--role", "user", "--name", "a", "--days", "0"), ExitCode.USAGE, "not in the range"),
        (("--role", "master", "--name", "m"), ExitCode.USAGE, "name the host under which it is reached"),
        (("--role", "user", "--name", "a", "--host", "h"), ExitCode.USAGE, "leave --host out"),
    ],
)
def test_what_cannot_be_issued_is_said(
    authority: str, tmp_path: Path, words: tuple[str, ...], code: ExitCode, said: str
) -> None:
    done = certs("issue", authority, *words, "--out", str(tmp_path / "out"))
    assert (done.code, said in done.err) == (code, True), done
    assert not (tmp_path / "out").exists()


def test_an_authority_is_not_made_twice_and_none_is_not_used(authority: str, tmp_path: Path) -> None:
    again = certs("init", authority)
    assert (again.code, "is there already" in again.err) == (ExitCode.REFUSED, True)
    words = ("--role", "user", "--name", "a", "--out", str(tmp_path / "out"))
    none = certs("issue", str(tmp_path / "nowhere"), *words)
    assert (none.code, "`ganger certs init" in none.err) == (ExitCode.REFUSED, True)


def issued(authority: str, tmp_path: Path, role: str, name: str, out: str) -> str:
    """Issue a certificate to a directory of this name; return its serial number as it is listed."""
    hosts = ("--host", "h") if role in ("master", "daemon") else ()
    words = ("--role", role, "--name", name, *hosts, "--out", str(tmp_path / out))
    assert certs("issue", authority, *words).code == ExitCode.OK
    return f"{serial_in(Path(authority), tmp_path / out):x}"


def states(authority: str) -> dict[str, str]:
    found = json.loads(certs("list", authority, "--json").out)
    return {one["serial"]: f"{one['role']} {one['name']} {one['state']}" for one in found}


def test_certificates_are_listed_and_revoked_by_serial_number_by_name_and_by_their_files(
    authority: str, tmp_path: Path
) -> None:
    first, second = (issued(authority, tmp_path, "user", "ann", out) for out in ("a", "b"))
    bob, node, master = (
        issued(authority, tmp_path, role, name, name)
        for role, name in (("user", "bob"), ("daemon", "n1"), ("master", "m"))
    )
    assert states(authority)[first] == "user ann valid"
    done = certs("revoke", authority, bob, "--to", str(tmp_path / "m"))
    assert (done.code, done.out) == (ExitCode.OK, f"revoked {bob}\n")
    assert {serial for _, serial in Revocations.beside(tmp_path / "m").current().serials} == {int(bob, 16)}
    done = certs("revoke", authority, "user/ann", str(tmp_path / "n1"))
    assert (done.code, "copy" in done.err) == (ExitCode.OK, True)
    ended = {serial for serial, state in states(authority).items() if state.endswith(" revoked")}
    assert ended == {first, second, bob, node}
    assert states(authority)[master] == "master m valid"


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("user/nn", "no certificate of user 'nn' is on record"),
        ("users/ann", "no certificate 'users/ann' is on record"),
        ("77", "no certificate '77' is on record"),
        (".", "cannot read cert.pem: no such file"),
    ],
)
def test_what_cannot_be_revoked_is_said(authority: str, named: str, said: str) -> None:
    done = certs("revoke", authority, named)
    assert (done.code, said in done.err) == (ExitCode.REFUSED, True), done
    assert not (Path(authority) / REVOKED).exists()


def test_a_revocation_of_one_certificate_names_another_one_of_the_same_party(authority: str, tmp_path: Path) -> None:
    stolen, renewed = (issued(authority, tmp_path, "daemon", "n1", out) for out in ("a", "b"))
    done = certs("revoke", authority, stolen)
    assert "daemon 'n1' has 1 other certificate still in use: if the key was stolen" in done.err, done
    assert "still in use" not in certs("revoke", authority, renewed).err


def test_a_certificate_of_another_authority_is_not_revoked_by_this_one(authority: str, tmp_path: Path) -> None:
    assert certs("init", str(tmp_path / "other")).code == ExitCode.OK
    issued(str(tmp_path / "other"), tmp_path, "user", "ann", "ann")
    done = certs("revoke", authority, str(tmp_path / "ann"))
    assert (done.code, "was made by another authority" in done.err) == (ExitCode.REFUSED, True), done
    assert not (Path(authority) / REVOKED).exists()


def test_a_record_that_cannot_be_read_is_named_and_the_others_are_revoked(authority: str, tmp_path: Path) -> None:
    broken, ann = (issued(authority, tmp_path, "user", name, name) for name in ("bob", "ann"))
    (Path(authority) / "issued" / f"{broken}.pem").write_text("nonsense")
    for named in (ann, "user/ann", broken):
        done = certs("revoke", authority, named)
        assert (done.code, f"{broken}.pem is no certificate of a cluster" in done.err) == (ExitCode.OK, True), done
    listed = certs("list", authority, "--json")
    assert f"{broken}.pem is no certificate of a cluster" in listed.err
    assert [one["state"] for one in json.loads(listed.out)] == ["revoked"]
    assert certs("revoke", authority, "user/bob").code == ExitCode.REFUSED


def test_a_renewal_while_a_name_is_revoked_is_revoked_too(
    authority: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renewal that holds the lock when the revocation begins records its certificate before the lock is free."""
    issued(authority, tmp_path, "daemon", "n1", "a")
    late = issued(authority, tmp_path, "daemon", "n1", "b")
    record = Path(authority) / "issued" / f"{late}.pem"
    content = record.read_bytes()
    record.unlink()
    locked = certificate_authority._locked

    @contextmanager
    def locked_after_a_renewal(directory: Path) -> Iterator[None]:
        record.write_bytes(content)
        with locked(directory):
            yield

    monkeypatch.setattr(certificate_authority, "_locked", locked_after_a_renewal)
    done = revoke(Path(authority), [CallerIdentity(CallerRole.DAEMON, "n1")])
    assert int(late, 16) in done.serials


def test_revocations_at_once_are_all_on_the_list(authority: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda serial: revoke(Path(authority), [serial]), range(1, 9)))
    listed = x509.load_pem_x509_crl((Path(authority) / REVOKED).read_bytes())
    assert {one.serial_number for one in listed} == set(range(1, 9))


def test_a_list_is_written_only_beside_a_certificate(authority: str, tmp_path: Path) -> None:
    serial = issued(authority, tmp_path, "user", "ann", "ann")
    done = certs("revoke", authority, serial, "--to", str(tmp_path / "nowhere"))
    assert (done.code, "there is no certificate in" in done.err) == (ExitCode.REFUSED, True), done


def test_an_authority_without_certificates_says_so(authority: str) -> None:
    done = certs("list", authority)
    assert (done.code, done.err) == (ExitCode.OK, f"no certificate is on record in {authority}\n")


def test_a_token_is_printed_once_and_alone_or_written_into_a_directory(
    call: Call, master: CannedMaster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    master.cluster.token_address = "m.lab:7071"
    assert call("tokens", "create", "ann", "--expires", "30d") == 0
    said = capsys.readouterr()
    assert said.out == "ann.0a.secret\n"
    assert "GANGER_MASTER=m.lab:7071" in said.err
    assert "secret" not in said.err
    request = next(one for one in master.requests if isinstance(one, node_pb2.CreateTokenRequest))
    assert (request.user, times.seconds(request.lifetime)) == ("ann", 30 * 86_400.0)
    out = tmp_path / "out"
    assert call("tokens", "create", "ann", "--out", str(out)) == 0
    assert (out / "token").read_text() == "ann.0a.secret\n"
    assert ((out / "token").stat().st_mode & 0o777, out.stat().st_mode & 0o777) == (0o600, 0o700)
    said = capsys.readouterr()
    assert said.out == ""
    assert f"GANGER_TLS={out}" in said.err
    count = len(master.requests)
    assert call("tokens", "create", "ann", "--out", str(out)) == 4
    assert call("tokens", "create", "ann", "--expires", "soon") == 2
    assert len(master.requests) == count, "nothing was made that cannot be written"


def test_tokens_are_listed_with_their_state_and_revoked(
    call: Call, master: CannedMaster, capsys: pytest.CaptureFixture[str]
) -> None:
    now, token = time.time(), node_pb2.Token
    master.tokens.tokens.extend(
        [
            token(name="3", user="ann", expire_time=times.timestamp(now + 3_600.0), creator="olga"),
            token(name="1", user="bob", expire_time=times.timestamp(now - 3_600.0)),
            token(name="2", user="c\x1b[2J", expire_time=times.timestamp(now), revoke_time=times.timestamp(now)),
        ]
    )
    assert call("tokens", "list") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(row[0], row[1], row[4]) for row in rows[1:]] == [
        ("1", "bob", "expired"),
        ("2", r"c\x1b[2J", "revoked"),
        ("3", "ann", "valid"),
    ]
    assert call("tokens", "revoke", "3", "4") == 0
    assert capsys.readouterr().out == "revoked 3 of ann\nrevoked 4 of ann\n"
