"""The master of this machine as a systemd unit: what `ganger cluster init` makes here, and how it is removed.

Every step can be repeated: the same command again repairs or upgrades the master, and keeps the authority, the
certificates and the database that are there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ganger.service_unit import MASTER_UNIT, unit_text

# Marks a directory that was made here and may be removed.
MADE: Final = ".made-by-ganger"
MADE_UNIT: Final = "# Made by ganger cluster init."
# Name of directories that all programs of a machine share: removed once they are empty.
SHARED_DIRECTORY: Final = "ganger"
_SYSTEMD: Final = Path("/run/systemd/system")
# Accounts of jobs go through the storage to their own directories in it.
_STORAGE_MODE: Final = 0o711
_OPEN_MODE: Final = 0o755
_DAYS: Final = 365.0


class LocalMasterError(Exception):
    """A step failed. The message has the step and its error, and what to do."""


@dataclass(frozen=True, slots=True)
class MasterPlaces:
    """Directories on this machine. `operator`: a certificate with which its holder administers the cluster."""

    state: Path = Path("/var/lib/ganger/master")
    authority: Path = Path("/etc/ganger/ca")
    certificates: Path = Path("/etc/ganger/master")
    operator: Path = Path("/etc/ganger/operator")
    unit: Path = Path("/etc/systemd/system") / MASTER_UNIT

    @property
    def directories(self) -> tuple[Path, ...]:
        return self.state, self.authority, self.certificates, self.operator


def check_machine(places: MasterPlaces) -> None:
    """Raise LocalMasterError for a machine on which no master can be made."""
    if os.geteuid() != 0:
        raise LocalMasterError("the unit of the master is root's to write: run this as root")
    if not _SYSTEMD.is_dir():
        raise LocalMasterError(
            "there is no systemd here: make certificates with `ganger certs`, and start `ganger master` by your own"
            " service manager"
        )
    if find_spec("ganger_master") is None or find_spec("sqlalchemy") is None:
        raise LocalMasterError("the packages of the master are missing: `pip install 'ganger[server]'`")
    if places.unit.exists() and not is_made_here(places):
        raise LocalMasterError(f"{places.unit} is there, and `cluster init` did not make it: remove it first")


def is_made_here(places: MasterPlaces) -> bool:
    """Return whether the master's unit is there, made by `ganger cluster init`."""
    return places.unit.is_file() and MADE_UNIT in places.unit.read_text().split("\n", 1)[0]


def is_anything_made(places: MasterPlaces) -> bool:
    """Return whether anything is there that `ganger cluster init` made."""
    return is_made_here(places) or any((directory / MADE).exists() for directory in places.directories)


def make_credentials(places: MasterPlaces, host: str, operator: str) -> None:
    """Make the authority, if it is missing, and certificates of a master that is dialled at `host`, and of an operator.

    Certificates that are there are replaced. Raises CertificateError.
    """
    from ganger.wire.certificate_authority import AUTHORITY_KEY, issue, make_authority
    from ganger.wire.methods import CallerIdentity, CallerRole

    for directory in (places.authority, places.certificates, places.operator):
        _make_directory(directory, 0o700)
    if not (places.authority / AUTHORITY_KEY).exists():
        make_authority(places.authority)
    master, person = CallerIdentity(CallerRole.MASTER, "master"), CallerIdentity(CallerRole.OPERATOR, operator)
    issue(places.authority, master, (host,), _DAYS, places.certificates, replaces=True)
    issue(places.authority, person, (), _DAYS, places.operator, replaces=True)


def make_unit(places: MasterPlaces, python: str, address: str, storage: Path | None, flags: Sequence[str]) -> None:
    """Write the unit of a master that listens at `address` (HOST:PORT), and make its directories.

    python: the interpreter of the installation that it runs from.
    """
    _make_directory(places.state, 0o700)
    own = ["--state-dir", str(places.state), "--tls", str(places.certificates), "--authority", str(places.authority)]
    writable = [str(places.state), str(places.authority)]
    if storage is not None:
        _make(storage, _STORAGE_MODE)
        own += ["--storage", str(storage)]
        writable.append(str(storage))
    command = (python or sys.executable, "-m", "ganger.cli.main", "master", *own, "--listen", address, *flags)
    text = unit_text("master", command, user="root", writable=writable)
    new = places.unit.with_suffix(".new")
    new.write_text(f"{MADE_UNIT}\n{text}")
    new.replace(places.unit)


def start(places: MasterPlaces) -> None:
    """Start the unit, now and at boot; one that runs is stopped first. Raises LocalMasterError.

    It waits for no answer of the new master: systemd would wait for ever for one that starts and ends again.
    """
    name = places.unit.name
    for words in (("daemon-reload",), ("enable", "--quiet", name), ("stop", name), ("start", "--no-block", name)):
        _systemctl(*words)


def log_end(places: MasterPlaces) -> str:
    """Return the end of the master's log."""
    words = ("journalctl", "--no-pager", "-o", "cat", "-n", "3", "-u", places.unit.name)
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def remove(places: MasterPlaces) -> None:
    """Stop the master and remove unit, database, certificates and authority; directories of others stay."""
    if is_made_here(places):
        _systemctl("disable", "--quiet", "--now", places.unit.name)
        places.unit.unlink()
        _systemctl("daemon-reload")
    remove_directories(places)


def remove_directories(places: MasterPlaces) -> None:
    """Remove the directories that were made here, with all that is in them."""
    for directory in places.directories:
        if (directory / MADE).exists():
            shutil.rmtree(directory)
        if directory.parent.name == SHARED_DIRECTORY:
            with suppress(OSError):
                directory.parent.rmdir()


def _make_directory(directory: Path, mode: int) -> None:
    """Make a directory and mark it; one that is there stays as it is."""
    if _make(directory, mode):
        (directory / MADE).touch()


def _make(directory: Path, mode: int) -> bool:
    """Make a directory that is missing, and those above it, which are open whatever the umask is."""
    if directory.exists():
        return False
    _make(directory.parent, _OPEN_MODE)
    directory.mkdir()
    directory.chmod(mode)
    return True


def _systemctl(*words: str) -> None:
    done = subprocess.run(("systemctl", *words), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LocalMasterError(f"systemctl {' '.join(words)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
