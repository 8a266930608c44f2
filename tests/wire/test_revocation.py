"""A list of revoked certificates is used when its authority has signed it; what else is in the file changes nothing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from cryptography import x509
from ganger.wire import revocation
from ganger.wire.certificate_authority import publish
from ganger.wire.endpoints import CredentialError
from ganger.wire.errors import CertificateInvalid, CertificateRevoked
from ganger.wire.methods import CallerIdentity, CallerRole
from ganger.wire.revocation import REVOKED, Revocations, ShownCertificate, read_certificate
from ganger.wire.tls import AUTHORITY, CERTIFICATE
from kit.certified import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture(autouse=True)
def always_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revocation, "_LOOK_S", 0.0)


def shown(directory: Path) -> ShownCertificate:
    return read_certificate((directory / CERTIFICATE).read_bytes())


def test_a_certificate_is_refused_once_it_is_on_the_list_and_others_are_not(authority: Authority) -> None:
    master, ann, bob = authority.issue("master", "m"), authority.issue("user", "ann"), authority.issue("user", "bob")
    used = Revocations.beside(master)
    used.check(shown(ann))
    (master / REVOKED).write_bytes(authority.revoke(ann))
    with pytest.raises(CertificateRevoked, match="the certificate of user 'ann' was revoked"):
        used.check(shown(ann))
    used.check(shown(bob))


def test_a_renewed_certificate_is_not_the_revoked_one(authority: Authority) -> None:
    ann, renewed = authority.issue("user", "ann"), authority.issue("user", "ann", to="renewed")
    master = authority.issue("master", "m")
    (master / REVOKED).write_bytes(authority.revoke(ann))
    Revocations.beside(master).check(shown(renewed))


def test_a_certificate_that_ends_while_a_connection_lasts_is_refused(authority: Authority) -> None:
    used = Revocations.beside(authority.issue("master", "m"))
    ended = ShownCertificate(CallerIdentity(CallerRole.USER, "ann"), (b"", 1), time.time() - 1.0)
    with pytest.raises(CertificateInvalid, match="the certificate of user 'ann' expired on"):
        used.check(ended)


def test_the_list_grows_and_an_older_one_does_not_replace_it(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    master, ann, bob = authority.issue("master", "m"), authority.issue("user", "ann"), authority.issue("user", "bob")
    first = authority.revoke(ann)
    (master / REVOKED).write_bytes(authority.revoke(bob))
    used = Revocations.beside(master)
    (master / REVOKED).write_bytes(first)
    assert used.current().serials == {shown(ann).serial, shown(bob).serial}
    (said,) = [one for one in caplog.records if one.message == "revoked certificates not read"]
    assert "is older than the list in use" in said.error  # type: ignore[attr-defined]


def test_a_list_that_cannot_be_used_is_refused_at_the_start_and_ignored_later(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    master, ann = authority.issue("master", "m"), authority.issue("user", "ann")
    foreign = Authority(tmp_path, "other").revoke(ann)
    (master / REVOKED).write_bytes(authority.revoke(ann))
    whole = (master / REVOKED).read_bytes()
    used = Revocations.beside(master)
    for content, why in (
        (foreign, "was not signed by the authority"),
        (b"nonsense", "in PEM form"),
        (b"", "in PEM"),
        (whole[:300], "in PEM"),
        (whole + whole[:300], "written to its end"),
    ):
        (master / REVOKED).write_bytes(content)
        with pytest.raises(CredentialError, match=why):
            Revocations.beside(master)
        assert used.current().serials == {shown(ann).serial}
    assert len([one for one in caplog.records if one.message == "revoked certificates not read"]) == 5


def test_a_list_that_is_taken_away_leaves_what_is_known(authority: Authority) -> None:
    master, ann = authority.issue("master", "m"), authority.issue("user", "ann")
    (master / REVOKED).write_bytes(authority.revoke(ann))
    used = Revocations.beside(master)
    (master / REVOKED).unlink()
    assert used.current().serials == {shown(ann).serial}


def test_a_list_that_was_sent_is_kept_and_an_older_or_foreign_one_is_not(authority: Authority, tmp_path: Path) -> None:
    daemon, ann, bob = authority.issue("daemon", "n1"), authority.issue("user", "ann"), authority.issue("user", "bob")
    file = tmp_path / "state.pem"
    used = Revocations(file, daemon / "ca.pem")
    first, second = authority.revoke(ann), authority.revoke(bob)
    used.accept(second)
    used.accept(first)
    with pytest.raises(CredentialError, match="was not signed"):
        used.accept(Authority(tmp_path, "other").revoke(ann))
    assert used.current().pem == second == file.read_bytes()
    assert Revocations(file, daemon / "ca.pem").current().serials == {shown(ann).serial, shown(bob).serial}


def test_with_two_authorities_in_use_each_has_its_list_and_none_revokes_for_the_other(
    authority: Authority, tmp_path: Path
) -> None:
    other = Authority(tmp_path, "other")
    master, ann, bob = authority.issue("master", "m"), authority.issue("user", "ann"), other.issue("user", "bob")
    both = [(tmp_path / name / AUTHORITY).read_bytes() for name in ("authority", "other")]
    (master / AUTHORITY).write_bytes(b"".join(both))
    authority.revoke(ann)
    publish(tmp_path / "authority" / REVOKED, master)
    used = Revocations.beside(master)
    other.revoke(bob)
    publish(tmp_path / "other" / REVOKED, master)
    for known in (used, Revocations.beside(master)):
        for revoked in (ann, bob):
            with pytest.raises(CertificateRevoked):
                known.check(shown(revoked))
    daemon = Revocations(tmp_path / "kept.pem", master / AUTHORITY)
    daemon.accept(used.current().pem)
    assert daemon.current() == used.current()


def test_a_serial_number_on_the_list_of_another_authority_does_not_count(authority: Authority) -> None:
    master, ann = authority.issue("master", "m"), authority.issue("user", "ann")
    (master / REVOKED).write_bytes(authority.revoke(ann))
    used, found = Revocations.beside(master), shown(ann)
    used.check(ShownCertificate(found.identity, (b"another authority", found.serial[1]), found.end))


@pytest.mark.parametrize("number", [0, 1 << 63, 1 << 150])
def test_a_list_with_a_number_that_no_message_holds_is_refused(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    master, ann = authority.issue("master", "m"), authority.issue("user", "ann")
    monkeypatch.setattr(x509, "CRLNumber", lambda _, made=x509.CRLNumber: made(number))
    content = authority.revoke(ann)
    monkeypatch.undo()
    (master / REVOKED).write_bytes(content)
    with pytest.raises(CredentialError, match=f"is {number}: make it with one from 1"):
        Revocations.beside(master)


def test_a_list_that_is_too_large_for_a_message_is_refused_by_its_size(authority: Authority) -> None:
    master = authority.issue("master", "m")
    (master / REVOKED).write_bytes(b"x" * (2 << 20))
    with pytest.raises(CredentialError, match="is larger than 1048576 bytes"):
        Revocations.beside(master)
