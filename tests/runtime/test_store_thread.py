"""The thread that waits for the disk in place of an event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest
from ganger_master.runtime.commits import StoreThread


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[BaseException | None]:
    """What ended a thread."""
    found: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: found.append(args.exc_value))
    return found


@pytest.mark.parametrize("fails", [False, True])
def test_work_that_ends_after_its_event_loop_leaves_the_thread_alive(
    failures: list[BaseException | None], fails: bool
) -> None:
    thread = StoreThread("disk")
    is_done = threading.Event()

    def work() -> None:
        is_done.wait()
        if fails:
            raise OSError("disk")

    async def give_up() -> None:
        asked = asyncio.ensure_future(thread.call(work))
        await asyncio.sleep(0)
        asked.cancel()

    asyncio.run(give_up())
    is_done.set()
    assert asyncio.run(thread.call(lambda: "next")) == "next"
    thread.close()
    assert failures == []


def test_work_is_repeated_while_no_other_task_comes_until_it_is_given_up_or_the_thread_ends() -> None:
    thread = StoreThread("renewals")
    times, thrice = 0, threading.Event()

    def work() -> None:
        nonlocal times
        times += 1
        if times == 3:
            thrice.set()

    thread.repeat(work, 0.01)
    assert thrice.wait(10.0)
    assert asyncio.run(thread.call(lambda: "asked")) == "asked"
    thread.repeat(None)
    asyncio.run(thread.call(lambda: None))
    before = times
    thread.close()
    assert times == before
