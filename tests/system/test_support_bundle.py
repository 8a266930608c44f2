"""A support bundle has what happened to jobs and nodes, and nothing of what jobs run, print or keep secret."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from ganger.console import ExitCode
from kit.shell import Shell
from kit.up import NO_PRELOAD, Up

pytestmark = pytest.mark.system

SCRIPT = "import sys; print('s3cret-out', flush=True); raise ValueError('s3cret-err ' + sys.argv[1])"


def parts_of(bundle: Path) -> dict[str, str]:
    with tarfile.open(bundle) as archive:
        names = [member.name for member in archive.getmembers()]
        read = {name: archive.extractfile(name) for name in names}
        return {name.removeprefix("ganger-support/"): file.read().decode() for name, file in read.items() if file}


def test_a_bundle_has_what_happened_and_no_secret_of_a_job_or_the_cluster(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.tar.gz"
    with Up(tmp_path / "c", "--virtual-gpus", "2", settings=NO_PRELOAD) as up:
        words = ("--name", "shown", "--env", "PASSWORD=s3cret-env", "--max-failures", "0", "--directory", str(tmp_path))
        job = up.submit(*words, "--", "python", "-c", SCRIPT, "s3cret-argument")
        up.try_("wait", job)
        up("support-bundle", str(bundle))
        token = (tmp_path / "c" / "token").read_text().strip()
        again = up.try_("support-bundle", str(bundle))
        assert (again.returncode, "cannot write" in again.stderr) == (ExitCode.REFUSED, True), again
    parts = parts_of(bundle)
    assert {"machine.json", "doctor.json", "cluster.json", "nodes.json", "jobs.json", "events.json"} <= set(parts)
    (shown,) = json.loads(parts["jobs.json"])
    assert (shown["state"], shown["spec"]["roles"][0]["tasks"]) == ("FAILED", 1)
    assert "gang_approved" in parts["events.json"]
    assert {one["subject"] for one in json.loads(parts["doctor.json"])} >= {"master", "this machine"}
    for name, text in parts.items():
        assert "s3cret" not in text, name
        assert token not in text, name
    assert bundle.stat().st_mode & 0o777 == 0o600


def test_a_bundle_without_a_master_says_in_each_place_that_there_is_none(tmp_path: Path) -> None:
    done = Shell(tmp_path / "nowhere").try_("support-bundle", str(tmp_path / "bundle.tar.gz"))
    assert done.code == ExitCode.OK, done
    parts = parts_of(tmp_path / "bundle.tar.gz")
    assert {"machine.json", "doctor.json", "cluster.error", "nodes.error", "jobs.error"} <= set(parts)
