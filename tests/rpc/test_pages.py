"""Lists and streams whatever they hold: every message stays below what one may be, and nothing is left out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from ganger.v1 import array_pb2, job_service_pb2, node_pb2, resources_pb2, scheduling_pb2
from ganger.wire.channels import PART_BYTES
from ganger_master.core import commands
from ganger_master.rpc import answer_messages
from ganger_master.store.tables import HistoryEntry
from rpc.kit import Served, Speaker, serving, spec_of

_SMALL = 2_000


async def all_pages(
    call: Callable[[Any], Awaitable[Any]], request: Any, entries: Callable[[Any], list[str]]
) -> tuple[list[str], list[int]]:
    """The entries of all pages, and the bytes of each page."""
    found: list[str] = []
    sizes: list[int] = []
    while True:
        page = await call(request)
        found += entries(page)
        sizes.append(page.ByteSize())
        if not page.next_page_token:
            return found, sizes
        request.page_token = page.next_page_token


async def with_arrays(served: Served, many: int) -> list[str]:
    names = []
    for index in range(many):
        request = job_service_pb2.CreateArrayRequest(
            spec=spec_of(name=f"array {index}"), members=[array_pb2.ArrayMember(index=0)]
        )
        names.append((await served.jobs.CreateArray(request)).name)
    return names[::-1]


def test_arrays_are_listed_in_pages_of_so_many(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            names = await with_arrays(served, 25)
            request = job_service_pb2.ListArraysRequest(page_size=10)
            found, sizes = await all_pages(served.jobs.ListArrays, request, lambda page: [a.name for a in page.arrays])
            assert found == names
            assert len(sizes) == 3
            cancelled = [int(name.removeprefix("arrays/")) for name in names[:20]]
            for number in cancelled:
                await served.master.writer.submit(commands.CancelArray(number, "enough", ""))
            live = await served.jobs.ListArrays(job_service_pb2.ListArraysRequest(live=True))
            assert [array.name for array in live.arrays] == names[20:]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("method", "request_of", "entries"),
    [
        ("ListArrays", job_service_pb2.ListArraysRequest, lambda page: [one.name for one in page.arrays]),
        ("ListJobs", job_service_pb2.ListJobsRequest, lambda page: [one.name for one in page.jobs]),
    ],
)
def test_a_page_of_jobs_or_arrays_is_full_by_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, request_of: Any, entries: Any
) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            await with_arrays(served, 40)
            call = getattr(served.jobs, method)
            whole, _ = await all_pages(call, request_of(page_size=1_000), entries)
            monkeypatch.setattr(answer_messages, "PAGE_BYTES", _SMALL)
            found, sizes = await all_pages(call, request_of(page_size=1_000), entries)
            assert found == whole
            assert len(whole) == 40
            assert max(sizes) <= _SMALL + 100

    asyncio.run(story())


def test_a_page_of_nodes_is_full_by_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            for number in range(30):
                await Speaker(served, f"n{number:02}").join()
            monkeypatch.setattr(answer_messages, "PAGE_BYTES", _SMALL)
            found, sizes = await all_pages(
                served.nodes.ListNodes, node_pb2.ListNodesRequest(), lambda page: [one.name for one in page.nodes]
            )
            assert found == [f"nodes/n{number:02}" for number in range(30)]
            assert len(sizes) > 1
            assert max(sizes) <= _SMALL + 100

    asyncio.run(story())


def test_a_page_of_events_is_full_by_its_bytes_and_old_long_texts_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def history(*_: object) -> list[HistoryEntry]:
        figures = '{"detail": "' + "y" * 100_000 + '"}'
        return [HistoryEntry(n, 1.0, "jobs/1", "job_submitted", "c", "x" * 3_900_000, figures) for n in range(1, 101)]

    async def story() -> None:
        async with serving(tmp_path) as served:
            monkeypatch.setattr(served.master.writer, "history", history)
            monkeypatch.setattr(answer_messages, "PAGE_BYTES", 20_000)
            page = await served.jobs.ListEvents(job_service_pb2.ListEventsRequest())
            assert page.ByteSize() <= 21_000
            assert page.next_sequence == page.events[-1].sequence == len(page.events)
            assert len(page.events[0].message) == len(page.events[0].figures["detail"]) == 1_000

    asyncio.run(story())


def test_the_jobs_of_a_cluster_are_sent_in_messages_that_are_bounded_by_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            await with_arrays(served, 60)
            monkeypatch.setattr(answer_messages, "PAGE_BYTES", _SMALL)
            found: list[str] = []
            watch = served.scheduling.WatchCluster(scheduling_pb2.WatchClusterRequest())
            async for delta in watch:
                assert delta.ByteSize() <= _SMALL + 100
                found += [job.job for job in delta.jobs]
                if not delta.has_more:
                    break
            watch.cancel()
            assert len(set(found)) == len(found) == 60

    asyncio.run(story())


def test_the_refusals_of_a_scheduler_are_cut_and_break_no_list(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            await Speaker(served, "n1").join()
            job = await served.submit()
            refusal = resources_pb2.Refusal(reason="GPUS", message="x" * 10_000)
            request = scheduling_pb2.GangRequest(job=job.name, revision=job.revision, blockers=[refusal] * 90)
            verdict = await served.scheduling.RequestGang(request)
            assert len(verdict.rejected.refusals) <= 20
            listed = await served.jobs.ListJobs(job_service_pb2.ListJobsRequest())
            assert 0 < len(listed.jobs[0].blockers) <= 20
            assert max(len(one.message) for one in listed.jobs[0].blockers) <= 600
            events = await served.jobs.ListEvents(job_service_pb2.ListEventsRequest())
            assert max(event.ByteSize() for event in events.events) < 10_000

    asyncio.run(story())


def test_verdicts_of_one_message_come_in_several_where_they_are_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            await Speaker(served, "n1").join()
            job = await served.submit()
            refusal = resources_pb2.Refusal(reason="GPUS", message="x" * 500)
            one = scheduling_pb2.GangRequest(job=job.name, revision=job.revision, blockers=[refusal])

            async def messages():  # type: ignore[no-untyped-def]
                yield scheduling_pb2.GangRequests(requests=[one] * 30)

            monkeypatch.setattr(answer_messages, "PAGE_BYTES", _SMALL)
            answers = [answer async for answer in served.scheduling.RequestGangs(messages())]
            assert sum(len(answer.verdicts) for answer in answers) == 30
            assert max(answer.ByteSize() for answer in answers) <= _SMALL + 100

    asyncio.run(story())


def test_a_page_has_room_for_the_one_entry_that_is_larger_than_it() -> None:
    room = answer_messages.PageRoom(10)
    assert room.take(resources_pb2.Refusal(message="x" * (PART_BYTES + 1)))
    assert not room.take(resources_pb2.Refusal())
