"""Storage that does not answer: the daemon goes on, and reports what waits for it."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ganger_daemon.checkpoints import storage as layout
from ganger_daemon.node import node_context
from ganger_daemon.node.node_context import Storage, StorageHungError, StorageWork


@pytest.fixture
def hang() -> Iterator[threading.Event]:
    """An event that ends calls that hang."""
    event = threading.Event()
    yield event
    event.set()


def test_work_that_hangs_is_given_up_and_later_work_has_places_of_its_own(hang: threading.Event) -> None:
    async def story() -> None:
        work = StorageWork(at_once=2)
        with pytest.raises(StorageHungError, match=r"has not answered within 0\.05 s"):
            await work.run(hang.wait, within_s=0.05)
        assert await work.run(sum, (1, 2), within_s=30.0) == 3
        with pytest.raises(ZeroDivisionError):
            await work.run(divmod, 1, 0, within_s=30.0)
        for _ in range(2):
            with pytest.raises(StorageHungError):
                await work.run(hang.wait, within_s=0.05)
        # All places are taken: work that is given up while it waits is never done.
        done: list[int] = []
        with pytest.raises(StorageHungError):
            await work.run(done.append, 1, within_s=0.05)
        hang.set()
        assert await work.run(sum, (3, 4), within_s=30.0) == 7
        assert done == []

    asyncio.run(story())


def test_the_daemon_does_not_wait_for_a_token_on_storage_that_hangs_and_reports_that_it_does(
    tmp_path: Path, hang: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".ganger-token").write_text("token\n")
    storage = Storage()
    storage.configure(str(tmp_path), "token")
    assert (storage.proved, storage.trouble) == (True, "")
    found = layout.token_found
    monkeypatch.setattr(layout, "token_found", lambda path: hang.wait() and found(path))
    monkeypatch.setattr(node_context, "_LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(node_context, "_HUNG_S", 0.1)
    began, last = time.monotonic(), time.time()
    assert storage.proved, "as was found last"
    while not storage.trouble:
        assert storage.proved
        assert time.monotonic() - began < 30.0
    reported = storage.trouble
    assert re.fullmatch(r"STORAGE_HUNG: storage has not answered since \d{4}(-\d\d){2} \d\d(:\d\d){2} UTC", reported)
    while time.time() < last + 1.1:
        assert storage.trouble == reported, "the report does not change while storage hangs"
    hang.set()
    while storage.trouble:
        assert time.monotonic() - began < 30.0
    assert storage.proved


def test_a_session_begins_once_it_is_known_whether_the_node_sees_a_storage_that_answers_late(
    tmp_path: Path, hang: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".ganger-token").write_text("token\n")
    found = layout.token_found
    monkeypatch.setattr(layout, "token_found", lambda path: hang.wait() and found(path))
    storage = Storage()
    storage.configure(str(tmp_path), "token")
    assert not storage.proved

    async def story() -> None:
        settling = asyncio.create_task(storage.settle())
        await asyncio.sleep(0)
        assert not settling.done()
        hang.set()
        await settling

    asyncio.run(story())
    assert storage.proved
    # One that hangs is not waited for any longer.
    monkeypatch.setattr(node_context, "_HUNG_S", 0.05)
    hang.clear()
    other = Storage()
    other.configure(str(tmp_path), "token")
    asyncio.run(other.settle())
    assert not other.proved
