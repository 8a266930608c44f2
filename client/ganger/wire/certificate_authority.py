"""A small authority of one's own: makes it, and certificates of roles and names by it.

Keys are EC P-256, certificates X.509 v3 (RFC 5280) with the hosts, and the URI that says role and name
(`ganger.wire.methods`), as subject alternative names. Roles that only dial (users, operators, ...) get
certificates that are not valid for servers. A directory with such files is refused.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ganger.text import counted, os_failure, os_reason
from ganger.wire.endpoints import CredentialError
from ganger.wire.errors import CertificateInvalid
from ganger.wire.methods import CallerIdentity, CallerRole, served_name
from ganger.wire.revocation import REVOKED, newest_lists, parse_list, parse_lists
from ganger.wire.tls import AUTHORITY, CERTIFICATE, KEY, check_directory, identity_in_pem

AUTHORITY_KEY: Final = "ca-key.pem"
# In the directory of the authority: each certificate that it has issued, by serial number.
_ISSUED: Final = "issued"
AUTHORITY_DAYS: Final = 3650
_SERVERS: Final = (CallerRole.MASTER, CallerRole.DAEMON)
_PEM: Final = serialization.Encoding.PEM
# What a renewed certificate has of the former one.
_KEPT: Final = (x509.SubjectAlternativeName, x509.ExtendedKeyUsage)
# Clocks of machines differ.
_BEFORE: Final = timedelta(minutes=5)
_HOST = re.compile(
    r"(\*\.)?([A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?\.)*[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?"
)


class CertificateError(Exception):
    """What was asked for cannot be made; the message says why and what to do."""


def make_authority(directory: Path) -> Path:
    """Writes ca-key.pem (mode 0600) and ca.pem of a new authority; the latter. Raises CertificateError."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ganger cluster authority")])
    usage = _usage("key_cert_sign", "crl_sign")
    certificate = (
        _builder(name, name, key.public_key(), AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(directory, {AUTHORITY_KEY: _pem_of(key), AUTHORITY: certificate.public_bytes(_PEM)})
    return directory / AUTHORITY


def check_hosts(role: CallerRole, hosts: Sequence[str]) -> None:
    """Raise CertificateError unless servers, and servers only, have hosts."""
    if role in _SERVERS and not hosts:
        raise CertificateError(f"a {role} accepts connections: name the host under which it is reached with --host")
    if hosts and role not in _SERVERS:
        raise CertificateError(f"a {role} accepts no connections: leave --host out")


def issue(
    authority: Path, identity: CallerIdentity, hosts: Sequence[str], days: float, out: Path, *, replaces: bool = False
) -> datetime:
    """Writes key.pem (mode 0600), cert.pem and ca.pem into `out`: a certificate of `identity`, by the authority in the
    directory `authority`, with `hosts` (DNS names and IP addresses). When it ends. `replaces`: files that are there are
    replaced. Raises CertificateError."""
    serves = identity.role in _SERVERS
    check_hosts(identity.role, hosts)
    signer, signing_key = read_authority(authority, f"`ganger certs init {authority}` makes one")
    if (left := signer.not_valid_after_utc - datetime.now(UTC)) < timedelta(days=days):
        raise CertificateError(
            f"the authority {authority / AUTHORITY} itself ends in {counted(max(0, left.days), 'day')}: take fewer"
            " --days, or make a new one"
        )
    key = ec.generate_private_key(ec.SECP256R1())
    names = [
        x509.UniformResourceIdentifier(identity.uri),
        *(_general_name(host) for host in hosts),
        *(x509.DNSName(served_name(identity.role, host)) for host in hosts),
    ]
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if serves else [])]
    extensions = (x509.SubjectAlternativeName(names), x509.ExtendedKeyUsage(purposes))
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.name)])
    certificate = _builder(subject, signer.subject, key.public_key(), days)
    shown = _signed(authority, certificate, extensions, signing_key)
    files = {KEY: _pem_of(key), CERTIFICATE: shown, AUTHORITY: signer.public_bytes(_PEM)}
    with _locked(out) if replaces else nullcontext():
        _write(out, files, replaces=replaces)
    return x509.load_pem_x509_certificate(shown).not_valid_after_utc


