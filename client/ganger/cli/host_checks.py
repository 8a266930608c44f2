"""Findings of `ganger doctor`, and what mends those about this machine: units, directories, certificates and sockets.

Only what has one right state is mended. Nothing of a job is touched, no process is ended, and a storage that is
missing is not made: it may be a share that is not mounted.
"""

from __future__ import annotations

import os
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from ganger.service_unit import (
    DAEMON_UNIT,
    DROP_IN,
    MASTER_UNIT,
    UNITS,
    command_of,
    directories_of,
    value_of,
)
from ganger.text import os_failure

OK, WARN, FAIL = "ok", "WARN", "FAIL"


class Finding(NamedTuple):
    """One thing that was looked at. `level`: OK, WARN (something could be better) or FAIL (jobs are harmed, or
    cannot start); `advice`: what mends it, empty where nothing must; `mend`: does that, and returns what was done;
    `mended`: what it has done."""

    level: str
    subject: str
    found: str
    advice: str = ""
    mend: Callable[[], str] | None = None
    mended: str = ""


class MendError(Exception):
    """What mends a finding failed; the message has the reason."""


def mended(finding: Finding) -> Finding:
    """Mend what was found, if that is possible, and return the finding as it is then."""
    if finding.mend is None or finding.level == OK:
        return finding
    try:
        done = finding.mend()
    except OSError as error:
        return finding._replace(found=f"{finding.found}; it could not be mended: {os_failure(error)}")
    except MendError as error:
        return finding._replace(found=f"{finding.found}; it could not be mended: {error}")
    return finding._replace(level=OK, advice="", mended=done)


def host_findings(units: Path = UNITS, systemd: Path = Path("/run/systemd/system")) -> Iterator[Finding]:
    """Yield what is to be said of the units of master and daemon on this machine, and of their directories. `systemd`:
    a directory that is there where systemd runs."""
    for name in (MASTER_UNIT, DAEMON_UNIT):
        try:
            text = (units / name).read_text()
        except OSError:
            # It is no unit of this machine.
            continue
        named = dict(directories_of(command_of(text)))
        yield from _directory_findings(name, named)
        authority = named.get("--authority", "")
        if "--tls" in named:
            yield certificate_finding(Path(named["--tls"]), Path(authority) if authority else None)
        # At last: a unit that is started needs all of that.
        if systemd.is_dir():
            yield from _unit_findings(units / name)


def master_of_unit(units: Path = UNITS) -> tuple[str, str]:
    """Return the master that the unit of this machine's daemon names, and the directory of its certificate; '' for
    neither, and for a certificate that is not this user's to show."""
    try:
        words = command_of((units / DAEMON_UNIT).read_text())
    except OSError:
        return "", ""
    tls = value_of(words, "--tls")
    return (value_of(words, "--master"), tls) if not tls or os.access(Path(tls, "key.pem"), os.R_OK) else ("", "")


# -- units -------------------------------------------------------------------------------------------------------------

_PROPERTIES: Final = ("UnitFileState", "ActiveState", "Result", "Delegate", "KillMode", "NeedDaemonReload")
_RUNNING: Final = ("active", "activating", "reloading")


def _unit_findings(unit: Path) -> Iterator[Finding]:
    name = unit.name
    shown = dict(
        line.partition("=")[::2] for line in _systemctl("show", "-p", ",".join(_PROPERTIES), name).splitlines()
    )
    if shown.get("NeedDaemonReload") == "yes":
        mend = partial(_done, "reloaded", ("daemon-reload",))
        yield Finding(WARN, name, "systemd has an older text of it", "systemctl daemon-reload", mend)
    if name == DAEMON_UNIT:
        lacks = [
            (line, meaning)
            for key, right, line, meaning in (
                ("Delegate", "yes", "Delegate=yes", "jobs may lose their control groups"),
                ("KillMode", "process", "KillMode=process", "a stop or a restart of the daemon ends its jobs"),
            )
            if shown.get(key) != right
        ]
        if lacks:
            lines, meanings = zip(*lacks, strict=True)
            advice = f"systemctl edit {name}, add [Service] {' '.join(lines)}, and restart it: jobs go on"
            yield Finding(FAIL, name, "; ".join(meanings), advice, partial(_write_drop_in, unit, lines))
    if shown.get("UnitFileState") != "enabled":
        mend = partial(_done, "enabled", ("enable", "--quiet", name))
        yield Finding(WARN, name, "it is not started at boot", f"systemctl enable {name}", mend)
    if (state := shown.get("ActiveState", "unknown")) in _RUNNING:
        yield Finding(OK, name, "it runs")
        return
    result = shown.get("Result", "")
    why = f" ({result})" if result not in ("", "success") else ""
    advice = f"journalctl -u {name} has the reason; then: systemctl start {name}"
    start = ("reset-failed", name), ("start", name)
    yield Finding(FAIL, name, f"it does not run: {state}{why}", advice, partial(_done, "started", *start))


def _write_drop_in(unit: Path, lines: Sequence[str]) -> str:
    """Add lines to a unit, beside its own text."""
    file = unit.with_name(f"{unit.name}.d") / DROP_IN
    file.parent.mkdir(mode=0o755, exist_ok=True)
    file.write_text("\n".join(("# Made by ganger doctor --fix.", "[Service]", *lines, "")))
    _systemctl("daemon-reload")
    return f"wrote {file}; it counts from the next restart of the daemon on"


