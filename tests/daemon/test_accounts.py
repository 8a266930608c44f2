"""Which accounts run jobs, by name; and what a daemon refuses to take for a map of them."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest
from ganger.node_test import TEST_USER
from ganger_daemon.node.accounts import (
    LEAST_UID,
    Account,
    AccountRefusedError,
    Accounts,
    choose_accounts,
    closed_step,
    give_directory,
    read_map,
    refusal_of,
    seen_by,
)
from kit.accounts import STRANGER, needs_a_stranger

STRANGERS = Account("stranger", STRANGER, STRANGER, (STRANGER,), "/")


def entry(uid: int = 1001, gid: int = 1001, shell: str = "/bin/bash") -> pwd.struct_passwd:
    return pwd.struct_passwd(("ann", "x", uid, gid, "", "/home/ann", shell))


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (entry(), ""),
        (entry(shell=""), ""),
        (entry(uid=0), "is one of the system (uid 0, below 1000)"),
        (entry(uid=999), "is one of the system (uid 999, below 1000)"),
        (entry(gid=0), "has the primary group root"),
        (entry(shell="/usr/sbin/nologin"), "has no shell (/usr/sbin/nologin)"),
        (entry(shell="/bin/false"), "has no shell (/bin/false)"),
    ],
)
def test_accounts_of_the_system_and_those_without_a_shell_run_no_jobs(found: pwd.struct_passwd, why: str) -> None:
    assert refusal_of(found) == why


@pytest.mark.parametrize("user", ["root", "daemon", "games", "no-such-user", "../etc", "a\0b", ""])
def test_a_user_without_an_account_is_refused_by_name(user: str) -> None:
    with pytest.raises(AccountRefusedError, match=r"^CANNOT_SWITCH_USER: no account of this node runs the jobs of"):
        Accounts({}).of(user)


def test_a_map_file_names_the_account_of_a_user_and_refuses_users() -> None:
    accounts = Accounts({"ann": "root", "bob": "-"})
    with pytest.raises(AccountRefusedError, match="account root is one of the system"):
        accounts.of("ann")
    with pytest.raises(AccountRefusedError, match="the map file of --accounts refuses it"):
        accounts.of("bob")


def test_the_test_of_a_node_needs_no_account_of_its_own() -> None:
    account = Accounts({}).of(TEST_USER)
    assert account is not None
    assert account.uid == pwd.getpwnam(account.name).pw_uid >= LEAST_UID
    with pytest.raises(AccountRefusedError, match="account root is one of the system"):
        Accounts({TEST_USER: "root"}).of(TEST_USER)


def test_without_switching_every_job_is_of_the_daemons_own_user() -> None:
    assert Accounts().of("ann") is None
    assert not Accounts().are_switched


@pytest.mark.parametrize(
    ("setting", "uid", "has_certificates", "are_switched", "is_warned"),
    [
        ("", 0, True, True, False),
        ("", 0, False, False, False),
        ("", 1000, True, False, False),
        ("", 1000, False, False, False),
        ("system", 0, False, True, False),
        ("own", 0, True, False, True),
        ("own", 0, False, False, False),
        ("own", 1000, True, False, False),
    ],
)
def test_jobs_run_as_their_users_where_root_has_certificates_that_name_them(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    setting: str,
    uid: int,
    has_certificates: bool,
    are_switched: bool,
    is_warned: bool,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert choose_accounts(setting, has_certificates=has_certificates).are_switched is are_switched
    said = [record.getMessage() for record in caplog.records]
    assert said == ["--accounts own: jobs of all users run as root, and can read this node's key and each other"] * (
        is_warned
    )


@needs_a_stranger
def test_a_map_file_is_roots_and_has_a_user_and_an_account_in_each_line(tmp_path: Path) -> None:
    path = tmp_path / "accounts"
    path.write_text("# of the lab\nann  aschmidt\n\nbob -   # left\n")
    assert read_map(path) == {"ann": "aschmidt", "bob": "-"}
    for text in ("ann\n", "ann a b\n", "ann a\nann b\n"):
        path.write_text(text)
        with pytest.raises(ValueError, match="a user and its account are expected, once each"):
            read_map(path)
    path.chmod(0o666)
    with pytest.raises(ValueError, match="others than root may write to it"):
        read_map(path)
    with pytest.raises(ValueError, match="it cannot be read"):
        choose_accounts(str(tmp_path / "none"))


def test_half_an_account_in_a_record_is_not_taken_for_the_daemons_own_user() -> None:
    assert Account.recall(STRANGERS.journal()) == STRANGERS
    assert Account.recall(None) is None
    with pytest.raises(ValueError, match="cannot be read"):
        Account.recall({"name": "ann"})


@needs_a_stranger
def test_a_look_as_an_account_has_its_rights_and_leaves_this_process_its_own(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    tmp_path.chmod(0o711)
    assert seen_by(None, (closed / "deeper").exists) is False
    with pytest.raises(PermissionError):
        seen_by(STRANGERS, lambda: os.stat(closed / "deeper"))
    assert os.geteuid() == 0
    assert os.listdir(closed) == []


@needs_a_stranger
def test_a_directory_is_made_for_an_account_and_no_link_of_its_is_followed(tmp_path: Path) -> None:
    theirs = give_directory(tmp_path, "job/checkpoints", STRANGERS, 0o700, is_its=True)
    give_directory(tmp_path, "job/checkpoints", STRANGERS, 0o700, is_its=True)
    found = [(path.stat().st_uid, oct(path.stat().st_mode & 0o7777)) for path in (theirs.parent, theirs)]
    assert found == [(0, "0o711"), (STRANGER, "0o700")]

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "led").symlink_to(elsewhere)
    for name in ("led", "led/deeper"):
        with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
            give_directory(tmp_path, name, STRANGERS, 0o700, is_its=True)
    assert (elsewhere.stat().st_uid, os.listdir(elsewhere)) == (0, [])

    # what another account has put there
    other = tmp_path / "other"
    other.mkdir()
    os.chown(other, STRANGER + 1, -1)
    with pytest.raises(PermissionError, match=f"belongs to user {STRANGER + 1}"):
        give_directory(tmp_path, "other", STRANGERS, 0o700, is_its=True)


def test_a_path_that_is_closed_to_other_accounts_is_named(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a").chmod(0o700)
    assert closed_step(tmp_path / "a" / "b").endswith("is closed to other accounts (mode 0700)")
    assert closed_step(Path("/usr/bin")) == ""
