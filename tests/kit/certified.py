"""An authority of a test's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from ganger.wire.certificate_authority import AUTHORITY_KEY, issue, make_authority, revoke, serial_in
from ganger.wire.methods import CallerIdentity, CallerRole
from ganger.wire.tls import AUTHORITY, CERTIFICATE

HOSTS = ("127.0.0.1", "localhost")


class Authority:
    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._directory = directory
        self._own = directory / name
        self.name = name
        make_authority(self._own)

    @property
    def directory(self) -> Path:
        """That of the authority itself, with its key."""
        return self._own

    def issue(
        self, role: CallerRole | str, name: str, hosts: Sequence[str] | None = None, days: float = 1.0, to: str = ""
    ) -> Path:
        """The directory with the new certificate; the one there is if it was issued before."""
        out = self._directory / (to or f"{self.name}-{role}-{name}")
        if not out.exists():
            identity = CallerIdentity(CallerRole(role), name)
            serves = identity.role in (CallerRole.MASTER, CallerRole.DAEMON)
            issue(self._own, identity, (HOSTS if hosts is None else hosts) if serves else (), days, out)
        return out

    def revoke(self, directory: Path) -> bytes:
        """Revoke the certificate in a directory; return the list, with those that were revoked before."""
        return revoke(self._own, [serial_in(self._own, directory)]).path.read_bytes()

    def leave_out(self, directory: Path, name: str) -> None:
        """Replace a certificate by one without this DNS name."""
        before = x509.load_pem_x509_certificate((directory / CERTIFICATE).read_bytes())
        extensions: list[tuple[x509.ExtensionType, bool]] = []
        for extension in before.extensions:
            value = extension.value
            if isinstance(value, x509.SubjectAlternativeName):
                value = x509.SubjectAlternativeName([one for one in value if one.value != name])
            extensions.append((value, extension.critical))
        self._replace(directory, before, extensions)

    def issue_with(self, uris: Sequence[str], identity: CallerIdentity) -> Path:
        """That of the identity, but with these URIs in the place of its own."""
        out = self.issue(identity.role, identity.name)
        names = [x509.UniformResourceIdentifier(uri) for uri in uris]
        before = x509.load_pem_x509_certificate((out / CERTIFICATE).read_bytes())
        self._replace(out, before, [(x509.SubjectAlternativeName(names), False)] if uris else [])
        return out

    def _replace(
        self, out: Path, before: x509.Certificate, extensions: Sequence[tuple[x509.ExtensionType, bool]]
    ) -> None:
        authority = x509.load_pem_x509_certificate((self._own / AUTHORITY).read_bytes())
        key = serialization.load_pem_private_key((self._own / AUTHORITY_KEY).read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        builder = (
            x509.CertificateBuilder()
            .subject_name(before.subject)
            .issuer_name(authority.subject)
            .public_key(before.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(before.not_valid_before_utc)
            .not_valid_after(before.not_valid_after_utc)
        )
        for value, is_critical in extensions:
            builder = builder.add_extension(value, is_critical)
        (out / CERTIFICATE).write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
