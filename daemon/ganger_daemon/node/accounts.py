"""Accounts of this node that jobs run as, and the execution of a program as one.

A user of the cluster has the account that a map file names, else the one of the same name in the node's user database
(NSS). Accounts of the system and accounts without a shell run no jobs.

Directories are made for accounts below directories of root. No link on the way is followed: each step is opened from
the one before, and its owner is looked at, so that no account leads the daemon elsewhere.

A program is executed by a process of root that the daemon starts with its own interpreter and an empty environment:
nothing of the user's (no interpreter, library or variable) is in effect before the identity is the user's. It reads a
`Becoming` as JSON from its standard input.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import platform
import pwd
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from ganger.injob.launcher.namespaces import in_own_thread, separate
from ganger.injob.launcher.process_record import set_limits
from ganger.node_test import TEST_USER
from ganger.text import os_reason

log = logging.getLogger(__name__)

_T = TypeVar("_T")

# Of the accounts of people, in Debian, Fedora and SUSE (UID_MIN of login.defs); what is below is the system's.
LEAST_UID = 1000
_NO_SHELLS = ("nologin", "false", "sync", "halt", "shutdown")
# Values of --accounts; anything else names a map file.
OWN, SYSTEM = "own", "system"
# Ends the reasons why a daemon does not start with accounts: it may have chosen them by itself.
OR_ALL_AS_ROOT = f"or let jobs of all users run as root (--accounts {OWN})"
_TEST_ACCOUNT = "nobody"
# In a map file: the user may run nothing here.
_REFUSED = "-"
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Others may go through a step, and not list it.
_STEP_MODE = 0o711


class AccountRefusedError(Exception):
    """A user's jobs cannot run here; the message begins with CANNOT_SWITCH_USER and says why."""

    def __init__(self, user: str, why: str) -> None:
        super().__init__(f"CANNOT_SWITCH_USER: no account of this node runs the jobs of {user!r}: {why}")


