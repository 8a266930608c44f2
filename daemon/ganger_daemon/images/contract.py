"""Interface to images of processes, which live in a unit: PID, IPC and mount namespaces with an init that no image has,
and whose first child is the root of the job's processes. An image is restored in a new unit, where the process ids are
free and the directories of the unit's own are empty."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from ganger_daemon.node.accounts import Account

FACTS = "facts.json"
PID_FILE = "pid"
"""In the image's directory, the id that the restored root has in its unit: written by the restore."""
CAPABILITY = "image"
SHARED_MEMORY = "/dev/shm"


class ImageRefusedError(Exception):
    """The processes cannot be dumped or restored; the message is the reason for the user. Those that ran go on."""


class DeviceStateLostError(Exception):
    """A process has lost its state on a device; it can only be ended. The message names it and the reason."""


class UnitProcesses(msgspec.Struct, frozen=True):
    """Processes by their ids in the daemon's own namespace. `init_pid`: of their unit, 0 for processes that were never
    restored and have none. `own_directories`: absolute paths that belong to them alone, so that the files in them
    travel with the image; outside a unit, of those in /dev/shm the ones that the processes hold. `labels`: what the
    daemon wants to know at the restore. `members`: processes that the daemon knows to be the job's. `freezer`:
    directory of the control group in which they are frozen, and stay so; empty if they run. `ranks`: of processes that
    are ranks below the root; none where the root is the only rank. `account`: that they run as; None: this process's
    user."""

    init_pid: int
    root_pid: int
    own_directories: tuple[str, ...] = (SHARED_MEMORY,)
    labels: dict[str, str] = {}
    members: tuple[int, ...] = ()
    freezer: str = ""
    ranks: dict[int, int] = {}
    account: Account | None = None

    @property
    def sight(self) -> int:
        """Process whose root directory is that of these processes; 0: it is this process's own, too."""
        return self.init_pid or (self.root_pid if self.account is not None else 0)


class ImagedRank(msgspec.Struct, frozen=True):
    """A rank below the root of an image. `pid`: inside the unit; `logs`: the files behind its descriptors 1 and 2."""

    rank: int
    pid: int
    logs: tuple[str, ...]


class OpenFile(msgspec.Struct, frozen=True):
    """A file that the processes need under the same path. `is_written`: a process may write to it."""

    path: str
    size_bytes: int
    is_written: bool


class Machine(msgspec.Struct, frozen=True):
    """What of a machine decides whether an image continues there."""

    architecture: str
    cpu_flags: tuple[str, ...]
    kernel: str
    tool: str

    def obstacle(self, here: Machine) -> str:
        """Return why an image of this machine cannot continue on `here`; empty if nothing is known against it."""
        if here.architecture != self.architecture:
            return f"the image is of a {self.architecture} machine, this one is {here.architecture}"
        lacking = sorted(set(self.cpu_flags) - set(here.cpu_flags))
        if lacking:
            return f"this processor lacks {', '.join(lacking[:8])}, which the image's programs may use"
        return ""


class ImageFacts(msgspec.Struct, frozen=True):
    """What a restore needs to know. `root_pid`: inside the unit. `logs`: the files behind descriptors 1 and 2 of the
    ranks, once each. `ranks`: empty where the root is the only one. `files`: all others, also those mapped as code;
    `own_directories` as in the unit; `is_outside_closed`: the restored processes find their TCP connections closed;
    `device_pids`: inside the unit, the processes whose device state is in the image. `owner`: uid and gid of all
    processes, of root in images of earlier versions. `shared_files`: outside a unit,
    their files in /dev/shm with the inodes."""

    root_pid: int
    processes: int
    logs: tuple[OpenFile, ...]
    files: tuple[OpenFile, ...]
    own_directories: tuple[str, ...]
    machine: Machine
    size_bytes: int = 0
    is_outside_closed: bool = False
    device_pids: tuple[int, ...] = ()
    labels: dict[str, str] = {}
    ranks: tuple[ImagedRank, ...] = ()
    shared_files: dict[str, int] = {}
    owner: tuple[int, int] = (0, 0)

    def foreign(self, account: Account | None) -> str:
        """Return why the processes cannot run as an account, or as root for None; empty if they do."""
        uid, gid = (0, 0) if account is None else (account.uid, account.gid)
        if self.owner == (uid, gid):
            return ""
        name = "root" if account is None else account.name
        return f"it is of uid {self.owner[0]} and gid {self.owner[1]}, and the job runs here as {name} ({uid}, {gid})"


class DumpRequest(NamedTuple):
    """A dump of a unit's processes into an empty directory. `goes_on`: they run on afterwards; `is_outside_closed`:
    connections to other machines may be cut, and the restored processes find them closed; `keeps_devices`: else
    processes that run on wait for their devices until the caller gives them back; `meanwhile`: called once the image is
    whole, while the processes stand still."""

    unit: UnitProcesses
    directory: Path
    goes_on: bool
    is_outside_closed: bool = False
    keeps_devices: bool = True
    meanwhile: Callable[[], None] = lambda: None


class ProcessImages:
    """Images of a node's processes. This class makes none, for one reason."""

    def __init__(self, unavailable: str = "") -> None:
        """`unavailable`: why images cannot be made on this node; empty if they can."""
        self.unavailable = unavailable

    @property
    def capability(self) -> str:
        """The tool and its version, or "none: why"."""
        return f"none: {self.unavailable}"

    def dump(self, request: DumpRequest) -> ImageFacts:
        """Write an image of processes. Blocks. Afterwards they are dead, or run on. Device state is part of the image.

        Raises ImageRefusedError, OSError and what `request.meanwhile` raises, then all run on; DeviceStateLostError,
        then one of them has lost its device."""
        raise ImageRefusedError(self.unavailable)

    def has_consent(self, directory: Path) -> bool:
        """Return whether the last dump into a directory ends its processes. Its daemon may have died before."""
        return False

    def fill(self, init_pid: int, directory: Path, account: Account | None = None) -> None:
        """Put the files of the unit's own directories into a new unit, before the restore. `account`: that restores the
        image; None: this process's user. Raises ImageRefusedError and OSError."""
        raise ImageRefusedError(self.unavailable)

    def restore_arguments(
        self, directory: Path, files: Mapping[str, int], *, is_stopped: bool = False, account: Account | None = None
    ) -> list[str]:
        """Return the command that restores an image, for a process inside a new unit and in this directory, whose
        sibling the restored root becomes. `files`: paths as in the image's facts, and the descriptors of that process
        that replace them. `is_stopped`: the processes stand still until they get SIGCONT. `account`: that the command
        takes on, with no rights beyond that but to choose process ids; None: it stays this process's user's."""
        raise ImageRefusedError(self.unavailable)

    def restore_failure(self, directory: Path) -> str:
        """Return why the last restore from a directory failed, in words for the user."""
        return self.unavailable


def write_facts(directory: Path, facts: ImageFacts) -> None:
    (directory / FACTS).write_bytes(msgspec.json.encode(facts))


def read_facts(directory: Path) -> ImageFacts:
    """Raises OSError, and ImageRefusedError for a file that is none."""
    content = (directory / FACTS).read_bytes()
    try:
        return msgspec.json.decode(content, type=ImageFacts)
    except (ValueError, RecursionError) as error:
        raise ImageRefusedError(f"the image's {FACTS} cannot be read: {error}") from error
