"""Control inside the job: checkpoints of one rank, written by itself or as an image of its process."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest
from ganger.injob.control import Control, Handlers, StopRequest
from ganger.injob.order_handler import OrderHandler
from ganger.injob.page import Page, PageOrder
from ganger.injob.page_layout import Capability, Error, PageOrderKind, PageParkLevel, PageState, Word
from injob.control_kit import meanwhile, within


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
        within(lambda: page.progress().reached_seq == 2, "the shard")
        assert (page.progress().state, page.progress().checkpoint_step) == (PageState.PAUSED, 2)
        # another rank's storage was full: asked again it need not write again, and running is always possible
        page.write_order(3, PageOrderKind.STOP, stop_seq=2, level=PageParkLevel.CHECKPOINT)
        within(lambda: page.progress().reached_seq == 3, "the same shard")
        page.let_leave(2)
        page.write_order(4, PageOrderKind.RUN)

    with meanwhile(daemon):
        control.boundary()
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
        within(lambda: page.progress().reached_seq == 2, "the stop")
        assert page.progress().reached_step == 2
        _as_restored(page, (1, PageOrderKind.WAIT))
        within(lambda: page.progress().state == PageState.READY and page.progress().reached_seq == 1, "readiness")
        assert (page.progress().step, page.progress().restored_step, page.progress().reached_step) == (2, 2, 2)
        page.write_order(2, PageOrderKind.RUN)

    with meanwhile(daemon):
        control.boundary()
    control.boundary()
    progress = page.progress()
    assert (progress.step, progress.state, control.epoch) == (3, PageState.RUNNING, 7)
    assert progress.first_step_time_ns > 0
    assert progress.capabilities & Capability.IMAGE
    assert page.get(Word.LOCK) == os.getpid()


def test_a_stop_after_a_restore_may_have_the_number_of_one_that_was_read_before_the_image(
    page: Page, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    agreement_of = OrderHandler._agreement

    def be_imaged_once_read(handler: OrderHandler, order: PageOrder) -> int:
        agreement = agreement_of(handler, order)
        if agreement and page.progress().reached_seq == 2 and page.get(Word.EPOCH) != 7:
            _as_restored(page, (1, PageOrderKind.RUN))
        return agreement

    _by_image(control)
    monkeypatch.setattr(OrderHandler, "_agreement", be_imaged_once_read)
    page.write_order(2, PageOrderKind.STOP, stop_seq=2, level=PageParkLevel.CHECKPOINT)
    control.boundary()
    assert page.get(Word.EPOCH) == 7
    control.boundary()
    page.write_order(2, PageOrderKind.STOP, stop_seq=2, level=PageParkLevel.PAUSE)

    def daemon() -> None:
        within(lambda: page.progress().reached_seq == 2, "the stop")
        page.write_order(3, PageOrderKind.RUN)

    with meanwhile(daemon):
        control.boundary()
    assert (page.progress().ack_step, page.progress().reached_step) == (4, 4)


def test_a_rank_stands_still_until_its_image_is_taken_and_then_goes_on(page: Page, control: Control) -> None:
    _by_image(control)
    page.request_checkpoint(1)
    agreement = page.get(Word.CHECKPOINT_SEQ)

    def daemon() -> None:
        within(lambda: page.progress().checkpoint_done == agreement, "the wait for the image")
        assert (page.progress().state, page.progress().checkpoint_step) == (PageState.SAVING, 2)
        page.set(Word.IMAGED_SEQ, agreement)

    with meanwhile(daemon):
        control.boundary()
        control.boundary()
    assert (page.progress().step, page.progress().state) == (3, PageState.RUNNING)


def test_an_image_taken_while_a_job_ran_goes_on_as_one_taken_at_a_stop(page: Page, control: Control) -> None:
    _by_image(control)
    page.request_checkpoint(1)
    agreement = page.get(Word.CHECKPOINT_SEQ)

    def daemon() -> None:
        within(lambda: page.progress().checkpoint_done == agreement, "the wait for the image")
        _as_restored(page, (1, PageOrderKind.RUN))

    with meanwhile(daemon):
        control.boundary()
        control.boundary()
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
            within(lambda: page.progress().reached_seq == 2, "the stop")
            page.write_order(3, PageOrderKind.RUN)
            listener.accept()[0].close()

        with meanwhile(daemon):
            control.boundary()
    assert page.progress().state == PageState.RUNNING
