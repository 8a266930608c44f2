"""Endpoints of servers: addresses, start-up tokens, and the file by which clients find them.

An address is "unix:PATH" or "HOST:PORT". A server that starts writes STATE_DIR/endpoint.json {"address", "token_file"};
clients on the same machine read it. Without certificates (`ganger.wire.tls`) a server listens on this machine only, and
clients dial no other.

Of several masters of one cluster one leads. A list of them is a text of addresses, or of state directories, separated
by commas. All connections of a process to the same list share what was found: a master that did not answer is left
alone for a while, and a stand-by names the leader.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from ganger.text import os_reason

ENDPOINT_FILE = "endpoint.json"
TOKEN_FILE = "token"
CERTIFICATE = "cert.pem"
MASTER_VARIABLE = "GANGER_MASTER"
TOKEN_VARIABLE = "GANGER_TOKEN"
TLS_VARIABLE = "GANGER_TLS"
# A master that has not answered is called again only if no other one is left, for so long.
_LEFT_ALONE_S = 2.0
_ANOTHER = "ask an operator for another"
# Hosts that stand for all addresses of a machine.
_ALL_HOSTS = ("0.0.0.0", "::")
# sockaddr_un holds 108 bytes, the last one a NUL.
_MAX_SOCKET_PATH_BYTES = 107


class EndpointError(Exception):
    """An address or token that cannot be used; the message has the remedy. `found` is False if there is none."""

    def __init__(self, message: str, *, found: bool = True) -> None:
        super().__init__(message)
        self.found = found


class CredentialError(EndpointError):
    """A token or a certificate that cannot be used, which a server would reject; or files that may not be read."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`tls`: a directory for TLS. With a `token` it is the caller's access token, and the server is at an address that
    takes those; without, the caller's certificate is in the directory. Without `tls`, the server's token."""

    address: str
    token: str = ""
    tls: str = ""
    # The list that it is of; None where one master was named.
    masters: MasterList | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        tls = f"tls={self.tls!r}, " if self.tls else ""
        return f"Endpoint({self.address!r}, {tls}token={'set' if self.token else 'none'})"


def default_state_directory() -> Path:
    """Return the default state directory of `ganger up`."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "ganger" / "cluster"


def find_endpoint(master: str | None = None, tls: str | None = None) -> Endpoint:
    """The master to talk to: `master` (an address or a directory that holds endpoint.json), else $GANGER_MASTER, else
    the default state directory. HOST:PORT is dialled with the certificate in the directory `tls`, else $GANGER_TLS, if
    there is one; if that holds none, with the access token in $GANGER_TOKEN or the directory's file `token`. Otherwise
    the token of a bare address is $GANGER_TOKEN, or that of an endpoint.json beside the socket
    or in the default state directory that names the same address. Of several, separated by commas, it is the one that
    leads as far as this process has found out (`MasterList`). Raises EndpointError."""
    wanted = master or os.environ.get(MASTER_VARIABLE) or ""
    # Unlike a Path these raise nothing for a text that can be no path, such as a long list.
    if "," in wanted and not os.path.exists(os.path.expanduser(wanted)):
        return master_list(_parts_of(wanted), tls).endpoint()
    if not wanted:
        directory = default_state_directory()
        if not (directory / ENDPOINT_FILE).exists():
            raise EndpointError(
                "no cluster is known here: start one with `ganger up`, or name its master with --master or"
                f" ${MASTER_VARIABLE}",
                found=False,
            )
        return read_endpoint(directory)
    _check_no_url(wanted)
    if not is_address(wanted):
        path = Path(os.path.expanduser(wanted))
        return read_endpoint(path.parent if path.name == ENDPOINT_FILE else path)
    check_address(wanted)
    tls = tls if tls is not None else os.environ.get(TLS_VARIABLE, "")
    if tls and not wanted.startswith("unix:"):
        directory = Path(tls).expanduser()
        return Endpoint(wanted, _access_token(directory), str(directory))
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        beside = [Path(wanted.removeprefix("unix:")).parent] if wanted.startswith("unix:") else []
        for directory in [*beside, default_state_directory()]:
            if (directory / ENDPOINT_FILE).exists():
                known = read_endpoint(directory)
                if known.address == wanted:
                    token = known.token
                    break
    return Endpoint(wanted, token)


