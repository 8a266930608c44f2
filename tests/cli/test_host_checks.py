"""What `ganger doctor --fix` mends on a machine, and what it leaves alone."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from ganger.cli.diagnosis import clock_finding
from ganger.cli.host_checks import (
    FAIL,
    OK,
    WARN,
    Finding,
    certificate_finding,
    host_findings,
    master_of_unit,
    mended,
    socket_findings,
)
from ganger.cli.main import run
from ganger.service_unit import DAEMON_UNIT, DROP_IN, MASTER_UNIT, unit_text
from ganger.wire.certificate_authority import life_of
from ganger.wire.endpoints import write_endpoint
from ganger_daemon import node_checks
from kit.canned import Call, CannedMaster
from kit.certified import Authority
from kit.waiting import eventually

WELL = {
    "UnitFileState": "enabled",
    "ActiveState": "active",
    "Result": "success",
    "Delegate": "yes",
    "KillMode": "process",
    "NeedDaemonReload": "no",
}
# `show` prints the properties in the file beside it; other commands are written down, and what they change.
SYSTEMCTL = """#!{python}
import json, pathlib, sys
here = pathlib.Path(__file__).parent
known = json.loads((here / "known").read_text())
words = sys.argv[1:]
if words[0] == "show":
    print("\\n".join(f"{{key}}={{value}}" for key, value in known.items()))
    sys.exit()
with (here / "done").open("a") as done:
    done.write(" ".join(words) + "\\n")
if known.get("refused") == words[0]:
    sys.exit(f"{{words[0]}}: refused")
known.update({{"enable": {{"UnitFileState": "enabled"}}, "start": {{"ActiveState": "active"}}}}.get(words[0], {{}}))
(here / "known").write_text(json.dumps(known))
"""


class Machine:
    """The units and directories of a machine, and a service manager that is asked by `systemctl`."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.units, self._bin = directory / "units", directory / "bin"
        for made in (self.units, self._bin, directory / "state", directory / "storage"):
            made.mkdir()
        (directory / "state").chmod(0o711)
        (self._bin / "systemctl").write_text(SYSTEMCTL.format(python=sys.executable))
        (self._bin / "systemctl").chmod(0o755)
        self.knows(**WELL)
        monkeypatch.setenv("PATH", f"{self._bin}:{os.environ['PATH']}")

    def knows(self, **properties: str) -> None:
        (self._bin / "known").write_text(json.dumps(properties))

    @property
    def commands(self) -> list[str]:
        done = self._bin / "done"
        return done.read_text().splitlines() if done.exists() else []

    def write_unit(self, name: str, *flags: str) -> None:
        program = "master" if name == MASTER_UNIT else "daemon"
        words = ("/opt/ganger/bin/python", "-m", "ganger.cli.main", program, *flags)
        (self.units / name).write_text(unit_text(program, words, user="root", writable=[]))  # type: ignore[arg-type]

    def findings(self) -> list[Finding]:
        return list(host_findings(self.units, self.directory))

    def mended(self) -> list[Finding]:
        return [mended(one) for one in host_findings(self.units, self.directory)]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def levels(findings: Sequence[Finding]) -> list[str]:
    return [one.level for one in findings]


def test_a_machine_without_units_has_no_findings_and_a_well_one_is_left_alone(machine: Machine) -> None:
    assert machine.findings() == []
    machine.write_unit(DAEMON_UNIT, "--state-dir", str(machine.directory / "state"))
    assert levels(machine.mended()) == [OK]
    assert machine.commands == []


@pytest.mark.parametrize(
    ("properties", "level", "found", "commands"),
    [
        ({"UnitFileState": "disabled"}, WARN, "not started at boot", ["enable --quiet ganger-daemon.service"]),
        (
            {"ActiveState": "failed", "Result": "exit-code"},
            FAIL,
            "does not run: failed (exit-code)",
            ["reset-failed ganger-daemon.service", "start ganger-daemon.service"],
        ),
        ({"NeedDaemonReload": "yes"}, WARN, "an older text", ["daemon-reload"]),
        ({"Delegate": "no"}, FAIL, "may lose their control groups", ["daemon-reload"]),
        ({"KillMode": "control-group"}, FAIL, "a stop or a restart of the daemon ends its jobs", ["daemon-reload"]),
    ],
)
def test_a_unit_that_is_not_as_it_should_be_is_mended(
    machine: Machine, properties: dict[str, str], level: str, found: str, commands: list[str]
) -> None:
    machine.write_unit(DAEMON_UNIT, "--state-dir", str(machine.directory / "state"))
    machine.knows(**WELL | properties)
    (finding,) = [one for one in machine.findings() if one.level != OK]
    assert (finding.level, finding.subject) == (level, DAEMON_UNIT)
    assert found in finding.found
    assert finding.advice
    assert machine.commands == [], "nothing is mended unasked"
    done = mended(finding)
    assert (done.level, done.advice) == (OK, "")
    assert done.mended
    assert machine.commands == commands
    drop_in = machine.units / f"{DAEMON_UNIT}.d" / DROP_IN
    wanted = {"Delegate": "Delegate=yes", "KillMode": "KillMode=process"}
    lines = [wanted[key] for key in properties if key in wanted]
    assert drop_in.exists() is bool(lines)
    assert not lines or drop_in.read_text().splitlines()[1:] == ["[Service]", *lines]


