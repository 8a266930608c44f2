"""The control page: what is written is read, and nonsense is refused or cut."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from ganger.injob.page import GangPages, Page, PageMismatchError, PageOrder, RawPoint, page_path
from ganger.injob.page_access import PageError
from ganger.injob.page_layout import (
    CHECKPOINT_BIT,
    MAGIC,
    PAGE_BYTES,
    VERSION,
    PageOrderKind,
    PageParkLevel,
    PagePhase,
    PageState,
    Word,
)
from ganger.protocol.stop_rules import RankPoint
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture(params=[True, False], ids=["mapped", "as a file"])
def page(tmp_path: Path, request: pytest.FixtureRequest) -> Page:
    """As a job touches it, and as its daemon does."""
    path, mapped = page_path(str(tmp_path), 0), bool(request.param)
    return Page.create(path, epoch=7, rank=0, world=2, local_rank=0, threads=3, mapped=mapped)


@pytest.fixture
def filed(page: Page) -> Page:
    return Page.open(page.path, mapped=False)


def test_created_page_is_whole_private_and_backed_by_blocks(page: Page) -> None:
    status = os.stat(page.path)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == PAGE_BYTES
    assert status.st_blocks > 0
    identity = Page.open(page.path, writable=False).identity()
    assert (identity.epoch, identity.rank, identity.world) == (7, 0, 2)
    assert os.listdir(os.path.dirname(page.path)) == ["rank-0.page"]


def test_page_of_an_epoch_is_made_once(page: Page) -> None:
    with pytest.raises(FileExistsError):
        Page.create(page.path, epoch=8, rank=0, world=2)
    assert Page.open(page.path).identity().epoch == 7


def test_both_sides_see_each_others_words(page: Page) -> None:
    job = Page.open(page.path)
    job.set(Word.STEP, 12)
    job.set_float(Word.LOSS, 0.25)
    assert (page.progress().step, page.progress().loss) == (12, 0.25)


def test_a_page_has_no_loss_before_the_first_and_then_any_number(page: Page) -> None:
    assert math.isnan(page.progress().loss)
    for loss in (0.25, 0.0, -1.5):
        page.set_loss(loss)
        assert str(page.progress().loss) == str(loss)


def test_read_only_page_cannot_be_written(page: Page) -> None:
    for mapped, refusal in ((True, TypeError), (False, OSError)):
        mirror = Page.open(page.path, writable=False, mapped=mapped)
        with pytest.raises(refusal):
            mirror.set(Word.STEP, 1)


def test_page_of_another_version_is_refused_naming_both(page: Page) -> None:
    page.set(Word.MAGIC, MAGIC << 16 | 9)
    with pytest.raises(PageMismatchError, match=f"version 9, this Ganger reads version {VERSION}"):
        Page.open(page.path)


DAEMONS_WORDS = (
    Word.MAGIC, Word.EPOCH, Word.RANK, Word.WORLD, Word.PID, Word.START_TICKS, Word.THREADS, Word.RETUNE_SEQ,
    Word.CHECKPOINT_SEQ,
)  # fmt: skip


@pytest.mark.parametrize("word", DAEMONS_WORDS)
def test_a_daemon_sees_that_a_job_wrote_over_what_is_not_its_own(page: Page, word: int) -> None:
    identity = page.identity()
    whose = (identity.epoch, identity.rank, identity.world)
    Page.open(page.path).set(Word.STEP, (1 << 64) - 1)
    assert page.damage(*whose) == ""
    Page.open(page.path).set(word, (1 << 63) + 1)
    assert "overwritten by its job" in page.damage(*whose)


def test_a_page_that_its_job_truncates_does_no_harm_to_readers_of_the_file(filed: Page) -> None:
    identity = filed.identity()
    os.truncate(filed.path, 0)
    assert "cut off by its job" in filed.damage(identity.epoch, identity.rank, identity.world)
    looks: list[Callable[[], object]] = [filed.identity, filed.progress, filed.raw_point, filed.read_order]
    for look in looks:
        with pytest.raises(PageError, match="cut off by its job"):
            look()
    filed.set(Word.LEASE_UNTIL, 1)
    assert "cut off by its job" in filed.damage(identity.epoch, identity.rank, identity.world)


def test_a_job_that_never_stops_changing_its_ack_keeps_no_reader_in_a_loop(page: Page) -> None:
    class Restless:
        """Another number at every look."""

        looks = 0

        def __getitem__(self, word: int) -> int:
            self.looks += 1
            return self.looks if word == Word.ACK_SEQ else 5

        def __setitem__(self, word: int, value: int) -> None:
            raise AssertionError("a look writes nothing")

    page.words = Restless()
    assert page.raw_point() == RawPoint(5, 0, 0, True)


def test_file_that_is_no_page_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.page"
    path.write_bytes(b"x" * PAGE_BYTES)
    with pytest.raises(PageError, match="no control page"):
        Page.open(str(path))
    path.write_bytes(b"")
    with pytest.raises(PageError, match="0 bytes"):
        Page.open(str(path))


def test_order_is_read_as_written_and_numbers_only_rise(page: Page) -> None:
    page.write_order(3, PageOrderKind.STOP, stop_seq=3, level=PageParkLevel.OFFLOAD, deadline_ns=99)
    assert page.read_order() == PageOrder(3, PageOrderKind.STOP, 3, PageParkLevel.OFFLOAD, 99)
    page.write_order(3, PageOrderKind.STOP, stop_seq=3, level=PageParkLevel.OFFLOAD, deadline_ns=99)
    with pytest.raises(ValueError, match="numbers only rise"):
        page.write_order(2, PageOrderKind.RUN)
    with pytest.raises(ValueError, match="stop sequence"):
        page.write_order(4, PageOrderKind.RUN, stop_seq=3)
    with pytest.raises(ValueError, match="stop sequence"):
        page.write_order(4, PageOrderKind.STOP)


def test_order_cut_off_in_the_middle_reads_as_none_and_is_written_again(page: Page) -> None:
    page.write_order(3, PageOrderKind.RUN)
    page.set(Word.ORDER_SEQ, 0)
    assert page.read_order().seq == 0
    page.write_order(3, PageOrderKind.RUN)
    assert page.read_order().seq == 3


def test_fence_ends_the_lease_for_good(page: Page) -> None:
    page.extend_lease(1000)
    page.fence()
    page.extend_lease(5000)
    assert page.fenced
    assert page.get(Word.LEASE_UNTIL) == 1


def test_checkpoint_request_never_looks_like_a_stop(page: Page) -> None:
    seq = page.request_checkpoint(3)
    page.publish_ack(3, 40)
    assert page.point(seq) == RankPoint(0, None)
    assert page.point(3) == RankPoint(0, 40)
    assert seq == 3 | CHECKPOINT_BIT


def test_mirror_follows_and_never_goes_back(page: Page) -> None:
    page.mirror(RawPoint(5, 2, 5, False))
    page.mirror(RawPoint(4, 0, 0, False))
    assert page.raw_point() == RawPoint(5, 2, 5, False)
    page.mirror(RawPoint(6, 2, 5, True))
    assert page.point(2) == RankPoint(6, 5, True)


def test_word_that_does_not_fit_is_refused(page: Page) -> None:
    for value in (-1, 1 << 64):
        with pytest.raises(ValueError, match="cannot hold"):
            page.set(Word.STEP, value)


@given(content=st.binary(min_size=PAGE_BYTES - 64, max_size=PAGE_BYTES - 64))
def test_whatever_a_job_scribbles_reads_as_harmless_numbers(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    page = Page.create(page_path(str(tmp_path_factory.mktemp("page")), 0), epoch=1, rank=0, world=1)
    with open(page.path, "r+b") as file:
        file.seek(64)
        file.write(content)
    progress = page.progress()
    assert 0 <= progress.step < 1 << 62
    assert PagePhase.START <= progress.phase <= PagePhase.DONE
    assert PageState.INIT <= progress.state <= PageState.EXITING
    assert progress.exit_code is None or 0 <= progress.exit_code <= 255
    assert math.isnan(progress.loss) or isinstance(progress.loss, float)
    assert 0 <= page.raw_point().step < 1 << 62
    page.close()


def test_gang_waits_for_pages_that_are_not_there_yet(page: Page) -> None:
    directory = os.path.dirname(page.path)
    pages = GangPages(directory, 2, [page])
    assert pages.points(1) is None
    other = Page.create(page_path(directory, 1), epoch=7, rank=1, world=2)
    other.publish_ack(1, 9)
    other.set(Word.STEP, 9)
    assert pages.points(1) == (RankPoint(0, None), RankPoint(9, 9))
    pages.close()


def test_gang_refuses_a_page_in_another_ranks_place(page: Page) -> None:
    directory = os.path.dirname(page.path)
    wrong = page_path(directory, 1)
    os.link(page.path, wrong)
    with pytest.raises(PageError, match="belongs to rank 0 of 2"):
        GangPages(directory, 2).page(1)
