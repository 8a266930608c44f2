"""Revoked certificates: the list that an authority signs (RFC 5280), and the check of each call and message against it.

gRPC looks at a certificate once, at the handshake, and knows no list. So servers look at the caller's certificate at
each call and at each message of a stream: one that was revoked, or has ended meanwhile, is refused there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ganger.text import os_reason
from ganger.wire.endpoints import CredentialError
from ganger.wire.errors import CertificateInvalid, CertificateRevoked
from ganger.wire.methods import CallerIdentity
from ganger.wire.tls import AUTHORITY, identity_in_pem

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

log = logging.getLogger(__name__)

# Beside ca.pem.
REVOKED: Final = "revoked.pem"

# Some 25,000 certificates: a list travels to daemons in one message.
_MOST_BYTES: Final = 1 << 20
_LOOK_S: Final = 1.0


# What is unique about a certificate: the name of its authority in DER form, and the serial number that it has there.
IssuerSerial = tuple[bytes, int]

_LAST_LINE: Final = b"-----END X509 CRL-----"


@dataclass(frozen=True, slots=True)
class RevocationList:
    """`number`: a later list of an authority has a higher one. `pem`: as it was signed."""

    number: int
    serials: frozenset[IssuerSerial]
    pem: bytes


@dataclass(frozen=True, slots=True)
class RevokedCertificates:
    """The lists of all authorities in one. `digest`: of `pem`, which has them one after the other; empty: no list."""

    serials: frozenset[IssuerSerial] = frozenset()
    pem: bytes = b""

    @property
    def digest(self) -> bytes:
        return sha256(self.pem).digest() if self.pem else b""


@dataclass(frozen=True, slots=True)
class ShownCertificate:
    """What a verified certificate says. `end`: seconds since 1970, when it ends."""

    identity: CallerIdentity
    serial: IssuerSerial
    end: float


# By the public key of the authority that has signed it.
ListOfAuthority = dict[bytes, RevocationList]


def parse_lists(pem: bytes, authorities: Sequence[Certificate]) -> ListOfAuthority:
    """Return the lists in a file, of each authority that with the highest number: with two authorities in use, each has
    a list of its own. One that none of the authorities has signed is left out. Raises CredentialError."""
    *lists, rest = pem.split(_LAST_LINE)
    if not lists or b"-----BEGIN" in rest:
        raise CredentialError("it is no list of revoked certificates in PEM form, or was not written to its end")
    found: ListOfAuthority = {}
    for each in lists:
        if (one := parse_list(each.lstrip() + _LAST_LINE + b"\n", authorities)) is None:
            log.warning("a list in %s is of no authority in %s: it is left out", REVOKED, AUTHORITY)
        else:
            found = newest_lists(found, {one[0]: one[1]})
    return found


def newest_lists(former: ListOfAuthority, later: ListOfAuthority) -> ListOfAuthority:
    """Return of each authority the list with the highest number, of two with the same one the later."""
    older = {key for key, one in later.items() if key in former and one.number < former[key].number}
    return {**former, **{key: one for key, one in later.items() if key not in older}}


def parse_list(pem: bytes, authorities: Iterable[Certificate]) -> tuple[bytes, RevocationList] | None:
    """Return the key of the authority that has signed a list in PEM form, and the list; None where none of the
    authorities has. Raises CredentialError."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    try:
        found = x509.load_pem_x509_crl(pem)
        signer = next((authority for authority in authorities if _is_signed_by(found, authority)), None)
        issuer = found.issuer.public_bytes()
        serials = frozenset((issuer, one.serial_number) for one in found)
        try:
            number = found.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
        except x509.ExtensionNotFound:
            number = int(found.last_update_utc.timestamp())
    except (ValueError, x509.InvalidVersion, UnsupportedAlgorithm) as error:
        raise CredentialError(f"it is no list of revoked certificates in PEM form ({error})") from error
    if signer is None:
        return None
    key = signer.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return key, RevocationList(number, serials, pem)


def _is_signed_by(found: object, authority: Certificate) -> bool:
    from cryptography import x509

    assert isinstance(found, x509.CertificateRevocationList)
    key = authority.public_key()
    try:
        return found.issuer == authority.subject and found.is_signature_valid(key)  # type: ignore[arg-type]
    except TypeError:
        # A key of a kind that signs no certificates.
        return False


