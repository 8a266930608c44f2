"""Another version of Ganger: what does not speak the same page is refused by name, and what runs is left alone."""

from __future__ import annotations

import uuid

import pytest
from daemon.kit import Cluster, Intents, Observed, in_phase, log_of, run, with_changes
from ganger.injob.page import MAGIC, VERSION, Page, Word, page_path
from kit.waiting import eventually

pytestmark = pytest.mark.system


def test_a_daemon_leaves_a_job_under_pages_of_another_version_alone_and_says_which() -> None:
    async def story(made: Cluster) -> None:
        first = await made.daemon_process("n1")
        await made.until_session("n1")
        uid = str(uuid.uuid4())
        gang = made.gang({"n1": [0]}, "n1", uid=uid)
        await made.master.want("n1", gang)
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        first.kill()
        await first.wait()
        page = Page.open(page_path(str(made.directory / "r-n1" / uid / "1"), 0))
        page.set(Word.MAGIC, MAGIC << 16 | VERSION + 1)

        assert await (await made.daemon_process("n1")).wait() == 4
        said = (made.directory / "n1.log").read_text()
        assert f"has version {VERSION + 1}, this Ganger reads version {VERSION}" in said
        assert "Traceback" not in said

        def steps() -> int:
            return len(log_of(made.directory, "n1", uid, 0, 1))

        before = steps()
        eventually(lambda: steps() > before + 5, what="the job goes on")

        # the right version is back
        page.set(Word.MAGIC, MAGIC << 16 | VERSION)
        made.master.book("n1").observed.clear()
        await made.daemon_process("n1")
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        await made.master.want("n1", with_changes(gang, 2, intent=Intents.INTENT_STOP))
        await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))

    run(story)