def _signed(
    authority: Path,
    builder: x509.CertificateBuilder,
    extensions: Iterable[x509.ExtensionType],
    key: ec.EllipticCurvePrivateKey,
) -> bytes:
    """Sign a certificate of a party, and record it. Raises CertificateError."""
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    made = (
        builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage("digital_signature"), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    shown = made.public_bytes(_PEM)
    # A certificate that is not on record cannot be revoked by its name.
    _write(authority / _ISSUED, {f"{made.serial_number:x}.pem": shown})
    return shown


def renewal_time(certificate: bytes) -> tuple[datetime, datetime]:
    """Return when a certificate, in PEM form, is due to be renewed, and when it ends: a third of its life later. Raises
    ValueError."""
    found = x509.load_pem_x509_certificate(certificate)
    begin, end = found.not_valid_before_utc + _BEFORE, found.not_valid_after_utc
    return end - (end - begin) / 3, end


def life_of(directory: Path) -> timedelta:
    """Return for how long the certificate in a directory was made. Raises CertificateError."""
    try:
        found = x509.load_pem_x509_certificate((directory / CERTIFICATE).read_bytes())
    except (OSError, ValueError) as error:
        raise CertificateError(f"{directory / CERTIFICATE} cannot be read: {error}") from error
    return found.not_valid_after_utc - found.not_valid_before_utc - _BEFORE


def request_renewal() -> tuple[bytes, bytes]:
    """Return a new key and a request for a certificate of it (RFC 2986), in PEM form. The names are those of the
    certificate with which the request comes."""
    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return _pem_of(key), request.public_bytes(_PEM)


def answer_renewal(authority: Path, certificate: bytes, request: bytes) -> bytes:
    """Return a certificate of the same names and length of life as a verified one, for the key of the request. Raises
    CertificateError, also for one that is not due, or on the list of revoked ones in the directory of the authority."""
    try:
        asked = x509.load_pem_x509_csr(request)
        key = asked.public_key()
        if not (asked.is_signature_valid and isinstance(key, ec.EllipticCurvePublicKey)):
            raise CertificateError("the request is not signed with an elliptic-curve key of its own")
    except (ValueError, TypeError) as error:
        raise CertificateError(f"it is no request for a certificate in PEM form: {error}") from error
    if (due := renewal_time(certificate)[0]) > datetime.now(UTC):
        raise CertificateError(f"the certificate is not due before {due:%Y-%m-%d %H:%M} UTC")
    former = x509.load_pem_x509_certificate(certificate)
    signer, signing_key = read_authority(authority)
    if not _is_made_by(former, signer):
        # Else a certificate of an authority that is taken out of ca.pem would live on under this one.
        raise CertificateError(f"the certificate was made by another authority than {authority}: issue one by this one")
    life = former.not_valid_after_utc - former.not_valid_before_utc - _BEFORE
    left = signer.not_valid_after_utc - datetime.now(UTC)
    if left <= timedelta(0):
        raise CertificateError(f"the authority {authority / AUTHORITY} itself has ended")
    kept = [one.value for one in former.extensions if isinstance(one.value, _KEPT)]
    days = min(life, left) / timedelta(days=1)
    # A revocation by name finds the new certificate on record, or is found here.
    with _locked(authority):
        if former.serial_number in {one.serial_number for one in _revoked(authority, signer)[1]}:
            raise CertificateError("the certificate was revoked: ask an operator for another")
        return _signed(authority, _builder(former.subject, signer.subject, key, days), kept, signing_key)


def replace_files(directory: Path, former: bytes, key: bytes, certificate: bytes) -> None:
    """Put a renewed certificate and its key in the place of the former ones, once they have been tried. Raises
    CertificateError, also where `former` is no longer the certificate there: what an operator has put there stays."""
    try:
        with TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as tried:
            authority = (directory / AUTHORITY).read_bytes()
            files = {KEY: key, CERTIFICATE: certificate}
            _write(Path(tried), {**files, AUTHORITY: authority})
            check_directory(Path(tried))
        with _locked(directory):
            if (directory / CERTIFICATE).read_bytes() != former:
                raise CertificateError(f"{directory} has another certificate meanwhile: it stays")
            _write(directory, files, replaces=True)
    except CredentialError as error:
        raise CertificateError(f"the renewed certificate does not do: {error}") from error
    except OSError as error:
        raise CertificateError(f"cannot write {os_failure(error)}") from error


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Let other programs that change files of a directory by their content wait. Raises CertificateError."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise CertificateError(f"cannot lock {os_failure(error)}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def renew(authority: Path, directory: Path, days: float) -> tuple[CallerIdentity, datetime]:
    """Replace the certificate in a directory, and its key, by one of the same identity and hosts. Return the identity,
    and when it ends. Raises CertificateError."""
    try:
        content = (directory / CERTIFICATE).read_bytes()
        identity = identity_in_pem(content)
        former = x509.load_pem_x509_certificate(content)
        found = former.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except OSError as error:
        raise CertificateError(f"cannot read {directory / CERTIFICATE}: {os_reason(error)}") from error
    except (CertificateInvalid, ValueError) as error:
        raise CertificateError(f"{directory / CERTIFICATE} is no certificate of a cluster: {error}") from error
    signer, _ = read_authority(authority, f"name the directory of the one that made {directory / CERTIFICATE}")
    if not _is_made_by(former, signer):
        raise CertificateError(
            f"{directory / CERTIFICATE} was made by another authority than {authority}: name that one, or issue a "
            "certificate by this one into another directory"
        )
    hosts = [*found.get_values_for_type(x509.DNSName), *map(str, found.get_values_for_type(x509.IPAddress))]
    served = {served_name(identity.role, host) for host in hosts}
    return identity, issue(
        authority, identity, [host for host in hosts if host not in served], days, directory, replaces=True
    )


def _is_made_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


@dataclass(frozen=True, slots=True)
class IssuedCertificate:
    identity: CallerIdentity
    serial: int
    end: datetime
    is_revoked: bool


def issued_certificates(authority: Path) -> tuple[list[IssuedCertificate], list[str]]:
    """Return what an authority has issued, the latest end last, and unreadable records. Raises CertificateError."""
    signer, _ = read_authority(authority)
    revoked = {one.serial_number for one in _revoked(authority, signer)[1]}
    found, problems = [], []
    for path in sorted((authority / _ISSUED).glob("*.pem")):
        try:
            content = path.read_bytes()
            one, identity = x509.load_pem_x509_certificate(content), identity_in_pem(content)
        except OSError as error:
            problems.append(f"cannot read {path}: {os_reason(error)}")
        except (CertificateInvalid, ValueError) as error:
            problems.append(f"{path} is no certificate of a cluster: {error}")
        else:
            is_revoked = one.serial_number in revoked
            found.append(IssuedCertificate(identity, one.serial_number, one.not_valid_after_utc, is_revoked))
    return sorted(found, key=lambda one: (one.end, one.serial)), problems


def is_on_record(authority: Path, serial: int) -> bool:
    """Return whether the authority in a directory has recorded this serial number. Raises CertificateError."""
    read_authority(authority)
    return os.path.exists(authority / _ISSUED / f"{serial:x}.pem")


@dataclass(frozen=True, slots=True)
class Revocation:
    """`path`: the list. `serials`: what was to be revoked. `others`: certificates in use of the same parties.
    `problems`: why records of certificates cannot be read, which may be of the same parties."""

    path: Path
    serials: tuple[int, ...]
    others: tuple[IssuedCertificate, ...]
    problems: tuple[str, ...]


def revoke(authority: Path, certificates: Iterable[int | CallerIdentity]) -> Revocation:
    """Add certificates to the list of revoked ones in the directory of the authority: of a serial number, or all on
    record of an identity. Raises CertificateError, also for an identity of which none is on record.

    A certificate that has ended stays on it: clocks of machines differ, and the list is short.
    """
    # Two at once would each leave out what the other one adds, and a renewal would be left out of its identity's.
    with _locked(authority):
        issued, problems = issued_certificates(authority)
        serials: list[int] = []
        for named in certificates:
            found = [one.serial for one in issued if one.identity == named]
            if isinstance(named, CallerIdentity) and not found:
                why = f"no certificate of {named} is on record: `ganger certs list {authority}` shows those that are"
                raise CertificateError("; ".join([why, *problems]))
            serials += found if isinstance(named, CallerIdentity) else [named]
        path = _add_revoked(authority, serials)
    parties, now = {one.identity for one in issued if one.serial in serials}, datetime.now(UTC)
    others = [
        one for one in issued
        if one.identity in parties and one.serial not in serials and not one.is_revoked and one.end > now
    ]  # fmt: skip
    return Revocation(path, tuple(dict.fromkeys(serials)), tuple(others), tuple(problems))


def _add_revoked(authority: Path, serials: Iterable[int]) -> Path:
    signer, key = read_authority(authority)
    now = datetime.now(UTC)
    number, former = _revoked(authority, signer)
    known = {one.serial_number for one in former}
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(signer.subject)
        .last_update(now - _BEFORE)
        # The list in use is the one with the highest number, however old it is.
        .next_update(signer.not_valid_after_utc)
        # By the clock: a list made from a backup of this directory comes after those made since.
        .add_extension(x509.CRLNumber(max(number + 1, int(now.timestamp() * 1_000))), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
    )
    for serial in dict.fromkeys(serials):
        if serial not in known:
            made = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
            former.append(made)
    for one in former:
        builder = builder.add_revoked_certificate(one)
    _write(authority, {REVOKED: builder.sign(key, hashes.SHA256()).public_bytes(_PEM)}, replaces=True)
    return authority / REVOKED


def publish(revoked: Path, directory: Path) -> None:
    """Add the list of revoked certificates to those in a directory with a certificate. Raises CertificateError, also
    where a list with a higher number there lacks a certificate of this one.

    Of each authority the list with the highest number stays, and none of an authority that ca.pem there does not have.
    """
    if not (directory / CERTIFICATE).is_file():
        raise CertificateError(f"there is no certificate in {directory}: name the directory of the master's")
    there = directory / REVOKED
    with _locked(directory):
        try:
            trusted = x509.load_pem_x509_certificates((directory / AUTHORITY).read_bytes())
            former = parse_lists(there.read_bytes(), trusted) if there.exists() else {}
        except (OSError, ValueError) as error:
            raise CertificateError(f"cannot read {os_failure(error)}") from error
        except CredentialError as error:
            raise CertificateError(f"cannot use {there}: {error}: remove it, and write each list anew") from error
        try:
            added = parse_lists(revoked.read_bytes(), trusted)
        except OSError as error:
            raise CertificateError(f"cannot read {os_failure(error)}") from error
        except CredentialError as error:
            raise CertificateError(f"cannot use {revoked}: {error}") from error
        if not added:
            raise CertificateError(
                f"no authority in {directory / AUTHORITY} has signed {revoked}: the master ignores it"
            )
        lists = newest_lists(former, added)
        if lacking := [key for key, one in added.items() if not one.serials <= lists[key].serials]:
            raise CertificateError(
                f"{there} has a list with a higher number, {lists[lacking[0]].number}, that lacks certificates of"
                f" {revoked}: was the authority restored from a backup, or this machine's clock set back?"
            )
        _write(directory, {REVOKED: b"".join(one.pem for one in lists.values())}, replaces=True)


def serial_in(authority: Path, directory: Path) -> int:
    """Return the serial number of a directory's certificate, made by this authority. Raises CertificateError."""
    try:
        found = x509.load_pem_x509_certificate((directory / CERTIFICATE).read_bytes())
    except OSError as error:
        raise CertificateError(f"cannot read {directory / CERTIFICATE}: {os_reason(error)}") from error
    except ValueError as error:
        raise CertificateError(f"{directory / CERTIFICATE} is no certificate: {error}") from error
    if not _is_made_by(found, read_authority(authority)[0]):
        raise CertificateError(
            f"{directory / CERTIFICATE} was made by another authority than {authority}: name that one"
        )
    return found.serial_number


def _revoked(directory: Path, signer: x509.Certificate) -> tuple[int, list[x509.RevokedCertificate]]:
    """Return the number of the list in the directory of the authority, and what is on it."""
    try:
        content = (directory / REVOKED).read_bytes()
        found = parse_list(content, [signer])
    except FileNotFoundError:
        return 0, []
    except OSError as error:
        raise CertificateError(f"cannot read {os_failure(error)}") from error
    except CredentialError as error:
        raise CertificateError(f"cannot use {directory / REVOKED}: {error}") from error
    if found is None:
        raise CertificateError(f"cannot use {directory / REVOKED}: it is of another authority than {directory}")
    return found[1].number, list(x509.load_pem_x509_crl(content))


def read_authority(
    directory: Path, advice: str = "name the directory of the cluster's"
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Return an authority and its key. `advice`: what to do where there is none. Raises CertificateError."""
    try:
        certificate = x509.load_pem_x509_certificate((directory / AUTHORITY).read_bytes())
        key = serialization.load_pem_private_key((directory / AUTHORITY_KEY).read_bytes(), None)
    except FileNotFoundError as error:
        missing = f"there is no authority in {directory} ({error.filename} is missing)"
        raise CertificateError(f"{missing}: {advice}") from error
    except OSError as error:
        raise CertificateError(f"cannot read {os_failure(error)}") from error
    except (ValueError, TypeError) as error:
        raise CertificateError(f"{directory} holds no authority that can be used: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise CertificateError(f"{directory / AUTHORITY_KEY} is not the key of {directory / AUTHORITY}")
    return certificate, key


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*allowed: str) -> x509.KeyUsage:
    names = (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
        *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    )
    return x509.KeyUsage(**{name: name in allowed for name in names})


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if len(host) > 240 or _HOST.fullmatch(host) is None:
        raise CertificateError(f"--host {host!r} is neither a host name nor an IP address; leave the port out")
    return x509.DNSName(host)


def _pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _write(directory: Path, files: dict[str, bytes], *, replaces: bool = False) -> None:
    """Write all files or none; files that are there are replaced only if `replaces`, each at once."""
    written: list[tuple[Path, Path]] = []
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        taken = [name for name in files if (directory / name).exists()]
        if taken and not replaces:
            raise CertificateError(f"{directory / taken[0]} is there already: choose another directory, or remove it")
        for name, content in files.items():
            mode = 0o600 if name in (KEY, AUTHORITY_KEY) else 0o644
            temporary = directory / f".{name}.{os.getpid()}"
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
            written.append((temporary, directory / name))
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                # Else a machine that goes down now may come up with an empty file in the place of this one.
                file.flush()
                os.fsync(file.fileno())
        for temporary, path in written:
            temporary.rename(path)
    except OSError as error:
        raise CertificateError(f"cannot write into {directory}: {os_reason(error)}") from error
    finally:
        for temporary, _ in written:
            temporary.unlink(missing_ok=True)