def test_what_cannot_be_mended_says_why(machine: Machine) -> None:
    machine.write_unit(DAEMON_UNIT, "--state-dir", str(machine.directory / "state"))
    machine.knows(**WELL | {"ActiveState": "inactive", "refused": "start"})
    (finding,) = [one for one in machine.mended() if one.level != OK]
    assert "it could not be mended: systemctl start ganger-daemon.service: start: refused" in finding.found
    assert "journalctl" in finding.advice


def test_modes_and_missing_directories_are_mended_and_a_missing_storage_is_not_made(machine: Machine) -> None:
    authority, state = Authority(machine.directory), machine.directory / "master"
    own, ca = authority.issue("master", "m"), authority.directory
    (own / "key.pem").chmod(0o644)
    (ca / "ca-key.pem").chmod(0o640)
    ca.chmod(0o755)
    storage = machine.directory / "share" / "ganger"
    flags = {"--state-dir": state, "--tls": own, "--authority": ca, "--storage": storage}
    machine.write_unit(MASTER_UNIT, *[f"{name}={path}" for name, path in flags.items()])
    before = {Path(one.subject.split()[-1]): one for one in machine.findings() if one.level != OK}
    assert before.keys() == {state, ca, ca / "ca-key.pem", own / "key.pem", own, storage}
    assert "can be read by others" in before[own].found, "the certificate cannot be used either"
    after = machine.mended()
    assert [one.subject for one in after if one.level != OK] == [f"storage {storage}"]
    assert not storage.exists()
    modes = [path.stat().st_mode & 0o777 for path in (state, ca, ca / "ca-key.pem", own / "key.pem")]
    assert modes == [0o700, 0o700, 0o600, 0o600]


@pytest.mark.parametrize(("days", "level"), [(3.0, WARN), (1.0 / 86_400.0, FAIL)])
def test_a_certificate_that_ends_is_renewed_where_its_authority_is(tmp_path: Path, days: float, level: str) -> None:
    authority = Authority(tmp_path)
    own = authority.issue("daemon", "n1", days=days)
    eventually(lambda: certificate_finding(own).level == level, what="it has ended, or not")
    elsewhere = certificate_finding(own)
    assert (elsewhere.advice, elsewhere.mend) == (f"ganger certs renew AUTHORITY {own}", None)
    finding, former = certificate_finding(own, authority.directory), (own / "cert.pem").read_bytes()
    assert finding.advice == f"ganger certs renew {authority.directory} {own}"
    assert mended(finding).level == OK
    assert (own / "cert.pem").read_bytes() != former
    assert life_of(own).total_seconds() == pytest.approx(days * 86_400.0, abs=2.0), "as long as the former one"


def test_a_certificate_of_another_authority_is_not_renewed(tmp_path: Path) -> None:
    own = Authority(tmp_path, "other").issue("daemon", "n1", days=3.0)
    done = mended(certificate_finding(own, Authority(tmp_path).directory))
    assert done.level == WARN
    assert "was made by another authority" in done.found


