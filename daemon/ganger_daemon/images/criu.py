"""Images of processes by CRIU 4 or newer, inside the unit, so that no namespace becomes part of the image. It waits in
its post-dump script, while the processes are frozen, for this module to pack the unit's own directories. The script
waits for a lock, which the kernel frees if the daemon dies; without consent the processes go on."""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from ganger.injob.process_identity import family
from ganger.text import os_failure

from ganger_daemon.images.contract import (
    PID_FILE,
    SHARED_MEMORY,
    DeviceStateLostError,
    DumpRequest,
    ImagedRank,
    ImageFacts,
    ImageRefusedError,
    Machine,
    OpenFile,
    ProcessImages,
    UnitProcesses,
    read_facts,
    write_facts,
)
from ganger_daemon.images.descriptors import mend_timers
from ganger_daemon.images.driver import DeviceState
from ganger_daemon.images.packing import fill_directories, from_outside, image_files, pack_directories
from ganger_daemon.images.process_tree import (
    UnitProc,
    foreign_process,
    loose_files,
    open_mounts,
    pid_inside,
    pids_outside,
    shared_files,
    shared_names,
    tracer_of,
)
from ganger_daemon.node.accounts import Account, as_account, seen_by

LEAST_VERSION = 4
PROBE_S = 20.0
DUMP_LOG, RESTORE_LOG = "dump.log", "restore.log"
_CONSENT, _DUMPED, _ERRORS = "consent", "dumped", "criu.stderr"
_YES = "yes\n"
_POLL_S = 0.001
# Longest wait for another program to leave the processes alone.
_TRACER_S = 5.0
# Removed files that are still open are part of the image, whatever their size: data loaders share batches in them.
_GHOST_LIMIT = "64G"
_SCRIPT = "post-dump.sh"
_SCRIPT_TEXT = f"""#!/bin/sh
[ "$CRTOOLS_SCRIPT_ACTION" = post-dump ] || exit 0
: > {_DUMPED}
exec flock -s {_CONSENT} grep -q yes {_CONSENT}
"""
# Of CRIU for an account: to choose process ids, and to restore TCP connections; for a dump also to stop processes, to
# read their filters of system calls, and to look at the names of logs, in directories that are closed to the account. A
# restore, which opens files by their names, has no rights on files beyond the account's.
_TO_RESTORE = ("checkpoint_restore", "net_admin")
_TO_DUMP = (*_TO_RESTORE, "sys_ptrace", "sys_admin", "dac_read_search")
_COMMON = ("--file-locks", "--manage-cgroups=ignore", "--link-remap", "-v2")


