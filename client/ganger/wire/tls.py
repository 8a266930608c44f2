"""Certificates in use: a directory's files as what gRPC and sockets want, and what is wrong with them, in a sentence.

A directory holds cert.pem (the certificate, intermediate ones after it), key.pem (its key, not encrypted, its owner's
alone) and ca.pem (the authorities that all parties trust). Every link is mutual: both ends show a certificate of one of
these authorities, the server's names the host that was dialled, and what the caller may do is decided by
`ganger.wire.methods`.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import stat
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import grpc

from ganger.text import os_reason
from ganger.wire.endpoints import CERTIFICATE as CERTIFICATE
from ganger.wire.endpoints import TOKEN_FILE, CredentialError, Endpoint, host_of
from ganger.wire.errors import CertificateInvalid
from ganger.wire.methods import CallerIdentity, CallerRole, identity_of, is_served_name, served_name

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

log = logging.getLogger(__name__)

_T = TypeVar("_T")

KEY: Final = "key.pem"
AUTHORITY: Final = "ca.pem"

_MOST_BYTES: Final = 1 << 20
_PROBE_S: Final = 2.0
_SOON: Final = timedelta(days=30)
# Parties that others dial: their certificates must do for servers, too.
_SERVERS: Final = frozenset({CallerRole.MASTER, CallerRole.DAEMON})


@dataclass(frozen=True, slots=True, repr=False)
class Files:
    certificate: bytes
    key: bytes
    authority: bytes


def read_files(directory: Path) -> Files:
    """Read key and certificates. Raises CredentialError for an unusable file, or a key that others can read."""
    return Files(*(_read(directory / name) for name in (CERTIFICATE, KEY, AUTHORITY)))


def channel_credentials(directory: Path, *, has_token: bool = False) -> grpc.ChannelCredentials:
    """Return the credentials of a client channel; with an access token it shows no certificate. Raises
    CredentialError."""
    if has_token:
        return grpc.ssl_channel_credentials(_read(directory / AUTHORITY))
    files = read_files(directory)
    return grpc.ssl_channel_credentials(files.authority, files.key, files.certificate)


def server_credentials(directory: Path, *, is_mutual: bool = True) -> grpc.ServerCredentials:
    """Return the credentials of a server. New connections get renewed files. `is_mutual`: it requires a certificate of
    its clients, otherwise it asks for none: gRPC knows no third way on one port. Raises CredentialError."""
    renewed = Renewed(directory, _server_configuration)
    used = [first := renewed.current()]

    def fetch() -> Any:
        found = renewed.current()
        if found is used[0]:
            return None
        used[0] = found
        return found

    return grpc.dynamic_ssl_server_credentials(first, fetch, require_client_authentication=is_mutual)


def _server_configuration(directory: Path) -> Any:
    files = read_files(directory)
    return grpc.ssl_server_certificate_configuration([(files.key, files.certificate)], files.authority)


def version_of(directory: Path) -> tuple[int, ...]:
    """Return a value that changes with the files of a directory, however they are replaced."""
    found: list[int] = []
    for name in (CERTIFICATE, KEY, AUTHORITY):
        try:
            status = (directory / name).stat()
        except OSError:
            found.append(0)
        else:
            found += (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return tuple(found)


class Renewed(Generic[_T]):
    """What is made of the files of a directory, and made anew when they change. Files that cannot be used are logged,
    and the former ones stay in use: a directory is seldom renewed at once. So do they beside those of another party.

    make: raises CredentialError; so does the first call.
    """

    def __init__(self, directory: Path, make: Callable[[Path], _T]) -> None:
        self._directory, self._make = directory, make
        self._lock = threading.Lock()
        self._version = version_of(directory)
        self._made = make(directory)
        self._identity = identity_in_pem(read_files(directory).certificate)

    def current(self) -> _T:
        """Look at the files. Any thread may call it."""
        version = version_of(self._directory)
        with self._lock:
            if version != self._version:
                self._version = version
                try:
                    found = check_directory(self._directory)
                    if found != self._identity:
                        raise CredentialError(f"{self._directory} is of {found} now, and this is {self._identity}")
                    self._made = self._make(self._directory)
                except CredentialError as error:
                    log.warning("certificate not renewed", extra={"error": str(error)})
                else:
                    tell_end(self._directory)
            return self._made


def client_context(directory: Path) -> ssl.SSLContext:
    """Return a TLS context for sockets that connect. Raises CredentialError."""
    return _loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), directory)


def server_context(directory: Path) -> ssl.SSLContext:
    """Return a TLS context for sockets that accept; it requires a client certificate. Raises CredentialError."""
    context = _loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), directory)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def identity_in_pem(certificate: bytes) -> CallerIdentity:
    """Return the identity in a verified certificate. Raises CertificateInvalid."""
    from cryptography import x509

    try:
        names = x509.load_pem_x509_certificate(certificate).extensions
        found = names.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return identity_of([])
    except (ValueError, x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
        raise CertificateInvalid(f"the certificate cannot be read: {error}") from error
    return identity_of(found.get_values_for_type(x509.UniformResourceIdentifier))


def check_directory(directory: Path, roles: Iterable[CallerRole] = CallerRole) -> CallerIdentity:
    """Return the identity of the certificate, after a handshake with itself: key and certificate match, are of the
    authority, valid now, and of one of `roles`. Raises CredentialError, which names the fault."""
    serving, calling = server_context(directory), client_context(directory)
    calling.check_hostname = False
    calling.verify_mode = ssl.CERT_NONE
    try:
        shown = _shake_hands(serving, calling)[0].getpeercert()
        identity = _identity_in(shown)
        if identity.role in _SERVERS:
            calling.verify_mode = ssl.CERT_REQUIRED
            _shake_hands(serving, calling)
            if missing := _served_names_missing(shown, identity.role):
                raise CredentialError(_without(f"{directory / CERTIFICATE}", missing, identity.role))
    except ssl.SSLCertVerificationError as error:
        raise CredentialError(_own_trouble(directory, error)) from error
    except ssl.SSLError as error:
        raise CredentialError(f"cannot use the certificate {directory / CERTIFICATE}: {_reason(error)}") from error
    except CertificateInvalid as error:
        raise CredentialError(f"cannot use {directory / CERTIFICATE}: {error.message}") from error
    wanted = tuple(roles)
    if identity.role not in wanted:
        raise CredentialError(
            f"{directory / CERTIFICATE} is the certificate of {identity}, here one of role {' or '.join(wanted)} is"
            f" needed: `ganger certs issue --role {wanted[0]}` makes one"
        )
    return identity


def tell_end(directory: Path) -> None:
    """Logs when a certificate that does ends: as a warning where that is soon."""
    end, is_soon = ends_soon(directory)
    level = logging.WARNING if is_soon else logging.INFO
    log.log(level, "certificate", extra={"file": str(directory / CERTIFICATE), "until": end})


def ends_soon(directory: Path) -> tuple[str, bool]:
    """Return the day on which a certificate ends, and whether that is soon enough to need a new one. Raises
    CredentialError."""
    if not (found := _certificates(directory / CERTIFICATE)):
        _read(directory / CERTIFICATE)
        raise CredentialError(f"{directory / CERTIFICATE} holds no certificate in PEM form")
    end = found[0].not_valid_after_utc
    return _day(end), end - datetime.now(UTC) < _SOON


def trouble_with(endpoint: Endpoint, role: CallerRole = CallerRole.MASTER) -> str:
    """Return why a connection to a server of this role fails: what is wrong with the certificates of either end.
    Empty where nothing is wrong, or no server listens. Dials the server, for two seconds at most."""
    directory = Path(endpoint.tls)
    try:
        if endpoint.token:
            context = _trusting(directory)
        else:
            check_directory(directory)
            context = client_context(directory)
    except CredentialError as error:
        return str(error)
    context.set_alpn_protocols(["h2"])
    host, port = host_of(endpoint.address), endpoint.address.rpartition(":")[2]
    try:
        with (
            socket.create_connection((host, int(port)), _PROBE_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as connection,
        ):
            # A server checks our certificate after the handshake. If it accepts it, the server sends first; else it
            # sends an alert or closes the connection.
            if not _first_byte(connection):
                return _not_taken(directory, endpoint.token)
            return _other_role(connection.getpeercert(), role, host)
    except ssl.SSLCertVerificationError as error:
        return _their_trouble(host, directory, error)
    except ssl.SSLError as error:
        return _refusal(directory, endpoint.token, error)
    except OSError:
        pass
    return ""


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(_MOST_BYTES)
    except FileNotFoundError as error:
        raise CredentialError(
            f"there is no {path}: a directory for TLS holds {CERTIFICATE}, {KEY} and {AUTHORITY}, as `ganger certs"
            f" issue` writes them, or of a person {AUTHORITY} and {TOKEN_FILE} (`ganger tokens`)"
        ) from error
    except OSError as error:
        raise CredentialError(f"cannot read {path}: {os_reason(error)}") from error
    if path.name == KEY and mode & 0o077:
        raise CredentialError(f"the key {path} can be read by others (mode {mode:04o}): chmod 600 it")
    if not content.strip():
        raise CredentialError(f"{path} is empty: copy it again, or issue another certificate")
    return content


def _trusting(directory: Path) -> ssl.SSLContext:
    """Return a TLS context for sockets that connect without a certificate. Raises CredentialError."""
    return _with_authority(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), directory, _read(directory / AUTHORITY))


def _with_authority(context: ssl.SSLContext, directory: Path, authority: bytes) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(cadata=authority.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError) as error:
        raise CredentialError(f"{directory / AUTHORITY} holds no certificate in PEM form") from error
    return context


def _loaded(context: ssl.SSLContext, directory: Path) -> ssl.SSLContext:
    files = read_files(directory)
    _with_authority(context, directory, files.authority)
    try:
        # Without a word for it OpenSSL would ask the terminal.
        context.load_cert_chain(directory / CERTIFICATE, directory / KEY, password=lambda: b"")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            why = f"{directory / KEY} is not the key of {directory / CERTIFICATE}: copy both again"
        elif b"ENCRYPTED" in files.key:
            why = f"the key {directory / KEY} is encrypted: store it without a password, readable by its owner alone"
        elif b"PRIVATE KEY-----" not in files.key:
            why = f"{directory / KEY} holds no key in PEM form"
        else:
            why = f"cannot read {directory / CERTIFICATE} and {directory / KEY} as certificate and key in PEM form"
        raise CredentialError(why) from error
    except OSError as error:
        raise CredentialError(f"cannot read the certificate in {directory}: {os_reason(error)}") from error
    return context


def _shake_hands(serving: ssl.SSLContext, calling: ssl.SSLContext) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """A handshake in memory. Raises ssl.SSLError where one end will not have the other."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    server, client = serving.wrap_bio(up, down, server_side=True), calling.wrap_bio(down, up)
    undone = [client, server]
    while undone:
        for end in tuple(undone):
            try:
                end.do_handshake()
                undone.remove(end)
            except ssl.SSLWantReadError:
                continue
    return server, client


