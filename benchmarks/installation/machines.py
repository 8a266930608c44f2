"""Machines with a root file system, a network and a systemd of their own, on this kernel: systemd-nspawn boots them.

They live in the namespaces of `__main__`, which end with it: nothing of them is left but their control groups, which
`remove_control_groups` removes from outside.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

BRIDGE: Final = "gangercheck0"
DOMAIN: Final = "lab"
_NETWORK: Final = "10.231.7"
_CGROUPS: Final = Path("/sys/fs/cgroup")
_CGROUP: Final = "ganger-install-check"
_BOOT_S: Final = 180.0
# Moves a shell into the control groups that come before "--", and runs what comes after it there.
_ENTER: Final = 'while test "$1" != --; do echo $$ >"$1/cgroup.procs" || exit 1; shift; done; shift; exec "$@"'
# State of the running system, not of an installation: the kernel's, and what services and logins write.
_SERVICES: Final = ("/run/systemd", "/run/log", "/run/user", "/run/motd.dynamic", "/var/log")
_NOT_COMPARED: Final = ("/proc", "/sys", "/dev/pts", "/srv/wheels", *_SERVICES)
# Programs that come and go by themselves.
_PASSING: Final = ("sshd", "sh", "bash", "find", "ps", "sed", "env", "sort", "systemd-tmpfile", "(sd-pam)", "systemd")

Found = TypeVar("Found")


class CheckError(Exception):
    """A command failed, or something is not as it should be; the message has the reason."""


@dataclass(slots=True)
class Machine:
    """A machine of this name; `number` is the last part of its address, and `directory` its own, here."""

    name: str
    number: int
    directory: Path
    _pid: int = 0
    _booted: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def host(self) -> str:
        return f"{self.name}.{DOMAIN}"

    @property
    def address(self) -> str:
        return f"{_NETWORK}.{self.number}"

    def boot(self, base: Path, shared: Mapping[Path, str], hosts: str) -> None:
        """Start systemd as process 1 of the machine, and wait until it has come up.

        base: the directory that its root is an overlay of. shared: directories here, and where the machine sees them.
        hosts: its /etc/hosts.
        """
        root, upper, work = (self.directory / part for part in ("root", "upper", "work"))
        for directory in (root, upper, work):
            directory.mkdir(parents=True, exist_ok=True)
        options = f"lowerdir={base},upperdir={upper},workdir={work}"
        run("mount", "-t", "overlay", "overlay", "-o", options, str(root))
        (root / "etc" / "hosts").write_text(hosts)
        (root / "etc" / "hostname").write_text(f"{self.name}\n")
        (root / "etc" / "machine-id").write_text(f"{self.number:032x}\n")
        binds = [f"--bind={here}:{there}" for here, there in shared.items()]
        words = (
            *("systemd-nspawn", "--quiet", f"--directory={root}", "--boot", f"--machine={self.name}"),
            *(f"--network-bridge={BRIDGE}", "--register=no", "--keep-unit", "--console=pipe", *binds),
        )
        groups = own_control_groups(self.name)
        with (self.directory / "console.log").open("wb") as console:
            self._booted = subprocess.Popen(
                ("sh", "-c", _ENTER, "sh", *map(str, groups), "--", *words),
                stdin=subprocess.DEVNULL, stdout=console, stderr=console,
            )  # fmt: skip
        self._pid = eventually(lambda: _child_of(self._booted.pid if self._booted else 0), f"{self.name} starts")
        state = "systemctl is-system-running --wait"
        eventually(lambda: self.try_(state).stdout.strip() in ("running", "degraded"), f"{self.name} boots")
        self(f"ip addr add {self.address}/24 dev host0 && ip link set host0 up")
        # Else the machine would see the control groups of version 1 without the right to use them.
        self("for g in /sys/fs/cgroup/*/; do mount -o remount,rw,bind $g 2>/dev/null || true; done")

    def try_(self, script: str, *, user: str = "root", timeout_s: float = 900.0) -> subprocess.CompletedProcess[str]:
        """Run a script of the shell on the machine, as a user."""
        path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        home = "/root" if user == "root" else f"/home/{user}"
        clean = ("env", "-i", path, f"HOME={home}", f"USER={user}", "LANG=C.UTF-8")
        shell = ("sh", "-c", script) if user == "root" else ("setpriv", f"--reuid={user}", f"--regid={user}",
                                                             "--init-groups", "sh", "-c", script)  # fmt: skip
        words = ("nsenter", f"--target={self._pid}", "--all", "--", *clean, *shell)
        return subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=False)

    def __call__(self, script: str, *, user: str = "root", timeout_s: float = 900.0) -> str:
        """Run a script, and return what it printed. Raises CheckError if it fails."""
        done = self.try_(script, user=user, timeout_s=timeout_s)
        if done.returncode != 0:
            said = f"{done.stdout}{done.stderr}".strip()[-2000:]
            raise CheckError(f"{self.name}: {script}: exit code {done.returncode}: {said}")
        return done.stdout

    def listing(self) -> set[str]:
        """Return what is there: files with owner and mode, accounts, units, mounts, processes, control groups."""
        pruned = " -o ".join(f"-path {path}" for path in _NOT_COMPARED)
        files = self(f"find / \\( {pruned} \\) -prune -o -printf 'file %p %y %U:%G %m\\n'")
        accounts = self("sed 's/^/account /' /etc/passwd; sed 's/^/group /' /etc/group")
        units = self("systemctl list-unit-files --no-legend --no-pager | awk '{print \"unit\", $1, $2}'")
        mounts = self("awk '{print \"mount\", $5}' /proc/self/mountinfo")
        processes = self("ps -e -o comm= | sed 's/^/process /'")
        groups = {
            f"cgroup {controller.name}/{path.relative_to(group)}"
            for controller, group in zip(_controllers(), own_control_groups(self.name), strict=True)
            for path in group.rglob("*")
            # Those below are the service manager's own.
            if path.is_dir() and "ganger" in path.name
        }
        lines = {line for text in (files, accounts, units, mounts, processes) for line in text.splitlines()}
        return groups | {line for line in lines if line.removeprefix("process ") not in _PASSING}

    def power_off(self) -> None:
        """Shut the machine down."""
        if self._booted is not None:
            self.try_("systemctl poweroff")
            try:
                self._booted.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self._booted.kill()
                self._booted.wait()


def run(*words: str) -> str:
    """Run a command here. Raises CheckError if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CheckError(f"{shlex.join(words)}: {(done.stderr or done.stdout).strip()[-1000:]}")
    return done.stdout