def test_a_directory_with_a_token_is_checked_as_one(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("ann.0a.secret\n")
    (tmp_path / "token").chmod(0o644)
    finding = certificate_finding(tmp_path)
    assert finding.level == FAIL
    assert "secret" not in finding.found
    assert mended(finding).level == OK
    assert certificate_finding(tmp_path).found == "of user 'ann'"


def test_a_socket_that_a_killed_master_left_is_removed_and_one_in_use_is_not(tmp_path: Path) -> None:
    path = tmp_path / "s"
    write_endpoint(tmp_path, f"unix:{path}", None)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        assert list(socket_findings(tmp_path)) == []
    (finding,) = socket_findings(tmp_path)
    assert mended(finding).mended == "removed it"
    assert not path.exists()
    assert list(socket_findings(tmp_path)) == []


def test_run_directories_of_daemons_that_are_gone_are_removed_and_those_in_use_are_not(tmp_path: Path) -> None:
    names = ("a", "b", "c", "d")
    directories = [tmp_path / (name * 12) for name in names]
    for directory in (*directories, tmp_path / "not-a-run-directory"):
        directory.mkdir()
        (directory / "daemon.lock").touch()
        os.utime(directory, (1e9, 1e9))
    stale, locked, named, opened = directories
    fresh = tmp_path / ("e" * 12)
    fresh.mkdir()
    waits = [sys.executable, "-c", "input()"]
    with (
        (locked / "daemon.lock").open() as lock,
        (opened / "page").open("w") as page,
        subprocess.Popen(waits, stdin=subprocess.PIPE, env={"PYTHONPATH": f"{named}/inject"}) as by_name,
        subprocess.Popen(waits, stdin=subprocess.PIPE, stdout=page) as by_file,
    ):
        os.utime(opened, (1e9, 1e9))
        fcntl.flock(lock, fcntl.LOCK_EX)
        (found,) = node_checks.stale_run_directories([tmp_path, tmp_path / "none"])
        assert (found[0], found[1]) == (WARN, str(stale))
        assert mended(Finding(*found)).mended == "removed it"
        assert not stale.exists()
        assert all(path.is_dir() for path in (locked, named, opened, fresh))
        for process in (by_name, by_file):
            process.communicate(b"\n")


@pytest.mark.parametrize(
    ("master_s", "level", "found"),
    [
        (1_000.05, OK, "0.000 s behind (± 0.050 s)"),
        (1_001.2, WARN, "1.150 s ahead"),
        (900.0, FAIL, "100.050 s behind"),
    ],
)
def test_the_difference_of_clocks_is_shown(master_s: float, level: str, found: str) -> None:
    finding = clock_finding(master_s, 1_000.0, 1_000.1)
    assert (finding.level, finding.subject) == (level, "clock")
    assert found in finding.found


def test_on_a_node_the_command_asks_the_master_that_the_unit_of_the_daemon_names(
    master: CannedMaster,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(machine.directory))
    monkeypatch.setattr("ganger.cli.diagnosis.master_of_unit", lambda: master_of_unit(machine.units))
    master.nodes.nodes.add(name="nodes/n1", state=1)
    assert run(["doctor"]) == 0
    assert "WARN  master: no cluster is known here" in capsys.readouterr().out
    machine.write_unit(DAEMON_UNIT, f"--master={master.directory}")
    assert run(["doctor"]) == 0
    assert "master: version 9.9" in capsys.readouterr().out
    (master.directory / "endpoint.json").unlink()
    assert run(["doctor"]) == 4
    assert "FAIL  master: " in capsys.readouterr().out


def test_the_master_of_a_unit_is_not_called_with_a_certificate_that_this_user_may_not_show(machine: Machine) -> None:
    tls = machine.directory / "tls"
    machine.write_unit(DAEMON_UNIT, "--master", "m.lab:7070,m2.lab:7070", "--tls", str(tls))
    assert master_of_unit(machine.units) == ("", "")
    tls.mkdir()
    (tls / "key.pem").touch()
    assert master_of_unit(machine.units) == ("m.lab:7070,m2.lab:7070", str(tls))


def test_the_command_marks_what_it_can_mend_and_mends_it(
    call: Call,
    master: CannedMaster,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine.write_unit(DAEMON_UNIT, "--state-dir", str(machine.directory / "state"))
    machine.knows(**WELL | {"UnitFileState": "disabled"})
    monkeypatch.setattr("ganger.cli.diagnosis.host_findings", machine.findings)
    master.nodes.nodes.add(name="nodes/n1", state=1)
    assert call("doctor") == 0
    said = capsys.readouterr().out
    assert "WARN  ganger-daemon.service: it is not started at boot\n   *  -> systemctl enable" in said
    assert call("doctor", "--fix") == 0
    said = capsys.readouterr().out
    assert "ok    ganger-daemon.service: it is not started at boot\n      -> mended: enabled" in said
    assert call("doctor") == 0
    assert "not started at boot" not in capsys.readouterr().out
