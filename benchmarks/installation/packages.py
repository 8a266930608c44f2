"""What machines are made of: a Debian with systemd and an ssh server, wheels, and a user's environment with PyTorch.

All of it is made once, in a directory that is kept between runs.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.installation.machines import DOMAIN, CheckError, run

ROOT: Final = Path(__file__).parents[2]
WHEELS: Final = "/srv/wheels"
SHARED: Final = "/shared"
ENVIRONMENT: Final = f"{SHARED}/env"
USER: Final = "ann"
_SUITE: Final = "bookworm"
_PACKAGES: Final = "systemd,systemd-sysv,dbus,python3,python3-venv,openssh-server,iproute2,procps,ca-certificates"
_TRAINING: Final = ("torch", "numpy", "scikit-learn")
_RELEASED: Final = re.compile(r"^## ([0-9]+\.[0-9]+\.[0-9]+) – [0-9]{4}-", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Supplies:
    """`base`: the root of every machine. `wheels`: packages, with `current` and `previous`, wheels of Ganger.
    `environment`: of the user. `previous_commit`: of which `previous` was built."""

    base: Path
    wheels: Path
    environment: Path
    current: str
    previous: str
    previous_commit: str

    @classmethod
    def read(cls, text: str) -> Supplies:
        """Read what `dataclasses.asdict` and JSON have made of one."""
        found: dict[str, Any] = json.loads(text)
        return cls(**found | {name: Path(found[name]) for name in ("base", "wheels", "environment")})


def previous_release() -> str:
    """Return the commit of the previous release: the last tag v*, else the commit that dated the changelog's newest
    released version. Raises CheckError in a checkout without history."""
    tag = subprocess.run(
        ("git", "-C", str(ROOT), "describe", "--tags", "--abbrev=0", "--match=v*"),
        capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip
    if tag:
        return run("git", "-C", str(ROOT), "rev-list", "-n1", tag).strip()
    line = f"## {newest_release((ROOT / 'CHANGELOG.md').read_text())} – "
    found = run("git", "-C", str(ROOT), "log", "--reverse", "--format=%H", f"-S{line}", "--", "CHANGELOG.md").split()
    if not found:
        raise CheckError(f"no commit of this checkout added {line!r} to CHANGELOG.md: fetch its history")
    return found[0]


def newest_release(changelog: str) -> str:
    """Return the newest version that a changelog dates. Raises CheckError."""
    if (released := _RELEASED.search(changelog)) is None:
        raise CheckError("CHANGELOG.md names no released version")
    return released[1]


def supplies(directory: Path) -> Supplies:
    """Make what is missing in the directory; the current wheel is built anew."""
    directory.mkdir(parents=True, exist_ok=True)
    commit = previous_release()
    wheels = directory / "wheels"
    wheels.mkdir(exist_ok=True)
    for old in wheels.glob("ganger-*.whl"):
        old.unlink()
    previous = _built_of_commit(commit, wheels)
    current = _built(ROOT, wheels)
    _download(wheels, current)
    base, environment = directory / "base", directory / "env"
    _make_base(base)
    _make_environment(base, wheels, environment)
    return Supplies(base, wheels, environment, f"{WHEELS}/{current}", f"{WHEELS}/{previous}", commit)


def _built(checkout: Path, wheels: Path) -> str:
    """Build the wheel of a checkout, and return its name."""
    with tempfile.TemporaryDirectory() as out:
        words = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out)
        done = subprocess.run(words, cwd=checkout, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise CheckError(f"cannot build the wheel of {checkout}: {done.stderr.strip()[-1000:]}")
        (made,) = Path(out).glob("*.whl")
        if (wheels / made.name).exists():
            raise CheckError(f"{made.name}: both releases have one version; raise it in pyproject.toml")
        shutil.copy(made, wheels)
        return made.name


def _built_of_commit(commit: str, wheels: Path) -> str:
    with tempfile.TemporaryDirectory() as checkout:
        packed = subprocess.run(("git", "-C", str(ROOT), "archive", commit), capture_output=True, check=True).stdout
        subprocess.run(("tar", "-x", "-C", checkout), input=packed, check=True)
        return _built(Path(checkout), wheels)


def _download(wheels: Path, current: str) -> None:
    """Fetch the packages that both releases and the user's environment need, for Python of the base."""
    wanted = (f"{wheels / current}[server,ssh]", *_TRAINING, "setuptools")
    ready = wheels / ".ready"
    # What Ganger requires may have changed since they were fetched.
    required = "".join((ROOT / name).read_text() for name in ("pyproject.toml", "constraints.txt"))
    if ready.exists() and ready.read_text() == required:
        return
    constraints = ("--constraint", str(ROOT / "constraints.txt"))
    run(sys.executable, "-m", "pip", "download", "--quiet", *constraints, "--dest", str(wheels), *wanted)
    ready.write_text(required)


def _make_base(base: Path) -> None:
    """Make a small Debian: with accounts, an ssh server that root of every machine may use, and no package index."""
    if (base / ".ready").exists():
        return
    shutil.rmtree(base, ignore_errors=True)
    mirror = "http://deb.debian.org/debian"
    run("debootstrap", "--variant=minbase", f"--include={_PACKAGES}", _SUITE, str(base), mirror)
    (base / "etc" / "pip.conf").write_text(f"[global]\nno-index = true\nfind-links = {WHEELS}\n")
    for directory in (WHEELS, SHARED):
        (base / directory.lstrip("/")).mkdir(parents=True, exist_ok=True)
    run("chroot", str(base), "useradd", "--create-home", "--uid", "1001", "--shell", "/bin/bash", USER)
    ssh = base / "root" / ".ssh"
    ssh.mkdir(mode=0o700, exist_ok=True)
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(ssh / "id_ed25519"))
    shutil.copy(ssh / "id_ed25519.pub", ssh / "authorized_keys")
    key = (base / "etc" / "ssh" / "ssh_host_ed25519_key.pub").read_text()
    (ssh / "known_hosts").write_text(f"*.{DOMAIN} {key}")
    # These timers would change files during the check.
    run("chroot", str(base), "systemctl", "mask", "--quiet", "apt-daily.timer", "apt-daily-upgrade.timer",
        "dpkg-db-backup.timer", "systemd-tmpfiles-clean.timer", "fstrim.timer", "e2scrub_all.timer")  # fmt: skip
    (base / ".ready").touch()


def _make_environment(base: Path, wheels: Path, environment: Path) -> None:
    """Make the user's environment with PyTorch, at the path that the machines see it."""
    if (environment / ".ready").exists():
        return
    shutil.rmtree(environment, ignore_errors=True)
    environment.mkdir()
    install = f"python3 -m venv {ENVIRONMENT} && {ENVIRONMENT}/bin/pip install --quiet {' '.join(_TRAINING)}"
    binds = (f"--bind-ro={wheels}:{WHEELS}", f"--bind={environment}:{ENVIRONMENT}")
    run("systemd-nspawn", "--quiet", f"--directory={base}", "--volatile=overlay", "--register=no", "--keep-unit",
        "--private-network", *binds, "sh", "-c", install)  # fmt: skip
    (environment / ".ready").touch()
