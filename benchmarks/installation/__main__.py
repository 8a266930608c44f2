"""The command of `make install-check`: two fresh machines become a cluster, and are as before again.

The commands that it runs are those of docs/how-to/operating.md. It prints one JSON object.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import click

from benchmarks.installation.machines import (
    CheckError,
    Machine,
    eventually,
    hosts_file,
    make_network,
    remove_control_groups,
    run,
)
from benchmarks.installation.packages import ENVIRONMENT, ROOT, SHARED, USER, Supplies, supplies
from benchmarks.machine import machine as this_machine

_INSIDE: Final = "GANGER_INSTALL_CHECK"
_NEEDED: Final = ("debootstrap", "systemd-nspawn", "unshare", "nsenter", "ip", "ssh-keygen")
PAGE: Final = ROOT / "docs" / "how-to" / "operating.md"
_OWN: Final = "/opt/ganger-master"
_STORAGE: Final = f"{SHARED}/ganger"
_NODE_FLAGS: Final = "--flag=--virtual-gpus=2"
_PORT: Final = 7070
_RUNS_S: Final = 120.0


@dataclass(slots=True)
class Check:
    """The two machines: of master and first node, and of the second node; and what was measured."""

    supplies: Supplies
    first: Machine
    second: Machine
    ganger: str = f"{_OWN}/bin/ganger"
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def machines(self) -> tuple[Machine, Machine]:
        return self.first, self.second

    @property
    def hosts(self) -> str:
        return " ".join(machine.host for machine in self.machines)

    @property
    def master(self) -> str:
        return f"{self.first.host}:{_PORT}"

    def as_operator(self, words: str) -> str:
        """Run a command of the operator on the first machine, and return what it printed."""
        return self.on_first(f"{self.ganger} {words}")

    def on_first(self, script: str) -> str:
        """Run a script on the first machine, as root and operator, and return what it printed."""
        path = f"PATH={Path(self.ganger).parent}:$PATH"
        return self.first(f"export {path} GANGER_MASTER={self.master} GANGER_TLS=/etc/ganger/operator; {script}")

    def as_user(self, words: str) -> str:
        """Run a command of the user on the first machine."""
        own = f"GANGER_MASTER={self.master} GANGER_TLS=~/.config/ganger/tls"
        return self.first(f"cd {SHARED}/{USER} && {own} {self.ganger} {words}", user=USER)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.figures[f"{name}_s"] = round(time.monotonic() - began, 1)
        say(f"{name}: {self.figures[f'{name}_s']} s")


def page_commands(block: str) -> list[str]:
    """Return the commands of a block of the how-to page, one a line. Raises CheckError."""
    marked = PAGE.read_text().partition(f"<!-- {block} -->")[2]
    if not marked:
        raise CheckError(f"{PAGE} has no commands marked {block!r}")
    text = marked.partition("```console\n")[2].partition("```")[0].replace("\\\n", "")
    return [line.removeprefix("$ ") for line in text.splitlines()]


def _exchanged(command: str, wheel: str) -> str:
    """Return a command of the page for these machines: with a wheel instead of a package index, virtual GPUs, and no
    questions."""
    for written, meant in (
        ("'ganger[", f"--quiet '{wheel}["),
        ("cluster add", f"cluster add --wheel {wheel} {_NODE_FLAGS}"),
        ("cluster remove", "cluster remove --yes"),
        ("cluster delete", "cluster delete --yes"),
    ):
        command = command.replace(written, meant)
    return command


def perform(check: Check, block: str, run_on: Callable[[str], str]) -> None:
    """Perform the commands of a block, one after the other, and time each."""
    for number, written in enumerate(page_commands(block), start=1):
        command = _exchanged(written, check.supplies.current)
        with check.timed(f"{block.replace(' ', '_')}_{number}"):
            say(f"{command}\n{run_on(command)}".strip())


def say(text: str) -> None:
    print(f"install-check: {text}", file=sys.stderr, flush=True)


def expect(is_so: bool, what: str) -> None:
    """Raise CheckError unless it is so."""
    if not is_so:
        raise CheckError(what)
    say(f"{what}: yes")


def install(check: Check) -> None:
    """Perform the three commands of the how-to page, and look at what they made."""
    perform(check, "three commands", check.first)
    check.figures["three_commands_s"] = round(sum(v for k, v in check.figures.items() if k.startswith("three_")), 1)
    nodes = json.loads(check.as_operator("nodes --json"))["nodes"]
    expect([node["state"] for node in nodes] == ["READY", "READY"], "both nodes are ready")
    looks = "doctor --tls /etc/ganger/tls --storage " + _STORAGE
    say(check.as_operator(looks))
    say(check.second(f"/opt/ganger/bin/ganger {looks}"))
    say("`ganger doctor` finds nothing on either machine that must be mended")


def give_certificate(check: Check) -> None:
    """Let the operator issue a certificate to the user."""
    own = f"/home/{USER}/.config/ganger"
    check.first(
        f"mkdir -p {own} && {check.ganger} certs issue /etc/ganger/ca --role user --name {USER} --out {own}/tls"
        f" && chown -R {USER}: /home/{USER}/.config"
    )


def start_job(check: Check) -> str:
    """Start a job of the user with a rank on each node, and return its number once it trains."""
    words = f"submit --json --gpus 2 --nodes 2 --name both --directory {SHARED}/{USER}"
    script = f"{ENVIRONMENT}/bin/python plain.py --epochs 1000000 --losses losses"
    job = str(json.loads(check.as_user(f"{words} -- {script}"))["name"]).removeprefix("jobs/")
    try:
        eventually(lambda: len(steps_of(check)) > 20, "the job trains", _RUNS_S)
    except CheckError as error:
        told = check.as_user(f"why {job}") + check.as_user(f"logs {job}")
        raise CheckError(f"{error}: {told}") from error
    gang = json.loads(check.as_user(f"show --json {job}"))["gang"]
    expect(gang["phase"] == "RUNNING" and len(gang["claims"]) == 2, "a job runs on both nodes")
    return job


def steps_of(check: Check) -> list[int]:
    """Return the numbers of the steps that the job has made, as its script wrote them."""
    return [
        int(line.split()[0]) for line in check.first(f"cat {SHARED}/{USER}/losses 2>/dev/null || true").splitlines()
    ]


def end_job(check: Check, job: str) -> None:
    """End the job; each of its steps was made exactly once, by one attempt."""
    shown = json.loads(check.as_user(f"show --json {job}"))
    check.as_user(f"cancel {job}")
    check.first(f"GANGER_MASTER={check.master} GANGER_TLS=/etc/ganger/operator {check.ganger} wait {job} || true")
    steps = steps_of(check)
    check.figures["steps"] = len(steps)
    expect(shown["failures"] == 0, "the job had no failure")
    expect(steps == list(range(steps[0], steps[0] + len(steps))), f"{len(steps)} steps, none lost and none twice")
    check.first(f"rm -f {SHARED}/{USER}/losses")
    for machine in check.machines:
        # PyTorch made it, and it is the user's.
        machine("rm -rf /tmp/torchinductor_*")


def uninstall(check: Check, before: Mapping[str, set[str]]) -> None:
    """Remove nodes and master by the commands of the how-to page; both machines are as before."""
    perform(check, "remove", check.on_first)
    check.first(f"rm -rf {_STORAGE} /home/{USER}/.config")
    compare(check, before)


def compare(check: Check, before: Mapping[str, set[str]]) -> None:
    """Raise CheckError unless both machines are as they were before."""
    wrong = []
    for machine in check.machines:
        after = machine.listing()
        left, gone = sorted(after - before[machine.name]), sorted(before[machine.name] - after)
        wrong += [
            f"{machine.name}: {kind} {line}" for kind, lines in (("left", left), ("gone", gone)) for line in lines
        ]
    check.figures["left_over"] = len(wrong)
    expect(not wrong, "nothing is left, and nothing of others is gone" + "".join(f"\n  {line}" for line in wrong[:60]))


def story(directory: Path, made: Supplies) -> dict[str, Any]:
    """Do it all on two new machines, and return the figures."""
    first, second = Machine("m", 2, directory / "run" / "m"), Machine("n2", 3, directory / "run" / "n2")
    check = Check(made, first, second)
    shared = directory / "run" / "shared"
    shutil.rmtree(directory / "run", ignore_errors=True)
    (shared / USER).mkdir(parents=True)
    (shared / "env").mkdir()
    shutil.copy(ROOT / "examples" / "ddp" / "plain.py", shared / USER)
    os.chown(shared / USER, 1001, 1001)
    make_network()
    binds = {shared: SHARED, check.supplies.environment: ENVIRONMENT, check.supplies.wheels: "/srv/wheels"}
    try:
        with check.timed("boot"):
            for machine in check.machines:
                machine.boot(check.supplies.base, binds, hosts_file(check.machines))
        before = {machine.name: machine.listing() for machine in check.machines}
        install(check)
        give_certificate(check)
        job = start_job(check)
        end_job(check, job)
        uninstall(check, before)
    finally:
        for machine in check.machines:
            machine.power_off()
    return check.figures


@click.command()
@click.option("--directory", type=click.Path(path_type=Path, file_okay=False), default=ROOT / "build" / "installation")
def main(directory: Path) -> None:
    """Install and remove Ganger on two machines with a root file system and a systemd of their own.

    Needs root. DIRECTORY keeps the Debian and the packages that both start from.
    """
    if os.geteuid() != 0:
        raise click.ClickException("it makes machines: run it as root")
    if missing := [name for name in _NEEDED if shutil.which(name) is None]:
        raise click.ClickException(
            f"{', '.join(missing)}: apt-get install debootstrap systemd-container openssh-client"
        )
    directory = directory.absolute()
    if _INSIDE not in os.environ:
        # Mounts, network and processes of all that follows end with this process.
        made = json.dumps(asdict(supplies(directory)), default=str)
        words = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-m")
        own = ("benchmarks.installation", "--directory", str(directory))
        try:
            code = subprocess.run((*words, *own), env={**os.environ, _INSIDE: made}, cwd=ROOT, check=False).returncode
        finally:
            remove_control_groups()
            shutil.rmtree(directory / "run", ignore_errors=True)
        sys.exit(code)
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    try:
        figures = story(directory, Supplies.read(os.environ.pop(_INSIDE)))
    except CheckError as error:
        raise click.ClickException(str(error)) from error
    print(json.dumps({"name": "install-check", "figures": figures, "machine": this_machine()}))


if __name__ == "__main__":
    main()
