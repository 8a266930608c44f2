"""A gang whose launch has to wait is reported all the same: a master that wanted it would read its absence as gone."""

from __future__ import annotations

import uuid

import pytest
from daemon.kit import Cluster, Observed, in_phase, run

pytestmark = pytest.mark.system


def test_gangs_that_wait_for_the_launch_of_another_are_reported_as_starting() -> None:
    async def story(made: Cluster) -> None:
        daemon = await made.daemon("n1")
        uid = str(uuid.uuid4())
        async with daemon.host.launch_lock:
            await made.master.want("n1", made.gang({"n1": [0]}, "n1", uid=uid, steps=20))
            waiting = await made.master.until("n1", 1, lambda _: True)
            assert waiting.phase == Observed.PHASE_STARTING
            assert not waiting.HasField("outcome")
        await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))

    run(story)