def _access_token(directory: Path) -> str:
    """Return the access token of a person whose directory has no certificate; empty with one, or without a token.
    Raises CredentialError for a file that others can read."""
    if (directory / CERTIFICATE).exists():
        return ""
    token, file = os.environ.get(TOKEN_VARIABLE, "").strip(), directory / TOKEN_FILE
    if token:
        return _printable(token, f"${TOKEN_VARIABLE}", _ANOTHER)
    return read_token(file, _ANOTHER) if file.exists() else ""


def _parts_of(masters: str) -> tuple[str, ...]:
    """Return the masters that a list names. Raises EndpointError for a list with a gap."""
    parts = tuple(part.strip() for part in masters.split(","))
    if not all(parts):
        raise EndpointError(f"{masters!r} is not a list of masters: give HOST:PORT,HOST:PORT")
    return parts


def _check_no_url(text: str) -> None:
    """Raises EndpointError for "http://HOST:PORT" and the like."""
    if "://" in text:
        raise EndpointError(f"{text!r} is not an address: give HOST:PORT, without {text.partition('://')[0]}://")


def _check_part(part: str) -> None:
    """Check a part of a list of masters: a wrong one would be left out for as long as another master answers. Raises
    EndpointError for one that is neither an address nor a directory."""
    _check_no_url(part)
    path = os.path.expanduser(part)
    if not is_address(part) and not os.path.exists(path.removesuffix(f"/{ENDPOINT_FILE}")):
        raise EndpointError(f"{part!r}, in the list of masters, is neither HOST:PORT nor a directory that is there")


def next_master(count: int, current: int, unreachable: Collection[int], leader: int | None = None) -> int:
    """Return which of `count` masters to call after `current` did not lead, or did not answer.

    unreachable: those that did not answer lately.
    leader: the one that a stand-by has named, if it is in the list.

    A stand-by names the former leader until that one's lease expires. So a leader that did not answer is not called,
    and the stand-by is called again where it is the only master that answers.
    """
    if leader is not None and leader != current and leader not in unreachable:
        return leader
    following = [(current + step) % count for step in range(1, count + 1)]
    return next((number for number in following if number not in unreachable), following[0])


class MasterList:
    """The masters of a list, and the one to call now. Thread-safe. `parts`: addresses or state directories; `tls`: as
    in `find_endpoint`."""

    def __init__(self, parts: tuple[str, ...], tls: str | None = None, clock: Callable[[], float] = time.monotonic):
        self._parts = parts
        self._tls = tls
        self._clock = clock
        self._lock = threading.Lock()
        self._current = 0
        # When each did not answer, by its number.
        self._unanswered: dict[int, float] = {}

    def endpoint(self) -> Endpoint:
        """Return the master to call now. Raises EndpointError if none can be named."""
        problem: EndpointError | None = None
        with self._lock:
            numbers = [(self._current + step) % len(self._parts) for step in range(len(self._parts))]
        for number in numbers:
            try:
                found = replace(find_endpoint(self._parts[number], self._tls), masters=self)
                with self._lock:
                    self._current = number
                return found
            except EndpointError as error:
                # The directory of a master that does not run names no address.
                if error.found:
                    raise
                problem = problem or error
        assert problem is not None, "a list has masters"
        raise problem

    def note(self, tried: Endpoint, leader: str = "", *, has_answered: bool) -> None:
        """Choose the master to call next, after a call to `tried`, which does not lead or has not answered. `leader`:
        the address that it has named; empty if none."""
        number = self._number_of(tried.address)
        with self._lock:
            # Another call may have found out before.
            if number is None or number != self._current:
                return
            now = self._clock()
            if not has_answered:
                self._unanswered[number] = now
            unreachable = {one for one, since in self._unanswered.items() if now - since < _LEFT_ALONE_S}
            self._current = next_master(len(self._parts), number, unreachable, self._number_of(leader))

    def _number_of(self, address: str) -> int | None:
        for number, part in enumerate(self._parts):
            try:
                if address and address in (part, find_endpoint(part, self._tls).address):
                    return number
            except EndpointError:
                continue
        return None

    def __str__(self) -> str:
        return ",".join(self._parts)