def _identity_in(shown: Mapping[str, Any] | None) -> CallerIdentity:
    names = (shown or {}).get("subjectAltName", ())
    return identity_of([str(value) for kind, value in names if kind == "URI"])


def _served_names_missing(shown: Mapping[str, Any] | None, role: CallerRole) -> list[str]:
    """Return the hosts that a certificate names without the name that states this role (`served_name`)."""
    names = [(kind, str(value)) for kind, value in (shown or {}).get("subjectAltName", ())]
    served = {value.lower() for kind, value in names if kind == "DNS"}
    hosts = [value for kind, value in names if kind == "IP Address" or (kind == "DNS" and not is_served_name(value))]
    return [host for host in hosts if served_name(role, host) not in served]


def _without(certificate: str, hosts: list[str], role: CallerRole) -> str:
    return (
        f"{certificate} does not name {hosts[0]} as the host of a {role}: issue it again with `ganger certs issue`,"
        f" or with the DNS name {served_name(role, hosts[0])} by an authority of your own"
    )


def _other_role(shown: Mapping[str, Any] | None, role: CallerRole, host: str) -> str:
    try:
        identity = _identity_in(shown)
    except CertificateInvalid as error:
        return error.message
    if identity.role is not role:
        return f"what answers there is {identity}, and no {role}"
    missing = [served for served in _served_names_missing(shown, role) if served.lower() == host.lower()]
    return _without("its certificate", missing, role) if missing else ""


