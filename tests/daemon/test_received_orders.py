"""The way of a gang's orders into its control pages."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ganger.agent.v1 import agent_pb2
from ganger_daemon.gang import gang_context
from ganger_daemon.gang.gang_context import ReceivedOrders, summary_of


def desired_gang(master_sequence: int, intent: agent_pb2.Intent) -> agent_pb2.DesiredGang:
    desired = agent_pb2.DesiredGang(job="jobs/1", job_uid="uid", epoch=7, intent=intent, level=1)  # type: ignore[arg-type]
    desired.order.epoch, desired.order.master_sequence = 7, master_sequence
    return desired


def context_on(directory: Path, written: list[int]) -> Any:
    pages = SimpleNamespace(write_order=lambda order: written.append(order.seq >> 40))
    host = SimpleNamespace(order_deadline_s=60.0)
    paths = SimpleNamespace(orders=directory, account=None, read_mode=0o600)
    return SimpleNamespace(host=host, paths=paths, pages=pages, proved_storage=None, write_notes=lambda: None)


def test_an_order_that_comes_while_another_is_written_is_written_next(tmp_path: Path, monkeypatch: Any) -> None:
    orders = ReceivedOrders(desired_gang(1, agent_pb2.INTENT_RUN))
    written: list[int] = []
    write_details = gang_context.write_details

    async def story() -> None:
        loop = asyncio.get_running_loop()

        def write_while_another_comes(*arguments: Any) -> None:
            write_details(*arguments)
            newer = desired_gang(2, agent_pb2.INTENT_PARK)
            asyncio.run_coroutine_threadsafe(take(newer), loop).result()

        async def take(newer: agent_pb2.DesiredGang) -> None:
            assert orders.take(newer, is_stale=False, is_launched=True) is not None

        monkeypatch.setattr(gang_context, "write_details", write_while_another_comes)
        await orders.write(context_on(tmp_path, written))
        monkeypatch.setattr(gang_context, "write_details", write_details)
        assert orders.is_due, "the newer order is not in the pages"
        await orders.write(context_on(tmp_path, written))

    asyncio.run(story())
    assert written == [1, 2]
    assert not orders.is_due


@pytest.mark.parametrize(
    ("message", "summary"),
    [
        ("", "it did not say why"),
        ("Traceback ...\n  File ...\nValueError: no such layer\n", "no such layer"),
        ("OSError: [Errno 28] No space left on device: '/s/1.tmp'", "/s/1.tmp: no space left on device"),
        ("OSError: [Errno 28] No space left on device", "no space left on device"),
    ],
)
def test_a_traceback_is_summed_up_in_its_last_line_without_the_number_of_an_error(message: str, summary: str) -> None:
    assert summary_of(message) == summary
