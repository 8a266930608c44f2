"""The command of `make install-check`: two fresh machines become a cluster, and are as before again; then a cluster of
the previous release is upgraded under its jobs.

The commands that it runs are those of docs/how-to/operating.md. It prints one JSON object.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
_NODE: Final = "/opt/ganger"
_UNITS: Final = "/etc/systemd/system"
_STORAGE: Final = f"{SHARED}/ganger"
_NODE_FLAGS: Final = "--flag=--virtual-gpus=2"
_PORT: Final = 7070
_RUNS_S: Final = 120.0
_PARTS: Final = ("install", "upgrade")


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

    def is_answering(self) -> bool:
        """Whether the master answers the operator."""
        own = f"GANGER_MASTER={self.master} GANGER_TLS=/etc/ganger/operator"
        return self.first.try_(f"{own} {self.ganger} nodes").returncode == 0

    def ready_nodes(self) -> list[str]:
        """Return the names of the nodes that are ready."""
        nodes = json.loads(self.as_operator("nodes --json"))["nodes"]
        return sorted(node["name"] for node in nodes if node["state"] == "READY")

    def shown(self, job: str) -> dict[str, Any]:
        """Return what is known of a job."""
        found: dict[str, Any] = json.loads(self.as_user(f"show --json {job}"))
        return found

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
    expect(len(check.ready_nodes()) == 2, "both nodes are ready")
    looks = "doctor --tls /etc/ganger/tls --storage " + _STORAGE
    say(check.as_operator(looks))
    say(check.second(f"/opt/ganger/bin/ganger {looks}"))
    say("`ganger doctor` finds nothing on either machine that must be mended")


def mend(check: Check) -> None:
    """Break the second node in some ways, and let `ganger doctor --fix` mend it."""
    left, unit = "/run/ganger/0123456789ab", f"{_UNITS}/ganger-daemon.service"
    check.second(
        f"systemctl disable --quiet --now ganger-daemon && sed -i /^Delegate/d {unit} && systemctl daemon-reload"
        f" && chmod 0644 /etc/ganger/tls/key.pem && mkdir {left} && touch -d '1 hour ago' {left}"
    )
    own = f"GANGER_MASTER={check.master} {_NODE}/bin/ganger doctor --tls /etc/ganger/tls"
    before = check.second.try_(own)
    expect(before.returncode == 4 and before.stdout.count("   *  ->") == 5, f"five faults are found:\n{before.stdout}")
    say(check.second(f"{own} --fix"))
    eventually(lambda: len(check.ready_nodes()) == 2, "both nodes are ready")
    say("`ganger doctor --fix` has mended them")


def start_own_unit(check: Check) -> None:
    """Start a master by what `ganger unit` prints, whose directories are missing, and remove it again."""
    unit, state = f"{_UNITS}/ganger-alone.service", "/var/lib/ganger/alone"
    check.second(f"{_NODE}/bin/ganger unit master -- --state-dir {state} --storage {state}-storage > {unit}")
    # It returns once the master has reported that it is ready.
    check.second("systemctl daemon-reload && systemctl start ganger-alone", timeout_s=60.0)
    check.second(f"systemctl stop ganger-alone; rm -r {unit} {state} {state}-storage && systemctl daemon-reload")
    say("a unit of `ganger unit master` starts where none of its directories exists")


def give_certificate(check: Check) -> None:
    """Let the operator issue a certificate to the user, by the commands of either release."""
    own = f"/home/{USER}/.config/ganger"
    check.first(
        f"mkdir -p {own} && {check.ganger} certs issue /etc/ganger/ca --role user --name {USER} --out {own}/tls"
        f" && chown -R {USER}: /home/{USER}/.config"
    )


def submit(check: Check, words: str) -> str:
    """Submit a job of the user, and return its number."""
    submitted = json.loads(check.as_user(f"submit --json --directory {SHARED}/{USER} {words}"))
    return str(submitted["name"]).removeprefix("jobs/")


def start_job(check: Check, name: str = "both", nodes: int = 2) -> str:
    """Start a job of the user with a rank on each node, and return its number once it trains."""
    script = f"{ENVIRONMENT}/bin/python plain.py --epochs 1000000 --losses {name}"
    job = submit(check, f"--gpus {nodes} --nodes {nodes} --name {name} -- {script}")
    await_steps(check, job, name, 20)
    gang = check.shown(job)["gang"]
    expect(gang["phase"] == "RUNNING" and len(gang["claims"]) == nodes, f"the job {name!r} runs on nodes: {nodes}")
    return job


def await_steps(check: Check, job: str, name: str, steps: int) -> None:
    """Wait until a job has made more than so many steps. Raises CheckError with what is known of it."""
    try:
        eventually(lambda: len(steps_of(check, name)) > steps, f"the job {name!r} trains", _RUNS_S)
    except CheckError as error:
        told = "".join([check.as_user(f"{command} {job}") for command in ("why", "show", "history", "logs")])
        raise CheckError(f"{error}: {told}") from error


def steps_of(check: Check, name: str = "both") -> list[int]:
    """Return the numbers of the steps that a job has made, as its script wrote them."""
    written = check.first(f"cat {SHARED}/{USER}/{name} 2>/dev/null || true")
    return [int(line.split()[0]) for line in written.splitlines()]


def end_job(check: Check, job: str, name: str = "both") -> None:
    """End the job; each of its steps was made exactly once, by one attempt."""
    shown = check.shown(job)
    check.as_user(f"cancel {job}")
    check.first(f"GANGER_MASTER={check.master} GANGER_TLS=/etc/ganger/operator {check.ganger} wait {job} || true")
    steps = steps_of(check, name)
    check.figures[f"steps_{name}"] = len(steps)
    expect(shown["failures"] == 0, f"the job {name!r} had no failure")
    expect(steps == list(range(steps[0], steps[0] + len(steps))), f"{len(steps)} steps, none lost and none twice")
    check.first(f"rm -f {SHARED}/{USER}/{name}")
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


# -- upgrade -----------------------------------------------------------------------------------------------------------


def _unit(command: str) -> str:
    """Return a unit as the how-to page of 0.2.0 asks for one: it has none."""
    service = f"[Service]\\nExecStart={command}\\nKillMode=process\\nRestart=always\\nDelegate=yes\\n"
    return f"{service}[Install]\\nWantedBy=multi-user.target\\n"


def install_previous(check: Check) -> None:
    """Make a cluster of the previous release by the steps of its own how-to page, in units of the operator's own."""
    wheel, (first, second) = check.supplies.previous, check.machines
    for machine, places in ((first, (_OWN, _NODE)), (second, (_NODE,))):
        for place in places:
            machine(f"python3 -m venv {place} && {place}/bin/pip install --quiet '{wheel}'")
    issue = f"{check.ganger} certs issue /etc/ganger/ca --role"
    first(
        f"mkdir -p /etc/ganger && {check.ganger} certs init /etc/ganger/ca"
        f" && {issue} master --name m --host {first.host} --out /etc/ganger/master"
        f" && {issue} daemon --name m --host {first.host} --out /etc/ganger/tls"
        f" && {issue} daemon --name n2 --host {second.host} --out /etc/ganger/n2"
        f" && {issue} operator --name root --out /etc/ganger/operator"
        f" && ssh {second.host} mkdir -p /etc/ganger && scp -qpr /etc/ganger/n2 {second.host}:/etc/ganger/tls"
    )
    state = "/var/lib/ganger"
    master = f"{_OWN}/bin/ganger master --state-dir {state}/master --storage {_STORAGE} --tls /etc/ganger/master"
    first(f"printf '{_unit(f'{master} --listen {check.master}')}' > {_UNITS}/ganger-master.service")
    first("systemctl daemon-reload && systemctl enable --quiet --now ganger-master")
    eventually(check.is_answering, "the previous master answers")
    for machine in check.machines:
        daemon = (
            f"{_NODE}/bin/ganger daemon --state-dir {state}/daemon --node {machine.name} --master {check.master}"
            f" --listen {machine.host} --tls /etc/ganger/tls --storage {_STORAGE} --virtual-gpus 2"
        )
        machine(f"printf '{_unit(daemon)}' > {_UNITS}/ganger-daemon.service")
        machine("systemctl daemon-reload && systemctl enable --quiet --now ganger-daemon")
    eventually(lambda: len(check.ready_nodes()) == 2, "both nodes are ready")