def _own_trouble(directory: Path, error: ssl.SSLCertVerificationError) -> str:
    path, now = directory / CERTIFICATE, datetime.now(UTC)
    for name in (CERTIFICATE, AUTHORITY):
        for found in _certificates(directory / name):
            if now > found.not_valid_after_utc:
                return f"{directory / name} expired on {_day(found.not_valid_after_utc)}: issue a new certificate"
            if now < found.not_valid_before_utc:
                return f"{directory / name} is valid from {_day(found.not_valid_before_utc)} on: is the clock right?"
    if "purpose" in error.verify_message:
        return f"{path} may not be used for this (extended key usage): issue it for servers and clients"
    return f"{path} was not made by the authority in {directory / AUTHORITY} ({error.verify_message})"


def _their_trouble(host: str, directory: Path, error: ssl.SSLCertVerificationError) -> str:
    said = error.verify_message.lower()
    if "mismatch" in said:
        return f"its certificate does not name the host {host}: issue it with --host {host}, or dial a name it has"
    if "expired" in said:
        return "its certificate has expired: it needs a new one, and a restart"
    if "not yet valid" in said:
        return "its certificate is not valid yet: are the clocks right?"
    if "purpose" in said:
        return "its certificate is not that of a server"
    return f"its certificate was not made by the authority in {directory / AUTHORITY}: are both of one cluster?"


def _refusal(directory: Path, token: str, error: ssl.SSLError) -> str:
    """Return the meaning of the server's alert. Our own files have no fault that can be seen here."""
    reason, own = (error.reason or "").upper(), directory / CERTIFICATE
    if "WRONG_VERSION" in reason or "PACKET_LENGTH" in reason or "HTTP_REQUEST" in reason:
        return "the server there speaks no TLS: was it started with --tls?"
    if "EXPIRED" in reason:
        return f"the server takes {own} for expired: is its clock right?"
    return _not_taken(directory, token) if "ALERT" in reason else _reason(error)


def _not_taken(directory: Path, token: str) -> str:
    if token:
        return "the server asks for a certificate there: it takes tokens at the address of its --listen-tokens"
    own = directory / CERTIFICATE
    return f"the server does not accept {own}: are both of the same cluster, and are their clocks right?"


def _first_byte(connection: ssl.SSLSocket) -> bytes:
    try:
        return connection.recv(1)
    except ConnectionError:
        return b""


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")


def _certificates(path: Path) -> list[Certificate]:
    # Loaded here, for it takes a tenth of a second: servers at their start, others where something is wrong.
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError):
        return []


def _day(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M UTC")