def _done(what: str, *commands: Sequence[str]) -> str:
    for words in commands:
        _systemctl(*words)
    return what


def _systemctl(*words: str) -> str:
    done = subprocess.run(("systemctl", *words), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise MendError(f"systemctl {' '.join(words)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


# -- directories -------------------------------------------------------------------------------------------------------

# Of each unit: option, file in that directory or the directory itself, bits that must not be set, and the right mode.
_MODES: Final = {
    MASTER_UNIT: (
        ("--state-dir", "", 0o077, 0o700),
        ("--authority", "", 0o077, 0o700),
        ("--authority", "ca-key.pem", 0o077, 0o600),
        ("--tls", "key.pem", 0o077, 0o600),
    ),
    # Jobs of other accounts go through it to their own directories.
    DAEMON_UNIT: (("--state-dir", "", 0o066, 0o711), ("--tls", "key.pem", 0o077, 0o600)),
}


def _directory_findings(unit: str, named: dict[str, str]) -> Iterator[Finding]:
    for option, name, forbidden, mode in _MODES[unit]:
        if option not in named:
            continue
        path = Path(named[option], name)
        try:
            found = stat.S_IMODE(path.stat().st_mode)
        except FileNotFoundError:
            if option == "--state-dir":
                text, advice = "it is missing", f"mkdir -p -m {mode:04o} {path}"
                yield Finding(FAIL, str(path), text, advice, partial(_make_directory, path, mode))
            continue
        except OSError:
            # Of the account of the master, which this user cannot look at.
            continue
        if found & forbidden:
            text, advice = f"other users have access to it (mode {found:04o})", f"chmod {mode:04o} {path}"
            yield Finding(FAIL if name else WARN, str(path), text, advice, partial(_change_mode, path, mode))
    storage = named.get("--storage", "")
    if storage and not os.path.isdir(storage):
        yield Finding(FAIL, f"storage {storage}", "it is missing", "mount it, or make it where it is no mount")
    yield from socket_findings(Path(named.get("--state-dir", "/nowhere")))


def _make_directory(path: Path, mode: int) -> str:
    path.mkdir(mode=mode, parents=True)
    path.chmod(mode)
    return f"made it (mode {mode:04o})"


def _change_mode(path: Path, mode: int) -> str:
    path.chmod(mode)
    return f"its mode is {mode:04o} now"


def socket_findings(state: Path) -> Iterator[Finding]:
    """Yield the socket that a master with this state directory has left behind, if nothing listens at it."""
    from ganger.wire.endpoints import EndpointError, read_endpoint

    try:
        address = read_endpoint(state).address
    except EndpointError:
        return
    path = Path(address.removeprefix("unix:"))
    if not address.startswith("unix:"):
        return
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            probe.connect(str(path))
    except ConnectionRefusedError:
        if is_socket:
            found = "no master listens at it: one was killed"
            yield Finding(WARN, str(path), found, "start the master, which replaces it", partial(_unlink, path))
    except OSError:
        return


def _unlink(path: Path) -> str:
    path.unlink()
    return "removed it"


# -- certificates ------------------------------------------------------------------------------------------------------


def certificate_finding(directory: Path, authority: Path | None = None) -> Finding:
    """Return whether a certificate, or an access token, can be used, and for how long. `authority`: directory of the
    one that could renew it, if it is on this machine."""
    from ganger.wire.certificate_authority import AUTHORITY_KEY
    from ganger.wire.endpoints import CERTIFICATE, TOKEN_FILE, CredentialError, read_token
    from ganger.wire.tls import check_directory, ends_soon

    subject = f"certificate {directory}"
    if not (directory / CERTIFICATE).exists() and (directory / TOKEN_FILE).exists():
        try:
            user = read_token(directory / TOKEN_FILE).rsplit(".", 2)[0]
        except CredentialError as error:
            mode = partial(_change_mode, directory / TOKEN_FILE, 0o600)
            return Finding(FAIL, f"token {directory}", str(error), "chmod 600 it", mode)
        return Finding(OK, f"token {directory}", f"of user {user!r}")
    trouble, end, is_soon = "", "", False
    try:
        end, is_soon = ends_soon(directory)
        found = f"of {check_directory(directory)}, until {end}"
    except CredentialError as error:
        trouble = str(error)
    if not (trouble or is_soon):
        return Finding(OK, subject, found)
    can_renew = is_soon and authority is not None and (authority / AUTHORITY_KEY).exists()
    where = authority if can_renew else "AUTHORITY"
    advice = f"ganger certs renew {where} {directory}" if is_soon else ""
    mend = partial(_renew, authority, directory) if can_renew and authority is not None else None
    return Finding(FAIL if trouble else WARN, subject, trouble or found, advice, mend)


def _renew(authority: Path, directory: Path) -> str:
    """Renew a certificate for as long as the former one was made for."""
    from ganger.wire.certificate_authority import CertificateError, life_of, renew

    try:
        identity, end = renew(authority, directory, life_of(directory) / timedelta(days=1))
    except CertificateError as error:
        raise MendError(str(error)) from error
    return f"renewed that of {identity}, until {end:%Y-%m-%d %H:%M} UTC; what runs uses it for new connections"