def upgrade(check: Check) -> None:
    """Upgrade the master, then the daemons, by the commands of the how-to page, with jobs that run, wait and ended."""
    ended = submit(check, "--gpus 1 -- true")
    check.first(f"GANGER_MASTER={check.master} GANGER_TLS=/etc/ganger/operator {check.ganger} wait {ended}")
    running = {name: start_job(check, name, nodes) for name, nodes in (("both", 2), ("one", 1))}
    waiting = submit(check, "--gpus 4 -- true")
    jobs = (ended, *running.values(), waiting)
    before = {job: check.shown(job) for job in jobs}
    versions = [check.as_operator("version")]
    for number, command in enumerate(page_commands("upgrade"), start=1):
        written = _exchanged(command, check.supplies.current)
        steps = {name: len(steps_of(check, name)) for name in running}
        is_of_nodes = f"{_NODE}/bin" in command
        with check.timed(f"upgrade_{number}"):
            for run_on in (check.first, check.second) if is_of_nodes else (check.on_first,):
                say(f"{written}\n{run_on(written)}".strip())
            eventually(check.is_answering, "the master answers")
            eventually(lambda: len(check.ready_nodes()) == 2, "both nodes are ready")
        versions.append(check.as_operator("version"))
        for name, job in running.items():
            await_steps(check, job, name, steps[name] + 20)
    old, new = (name.split("-")[1] for name in (check.supplies.previous, check.supplies.current))
    said = "\n".join(versions)
    say(said)
    # Its command line lists no daemons.
    expect(f"client {old}\nmaster {old}\n" in versions[0], f"all began as {old}")
    expect(f"master {new}\ndaemon {old} on 2 nodes (m n2)" in said, "`ganger version` shows the skew")
    expect(f"master {new}\ndaemon {new} on 2 nodes\n" in versions[-1], f"all ended as {new}, without a skew")
    after = {job: check.shown(job) for job in jobs}
    same = ("uid", "user", "state", "create_time", "failures", "preemptions")
    differ = [f"{job} {key}" for job in jobs for key in same if before[job][key] != after[job][key]]
    expect(not differ, "each job is as it was in the database of the previous release" + " ".join(differ))
    suspend_and_resume(check, running["both"])
    for name, job in running.items():
        end_job(check, job, name)
    check.as_operator(f"wait {waiting}")
    expect(check.shown(waiting)["state"] == "SUCCEEDED", "the job that waited has run")


