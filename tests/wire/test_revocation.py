"""A list of revoked certificates is used when its authority has signed it; what else is in the file changes nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pytest
from cryptography import x509
from ganger.wire import revocation
from ganger.wire.certificate_authority import CertificateError, publish
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
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    master, ann = authority.issue("master", "m"), authority.issue("user", "ann")
    (master / REVOKED).write_bytes(authority.revoke(ann))
    whole = (master / REVOKED).read_bytes()
    used = Revocations.beside(master)
    for content, why in (
        (b"nonsense", "in PEM form.*: copy the one in the directory of the authority there again"),
        (b"", "in PEM"),
        (whole[:300], "in PEM"),
        (whole + whole[:300], "written to its end"),
    ):
        (master / REVOKED).write_bytes(content)
        with pytest.raises(CredentialError, match=why):
            Revocations.beside(master)
        assert used.current().serials == {shown(ann).serial}
    assert len([one for one in caplog.records if one.message == "revoked certificates not read"]) == 4


def test_the_list_of_an_authority_that_is_out_of_use_is_left_out_with_a_warning(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    master, ann = authority.issue("master", "m"), authority.issue("user", "ann")
    retired = Authority(tmp_path, "other")
    (master / REVOKED).write_bytes(retired.revoke(retired.issue("user", "ann")))
    used = Revocations.beside(master)
    assert (used.current().pem, used.current().digest) == (b"", b"")
    assert "a list in revoked.pem is of no authority in ca.pem: it is left out" in caplog.messages
    publish_of(authority, ann, master)
    assert (master / REVOKED).read_bytes() == used.current().pem
    assert used.current().serials == {shown(ann).serial}


def publish_of(authority: Authority, revoked: Path, master: Path) -> None:
    """Revoke a certificate, and give the master the list."""
    authority.revoke(revoked)
    publish(revoked.parent / authority.name / REVOKED, master)


def test_a_list_counts_as_soon_as_its_authority_is_in_use(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    master, bob = authority.issue("master", "m"), other.issue("user", "bob")
    (master / REVOKED).write_bytes(other.revoke(bob))
    used = Revocations.beside(master)
    with (master / AUTHORITY).open("ab") as file:
        file.write((tmp_path / "other" / AUTHORITY).read_bytes())
    assert used.current().serials == {shown(bob).serial}


def test_an_older_list_does_not_replace_a_newer_one_that_is_published(authority: Authority, tmp_path: Path) -> None:
    master, ann, bob = authority.issue("master", "m"), authority.issue("user", "ann"), authority.issue("user", "bob")
    older = tmp_path / "older.pem"
    older.write_bytes(authority.revoke(ann))
    publish_of(authority, bob, master)
    newer = (master / REVOKED).read_bytes()
    publish(older, master)
    assert (master / REVOKED).read_bytes() == newer


def test_an_older_list_with_a_certificate_that_the_newer_one_lacks_is_refused(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    master, ann, bob = authority.issue("master", "m"), authority.issue("user", "ann"), authority.issue("user", "bob")
    with numbered(monkeypatch, 7):
        older = authority.revoke(ann)
    (tmp_path / "authority" / REVOKED).unlink()
    publish_of(authority, bob, master)
    (tmp_path / "older.pem").write_bytes(older)
    with pytest.raises(CertificateError, match=r"has a list with a higher number, .* that lacks certificates of"):
        publish(tmp_path / "older.pem", master)


def test_what_is_no_list_of_the_cluster_is_not_published(authority: Authority, tmp_path: Path) -> None:
    master, other = authority.issue("master", "m"), Authority(tmp_path, "other")
    with pytest.raises(CertificateError, match=r"no authority in .*ca.pem has signed"):
        publish_of(other, other.issue("user", "ann"), master)
    (master / REVOKED).write_text("nonsense")
    with pytest.raises(CertificateError, match="remove it, and write each list anew"):
        publish_of(authority, authority.issue("user", "ann"), master)


@contextmanager
def numbered(monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[None]:
    """Give lists this number."""

    class Numbered(x509.CRLNumber):
        def __init__(self, _: int) -> None:
            super().__init__(number)

    with monkeypatch.context() as patch:
        patch.setattr(x509, "CRLNumber", Numbered)
        yield


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
    for ignored in (first, (foreign := Authority(tmp_path, "other")).revoke(foreign.issue("user", "ann"))):
        used.accept(ignored)
        # It is stated, else it would be sent again with each heartbeat.
        assert used.stated_digest() == sha256(ignored).digest()
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
    assert Revocations(tmp_path / "kept.pem", master / AUTHORITY).stated_digest() == used.current().digest


def test_each_list_of_either_authority_changes_the_digest_whatever_the_numbers(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Authority(tmp_path, "other")
    master, ann = authority.issue("master", "m"), authority.issue("user", "ann")
    with (master / AUTHORITY).open("ab") as file:
        file.write((tmp_path / "other" / AUTHORITY).read_bytes())
    publish_of(authority, ann, master)
    used, digests = Revocations.beside(master), set()
    for number, name in ((0, "bob"), (1, "eve"), (1 << 150, "joe")):
        with numbered(monkeypatch, number):
            other.revoke(other.issue("user", name))
        publish(tmp_path / "other" / REVOKED, master)
        digests.add(used.current().digest)
    assert len(digests) == 3
    assert len(used.current().serials) == 4


def test_lists_are_sent_anew_once_the_daemon_has_another_authority(authority: Authority, tmp_path: Path) -> None:
    daemon, other = authority.issue("daemon", "n1"), Authority(tmp_path, "other")
    bob = other.issue("user", "bob")
    used = Revocations(tmp_path / "kept.pem", daemon / AUTHORITY)
    list_of = other.revoke(bob)
    used.accept(list_of)
    with (daemon / AUTHORITY).open("ab") as file:
        file.write((tmp_path / "other" / AUTHORITY).read_bytes())
    assert used.stated_digest() == b""
    used.accept(list_of)
    assert used.current().serials == {shown(bob).serial}


def test_a_serial_number_on_the_list_of_another_authority_does_not_count(authority: Authority) -> None:
    master, ann = authority.issue("master", "m"), authority.issue("user", "ann")
    (master / REVOKED).write_bytes(authority.revoke(ann))
    used, found = Revocations.beside(master), shown(ann)
    used.check(ShownCertificate(found.identity, (b"another authority", found.serial[1]), found.end))


def test_a_list_that_is_too_large_for_a_message_is_refused_by_its_size(authority: Authority) -> None:
    master = authority.issue("master", "m")
    (master / REVOKED).write_bytes(b"x" * (2 << 20))
    with pytest.raises(CredentialError, match="is larger than 1048576 bytes"):
        Revocations.beside(master)
