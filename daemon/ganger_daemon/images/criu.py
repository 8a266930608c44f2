"""Images of processes by CRIU (Checkpoint/Restore In Userspace), version 4 or newer.

CRIU runs inside the unit, so that no namespace becomes part of the image. It freezes the processes, writes them, and
waits for this module in its post-dump script before it ends or continues them: meanwhile the unit's own directories are
packed, from the same moment as the memory. The script waits for a lock, which the kernel frees if the daemon dies; then
it finds no consent, and the processes go on.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ganger_daemon.images.contract import (
    PID_FILE,
    ImageFacts,
    ImageRefusedError,
    Machine,
    UnitProcesses,
    read_facts,
    write_facts,
)
from ganger_daemon.images.own_files import fill_directories, pack_directories
from ganger_daemon.images.process_tree import UnitProc, pid_inside
from ganger_daemon.images.reasons import reason_of

LEAST_VERSION = 4
PROBE_S = 20.0
DUMP_LOG, RESTORE_LOG = "dump.log", "restore.log"
_CONSENT, _DUMPED, _ERRORS = "consent", "dumped", "criu.stderr"
_POLL_S = 0.001
# Removed files that are still open are part of the image, whatever their size: data loaders share batches in them.
_GHOST_LIMIT = "64G"
_SCRIPT = "post-dump.sh"
_SCRIPT_TEXT = f"""#!/bin/sh
[ "$CRTOOLS_SCRIPT_ACTION" = post-dump ] || exit 0
: > {_DUMPED}
exec flock -s {_CONSENT} grep -q yes {_CONSENT}
"""
_COMMON = ("--tcp-established", "--file-locks", "--manage-cgroups=ignore", "--link-remap", "-v2")


class NoImages:
    """No images on this node, for one reason."""

    def __init__(self, reason: str) -> None:
        self.unavailable = reason

    @property
    def capability(self) -> str:
        return f"none: {self.unavailable}"

    def dump(
        self, unit: UnitProcesses, directory: Path, *, goes_on: bool, is_outside_closed: bool = False
    ) -> ImageFacts:
        raise ImageRefusedError(self.unavailable)

    def fill(self, init_pid: int, directory: Path) -> None:
        raise ImageRefusedError(self.unavailable)

    def restore_arguments(self, directory: Path, logs: Mapping[str, int]) -> list[str]:
        raise ImageRefusedError(self.unavailable)

    def restore_failure(self, directory: Path) -> str:
        return self.unavailable


class CriuImages:
    """Images by one CRIU program, which has been probed."""

    unavailable = ""

    def __init__(self, program: str, version: str) -> None:
        self._program = program
        self._machine = Machine(platform.machine(), cpu_flags(), platform.release(), f"criu {version}")

    @property
    def capability(self) -> str:
        return self._machine.tool

    def dump(
        self, unit: UnitProcesses, directory: Path, *, goes_on: bool, is_outside_closed: bool = False
    ) -> ImageFacts:
        try:
            root = pid_inside(unit.root_pid)
            facts = self._facts(unit, root)
        except OSError as error:
            raise ImageRefusedError(f"the job's processes are gone: {error}") from error
        image = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            arguments = ["dump", "-t", str(root), "-o", DUMP_LOG, *_COMMON, "--network-lock", "skip"]
            arguments += ["--ghost-limit", _GHOST_LIMIT, "--action-script", f"./{_SCRIPT}"]
            arguments += ["--leave-running"] if goes_on else []
            arguments += ["--tcp-close"] if is_outside_closed else []
            # By descriptor: the unit need not see the directory under its path.
            inside = [self._program, *arguments, "-D", f"/proc/self/fd/{image}"]
            self._run(["nsenter", "-t", str(unit.init_pid), "-m", "-p", "-i", *inside], unit, directory, image)
        finally:
            os.close(image)
        size = sum(file.stat().st_size for file in image_files(directory))
        facts = msgspec.structs.replace(facts, size_bytes=size)
        write_facts(directory, facts)
        return facts

    def fill(self, init_pid: int, directory: Path) -> None:
        # CRIU writes no file that is there already.
        (directory / PID_FILE).unlink(missing_ok=True)
        fill_directories(init_pid, read_facts(directory).own_directories, directory)

    def restore_arguments(self, directory: Path, logs: Mapping[str, int]) -> list[str]:
        given = [option for path, fd in logs.items() for option in ("--inherit-fd", f"fd[{fd}]:{path.lstrip('/')}")]
        placed = ["-D", str(directory), "-o", RESTORE_LOG, "--pidfile", str(directory / PID_FILE)]
        return [self._program, "restore", *placed, "--restore-detached", "--restore-sibling", *_COMMON, *given]

    def restore_failure(self, directory: Path) -> str:
        return reason_of(_text(directory / RESTORE_LOG)) or "CRIU failed without naming an error"

    def _facts(self, unit: UnitProcesses, root: int) -> ImageFacts:
        """Raises OSError, and ImageRefusedError for processes that would be left out of the image."""
        proc = UnitProc(unit.init_pid)
        tree = proc.tree(root)
        for pid in proc.pids():
            if pid not in tree:
                raise ImageRefusedError(f"process {pid} ({proc.name(pid)}) has left the job's process tree")
        files = proc.open_files(tree)
        descriptors = proc.descriptors(root)
        logs = {path for number in (1, 2) if (path := descriptors.get(number, "")) in files}
        return ImageFacts(
            root_pid=root,
            processes=len(tree),
            logs=tuple(files[path] for path in sorted(logs)),
            files=tuple(file for path, file in sorted(files.items()) if path not in logs),
            own_directories=unit.own_directories,
            machine=self._machine,
        )

    def _run(self, command: Sequence[str], unit: UnitProcesses, directory: Path, image: int) -> None:
        """Run the dump, and pack the unit's own directories while its processes are frozen."""
        # CRIU runs it in the image's directory.
        (directory / _SCRIPT).write_text(_SCRIPT_TEXT)
        (directory / _SCRIPT).chmod(0o700)
        consent = os.open(directory / _CONSENT, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        trouble = ""
        try:
            fcntl.flock(consent, fcntl.LOCK_EX)
            with (directory / _ERRORS).open("wb") as errors:
                process = subprocess.Popen(
                    command, pass_fds=(image,), stdin=subprocess.DEVNULL, stdout=errors, stderr=errors
                )
            while process.poll() is None and not (directory / _DUMPED).exists():
                time.sleep(_POLL_S)
            if process.poll() is None:
                trouble = pack_directories(unit.init_pid, unit.own_directories, directory)
                os.write(consent, b"no\n" if trouble else b"yes\n")
        finally:
            os.close(consent)
        if process.wait():
            text = trouble or reason_of(_text(directory / DUMP_LOG)) or _text(directory / _ERRORS).strip()[-300:]
            raise ImageRefusedError(text or f"criu dump ended with code {process.returncode}")


def image_files(directory: Path) -> tuple[Path, ...]:
    """The files of an image but for its facts, by name."""
    return tuple(sorted(path for path in directory.iterdir() if path.suffix in (".img", ".tar")))


def cpu_flags() -> tuple[str, ...]:
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return tuple(sorted(value.split()))
    return ()


def choose_images(setting: str = "") -> CriuImages | NoImages:
    """Find and probe CRIU. `setting`: its path, "none", or empty: on the path, else beside this interpreter. Blocks
    for a second at most, where the kernel answers."""
    if setting == "none":
        return NoImages("not wanted")
    program = setting or shutil.which("criu") or shutil.which("criu", path=str(Path(sys.executable).parent)) or ""
    if not program:
        return NoImages("no CRIU found; make criu fetches it, or give --criu its path")
    missing = next((tool for tool in ("nsenter", "flock") if shutil.which(tool) is None), "")
    if missing:
        return NoImages(f"no {missing} on the path (Debian: util-linux)")
    code, text = _output([program, "--version"])
    match = re.search(r"Version: *([\d.]+)", text)
    if code or match is None:
        return NoImages(f"{program} --version answers {text.strip()[-200:]!r}")
    if int(match.group(1).split(".")[0]) < LEAST_VERSION:
        return NoImages(f"{program} is CRIU {match.group(1)}; {LEAST_VERSION} is the oldest that will do")
    code, text = _output([program, "check"])
    if code:
        is_root = os.geteuid() == 0
        why = reason_of(text) or text.strip()[-200:]
        return NoImages(why if is_root else f"the daemon is not root ({why})")
    return CriuImages(program, match.group(1))


def _output(command: Sequence[str]) -> tuple[int, str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, errors="replace", check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, done.stdout + done.stderr


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