def make_network() -> None:
    """Make the bridge that the machines are on. It has no way to anywhere else."""
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "addr", "add", f"{_NETWORK}.1/24", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")


def own_control_groups(name: str) -> list[Path]:
    """Return the control groups of a machine, one of each hierarchy that is mounted here; they are made."""
    groups = []
    for controller in _controllers():
        group = controller / _CGROUP / name
        for made in (group.parent, group):
            if not made.exists():
                made.mkdir()
                for file in ("cpuset.cpus", "cpuset.mems"):
                    if (made / file).exists():
                        (made / file).write_text((made.parent / file).read_text())
        groups.append(group)
    return groups


def remove_control_groups() -> None:
    """Remove the control groups of all machines, once their processes have ended."""
    for controller in _controllers():
        eventually(partial(_is_removed, controller / _CGROUP), f"{controller / _CGROUP} is empty")


def _is_removed(top: Path) -> bool:
    """Remove a control group and all below it; False while a process is in one."""
    try:
        for directory, _, _ in os.walk(top, topdown=False):
            os.rmdir(directory)
    except OSError:
        return False
    return True


def _controllers() -> list[Path]:
    """Return the mounted hierarchies: the root of version 2, or each one of version 1 and the unified one."""
    if (_CGROUPS / "cgroup.procs").exists():
        return [_CGROUPS]
    return sorted(path for path in _CGROUPS.iterdir() if (path / "cgroup.procs").exists() and not path.is_symlink())


def _child_of(pid: int) -> int:
    """Return the first child of a process; zero: it has none."""
    try:
        return int((Path(f"/proc/{pid}/task/{pid}/children").read_text().split() or ["0"])[0])
    except OSError:
        return 0


def eventually(look: Callable[[], Found], what: str, limit_s: float = _BOOT_S) -> Found:
    """Look again and again until something is found. Raises CheckError after `limit_s`."""
    end = time.monotonic() + limit_s
    while not (found := look()):
        if time.monotonic() > end:
            raise CheckError(f"{what}: not within {limit_s:g} s")
        time.sleep(0.1)
    return found


def hosts_file(machines: Sequence[Machine]) -> str:
    """Return /etc/hosts of all machines."""
    return "".join(_host_lines(machines))


def _host_lines(machines: Sequence[Machine]) -> Iterator[str]:
    yield "127.0.0.1 localhost\n"
    for machine in machines:
        yield f"{machine.address} {machine.host} {machine.name}\n"
