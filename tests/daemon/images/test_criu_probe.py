"""Whether images can be made on a node, and the reason where they cannot."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ganger_daemon.images.contract import DumpRequest, ImageRefusedError, UnitProcesses
from ganger_daemon.images.criu import CriuImages, choose_images


def program(directory: Path, version: str, check: str = "echo Looks good.") -> str:
    path = directory / "criu"
    path.write_text(f'#!/bin/sh\ncase "$1" in --version) echo "Version: {version}";; check) {check};; esac\n')
    path.chmod(0o755)
    return str(path)


def test_a_program_that_passes_its_own_check_is_used(tmp_path: Path) -> None:
    found = choose_images(program(tmp_path, "4.2.1"))
    assert (found.unavailable, found.capability) == ("", "criu 4.2.1")


def test_a_program_on_the_path_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "5.0")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert choose_images().capability == "criu 5.0"


def test_a_program_beside_the_interpreter_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "4.9")
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("nsenter", "flock"):
        (tools / tool).symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    assert choose_images().capability == "criu 4.9"


@pytest.mark.parametrize(
    ("version", "check", "reason"),
    [
        ("3.17.1", "true", "CRIU 3.17.1; 4 is the oldest that will do"),
        ("", "true", "--version answers"),
        ("4.2", "echo 'Error (criu/cr-check.c:1): PTRACE_SEIZE is not there'; exit 1", "may not be traced"),
        ("4.2", "echo something; echo else; exit 1", "something else"),
    ],
)
def test_an_unsuitable_program_gives_the_reason(tmp_path: Path, version: str, check: str, reason: str) -> None:
    found = choose_images(program(tmp_path, version, check))
    assert reason in found.unavailable
    assert found.capability == f"none: {found.unavailable}"


def test_a_program_that_is_not_there_gives_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no such file" in choose_images(str(tmp_path / "criu")).unavailable
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    assert "no CRIU found" in choose_images().unavailable


def test_a_machine_without_the_tools_of_namespaces_gives_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = program(tmp_path, "4.2")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no nsenter on the path" in choose_images(path).unavailable


def test_images_that_are_not_wanted_are_refused_with_the_reason(tmp_path: Path) -> None:
    found = choose_images("none")
    assert not isinstance(found, CriuImages)
    assert found.capability == "none: not wanted"
    with pytest.raises(ImageRefusedError, match="not wanted"):
        found.dump(DumpRequest(UnitProcesses(1, 2), tmp_path, goes_on=False))
    with pytest.raises(ImageRefusedError, match="not wanted"):
        found.restore_arguments(tmp_path, {})
