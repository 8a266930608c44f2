"""A trial of less memory: when file caches are held back, and that it outlives neither its daemon nor the pages."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from types import SimpleNamespace
from typing import cast

import pytest
from daemon.kit import Cluster, Observed, in_phase, run, with_changes
from ganger_daemon.cgroups.controllers import MemoryUse
from ganger_daemon.gang.gang_memory import MemoryTrial
from ganger_daemon.node.node_context import NodeContext
from rpc.kit import until

MIB = 1 << 20
LIMIT = 1024 * MIB


class Held:
    """Control groups that hold caches back, and record to what; `refuses`: the next calls that fail."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.refuses = 0
        self.may_return = threading.Event()
        self.may_return.set()

    def memory_use(self, group: str) -> MemoryUse:
        return MemoryUse(600 * MIB, None, used=600 * MIB, least=256 * MIB)

    def hold_caches(self, group: str, memory_bytes: int) -> bool:
        assert self.may_return.wait(30)
        self.calls.append(memory_bytes // MIB)
        self.refuses -= self.refuses > 0
        return not self.refuses


def trial_on(held: Held) -> MemoryTrial:
    return MemoryTrial(cast(NodeContext, SimpleNamespace(cgroups=held)), "gang", lambda: 0)


def test_a_new_daemon_lifts_what_it_finds_once_and_repeats_what_failed() -> None:
    async def story() -> None:
        held = Held()
        held.refuses = 3
        trial = trial_on(held)
        for _ in range(5):
            # Also of a gang whose limit and pages cannot be read.
            await trial.follow(0, False, time.monotonic())
        assert held.calls == [0, 0, 0]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("limit", "is_running", "after_s"), [(LIMIT, False, 1.0), (LIMIT, True, 900.0), (300 * MIB, True, 1.0)]
)
def test_a_trial_ends_with_the_run_with_its_time_and_where_the_limit_leaves_no_room(
    limit: int, is_running: bool, after_s: float
) -> None:
    async def story() -> None:
        held = Held()
        trial = trial_on(held)
        trial.ask(400 * MIB)
        await trial.follow(LIMIT, True, time.monotonic())
        assert (held.calls, trial.bytes_now) == ([400], 400 * MIB)
        await trial.follow(limit, is_running, time.monotonic() + after_s)
        assert (held.calls, trial.bytes_now) == ([400, 0], 0)

    asyncio.run(story())


def test_a_hold_that_failed_is_no_trial_and_is_repeated_and_lifted() -> None:
    async def story() -> None:
        held = Held()
        held.refuses = 2
        trial = trial_on(held)
        trial.ask(1)
        now = time.monotonic()
        await trial.follow(LIMIT, True, now)
        assert (held.calls, trial.bytes_now) == ([320], 0)
        await trial.follow(LIMIT, True, now + 1.0)
        assert (held.calls, trial.bytes_now) == ([320, 320], 320 * MIB)
        held.refuses = 2
        trial.ask(0)
        await trial.follow(LIMIT, True, now + 2.0)
        await trial.follow(LIMIT, True, now + 2.0)
        assert (held.calls, trial.bytes_now) == ([320, 320, 0, 0], 0)

    asyncio.run(story())


def test_a_lift_comes_after_a_hold_whose_caller_was_cancelled() -> None:
    async def story() -> None:
        held = Held()
        trial = trial_on(held)
        trial.ask(400 * MIB)
        held.may_return.clear()
        holding = asyncio.create_task(trial.follow(LIMIT, True, time.monotonic()))
        await asyncio.sleep(0)
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        lifting = asyncio.create_task(trial.lift())
        await asyncio.sleep(0)
        held.may_return.set()
        await lifting
        assert held.calls == [400, 0]

    asyncio.run(story())


@pytest.mark.system
@pytest.mark.parametrize("ends_by", ["a stop of the daemon", "damaged pages"])
def test_a_trial_ends_with_its_daemon_and_with_the_pages_of_its_job(
    ends_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(made: Cluster) -> None:
        daemon, held = await made.daemon("n1"), Held()
        monkeypatch.setattr(daemon.host.cgroups, "memory_use", held.memory_use)
        monkeypatch.setattr(daemon.host.cgroups, "hold_caches", held.hold_caches)
        gang = made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()))
        await made.master.want("n1", gang)
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        await made.master.want("n1", with_changes(gang, 1, trial_memory_bytes=400 * MIB))
        await until(lambda: bool(held.calls) and held.calls[-1] >= 400)
        if ends_by == "damaged pages":
            (local,) = daemon.gangs.all()
            local.context.pages.spoil("a test did it")
            await until(lambda: held.calls[-1] == 0)
        else:
            await made.stop_daemon("n1")
            assert held.calls[-1] == 0

    run(story)