class Revocations:
    """The lists in a file, read anew within a second when it, or ca.pem, changes. A file that cannot be used, and one
    that is older than what is known, is logged, and what is known stays in use. So does the list of an authority of
    which the file has none.

    file: the list; there may be none. authority: ca.pem. Raises CredentialError for a list that cannot be used.
    """

    def __init__(self, file: Path, authority: Path) -> None:
        self._file, self._authority = file, authority
        self._lock = threading.Lock()
        self._version = self._file_version()
        self._lists: ListOfAuthority = {}
        self._known = RevokedCertificates()
        # Of what was sent last, since the files changed.
        self._sent_digest = b""
        self._take(self._read())
        self._looked = time.monotonic()

    @classmethod
    def beside(cls, directory: Path) -> Revocations:
        """Return those of a directory of certificates: revoked.pem beside ca.pem. Raises CredentialError."""
        return cls(directory / REVOKED, directory / AUTHORITY)

    def current(self) -> RevokedCertificates:
        """Return what is in use. Any thread may call it."""
        if time.monotonic() - self._looked >= _LOOK_S:
            with self._lock:
                self._looked = time.monotonic()
                if (version := self._file_version()) != self._version:
                    self._version, self._sent_digest = version, b""
                    try:
                        self._take(self._read())
                    except CredentialError as error:
                        log.warning("revoked certificates not read", extra={"error": str(error)})
        return self._known

    def stated_digest(self) -> bytes:
        """Return the digest that keeps the sender of lists from sending the same ones again: of those sent last, for
        some of them may be left out here, else of those in use."""
        known = self.current()
        return self._sent_digest or known.digest

    def accept(self, pem: bytes) -> None:
        """Take newer lists and keep them in the file. Raises CredentialError; lists that cannot be kept are in use."""
        with self._lock:
            self._sent_digest = sha256(pem).digest()
            newest = newest_lists(self._lists, parse_lists(pem, self._authorities()))
            if newest == self._lists:
                return
            self._take(newest)
            temporary = self._file.with_name(f".{self._file.name}.{os.getpid()}")
            try:
                temporary.write_bytes(self._known.pem)
                temporary.replace(self._file)
            except OSError as error:
                raise CredentialError(f"cannot write {self._file}: {os_reason(error)}") from error
            finally:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
            self._version = self._file_version()

    def check(self, shown: ShownCertificate) -> None:
        """Check the certificate of a caller. Raises CertificateRevoked, and CertificateInvalid for one that has ended
        since the connection was made."""
        if shown.serial in self.current().serials:
            raise CertificateRevoked(f"the certificate of {shown.identity} was revoked: ask an operator for another")
        if shown.end < time.time():
            moment = datetime.fromtimestamp(shown.end, UTC)
            raise CertificateInvalid(
                f"the certificate of {shown.identity} expired on {moment:%Y-%m-%d %H:%M UTC}: it needs a new one"
            )

    def _take(self, found: ListOfAuthority) -> None:
        former, self._lists = self._lists, newest_lists(self._lists, found)
        # In one order, so that master and daemons with the same lists have the same digest.
        lists = [self._lists[key] for key in sorted(self._lists)]
        serials = frozenset(serial for one in lists for serial in one.serials)
        if serials != self._known.serials:
            log.info("revoked certificates", extra={"certificates": len(serials)})
        self._known = RevokedCertificates(serials, b"".join(one.pem for one in lists))
        for key, one in found.items():
            if key in former and one.number < former[key].number:
                raise CredentialError(f"{self._file} is older than the list in use: it has number {one.number}")

    def _read(self) -> ListOfAuthority:
        try:
            with self._file.open("rb") as file:
                pem = file.read(_MOST_BYTES + 1)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise CredentialError(f"cannot read {self._file}: {os_reason(error)}") from error
        if len(pem) > _MOST_BYTES:
            raise CredentialError(
                f"cannot use {self._file}: it is larger than {_MOST_BYTES} bytes: take a new authority"
            )
        try:
            return parse_lists(pem, self._authorities())
        except CredentialError as error:
            raise CredentialError(
                f"cannot use {self._file}: {error}: copy the one in the directory of the authority there again"
            ) from error

    def _authorities(self) -> list[Certificate]:
        from cryptography import x509

        try:
            return x509.load_pem_x509_certificates(self._authority.read_bytes())
        except (OSError, ValueError) as error:
            raise CredentialError(f"cannot read {self._authority}: {os_reason(error)}") from error

    def _file_version(self) -> tuple[int, ...]:
        """Return what changes with the file, and with ca.pem: it decides which lists count."""
        found: list[int] = []
        for path in (self._file, self._authority):
            with contextlib.suppress(OSError):
                status = path.stat()
                found += (status.st_ino, status.st_size, status.st_mtime_ns)
        return tuple(found)


@lru_cache(4_096)
def read_certificate(certificate: bytes) -> ShownCertificate:
    """Return what a verified certificate, in PEM form, says. Raises CertificateInvalid."""
    from cryptography import x509

    identity = identity_in_pem(certificate)
    found = x509.load_pem_x509_certificate(certificate)
    try:
        issued = found.issuer.public_bytes(), found.serial_number
        ends_s = found.not_valid_after_utc.timestamp()
    except ValueError as error:
        raise CertificateInvalid(f"the certificate cannot be read: {error}") from error
    return ShownCertificate(identity, issued, ends_s)