def suspend_and_resume(check: Check, job: str) -> None:
    """Suspend and resume a job whose ranks are of the previous release, by daemons of the current one."""
    check.as_user(f"suspend --level offload {job}")
    rests_at = len(steps_of(check))
    check.as_user(f"resume {job}")
    await_steps(check, job, "both", rests_at + 20)


def undo_previous(check: Check, before: Mapping[str, set[str]]) -> None:
    """Remove units of the operator's own by the commands of the how-to page; both machines are as before."""
    for command in page_commands("remove by hand"):
        for machine in (check.first,) if "ganger-master.service" in command else check.machines:
            say(f"{command}\n{machine(command)}".strip())
    check.first(f"rm -rf {_STORAGE} /home/{USER}/.config")
    compare(check, before)


def story(directory: Path, made: Supplies, parts: Sequence[str]) -> dict[str, Any]:
    """Do it on two new machines, and return the figures. `parts`: of `_PARTS`."""
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
        if "install" in parts:
            install(check)
            give_certificate(check)
            end_job(check, start_job(check))
            mend(check)
            start_own_unit(check)
            uninstall(check, before)
        if "upgrade" in parts:
            with check.timed("previous"):
                install_previous(check)
            give_certificate(check)
            upgrade(check)
            undo_previous(check, before)
    finally:
        for machine in check.machines:
            machine.power_off()
    return check.figures


@click.command()
@click.option("--directory", type=click.Path(path_type=Path, file_okay=False), default=ROOT / "build" / "installation")
@click.option("--only", type=click.Choice(_PARTS), help="Do this part alone.")
def main(directory: Path, only: str | None) -> None:
    """Install, remove and upgrade Ganger on two machines with a root file system and a systemd of their own.

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
        own = ("benchmarks.installation", "--directory", str(directory), *(("--only", only) if only else ()))
        try:
            code = subprocess.run((*words, *own), env={**os.environ, _INSIDE: made}, cwd=ROOT, check=False).returncode
        finally:
            remove_control_groups()
            shutil.rmtree(directory / "run", ignore_errors=True)
        sys.exit(code)
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    try:
        figures = story(directory, Supplies.read(os.environ.pop(_INSIDE)), (only,) if only else _PARTS)
    except CheckError as error:
        raise click.ClickException(str(error)) from error
    print(json.dumps({"name": "install-check", "figures": figures, "machine": this_machine()}))


if __name__ == "__main__":
    main()
