"""Control inside the job: one rank obeys the words of a real page."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ganger.injob import job_socket, order_handler
from ganger.injob.control import Control, Handlers, RestoreOrder, StopRequest
from ganger.injob.page import Page, RawPoint, now_ns, page_path
from ganger.injob.page_access import PageError
from ganger.injob.page_layout import (
    EXIT_NO_STATE,
    Capability,
    Error,
    PageOrderKind,
    PageParkLevel,
    PagePhase,
    PageState,
    Word,
)
from ganger.injob.process_identity import start_ticks
from ganger.injob.state_image import arena_variable, inherited_arena, make_arena
from kit.waiting import eventually


@pytest.fixture
def page(tmp_path: Path) -> Page:
    page = Page.create(page_path(str(tmp_path), 0), epoch=1, rank=0, world=1)
    page.write_order(1, PageOrderKind.RUN)
    return page


@pytest.fixture
def control(page: Page, tmp_path: Path) -> Iterator[Control]:
    control = Control(Page.open(page.path), job_dir=str(tmp_path), socket_path=str(tmp_path / "job.sock"))
    yield control
    control.close()


def _meanwhile(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act)
    thread.start()
    return thread


def _within(condition: Callable[[], object], what: str) -> None:
    eventually(condition, within_seconds=20, what=what, every_seconds=0.001)


def test_boundary_counts_and_tells_the_time(page: Page, control: Control) -> None:
    control.start(40)
    assert (page.progress().step, page.progress().restored_step, page.progress().phase) == (40, 40, PagePhase.START)
    before = now_ns()
    control.boundary()
    control.boundary()
    progress = page.progress()
    assert (progress.step, progress.phase, progress.state) == (42, PagePhase.TRAINING, PageState.RUNNING)
    assert before <= progress.first_step_time_ns <= progress.step_time_ns <= now_ns()
    assert progress.reached_seq == 1
    assert control.step == 42


def test_boundary_costs_less_than_half_a_microsecond_over_an_empty_call(page: Page, control: Control) -> None:
    page.extend_lease(now_ns() + 3_600_000_000_000)
    control.start(0)
    number = 2_000

    def empty() -> None:
        pass

    def cost(call: Callable[[], None]) -> float:
        return min(timeit.repeat(call, number=number, repeat=200)) / number

    # Measured 0.21 us; the limit is the one users are promised, tripled for a machine that does other things meanwhile;
    # the best of many short rounds, because the others measure our neighbours.
    assert cost(control.boundary) - cost(empty) < 1.5e-6


def test_alone_a_rank_pauses_at_its_own_boundary_and_goes_on(page: Page, control: Control) -> None:
    control.start(0)
    control.boundary()
    page.write_order(2, PageOrderKind.STOP, stop_seq=2, level=PageParkLevel.PAUSE)

    def daemon() -> None:
        _within(lambda: page.progress().reached_seq == 2, "the pause")
        assert (page.progress().state, page.progress().reached_step) == (PageState.PAUSED, 2)
        page.write_order(3, PageOrderKind.RUN)

    thread = _meanwhile(daemon)
    control.boundary()
    thread.join()
    assert (control.step, page.progress().reached_seq, page.progress().state) == (2, 3, PageState.RUNNING)
    assert page.progress().first_step_time_ns == 0
    control.boundary()
    assert page.progress().first_step_time_ns > 0


def test_levels_deepen_during_one_stop_and_run_restores(page: Page, control: Control, tmp_path: Path) -> None:
    told: list[tuple[str, object]] = []
    (tmp_path / "orders").mkdir()
    (tmp_path / "orders" / "3.json").write_text('{"why": "row switch"}')

    def offload(request: StopRequest) -> int:
        told.append(("offload", request.details["why"]))
        return 4096

    def hand_over(request: StopRequest) -> None:
        told.append(("hand over", request.offloaded))

    control.handlers = Handlers(
        on_stop=lambda step: told.append(("stop", step)),
        on_offload=offload,
        on_restore=lambda _: told.append(("restore", control.step)),
        on_hand_over=hand_over,
    )
    control.start(9)

    def daemon() -> None:
        for seq, level, state in (
            (2, PageParkLevel.PAUSE, PageState.PAUSED),
            (3, PageParkLevel.OFFLOAD, PageState.OFFLOADED),
            (4, PageParkLevel.HAND_OVER, PageState.HANDED_OVER),
        ):
            page.write_order(seq, PageOrderKind.STOP, stop_seq=2, level=level)
            _within(lambda seq=seq: page.progress().reached_seq == seq, f"order {seq}")
            assert page.progress().state == state
        assert page.progress().offloaded_bytes == 4096
        page.write_order(5, PageOrderKind.RUN)

    page.write_order(2, PageOrderKind.STOP, stop_seq=2, level=PageParkLevel.PAUSE)
    thread = _meanwhile(daemon)
    control.boundary()
    thread.join()
    assert told == [("stop", 10), ("offload", "row switch"), ("hand over", True), ("restore", 10)]


def test_unsupported_level_is_reported_and_the_rank_stays(page: Page, control: Control, tmp_path: Path) -> None:
    control.start(0)
    page.write_order(2, PageOrderKind.STOP, stop_seq=2, level=PageParkLevel.OFFLOAD)

    def daemon() -> None:
        _within(lambda: page.progress().error == Error.STATE_UNSAVEABLE, "the error")
        _within(lambda: page.progress().state == PageState.PAUSED, "the pause")
        assert page.progress().reached_seq == 1
        page.write_order(3, PageOrderKind.RUN)

    thread = _meanwhile(daemon)
    control.boundary()
    thread.join()
    error = json.loads((tmp_path / "rank-0.error.json").read_text())
    assert error["reason"] == "STATE_UNSAVEABLE"
    assert "level 2" in error["message"]


def test_full_storage_is_named_as_such_and_training_goes_on(page: Page, control: Control) -> None:
    def fail(request: StopRequest) -> None:
        raise OSError(28, "No space left on device")

    control.handlers = Handlers(on_checkpoint=fail)
    control.start(0)
    page.request_checkpoint(1)
    page.write_order(2, PageOrderKind.RUN)
    control.boundary()
    assert (page.progress().error, page.progress().state) == (Error.STORAGE_FULL, PageState.RUNNING)
    control.boundary()
    assert control.step == 2


def test_a_rank_that_saved_for_good_stays_until_its_checkpoint_is_published_and_may_go_on(
    page: Page, control: Control
) -> None:
    saved: list[int] = []
    control.handlers = Handlers(on_checkpoint=lambda request: saved.append(request.step))
    control.start(0)
    control.boundary()
    page.write_order(2, PageOrderKind.STOP, stop_seq=2, level=PageParkLevel.CHECKPOINT)

    def daemon() -> None:
        _within(lambda: page.progress().reached_seq == 2, "the shard")
        assert (page.progress().state, page.progress().checkpoint_step) == (PageState.PAUSED, 2)
        # another rank's storage was full: asked again it need not write again, and running is always possible
        page.write_order(3, PageOrderKind.STOP, stop_seq=2, level=PageParkLevel.CHECKPOINT)
        _within(lambda: page.progress().reached_seq == 3, "the same shard")
        page.let_leave(2)
        page.write_order(4, PageOrderKind.RUN)

    thread = _meanwhile(daemon)
    control.boundary()
    thread.join()
    assert (control.step, page.progress().state, saved) == (2, PageState.RUNNING, [2])


def test_checkpoint_request_is_served_once_and_training_goes_on(page: Page, control: Control) -> None:
    saved: list[StopRequest] = []

    def save(request: StopRequest) -> None:
        saved.append(request)
        control.checkpoint_durable(request.seq, request.step)

    control.handlers = Handlers(on_checkpoint=save)
    control.start(0)
    seq = page.request_checkpoint(1)
    for _ in range(3):
        page.write_order(page.read_order().seq + 1, PageOrderKind.RUN)
        control.boundary()
    assert [(request.seq, request.step, request.exiting) for request in saved] == [(seq, 1, False)]
    assert (page.progress().checkpoint_done, page.progress().checkpoint_step) == (seq, 1)


def test_a_checkpoint_request_that_fails_is_reported_by_its_number(page: Page, control: Control) -> None:
    def save(request: StopRequest) -> None:
        if request.seq == first:
            raise OSError(errno.ENOSPC, "No space left on device")
        control.checkpoint_durable(request.seq, request.step)

    control.handlers = Handlers(on_checkpoint=save)
    control.start(0)
    first = page.request_checkpoint(1)
    control.boundary()
    assert (page.progress().checkpoint_failed, page.progress().checkpoint_done) == (first, 0)
    assert (page.progress().error, page.progress().state) == (Error.STORAGE_FULL, PageState.RUNNING)
    second = page.request_checkpoint(2)
    page.write_order(page.read_order().seq + 1, PageOrderKind.RUN)
    control.boundary()
    assert (page.progress().checkpoint_failed, page.progress().checkpoint_done) == (first, second)


def test_destination_of_a_move_is_ready_and_waits_for_run(tmp_path: Path) -> None:
    page = Page.create(page_path(str(tmp_path), 0), epoch=2, rank=0, world=1)
    page.write_order(1, PageOrderKind.WAIT)
    control = Control(Page.open(page.path))

    def daemon() -> None:
        _within(lambda: page.progress().state == PageState.READY, "readiness")
        assert (page.progress().reached_seq, page.progress().reached_step) == (1, 17)
        page.write_order(2, PageOrderKind.RUN)

    thread = _meanwhile(daemon)
    control.start(17)
    thread.join()
    assert (control.step, page.progress().state) == (17, PageState.RUNNING)
    control.close()


def test_rank_without_a_lease_waits_at_its_boundary_until_it_has_one(page: Page, control: Control) -> None:
    page.extend_lease(now_ns() - 1)

    def daemon() -> None:
        _within(lambda: page.progress().state == PageState.WAITING or page.progress().reached_seq == 1, "the wait")
        page.extend_lease(now_ns() + 60_000_000_000)

    thread = _meanwhile(daemon)
    control.start(3)
    thread.join()
    page.write_order(2, PageOrderKind.RUN)
    control.boundary()
    assert control.step == 4


def test_retune_is_applied_and_answered(page: Page, control: Control) -> None:
    applied: list[tuple[int, int]] = []
    control.handlers = Handlers(on_retune=lambda threads, workers: applied.append((threads, workers)))
    control.start(0)
    page.retune(5, 3, 2)
    control.safe_point()
    assert applied == [(3, 2)]
    assert (page.get(Word.RETUNE_DONE), page.progress().threads_applied) == (5, 3)


def test_the_number_of_threads_that_a_rank_was_launched_with_is_not_applied_over_the_scripts_own(
    tmp_path: Path,
) -> None:
    page = Page.create(page_path(str(tmp_path), 0), epoch=1, rank=0, world=1, threads=4)
    page.write_order(1, PageOrderKind.RUN)
    control, asked = Control(page), []
    control.handlers = Handlers(on_retune=lambda threads, workers: asked.append(threads))
    control.start(0)
    assert (asked, page.progress().threads_applied) == ([], 4)
    page.retune(1, 2, 0)
    control.safe_point()
    assert (asked, page.progress().threads_applied) == ([2], 2)
    control.close()


def test_newer_stop_further_on_restores_before_it_steps(tmp_path: Path) -> None:
    pages = [Page.create(page_path(str(tmp_path), rank), epoch=1, rank=rank, world=2) for rank in range(2)]
    control = Control(Page.open(pages[0].path))
    told = []
    control.handlers = Handlers(on_offload=lambda _: 1, on_restore=lambda _: told.append(control.step))
    pages[0].write_order(1, PageOrderKind.STOP, stop_seq=1, level=PageParkLevel.OFFLOAD)
    pages[1].mirror(RawPoint(4, 1, 4, False))

    def daemon() -> None:
        _within(lambda: pages[0].progress().state == PageState.OFFLOADED, "the offload")
        # The RUN in between never reached this rank; the other one has gone on to step 7 meanwhile.
        pages[1].mirror(RawPoint(7, 3, 7, False))
        pages[0].write_order(3, PageOrderKind.STOP, stop_seq=3, level=PageParkLevel.PAUSE)
        _within(lambda: pages[0].progress().reached_seq == 3, "the newer stop")
        assert pages[0].progress().reached_step == 8
        pages[0].write_order(4, PageOrderKind.RUN)

    control.start(4)
    thread = _meanwhile(daemon)
    for _ in range(4):
        control.boundary()
    thread.join()
    assert told == [5]
    assert (control.step, pages[0].progress().ack_step) == (8, 5)
    control.close()


def _parked_with_a_state_that_fails(page: Page, control: Control, failures: int) -> list[int]:
    """A rank parked at step 1 whose state comes back after so many failures; returns what counts the attempts."""
    attempts: list[int] = []

    def restore(_: object) -> None:
        attempts.append(control.step)
        if len(attempts) <= failures:
            raise RuntimeError("device memory is not free yet")

    control.handlers = Handlers(on_offload=lambda _: 1, on_restore=restore)
    control.start(0)
    page.write_order(2, PageOrderKind.STOP, stop_seq=2, level=PageParkLevel.OFFLOAD)
    return attempts


def _run_when_offloaded(page: Page) -> None:
    _within(lambda: page.progress().state == PageState.OFFLOADED, "the offload")
    page.write_order(3, PageOrderKind.RUN)


def test_a_state_that_does_not_come_back_is_tried_again(
    page: Page, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order_handler, "_RESTORE_AGAIN_NS", 1_000_000)
    attempts = _parked_with_a_state_that_fails(page, control, failures=2)
    thread = _meanwhile(lambda: _run_when_offloaded(page))
    control.boundary()
    control.boundary()
    thread.join()
    assert attempts == [1, 1, 1]
    assert (control.step, page.progress().state) == (2, PageState.RUNNING)


def test_a_rank_whose_state_never_comes_back_ends(
    page: Page, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(order_handler, "_RESTORE_AGAIN_NS", 1_000_000)
    monkeypatch.setattr(order_handler, "_RESTORE_PATIENCE_NS", 20_000_000)
    monkeypatch.setattr(order_handler.exitcode, "leave_now", leave)
    attempts = _parked_with_a_state_that_fails(page, control, failures=1 << 30)
    thread = _meanwhile(lambda: _run_when_offloaded(page))
    with pytest.raises(SystemExit) as ending:
        control.boundary()
    thread.join()
    assert ending.value.code == EXIT_NO_STATE
    assert len(attempts) > 1
    assert page.progress().error == Error.STATE_UNREADABLE


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


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second account")
def test_a_rank_sends_nothing_to_a_socket_of_another_account(page: Page, tmp_path: Path) -> None:
    path = str(tmp_path / "job.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        os.seteuid(12345)
        try:
            listener.listen(1)
        finally:
            os.seteuid(0)
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

        _within(tend, "the connection")
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
        _within(lambda: page.progress().reached_seq == 2, "the pause")
        page.write_order(3, PageOrderKind.RUN)
        over.append(page.progress().reached_seq)
        connection.send(b"{}")

    thread = _meanwhile(daemon)
    control.boundary()
    thread.join()
    assert over == [2]
    assert page.progress().reached_seq == 3
    page.write_order(4, PageOrderKind.STOP, stop_seq=4, level=PageParkLevel.PAUSE)

    def dying_daemon() -> None:
        _within(lambda: page.progress().reached_seq == 4, "the pause")
        connection.close()
        page.write_order(5, PageOrderKind.RUN)

    # a rank without a daemon polls by itself
    thread = _meanwhile(dying_daemon)
    control.boundary()
    thread.join()
    assert page.progress().reached_seq == 5
    control.close()


def _as_restored(page: Page, *orders: tuple[int, int]) -> None:
    """Write the page of a later epoch over this one, as a process that is restored from its image finds it."""
    fresh = Page.create(f"{page.path}.later", epoch=7, rank=0, world=1)
    for sequence, order in orders:
        fresh.write_order(sequence, order)
    with open(page.path, "r+b") as file:
        file.write(Path(fresh.path).read_bytes())
    fresh.close()


def _by_image(control: Control) -> None:
    control.handlers = Handlers(by_image=True)
    control.hello(Capability.PAUSE | Capability.CHECKPOINT | Capability.IMAGE, form="unmodified")
    control.start(0)
    control.boundary()


@pytest.mark.parametrize("level", [PageParkLevel.CHECKPOINT, PageParkLevel.HAND_OVER])
def test_a_process_restored_from_its_image_goes_on_under_the_orders_of_its_new_epoch(
    page: Page, control: Control, level: int
) -> None:
    _by_image(control)
    page.write_order(2, PageOrderKind.STOP, stop_seq=2, level=level)

    def daemon() -> None:
        _within(lambda: page.progress().reached_seq == 2, "the stop")
        assert page.progress().reached_step == 2
        _as_restored(page, (1, PageOrderKind.WAIT))
        _within(lambda: page.progress().state == PageState.READY and page.progress().reached_seq == 1, "readiness")
        assert (page.progress().step, page.progress().restored_step, page.progress().reached_step) == (2, 2, 2)
        page.write_order(2, PageOrderKind.RUN)

    thread = _meanwhile(daemon)
    control.boundary()
    thread.join()
    control.boundary()
    progress = page.progress()
    assert (progress.step, progress.state, control.epoch) == (3, PageState.RUNNING, 7)
    assert progress.first_step_time_ns > 0
    assert progress.capabilities & Capability.IMAGE
    assert page.get(Word.LOCK) == os.getpid()


def test_a_rank_stands_still_until_its_image_is_taken_and_then_goes_on(page: Page, control: Control) -> None:
    _by_image(control)
    page.request_checkpoint(1)
    agreement = page.get(Word.CHECKPOINT_SEQ)

    def daemon() -> None:
        _within(lambda: page.progress().checkpoint_done == agreement, "the wait for the image")
        assert (page.progress().state, page.progress().checkpoint_step) == (PageState.SAVING, 2)
        page.set(Word.IMAGED_SEQ, agreement)

    thread = _meanwhile(daemon)
    control.boundary()
    control.boundary()
    thread.join()
    assert (page.progress().step, page.progress().state) == (3, PageState.RUNNING)


def test_an_image_taken_while_a_job_ran_goes_on_as_one_taken_at_a_stop(page: Page, control: Control) -> None:
    _by_image(control)
    page.request_checkpoint(1)
    agreement = page.get(Word.CHECKPOINT_SEQ)

    def daemon() -> None:
        _within(lambda: page.progress().checkpoint_done == agreement, "the wait for the image")
        _as_restored(page, (1, PageOrderKind.RUN))

    thread = _meanwhile(daemon)
    control.boundary()
    control.boundary()
    thread.join()
    assert (page.progress().step, page.progress().restored_step, control.epoch) == (3, 2, 7)


def test_nothing_of_a_rank_that_waits_for_its_image_leads_outside(page: Page, control: Control, tmp_path: Path) -> None:
    path = str(tmp_path / "job.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        _by_image(control)
        connection, _ = listener.accept()
        page.write_order(2, PageOrderKind.STOP, stop_seq=2, level=PageParkLevel.CHECKPOINT)

        def daemon() -> None:
            with connection:
                while connection.recv(4096):
                    pass
            _within(lambda: page.progress().reached_seq == 2, "the stop")
            page.write_order(3, PageOrderKind.RUN)
            listener.accept()[0].close()

        thread = _meanwhile(daemon)
        control.boundary()
        thread.join()
    assert page.progress().state == PageState.RUNNING
