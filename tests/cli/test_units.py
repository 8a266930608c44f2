"""Unit files are what systemd takes, and a program that is a unit says that it is ready and that its loop turns."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from ganger.console import ExitCode
from ganger.service_unit import ServiceManager, unit_text
from kit.shell import Shell


def unit(*words: str) -> str:
    done = Shell("unused:1").try_("unit", *words)
    assert (done.code, done.err) == (ExitCode.OK, ""), done
    return done.out


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
@pytest.mark.parametrize("program", ["master", "daemon"])
def test_systemd_takes_the_unit_of_a_program(program: str, tmp_path: Path) -> None:
    file = tmp_path / f"ganger-{program}.service"
    file.write_text(unit(program, "--", "--state-dir", "/var/lib/ganger", "--storage", "/a b/100%/$x"))
    done = subprocess.run(("systemd-analyze", "verify", str(file)), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("word", "written"),
    [
        ("--rack=R1", "--rack=R1"),
        ("a b", '"a b"'),
        ("100%", "100%%"),
        ("$HOME", '"$$HOME"'),
        ('a"b\\', '"a\\"b\\\\"'),
        ("a\nUser=root", '"a\\nUser=root"'),
    ],
)
def test_words_of_a_command_are_written_as_units_have_them(word: str, written: str) -> None:
    text = unit_text("daemon", ("/usr/bin/python3", word))
    assert f"ExecStart=/usr/bin/python3 {written}\n" in text


def test_jobs_outlive_the_unit_of_a_daemon_and_the_master_writes_into_its_directories_only() -> None:
    daemon = unit("daemon", "--", "--state-dir", "/d")
    assert {"KillMode=process", "Delegate=yes", "Type=notify"} <= set(daemon.splitlines())
    master = unit("master", "--user", "ganger", "--", "--state-dir", "/m", "--storage", "/s")
    assert {"User=ganger", "ProtectSystem=strict", "ReadWritePaths=-/m -/s"} <= set(master.splitlines())
    assert f"ExecStart={sys.executable} -m ganger.cli.main master --state-dir /m --storage /s" in master.splitlines()


@pytest.mark.parametrize(
    ("flags", "writable"),
    [
        (("--state-dir=/m", "--storage=/s"), "-/m -/s"),
        (("--state-dir", "/m", "--authority", "/etc/ganger/ca"), "-/m -/etc/ganger/ca"),
        (("--state-dir", "/a b/100%/$x"), '"-/a b/100%%/$x"'),
    ],
)
def test_a_master_writes_into_all_its_directories_however_they_are_named(flags: tuple[str, ...], writable: str) -> None:
    assert f"ReadWritePaths={writable}\n" in unit("master", "--", *flags)


def test_a_unit_of_a_master_names_where_it_writes() -> None:
    done = Shell("unused:1").try_("unit", "master", "--", "--storage", "/s")
    assert (done.code, "name the master's --state-dir" in done.err) == (ExitCode.USAGE, True), done


def test_a_unit_has_absolute_paths() -> None:
    for flags in (("--state-dir", "here"), ("--state-dir=here",), ("--tls", "certs/m")):
        done = Shell("unused:1").try_("unit", "daemon", "--", *flags)
        assert (done.code, "a unit needs absolute paths" in done.err) == (ExitCode.USAGE, True), done


@pytest.mark.parametrize("is_abstract", [False, True])
def test_a_service_says_when_it_is_ready_that_it_lives_and_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_abstract: bool
) -> None:
    name = f"@ganger-{tmp_path.name}" if is_abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name[1:] if is_abstract else name)
        manager.settimeout(10.0)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        monkeypatch.setenv("WATCHDOG_USEC", "30000")

        async def serve() -> list[bytes]:
            async with ServiceManager().notified():
                return [await asyncio.to_thread(manager.recv, 99) for _ in range(4)]

        assert asyncio.run(serve()) == [b"READY=1", *[b"WATCHDOG=1"] * 3]
        said = b""
        while said != b"STOPPING=1":
            said = manager.recv(99)


def test_programs_that_a_service_starts_are_not_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere")
    monkeypatch.setenv("WATCHDOG_USEC", "1000")
    ServiceManager()
    code = "import os; print([name for name in os.environ if name in ('NOTIFY_SOCKET', 'WATCHDOG_USEC')])"
    assert subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True).stdout == "[]\n"