@dataclass(frozen=True, slots=True)
class Account:
    """A Unix account. `groups`: its supplementary groups, the primary one among them."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str

    def journal(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def recall(cls, fields: Any) -> Account | None:
        """Return the account that a former daemon noted; None where it noted none. Raises ValueError for half of
        one: its processes would be taken for the daemon's own."""
        if fields is None:
            return None
        try:
            numbers = tuple(int(group) for group in fields["groups"])
            return cls(str(fields["name"]), int(fields["uid"]), int(fields["gid"]), numbers, str(fields["home"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the account in a gang's record cannot be read: {error!r}") from error


class Accounts:
    """The accounts of one daemon. `names`: account by user, from a map file; None: all jobs run as the daemon's own
    user, and nothing is switched."""

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        self._names = names

    @property
    def are_switched(self) -> bool:
        """Whether jobs run as their users."""
        return self._names is not None

    def of(self, user: str) -> Account | None:
        """Return the account that the jobs of a user run as; None for the daemon's own. Blocks, where the user database
        is a server. Raises AccountRefusedError."""
        if self._names is None:
            return None
        # The test of a node is of no person, and needs no account of its own.
        name = self._names.get(user, _TEST_ACCOUNT if user == TEST_USER else user)
        if name == _REFUSED:
            raise AccountRefusedError(user, "the map file of --accounts refuses it")
        try:
            entry = pwd.getpwnam(name)
        except (KeyError, ValueError, UnicodeError):
            raise AccountRefusedError(user, f"there is no account {name!r}") from None
        if (why := refusal_of(entry)) and (user, name) != (TEST_USER, _TEST_ACCOUNT):
            raise AccountRefusedError(user, f"account {name} {why}")
        groups = tuple(sorted({entry.pw_gid, *os.getgrouplist(name, entry.pw_gid)}))
        return Account(name, entry.pw_uid, entry.pw_gid, groups, entry.pw_dir or "/")


def refusal_of(entry: pwd.struct_passwd) -> str:
    """Return why an account may run no jobs; empty if it may."""
    if entry.pw_uid < LEAST_UID:
        return f"is one of the system (uid {entry.pw_uid}, below {LEAST_UID})"
    if entry.pw_gid == 0:
        return "has the primary group root"
    if os.path.basename(entry.pw_shell) in _NO_SHELLS:
        return f"has no shell ({entry.pw_shell})"
    return ""


def choose_accounts(setting: str, *, has_certificates: bool = False) -> Accounts:
    """Return the accounts of a daemon. `setting`: OWN, SYSTEM, the path of a map file, or empty: SYSTEM for root where
    certificates name the users, else OWN. Raises ValueError for a file that cannot be used, and for a daemon that may
    not switch users."""
    is_of_several_users = has_certificates and os.geteuid() == 0
    if not setting:
        setting = SYSTEM if is_of_several_users else OWN
    if setting == OWN:
        if is_of_several_users:
            log.warning("--accounts own: jobs of all users run as root, and can read this node's key and each other")
        return Accounts()
    if os.geteuid() != 0:
        raise ValueError(f"--accounts {setting}: only a daemon of root runs jobs as other accounts; leave it out")
    return Accounts({} if setting == SYSTEM else read_map(Path(setting)))


def read_map(path: Path) -> dict[str, str]:
    """Read a map file: a user and an account, or `-` for none, in each line; `#`: a comment. Raises ValueError."""
    try:
        status, text = path.stat(), path.read_text()
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--accounts {path}: it cannot be read: {os_reason(error)}") from error
    if status.st_uid != 0 or status.st_mode & 0o022:
        raise ValueError(f"--accounts {path}: others than root may write to it (chown root, chmod 644)")
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or words[0] in found:
            raise ValueError(f"--accounts {path}, line {number}: a user and its account are expected, once each")
        found[words[0]] = words[1]
    return found


# Numbers of the system calls setgroups, setfsuid and setfsgid, by machine.
_CALLS = {"x86_64": (116, 122, 123), "aarch64": (159, 151, 152)}


def seen_by(account: Account | None, look: Callable[[], _T]) -> _T:
    """Return what `look` returns, with the rights that an account has on files: root may see more, and on a server that
    squashes root, less. Only for calls that judge by the file system's ids, as stat; not for os.access. Raises what
    `look` raises, OSError where the kernel does not switch."""
    if account is None:
        return look()

    def run() -> _T:
        _take_file_rights(account)
        return look()

    # These ids are of a thread. It ends with them, so that no other work is done under them.
    return in_own_thread(run)


def _take_file_rights(account: Account) -> None:
    if platform.machine() not in _CALLS:
        return
    set_groups, set_uid, set_gid = _CALLS[platform.machine()]
    libc = ctypes.CDLL(None, use_errno=True)
    numbers = (ctypes.c_uint32 * len(account.groups))(*account.groups)
    # Not by the C library, which would change all threads of this process.
    if libc.syscall(ctypes.c_long(set_groups), ctypes.c_long(len(numbers)), numbers) != 0:
        raise OSError(ctypes.get_errno(), "the groups of an account cannot be taken")
    for call, number in ((set_gid, account.gid), (set_uid, account.uid)):
        libc.syscall(ctypes.c_long(call), ctypes.c_ulong(number))
        # Asked with a number that is none, it changes nothing and returns the present one.
        if libc.syscall(ctypes.c_long(call), ctypes.c_ulong(0xFFFFFFFF)) != number:
            raise PermissionError(f"the rights of account {account.name} on files cannot be taken")


def give_directory(base: Path, name: str, account: Account, mode: int, *, is_its: bool) -> Path:
    """Make the directory `name` below `base` for an account, and return its path. Idempotent.

    `name`: one or more steps, all but the last of which are this process's. `is_its`: the last one belongs to the
    account; otherwise to this process, with the account's primary group. Raises OSError: EPERM where an account has put
    something in the place of a step."""
    owner, group = (account.uid if is_its else os.geteuid()), account.gid
    *steps, last = Path(name).parts
    descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for step in steps:
        descriptor = _enter(descriptor, step, (os.geteuid(), -1), _STEP_MODE)
    os.close(_enter(descriptor, last, (owner, group), mode))
    return base / name


def _enter(parent: int, name: str, owner: tuple[int, int], mode: int) -> int:
    """Open a directory in a parent, which is closed; make it if there is none."""
    try:
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            pass
        found = os.open(name, _OPEN, dir_fd=parent)
    finally:
        os.close(parent)
    try:
        status = os.fstat(found)
        # one of root's becomes the account's; what is another account's was put there
        if status.st_uid not in (owner[0], os.geteuid()):
            raise OSError(errno.EPERM, f"belongs to user {status.st_uid}", name)
        if status.st_uid != owner[0] or owner[1] not in (-1, status.st_gid):
            os.fchown(found, *owner)
        if stat.S_IMODE(status.st_mode) != mode:
            os.fchmod(found, mode)
    except OSError:
        os.close(found)
        raise
    return found


def closed_step(path: Path) -> str:
    """Return why accounts cannot reach a path; empty if they can: every directory on the way lets others through."""
    for step in [*reversed(path.resolve().parents), path.resolve()]:
        try:
            mode = step.stat().st_mode
        except FileNotFoundError:
            return ""
        if stat.S_ISDIR(mode) and not mode & 0o001:
            return f"{step} is closed to other accounts (mode {stat.S_IMODE(mode):04o})"
    return ""


_PR_SET_NO_NEW_PRIVS = 38
_CANNOT = 126  # exit code of a shell that may not execute a command
UMASK = 0o077


@dataclass(frozen=True, slots=True)
class Becoming:
    """`command` with `environment`, to be executed as `account`. `cgroup_procs`: of control groups to enter first;
    `limits`: of the process and all that it starts, as `set_limits` takes them."""

    account: Account
    command: Sequence[str]
    environment: Mapping[str, str]
    cgroup_procs: Sequence[str] = ()
    limits: Mapping[str, Sequence[int]] = field(default_factory=dict)


def start_as(becoming: Becoming, directory: str, output: BinaryIO) -> subprocess.Popen[bytes]:
    """Start the program in a session of its own. `directory`: its own; `output`: for its prints. Raises OSError."""
    # What this process imports from, and nothing of the user's.
    places = [place for place in sys.path if os.path.isabs(place)]
    program = f"import sys; sys.path[:] = {places!r}; from ganger_daemon.node.accounts import execute; execute()"
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", program],
        env={},
        cwd=directory,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
    assert process.stdin is not None, "it is a pipe"
    try:
        with process.stdin as words:
            words.write(json.dumps(asdict(becoming)).encode())
    except BrokenPipeError:
        pass  # it has ended: its output says why
    return process


def become(account: Account) -> None:
    """Take an account's identity for good: no program that is executed gives more rights. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs cannot be set")
    os.setgroups(account.groups)
    os.setresgid(account.gid, account.gid, account.gid)
    os.setresuid(account.uid, account.uid, account.uid)
    if os.getresuid() != (account.uid,) * 3 or os.getresgid() != (account.gid,) * 3:
        raise PermissionError(f"the identity of account {account.name} was not taken")
    os.umask(UMASK)


def as_account(account: Account | None, capabilities: Sequence[str]) -> list[str]:
    """Return the words before a command that runs as an account, with no capabilities but these; none without one.

    What it does by path is then what the account may do: a job can put no link in its way."""
    if account is None:
        return []
    kept = ",".join(["-all", *(f"+{name}" for name in capabilities)])
    ids = ["--reuid", str(account.uid), "--regid", str(account.gid), "--groups", ",".join(map(str, account.groups))]
    program = shutil.which("setpriv") or "setpriv"
    return [program, *ids, "--inh-caps", kept, "--ambient-caps", kept, "--no-new-privs"]


def execute() -> None:
    """Be the process that `start_as` starts."""
    fields = json.load(sys.stdin.buffer)
    account = Account.recall(fields["account"])
    assert account is not None, "the daemon names one"
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(nothing, 0)
    command = [str(word) for word in fields["command"]]
    try:
        for path in fields["cgroup_procs"]:
            with open(path, "w", encoding="ascii") as file:
                file.write(str(os.getpid()))
        set_limits(fields["limits"])
        try:
            separate()
        except OSError as error:
            # as in a container that may not mount: file modes keep accounts apart still
            print(f"{account.name} shares /dev/shm and /proc with others: {error}", file=sys.stderr)
        become(account)
        os.execve(command[0], command, fields["environment"])
    except (OSError, ValueError) as error:
        print(f"{command[0]} cannot be started as {account.name}: {os_reason(error)}", file=sys.stderr)
    os._exit(_CANNOT)
