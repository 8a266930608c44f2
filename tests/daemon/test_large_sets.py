"""Sets that do not fit into one message: specs that come later, and observed sets in parts."""

from __future__ import annotations

import uuid

import pytest
from daemon.kit import Cluster, Observed, in_phase, run, with_changes
from ganger.agent.v1 import agent_pb2
from ganger.wire.channels import MAX_MESSAGE_BYTES, PART_BYTES
from ganger_daemon.node.session import _first_parts
from rpc.kit import until


def test_an_observed_set_that_is_too_large_goes_up_in_parts_that_each_fit() -> None:
    gangs = [
        agent_pb2.ObservedGang(job="jobs/1", epoch=epoch, outcome=agent_pb2.Outcome(message="x" * 10_000))
        for epoch in range(1, 901)
    ]
    request = agent_pb2.ReconcileRequest(session="s", observation=7, changed=True, gangs=gangs, storage_proved=True)
    assert request.ByteSize() > 2 * MAX_MESSAGE_BYTES
    parts = _first_parts(request)
    assert max(part.ByteSize() for part in (*parts, request)) <= PART_BYTES + 100
    assert [part.observation for part in parts] == [7] * len(parts)
    assert all(part.has_more for part in parts)
    assert not request.has_more
    assert request.storage_proved
    assert [gang.epoch for part in (*parts, request) for gang in part.gangs] == list(range(1, 901))


def test_an_observed_set_that_fits_goes_up_in_one_call() -> None:
    request = agent_pb2.ReconcileRequest(session="s", changed=True, gangs=[agent_pb2.ObservedGang(epoch=1)])
    assert _first_parts(request) == []
    assert len(request.gangs) == 1


@pytest.mark.system
def test_a_gang_whose_spec_comes_later_starts_with_it_and_no_other_gang_is_stopped_meanwhile() -> None:
    async def story(made: Cluster) -> None:
        daemon = await made.daemon("n1")
        book = made.master.book("n1")
        first, second = str(uuid.uuid4()), str(uuid.uuid4())
        running = made.gang({"n1": [0]}, "n1", uid=first, epoch=1, pause=0.005)
        await made.master.want("n1", running)
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        late = made.gang({"n1": [0]}, "n1", uid=second, epoch=2, pause=0.005)
        late.claim.device_mask = 0b10
        # The spec of the first is left out for want of room as well: its daemon has it already.
        book.late = {1, 2}
        await made.master.want("n1", late)
        await until(lambda: book.missed == (2,))
        assert daemon.gangs.find(second, 2) is None, "it was started without its spec"
        # Orders for others are obeyed while the spec is missing.
        await made.master.want("n1", with_changes(running, 2, checkpoint_request=1))
        await made.master.until("n1", 1, lambda seen: seen.order.master_sequence == 2)
        assert 2 not in book.observed
        book.late = set()
        await made.master.until("n1", 2, in_phase(Observed.PHASE_RUNNING))
        assert book.observed[1].phase == Observed.PHASE_RUNNING
        await until(lambda: book.missed == ())

    run(story)
