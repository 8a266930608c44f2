"""Desired and observed sets that do not fit into one message."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from ganger.agent.v1 import agent_pb2
from ganger.cluster.resources import Role, TaskShape
from ganger.v1 import node_pb2
from ganger.wire.channels import MAX_MESSAGE_BYTES, PART_BYTES
from ganger.wire.errors import from_rpc_error
from ganger_master.core.desired_projection import DesiredGang, DesiredSet
from ganger_master.core.gang_model import GangIntent
from ganger_master.core.job_spec import JobSpec
from ganger_master.rpc import agent_service
from ganger_master.rpc.agent_messages import response_to_wire
from rpc.kit import Speaker, serving

WORD = "\N{GRINNING FACE}" * 65_000


def large_set(gangs: int = 60, version: int = 9) -> DesiredSet:
    """As an array of members with environments of 65,000 characters of four bytes each makes it."""
    spec = JobSpec(("train",), (Role("worker", 1, TaskShape(1)),), environment={"WORD": WORD})
    return DesiredSet(
        version, strays=tuple(DesiredGang(n, f"u{n}", n, 1, GangIntent.RUN, spec=spec) for n in range(1, gangs + 1))
    )


def test_a_desired_set_with_large_specs_is_complete_in_every_answer_and_its_specs_come_one_after_the_other() -> None:
    desired = large_set()
    got: set[int] = set()
    missing: list[int] = []
    answers = 0
    while not answers or missing:
        answer = response_to_wire(desired, 1, 0, missing)
        assert answer.ByteSize() <= PART_BYTES
        assert [gang.epoch for gang in answer.gangs] == list(range(1, 61))
        with_spec = {gang.epoch for gang in answer.gangs if gang.HasField("spec")}
        assert with_spec.isdisjoint(answer.later_specs)
        assert with_spec | set(answer.later_specs) == set(range(1, 61))
        assert with_spec - got, "an answer without a new spec"
        got |= with_spec
        missing = [epoch for epoch in answer.later_specs if epoch not in got]
        answers += 1
    assert got == set(range(1, 61))
    assert answers == 5


def test_a_spec_that_is_larger_than_a_part_goes_alone() -> None:
    big = JobSpec(("train",), (), environment={"WORD": "x" * (PART_BYTES + 1_000)})
    small = JobSpec(("train",), ())
    desired = DesiredSet(
        1,
        strays=(
            DesiredGang(1, "u1", 1, 1, GangIntent.RUN, spec=small),
            DesiredGang(2, "u2", 2, 1, GangIntent.RUN, spec=big),
        ),
    )
    first = response_to_wire(desired, 1, 0)
    assert list(first.later_specs) == [2]
    second = response_to_wire(desired, 1, 0, [2])
    assert list(second.later_specs) == [1]
    assert PART_BYTES < second.ByteSize() <= MAX_MESSAGE_BYTES


def test_a_node_whose_desired_state_cannot_be_sent_is_not_ready_and_the_reason_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            node = Speaker(served, "n1")
            await node.join()

            async def seen() -> node_pb2.Node:
                return await served.nodes.GetNode(node_pb2.GetNodeRequest(name="nodes/n1"))

            assert (await seen()).state == node_pb2.Node.STATE_READY
            monkeypatch.setattr(agent_service, "MAX_MESSAGE_BYTES", 1)
            before = (await seen()).last_seen_time
            for _ in range(2):
                with pytest.raises(grpc.RpcError) as refused:
                    await node.reconcile([], max_wait_seconds=0.01)
                assert from_rpc_error(refused.value).reason == "MESSAGE_TOO_LARGE"
            found = await seen()
            assert found.state == node_pb2.Node.STATE_SILENT
            assert "a message holds" in found.state_reason
            assert found.last_seen_time == before, "a call without an answer renews no lease"
            monkeypatch.undo()
            await node.reconcile([])
            assert (await seen()).state == node_pb2.Node.STATE_READY

    asyncio.run(story())


def test_an_observed_set_that_comes_in_parts_counts_whole(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            node = Speaker(served, "n1")
            await node.join()

            def part(observation: int, uid: str, *, continues: bool) -> agent_pb2.ReconcileRequest:
                gang = agent_pb2.ObservedGang(
                    job="jobs/1", job_uid=uid, epoch=99, phase=agent_pb2.ObservedGang.PHASE_RUNNING
                )
                return agent_pb2.ReconcileRequest(
                    session=node.session, observation=observation, changed=True, gangs=[gang], has_more=continues,
                    storage_proved=True,
                )  # fmt: skip

            # The first part of an observation that was never completed counts no more.
            await served.agents.Reconcile(part(7, "lost", continues=True))
            answer = await served.agents.Reconcile(part(8, "first", continues=True))
            assert not answer.changed
            shown = await served.nodes.GetNode(node_pb2.GetNodeRequest(name="nodes/n1"))
            assert list(shown.quarantined) == []
            await served.agents.Reconcile(part(8, "second", continues=False))
            shown = await served.nodes.GetNode(node_pb2.GetNodeRequest(name="nodes/n1"))
            assert sorted(shown.quarantined) == ["first epoch 99", "second epoch 99"]

    asyncio.run(story())