@lru_cache(maxsize=64)
def master_list(parts: tuple[str, ...], tls: str | None) -> MasterList:
    """Return the list of these masters, one for the whole process. Raises EndpointError for a part that names none."""
    for part in parts:
        _check_part(part)
    return MasterList(parts, tls)


def read_endpoint(directory: Path) -> Endpoint:
    """The endpoint a server wrote into its state directory. Raises EndpointError."""
    path = directory / ENDPOINT_FILE
    try:
        content = json.loads(path.read_text())
        address, token_file = content["address"], content.get("token_file")
        if not isinstance(address, str) or not isinstance(token_file, str | None):
            raise ValueError("address and token_file must be strings")
    except FileNotFoundError as error:
        raise EndpointError(
            f"no master has written {path}: is it running, and is this its --state-dir?", found=False
        ) from error
    except OSError as error:
        kind = CredentialError if isinstance(error, PermissionError) else EndpointError
        raise kind(f"cannot read {path}: {os_reason(error)}") from error
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise EndpointError(f"{path} is not an endpoint file ({error}): restart the master to rewrite it") from error
    check_address(address)
    return Endpoint(address, read_token(directory / token_file) if token_file else "")


def write_endpoint(directory: Path, address: str, token_file: Path | None) -> None:
    """Tells clients on this machine where the server of `directory` listens. Atomic."""
    content = {"address": address, "token_file": str(token_file) if token_file else None}
    _write_private(directory / ENDPOINT_FILE, json.dumps(content, indent=1) + "\n")


def remove_endpoint(directory: Path) -> None:
    (directory / ENDPOINT_FILE).unlink(missing_ok=True)


def ensure_token(directory: Path) -> tuple[str, Path]:
    """The start-up token of the server of `directory`, made on first use, and its file (mode 0600)."""
    path = directory / TOKEN_FILE
    if path.exists():
        return read_token(path), path
    # Loaded here, as below: every command of a client passes through this module, only servers come here.
    import secrets

    token = secrets.token_urlsafe(32)
    _write_private(path, token + "\n")
    return token, path


def read_token(path: Path, remedy: str = "delete it and restart the master") -> str:
    """Return the token of a file. Raises EndpointError, also if other users can read the file. `remedy`: of one that is
    lost."""
    try:
        with path.open() as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            token = file.read(1_024).strip()
    except PermissionError as error:
        raise CredentialError(f"may not read the token {path}: the cluster belongs to another user") from error
    except OSError as error:
        raise CredentialError(f"cannot read the token {path}: {os_reason(error)}") from error
    if mode & 0o077:
        raise CredentialError(f"the token {path} can be read by others (mode {mode:04o}): chmod 600 it, or {remedy}")
    if not token:
        raise CredentialError(f"the token {path} is empty: {remedy}")
    return _printable(token, str(path), remedy)


def _printable(token: str, where: str, remedy: str) -> str:
    """Return a token that can be sent as a header. Raises CredentialError."""
    if not (token.isascii() and token.isprintable()):
        raise CredentialError(f"what {where} holds is no token: {remedy}")
    return token


def is_address(text: str) -> bool:
    """Return True for "unix:PATH" and "HOST:PORT", False for text that must be a directory."""
    if text.startswith("unix:"):
        return True
    host, colon, port = text.rpartition(":")
    return bool(colon and host) and port.isdigit() and "/" not in text


def check_address(address: str) -> None:
    """Check that `address` is one to connect to. Raises EndpointError."""
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        if not path:
            raise EndpointError("the address unix: names no path: give unix:/path/of/socket")
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
            raise EndpointError(
                f"the socket path {path} is {len(os.fsencode(path))} bytes, the system allows {_MAX_SOCKET_PATH_BYTES}:"
                " choose a shorter directory, or listen on 127.0.0.1:PORT"
            )
    elif not is_address(address) or int(address.rpartition(":")[2]) > 65_535:
        raise EndpointError(f"{address!r} is not an address: give HOST:PORT or unix:PATH")


