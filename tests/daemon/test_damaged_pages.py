"""A job may do anything to its own control page: it alone ends for it."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import pytest
from daemon.kit import Cluster, Intents, Observed, in_phase, run, with_changes
from ganger.injob.page import Page, page_path
from ganger.injob.page_access import PageError
from ganger.injob.page_layout import VERSION, Word
from ganger_daemon.gang.control_pages import ControlPages


def test_a_daemon_maps_no_page_that_a_job_could_cut_off_under_it(tmp_path: Path) -> None:
    for make in (lambda pages: pages.create({0: 1}), lambda pages: pages.open(VERSION)):
        pages = ControlPages(tmp_path, epoch=1, world=2, local=(0,))
        make(pages)
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()
        at_hand = [pages[0], pages[1]]
    for page in at_hand:
        os.truncate(page.path, 0)
        with pytest.raises(PageError, match="cut off by its job"):
            page.raw_point()
    assert pages.damage() == f"control page {at_hand[0].path} was cut off by its job"
    assert not pages.readable


@pytest.mark.system
def test_jobs_that_damage_their_pages_are_killed_by_name_and_the_daemon_and_others_go_on() -> None:
    async def story(made: Cluster) -> None:
        daemon = await made.daemon_process("n1")
        await made.until_session("n1")
        uids = [str(uuid.uuid4()) for _ in range(3)]
        for index, uid in enumerate(uids):
            gang = made.gang({"n1": [0]}, "n1", uid=uid, epoch=index + 1)
            gang.job, gang.claim.device_mask = f"jobs/{index + 1}", 1 << index
            gang.claim.millicores[:] = [500, 500]
            await made.master.want("n1", gang)
        for epoch in (1, 2, 3):
            await made.master.until("n1", epoch, in_phase(Observed.PHASE_RUNNING))
        cut, overwritten = (
            page_path(str(made.directory / "r-n1" / uids[index] / f"{index + 1}"), 0) for index in (0, 1)
        )
        os.truncate(cut, 0)
        Page.open(overwritten).set(Word.MAGIC, 1)

        first = await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        second = await made.master.until("n1", 2, in_phase(Observed.PHASE_ENDED))
        assert first.outcome.message == f"killed: control page {cut} was cut off by its job"
        assert second.outcome.message == f"killed: control page {overwritten} was overwritten by its job"
        assert made.master.book("n1").observed[3].phase == Observed.PHASE_RUNNING
        assert daemon.returncode is None

    run(story)


@pytest.mark.system
@pytest.mark.parametrize("word", [(1 << 64) - 1, 1 << 62])
def test_whatever_a_job_reports_fits_into_what_the_daemon_says_of_it(word: int) -> None:
    async def story(made: Cluster) -> None:
        await made.daemon("n1")
        uid = str(uuid.uuid4())
        await made.master.want("n1", made.gang({"n1": [0]}, "n1", uid=uid, command=["sleep", "1000"]))
        await made.master.until("n1", 1, lambda gang: bool(gang.ranks))
        page = Page.open(page_path(str(made.directory / "r-n1" / uid / "1"), 0))
        for index in range(Word.ACK_SEQ, Word.ERROR + 1):
            page.set(index, word)
        stop = with_changes(made.gang({"n1": [0]}, "n1", uid=uid), 2, intent=Intents.INTENT_STOP)
        await made.master.want("n1", stop)
        await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))

    run(story)
