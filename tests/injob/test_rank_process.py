"""The process of a rank: whether it is the rank, and what connects it with its daemon: page, arena and socket."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path

import pytest
from ganger.injob import job_socket
from ganger.injob.control import Control, RestoreOrder
from ganger.injob.page import Page
from ganger.injob.page_access import PageError
from ganger.injob.page_layout import PageOrderKind, PageParkLevel, Word
from ganger.injob.process_identity import start_ticks
from ganger.injob.state_image import arena_variable, inherited_arena, make_arena
from injob.control_kit import meanwhile, within
from kit.accounts import as_stranger, needs_a_stranger
from kit.waiting import eventually


def test_outside_ganger_there_is_no_control(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GANGER_PAGE", raising=False)
    assert Control.from_environment() is None


def test_environment_is_read_and_checked(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    restore = tmp_path / "restore.json"
    restore.write_text(json.dumps({"kind": "checkpoint", "path": "/c/12-1", "step": 12}))
    monkeypatch.setenv("GANGER_PAGE", page.path)
    monkeypatch.setenv("GANGER_RESTORE", str(restore))
    found = Control.from_environment()
    assert found is not None
    assert found.restore == RestoreOrder("checkpoint", "/c/12-1", 12, 0, page.get(Word.RANK))
    found.close()
    restore.write_text('{"kind": "magic"}')
    with pytest.raises(PageError, match="magic"):
        Control.from_environment()
    monkeypatch.setenv("GANGER_PAGE", str(tmp_path / "none.page"))
    with pytest.raises(PageError, match="cannot be opened"):
        Control.from_environment()


def test_first_process_takes_the_page_and_keeps_it(page: Page, control: Control) -> None:
    assert control.claim()
    assert control.claim()
    page.set(Word.LOCK, os.getpid() + 1)
    assert not control.claim()


def test_forked_process_touches_nothing(page: Page, control: Control) -> None:
    control.start(0)
    control.boundary()
    boundary = control.boundary
    pid = os.fork()
    if pid == 0:
        page.write_order(2, PageOrderKind.STOP, stop_seq=2, level=PageParkLevel.PAUSE)
        boundary()
        boundary()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert page.progress().step == 1
    page.write_order(3, PageOrderKind.RUN)


def test_only_the_process_that_the_launcher_named_is_the_rank(page: Page) -> None:
    assert page.is_of_this_process()
    page.set(Word.PID, os.getpid())
    page.set(Word.START_TICKS, start_ticks(os.getpid()) or 0)
    assert page.is_of_this_process()
    # the same number in another pid namespace, or used again
    page.set(Word.START_TICKS, 1)
    assert not page.is_of_this_process()
    page.set(Word.PID, os.getppid())
    assert not page.is_of_this_process()


def test_a_descriptor_of_the_arenas_number_that_is_another_file_is_not_the_arena(tmp_path: Path) -> None:
    own, other = make_arena(None, "own", 4096), make_arena(None, "own", 4096)
    unsealed = os.memfd_create("own", os.MFD_ALLOW_SEALING)
    number = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    value = arena_variable(own)
    try:
        assert inherited_arena(value) == own
        _, device, inode = value.split(":")
        for descriptor in (number, other, unsealed):
            assert inherited_arena(f"{descriptor}:{device}:{inode}") is None
        assert inherited_arena(arena_variable(unsealed)) is None
        assert inherited_arena(arena_variable(number)) is None
    finally:
        for descriptor in (own, other, unsealed, number):
            os.close(descriptor)
    for nonsense in (value, "", "12", "a:b:c", f"{1 << 80}:1:1", "-1:1:1"):
        assert inherited_arena(nonsense) is None


def test_a_process_that_did_not_inherit_the_arena_has_no_control(
    page: Page, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    descriptor = make_arena(None, "own", 4096)
    monkeypatch.setenv("GANGER_PAGE", page.path)
    monkeypatch.setenv("GANGER_ARENA", arena_variable(descriptor))
    found = Control.from_environment()
    assert found is not None
    assert found.arena_fd == descriptor
    found.close()
    os.close(descriptor)
    assert Control.from_environment() is None
    assert "did not inherit the arena" in capsys.readouterr().err
    assert page.get(Word.LOCK) == 0


@needs_a_stranger
def test_a_rank_sends_nothing_to_a_socket_of_another_account(page: Page, tmp_path: Path) -> None:
    path = str(tmp_path / "job.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        with as_stranger():
            listener.listen(1)
        control = Control(page, socket_path=path)
        control.hello(capabilities=1)
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(1024) == b""
        control.close()


def test_socket_says_hello_again_to_a_new_daemon_and_loses_nothing(page: Page, tmp_path: Path) -> None:
    path = str(tmp_path / "job.sock")
    control = Control(Page.open(page.path), socket_path=path)
    control.hello(1, torch="2.0")
    control.note("noted without a daemon")
    for _ in range(2):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(path)
        listener.listen()
        listener.settimeout(20)

        def tend() -> bool:
            control.safe_point()
            return control._socket.connected

        within(tend, "the connection")
        connection, _ = listener.accept()
        connection.settimeout(20)
        hello = json.loads(connection.recv(65536))
        assert (hello["event"], hello["rank"], hello["pid"], hello["torch"]) == ("hello", 0, os.getpid(), "2.0")
        control.safe_point()
        assert json.loads(connection.recv(65536))["event"] == "note"
        connection.close()
        listener.close()
        os.unlink(path)
        for number in range(2):
            control.note(f"said after the daemon died: {number}")
    control.close()


def test_a_parked_rank_does_not_poll_until_its_daemon_sends_a_message(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_socket, "_TOLD_SLEEP", 1_000.0)
    path = str(tmp_path / "job.sock")
    control = Control(Page.open(page.path), socket_path=path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        control.hello(1)
        connection, _ = listener.accept()
    control.start(0)
    page.write_order(2, PageOrderKind.STOP, stop_seq=2, level=PageParkLevel.PAUSE)
    over: list[int] = []

    def daemon() -> None:
        within(lambda: page.progress().reached_seq == 2, "the pause")
        page.write_order(3, PageOrderKind.RUN)
        over.append(page.progress().reached_seq)
        connection.send(b"{}")

    with meanwhile(daemon):
        control.boundary()
    assert over == [2]
    assert page.progress().reached_seq == 3
    page.write_order(4, PageOrderKind.STOP, stop_seq=4, level=PageParkLevel.PAUSE)

    def dying_daemon() -> None:
        within(lambda: page.progress().reached_seq == 4, "the pause")
        connection.close()
        page.write_order(5, PageOrderKind.RUN)

    # a rank without a daemon polls by itself
    with meanwhile(dying_daemon):
        control.boundary()
    assert page.progress().reached_seq == 5
    control.close()


def test_stacks_are_printed_when_the_page_asks_for_them(
    page: Page, control: Control, capfd: pytest.CaptureFixture[str]
) -> None:
    control.hello(capabilities=1)
    page.set(Word.STACKS_SEQ, 1)
    printed = ""

    def is_printed() -> bool:
        nonlocal printed
        printed += capfd.readouterr().err
        return "in test_stacks_are_printed" in printed

    eventually(is_printed, what="the stacks")
    control.close()
    assert "ganger-stacks" not in [thread.name for thread in threading.enumerate()]