def check_listen_address(address: str, *, has_certificates: bool = False) -> None:
    """Check an address to listen at. Raises EndpointError for one that other machines can reach, without
    certificates."""
    check_address(address)
    if not address.startswith("unix:") and not has_certificates and not is_loopback(address):
        raise EndpointError(_exposed(address, "127.0.0.1:PORT or unix:PATH"))


def _exposed(place: str, instead: str) -> str:
    return (
        f"refuse to listen on {place} without certificates: others on the network could take over jobs;"
        f" listen on {instead}, or give --tls DIR (`ganger certs`)"
    )


def check_listen_host(host: str, *, has_certificates: bool = False) -> None:
    """Check a host to listen at, at any free port. Raises EndpointError as `check_listen_address`, and for text that is
    more than a host name or an IPv4 address."""
    if not host or any(sign in host for sign in ":/[] "):
        port = host.rpartition(":")[2]
        hint = f"without a port: {host.rpartition(':')[0]}" if port.isdigit() and host.count(":") == 1 else "alone"
        raise EndpointError(
            f"--listen {host!r}: give a host name or an IPv4 address {hint}; the daemon takes free ports"
        )
    if not has_certificates and not is_loopback(f"{host}:0"):
        raise EndpointError(_exposed(host, "127.0.0.1"))


def why_not_listening(address: str, error: OSError) -> str:
    """Return what is wrong with an address to listen at, "HOST:PORT", and what to do."""
    import socket

    host, _, port = address.rpartition(":")
    if isinstance(error, socket.gaierror):
        why = f"the host name {host} is not known; give a name or address of this machine"
    elif error.errno == errno.EADDRNOTAVAIL:
        why = f"{host} is not an address of this machine; give one of its own"
    elif error.errno == errno.EADDRINUSE:
        why = f"in use; stop the program that has port {port}, or give another port"
    elif error.errno in (errno.EACCES, errno.EPERM):
        why = f"port {port} is not permitted; give one above 1023"
    else:
        why = f"{os_reason(error)}; give another address"
    return f"cannot listen on {address}: {why}"


def address_for_clients(address: str) -> str:
    """Return the address at which clients of other machines reach a server that listens at `address`: the name of this
    machine in place of all its addresses ("0.0.0.0:PORT", "[::]:PORT")."""
    import socket

    if not address.startswith("unix:") and host_of(address) in _ALL_HOSTS:
        return f"{socket.gethostname()}:{address.rpartition(':')[2]}"
    return address


def host_of(address: str) -> str:
    """The host in "HOST:PORT", that of an IPv6 address without its brackets."""
    return address.rpartition(":")[0].strip("[]")


def check_dial_address(address: str, *, has_certificate: bool = False) -> None:
    """Check an address to connect to. Raises EndpointError; also for another machine's address without certificates."""
    check_address(address)
    if not address.startswith("unix:") and not has_certificate and not is_loopback(address):
        raise EndpointError(
            f"refuse to talk to {address} without a certificate: name the directory of yours by ${TLS_VARIABLE}"
        )


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach "HOST:PORT". Names other than localhost are not looked up: not
    loopback."""
    import ipaddress

    host = host_of(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def prepare_socket(address: str) -> None:
    """Makes way for listening on "unix:PATH": makes the directory (0700) and removes the socket a dead server left.
    Raises EndpointError if a living one listens there or a file that is no socket lies there. Leaves TCP alone."""
    if not address.startswith("unix:"):
        return
    import socket

    path = Path(address.removeprefix("unix:"))
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise EndpointError(f"{path} exists and is not a socket: remove it or listen elsewhere")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise EndpointError(f"cannot tell whether {path} is in use: {os_reason(error)}") from error
    raise EndpointError(f"{address} is in use by another server: stop it or listen elsewhere")


def _write_private(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