class CriuImages(ProcessImages):
    """Images by one CRIU program, which has been probed."""

    def __init__(self, program: str, version: str, devices: DeviceState | None = None) -> None:
        super().__init__()
        self.program = program
        self._devices = devices or DeviceState(None, "there is no GPU driver")
        self._machine = Machine(platform.machine(), cpu_flags(), platform.release(), f"criu {version}")

    @property
    def capability(self) -> str:
        return self._machine.tool

    def dump(self, request: DumpRequest) -> ImageFacts:
        unit, goes_on = request.unit, request.goes_on
        proc = UnitProc(unit.init_pid or None)
        try:
            root = pid_inside(unit.root_pid)
            closes = self._check(proc, unit, root, request.is_outside_closed)
            pids = pids_outside(unit.root_pid)
        except OSError as error:
            raise ImageRefusedError(f"the job's processes are gone: {os_failure(error)}") from error
        _await_no_tracer(pids.values())
        holders = self._devices.save(tuple(pids.values()))
        try:
            return self._dump(request, root, closes, tuple(pid for pid, outside in pids.items() if outside in holders))
        except BaseException:
            goes_on = True
            raise
        finally:
            if goes_on and request.keeps_devices:
                self._give_back(holders)

    def _give_back(self, holders: tuple[int, ...]) -> None:
        try:
            self._devices.restore(holders)
        except ImageRefusedError as error:
            raise DeviceStateLostError(f"{error}; so it cannot go on") from error

    def _dump(self, request: DumpRequest, root: int, closes: bool, device_pids: tuple[int, ...]) -> ImageFacts:
        """`root`: as in its unit; `closes`: TCP connections are closed; `device_pids`: in the unit, of the processes
        whose device state is in the image."""
        unit, directory = request.unit, request.directory
        proc, memory = UnitProc(unit.init_pid or None), from_outside(unit.sight, SHARED_MEMORY)

        def in_memory(tree: tuple[int, ...]) -> tuple[dict[str, int], Sequence[str]]:
            shared = shared_files(proc, tree, memory)
            return shared, loose_files(proc, root, tree, shared, memory)

        def while_frozen() -> None:
            # Again: a connection may have been opened meanwhile.
            if why := proc.connections(proc.tree(root), "the driver left it open").refusal(closes):
                raise ImageRefusedError(why)
            _check_account(unit)
            mend_timers(directory)
            facts = self._facts(proc, root, unit, closes)
            shared, loose = ({}, ()) if unit.init_pid else seen_by(unit.account, lambda: in_memory(proc.tree(root)))
            pack_directories(unit, directory, (*shared, *loose))
            size = sum(file.stat().st_size for file in image_files(directory))
            facts = msgspec.structs.replace(facts, device_pids=device_pids, size_bytes=size, shared_files=shared)
            write_facts(directory, facts)
            request.meanwhile()

        arguments = ["dump", "-t", str(root), "-o", DUMP_LOG, *_options(closes), "--network-lock", "skip"]
        arguments += ["--ghost-limit", _GHOST_LIMIT, "--action-script", f"./{_SCRIPT}"]
        arguments += ["--leave-running"] if request.goes_on else []
        arguments += ["--freeze-cgroup", unit.freezer] if unit.freezer else []
        with shared_names(proc, () if unit.init_pid else proc.tree(root), memory, unit.account):
            self._run(unit, arguments, directory, while_frozen)
        return read_facts(directory)

    def has_consent(self, directory: Path) -> bool:
        return _text(directory / _CONSENT) == _YES

    def fill(self, init_pid: int, directory: Path, account: Account | None = None) -> None:
        if why := read_facts(directory).machine.obstacle(self._machine):
            raise ImageRefusedError(why)
        # CRIU writes no file that is there already.
        (directory / PID_FILE).unlink(missing_ok=True)
        fill_directories(init_pid, read_facts(directory).own_directories, directory)
        if account is not None:
            # The directories above are closed to the account: nothing of its own gets there.
            for path in (directory, *directory.iterdir()):
                os.chown(path, account.uid, account.gid)

    def restore_arguments(
        self, directory: Path, files: Mapping[str, int], *, is_stopped: bool = False, account: Account | None = None
    ) -> list[str]:
        given = [option for path, fd in files.items() for option in ("--inherit-fd", f"fd[{fd}]:{path.lstrip('/')}")]
        options = _options(read_facts(directory).is_outside_closed)
        placed = ["-D", ".", "-o", RESTORE_LOG, "--pidfile", PID_FILE]
        placed += ["--restore-detached", "--restore-sibling", *(["--leave-stopped"] if is_stopped else [])]
        return [*as_account(account, _TO_RESTORE), self.program, "restore", *_unprivileged(account), *placed, *options,
                *given]  # fmt: skip

    def restore_failure(self, directory: Path) -> str:
        return reason_of(_text(directory / RESTORE_LOG)) or "CRIU failed without naming an error"

    def _check(self, proc: UnitProc, unit: UnitProcesses, root: int, is_outside_closed: bool) -> bool:
        """Return whether TCP connections are to be closed. Raises OSError; ImageRefusedError for what would be cut."""
        tree = proc.tree(root)
        # outside a unit: those of its session and its control group
        for pid in proc.pids() if unit.init_pid else sorted({*family(root), *unit.members}):
            if pid not in tree:
                raise ImageRefusedError(f"process {pid} ({proc.name(pid)}) has left the job's process tree")
        _check_account(unit)
        for pid in tree:
            # CRIU takes the kernel's notice of it to its restore for a fault
            if signal.SIGCONT in proc.waiting_signals(pid):
                raise ImageRefusedError(f"a SIGCONT waits at process {pid} ({proc.name(pid)}), which blocks it")
        connections = proc.connections(tree, self._devices.unavailable)
        if why := connections.refusal(is_outside_closed):
            raise ImageRefusedError(why)
        return bool(connections.tcp)

    def _facts(self, proc: UnitProc, root: int, unit: UnitProcesses, closes: bool) -> ImageFacts:
        tree = proc.tree(root)
        files = proc.open_files(tree)
        ranks = [
            ImagedRank(rank, inside, _logs_of(proc, inside, files))
            for rank, inside in ((rank, pid_inside(pid)) for rank, pid in unit.ranks.items())
        ]
        logs = {path for rank in ranks for path in rank.logs} or set(_logs_of(proc, root, files))
        return ImageFacts(
            root_pid=root,
            processes=len(tree),
            logs=tuple(files[path] for path in sorted(logs)),
            files=tuple(file for path, file in sorted(files.items()) if path not in logs),
            own_directories=unit.own_directories,
            machine=self._machine,
            is_outside_closed=closes,
            labels=unit.labels,
            ranks=tuple(ranks),
            owner=(os.geteuid(), os.getegid()) if unit.account is None else (unit.account.uid, unit.account.gid),
        )

    def _run(
        self, unit: UnitProcesses, arguments: Sequence[str], directory: Path, while_frozen: Callable[[], None]
    ) -> None:
        """Run a dump, inside a unit where there is one. `while_frozen` is called once all is written but the processes
        are frozen; if it raises, they go on. Raises ImageRefusedError, OSError, and what `while_frozen` raises."""
        account, mounts = unit.account, tuple[int, ...]()
        # CRIU runs it in the image's directory.
        (directory / _SCRIPT).write_text(_SCRIPT_TEXT)
        (directory / _SCRIPT).chmod(0o755)
        (directory / _DUMPED).unlink(missing_ok=True)
        enter = ["nsenter", "-t", str(unit.init_pid), "-m", "-p", "-i", "-n"] if unit.init_pid else []
        if account is not None and not unit.init_pid:
            mounts = (open_mounts(unit.root_pid),)
            enter = ["nsenter", f"--mount=/proc/self/fd/{mounts[0]}"]
        image = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        consent = os.open(directory / _CONSENT, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        fcntl.flock(consent, fcntl.LOCK_EX)
        # The image's directory by descriptor: the unit need not see it under its path.
        inside = [self.program, *arguments, *_unprivileged(account), "-D", f"/proc/self/fd/{image}"]
        process = None
        try:
            with (directory / _ERRORS).open("wb") as errors:
                if account is not None:
                    os.fchown(image, account.uid, account.gid)
                    os.fchown(consent, account.uid, account.gid)
                process = subprocess.Popen(
                    [*enter, *as_account(account, _TO_DUMP), *inside],
                    env=None if account is None else {"PATH": os.environ.get("PATH", os.defpath)},
                    pass_fds=(image, *mounts),
                    stdin=subprocess.DEVNULL,
                    stdout=errors,
                    stderr=errors,
                )
            while process.poll() is None and not (directory / _DUMPED).exists():
                time.sleep(_POLL_S)
            if process.poll() is None:
                while_frozen()
                os.write(consent, _YES.encode())
        finally:
            # Without the lock the script goes on: it ends the processes only where it finds a yes.
            for one in (consent, image, *mounts):
                os.close(one)
            code = 1 if process is None else process.wait()
        if code:
            text = reason_of(_text(directory / DUMP_LOG)) or _end(_text(directory / _ERRORS))
            raise ImageRefusedError(text or f"criu dump ended with code {code}")


def _unprivileged(account: Account | None) -> tuple[str, ...]:
    return () if account is None else ("--unprivileged",)


def _check_account(unit: UnitProcesses) -> None:
    """Raises ImageRefusedError for a process that an image of the account must not have."""
    if unit.account is not None and (why := foreign_process(unit.root_pid, unit.account)):
        raise ImageRefusedError(why)


def _await_no_tracer(pids: Iterable[int]) -> None:
    """Wait for a dead daemon's dump, which is about to let the processes go on. CRIU refuses traced ones."""
    deadline = time.monotonic() + _TRACER_S
    while any(map(tracer_of, pids)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _logs_of(proc: UnitProc, pid: int, files: Mapping[str, OpenFile]) -> tuple[str, ...]:
    """Return the files behind descriptors 1 and 2 of a process, once each."""
    descriptors = proc.descriptors(pid)
    return tuple(sorted({path for number in (1, 2) if (path := descriptors.get(number, "")) in files}))


def _options(closes: bool) -> tuple[str, ...]:
    return ("--tcp-close" if closes else "--tcp-established", *_COMMON)


# Of the kernel's flags of a processor, those of instructions that programs use and of state that they have.
_INSTRUCTIONS = re.compile(
    r"sse|ssse|avx|amx|aes|vaes|pclmul|vpclmul|bmi|fma|f16c|adx|sha|gfni|popcnt|movbe|movdir|lzcnt|abm|rdrand|rdseed|"
    r"rdpid|rdtscp|xsave|fxsr|mmx|cx16|lahf|clwb|clflush|pku|fsgsbase|serialize|waitpkg|tbm|xop|3dnow|rtm|erms|fsrm"
)


def cpu_flags() -> tuple[str, ...]:
    """Return the instructions of this processor, by the kernel's names."""
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return tuple(sorted(filter(_INSTRUCTIONS.match, value.split())))
        if name.strip() == "Features":
            return tuple(sorted(value.split()))
    return ()


# An account that has nothing, by which CRIU is tried.
_NO_ACCOUNT = Account("none", 65534, 65534, (65534,), "/")


def choose_images(
    setting: str = "", devices: DeviceState | None = None, *, are_accounts_switched: bool = False
) -> ProcessImages:
    """Find and probe CRIU. `setting`: its path, "none", or empty: on the path, else beside this interpreter. `devices`:
    what saves state on GPUs, if any. `are_accounts_switched`: it is to run as other accounts. Blocks for a second at
    most, where the kernel answers."""
    if setting == "none":
        return ProcessImages("not wanted")
    program = setting or shutil.which("criu") or shutil.which("criu", path=str(Path(sys.executable).parent)) or ""
    if not program:
        return ProcessImages("no CRIU found; make criu fetches it, or give --criu its path")
    tools = ("nsenter", "flock", *(("setpriv",) if are_accounts_switched else ()))
    missing = next((tool for tool in tools if shutil.which(tool) is None), "")
    if missing:
        return ProcessImages(f"no {missing} on the path (Debian: util-linux)")
    code, text = _output([program, "--version"])
    match = re.search(r"Version: *([\d.]+)", text)
    if code or match is None:
        return ProcessImages(f"{program} --version answers {_end(text) or 'nothing'}")
    if int(match.group(1).split(".")[0]) < LEAST_VERSION:
        return ProcessImages(f"{program} is CRIU {match.group(1)}; {LEAST_VERSION} is the oldest that will do")
    account = _NO_ACCOUNT if are_accounts_switched else None
    code, text = _output([*as_account(account, _TO_DUMP), program, "check", *_unprivileged(account)])
    if code:
        is_root = os.geteuid() == 0
        why = reason_of(text) or _end(text)
        return ProcessImages(why if is_root else f"the daemon is not root ({why})")
    return CriuImages(program, match.group(1), devices)


def _output(command: Sequence[str]) -> tuple[int, str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, errors="replace", check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, os_failure(error)
    return done.returncode, done.stdout + done.stderr


def _end(text: str) -> str:
    """Return the end of an output, on one line."""
    return " ".join(text.split())[-200:]


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# -- reasons in plain words for what CRIU writes to its log ----------------------------------------------------------

_LINE = re.compile(r"^(?:\(\s*[\d.]+\)\s*)?(?:\s*\d+:\s*)?Error \(([^)]*)\):\s*(.*)$")

PORT_IN_USE = "a network port of the image is in use on this node"

# What a message of CRIU means, most telling first. Named groups of the pattern are put into the text.
_MEANINGS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (r"Can't bind inet socket .*Address already in use|Can't connect inet socket", PORT_IN_USE),
        (r"io_uring", "a process uses io_uring, which cannot be saved"),
        (r"Connected TCP socket", "a process has an open TCP connection"),
        (r"External socket is used", "a process is connected to a program outside the job"),
        (
            r"[Pp]acket socket|[Nn]etlink|[Uu]nsupported socket|Unsupported proto",
            "a process has an unusual kind of socket",
        ),
        (
            r"ghost file (?P<path>\S+) of (?P<size>\d+) size",
            "{path}, removed and still open, has {size} bytes: too many",
        ),
        (r"Can't .*?(?P<path>/dev/nvidia[^\s)]*)", "a process still uses the GPU through {path}"),
        (
            r"Can't dump file .* of that type|[Cc]haracter device|[Bb]lock device",
            "a process uses a device or file of a kind that cannot be saved",
        ),
        (
            r"File (?P<path>\S+) has bad size (?P<found>\d+) \(expect (?P<wanted>\d+)\)",
            "/{path} has {found} bytes; it had {wanted} when the image was made",
        ),
        (
            r"File (?P<path>\S+) has bad (?:build-ID|mode|checksum)",
            "/{path} is another file than when the image was made",
        ),
        (r"Can't open file (?P<path>\S+) on restore", "/{path} cannot be opened"),
        (
            r"Can't fork for \d+: File exists|[Pp]id \d+ (?:mismatch|do not match)",
            "a process id of the image is in use",
        ),
        (
            r"CPU capabilities do not match|CPU .*not (?:compatible|match)",
            "the image needs a processor with other instructions",
        ),
        (
            r"get rlimit .*not permitted",
            "the daemon lacks CAP_SYS_RESOURCE, which images of other users' processes need",
        ),
        (r"No space left on device", "there is no space left for the image"),
        (r"Cannot allocate memory", "there is not enough memory"),
        (r"[Ff]ile lock", "a process holds a file lock that cannot be saved"),
        (r"PTRACE_SEIZE|[Pp]trace|Unable to (?:attach|seize)", "a process is being debugged, or may not be traced"),
    )
)


# Messages that say nothing of the cause.
_CONSEQUENCES = re.compile(
    r"rlimit:|Dumping FAILED|Dump .*failed|Restoring FAILED|exited, status|exited with|action scripts? failed|^\s*$"
    r"|Can't dump (?:task|processes)|Dump (?:core|files) \(pid|Collect mappings|Can't open vma|cgroupd: recv req error"
)


def errors_of(log: str) -> tuple[str, ...]:
    """Return the messages of the log's error lines that may name a cause, in order."""
    found = (match.group(2).strip() for line in log.splitlines() if (match := _LINE.match(line)))
    return tuple(message for message in found if not _CONSEQUENCES.search(message))


def reason_of(log: str) -> str:
    """Return why a dump or restore failed, from its log; empty if the log names no error.

    A known message is put in plain words, with CRIU's own behind it. Of several known ones the first in the log counts,
    as those after it tend to follow from it."""
    messages = errors_of(log)
    for message in messages:
        for pattern, text in _MEANINGS:
            if (match := pattern.search(message)) is not None:
                named = {name: value or "" for name, value in match.groupdict().items()}
                return f"{text.format(**named)} (CRIU: {message})"
    return f"CRIU: {messages[-1]}" if messages else ""
