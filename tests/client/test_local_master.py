"""What `ganger cluster init` makes on a machine runs a master, can be made again, and is removed without a trace."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from ganger import local_master
from ganger.client import Client
from ganger.console import ExitCode
from ganger.local_master import (
    MADE_UNIT,
    LocalMasterError,
    MasterPlaces,
    check_machine,
    make_credentials,
    make_unit,
    remove_directories,
)
from ganger.wire.endpoints import Endpoint
from ganger.wire.methods import CallerIdentity, CallerRole
from ganger.wire.tls import AUTHORITY, CERTIFICATE, check_directory
from kit.shell import Shell

HOST = "127.0.0.1"


@pytest.fixture
def places(tmp_path: Path) -> MasterPlaces:
    etc = tmp_path / "etc" / "ganger"
    etc.parent.mkdir()
    unit = tmp_path / "ganger-master.service"
    return MasterPlaces(tmp_path / "lib" / "ganger" / "master", etc / "ca", etc / "master", etc / "operator", unit)


def made(places: MasterPlaces, storage: Path) -> None:
    make_credentials(places, HOST, "olga")
    make_unit(places, sys.executable, f"{HOST}:0", storage, ["--no-planner"])


def test_the_command_of_the_unit_starts_a_master_that_the_operator_reaches(
    places: MasterPlaces, tmp_path: Path
) -> None:
    made(places, tmp_path / "storage")
    found = re.search(r"^ExecStart=(.*)$", places.unit.read_text(), re.MULTILINE)
    assert found is not None
    with subprocess.Popen(shlex.split(found[1]), stdout=subprocess.PIPE, text=True) as master:
        assert master.stdout is not None
        try:
            address = master.stdout.readline().split()[-1]
            with Client(Endpoint(address, tls=str(places.operator))) as client:
                assert client.get_cluster().policy == "ganger"
        finally:
            master.terminate()


def test_directories_let_the_accounts_of_jobs_through_whatever_the_umask_is(
    places: MasterPlaces, tmp_path: Path
) -> None:
    former = os.umask(0o077)
    try:
        made(places, tmp_path / "storage")
    finally:
        os.umask(former)
    assert (tmp_path / "storage").stat().st_mode & 0o777 == 0o711
    assert places.state.parent.stat().st_mode & 0o777 == 0o755


def test_the_master_may_write_what_it_is_given_and_others_see_none_of_it(places: MasterPlaces, tmp_path: Path) -> None:
    made(places, tmp_path / "storage")
    writable = f"ReadWritePaths=-{places.state} -{places.authority} -{tmp_path / 'storage'}\n"
    assert writable in places.unit.read_text()
    assert all(directory.stat().st_mode & 0o777 == 0o700 for directory in places.directories)


def test_what_is_made_again_has_the_same_authority_and_new_certificates(places: MasterPlaces, tmp_path: Path) -> None:
    made(places, tmp_path / "storage")
    files = (places.authority / AUTHORITY, places.certificates / CERTIFICATE, places.operator / CERTIFICATE)
    former = [file.read_bytes() for file in files]
    made(places, tmp_path / "storage")
    assert [file.read_bytes() == before for file, before in zip(files, former, strict=True)] == [True, False, False]
    assert check_directory(places.operator) == CallerIdentity(CallerRole.OPERATOR, "olga")


def test_all_that_was_made_is_removed_and_storage_stays(places: MasterPlaces, tmp_path: Path) -> None:
    made(places, tmp_path / "storage")
    places.unit.unlink()
    remove_directories(places)
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "etc", tmp_path / "lib", tmp_path / "storage"]


def test_directories_that_were_there_stay(places: MasterPlaces, tmp_path: Path) -> None:
    places.authority.mkdir(parents=True)
    (places.authority / "theirs").touch()
    made(places, tmp_path / "storage")
    remove_directories(places)
    assert (places.authority / "theirs").exists()
    assert not places.operator.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes units")
def test_a_unit_of_others_and_a_machine_without_systemd_are_refused(
    places: MasterPlaces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_master, "_SYSTEMD", tmp_path / "none")
    with pytest.raises(LocalMasterError, match="there is no systemd here: make certificates with `ganger certs`"):
        check_machine(places)
    monkeypatch.setattr(local_master, "_SYSTEMD", tmp_path)
    check_machine(places)
    places.unit.write_text("[Service]\n")
    with pytest.raises(LocalMasterError, match="is there, and `cluster init` did not make it: remove it first"):
        check_machine(places)
    places.unit.write_text(f"{MADE_UNIT}\n[Service]\n")
    check_machine(places)


def test_only_what_init_made_is_deleted(tmp_path: Path) -> None:
    where = (f"--{name}={tmp_path / name}" for name in ("state-dir", "tls", "authority", "operator-tls"))
    done = Shell("unused:1").try_("cluster", "delete", "--yes", *where)
    assert (done.code, done.err) == (
        ExitCode.NOT_FOUND,
        "ganger: there is nothing on this machine that `cluster init` made\n",
    )


@pytest.mark.skipif(Path("/run/systemd/system").is_dir() and os.geteuid() == 0, reason="it would make a master here")
def test_init_prints_what_keeps_this_machine_from_being_a_master() -> None:
    done = Shell("unused:1").try_("cluster", "init", HOST)
    said = "run this as root" if os.geteuid() else "there is no systemd here"
    assert (done.code, said in done.err) == (ExitCode.REFUSED, True), done
