"""The one writer: nothing is answered before it is durable, and a failed commit takes back all that rests on it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from core.drive import SERVER, Drive
from core.test_time_slices import Turns
from ganger.cluster.resources import Role, TaskShape
from ganger.job_state import JobState
from ganger.wire.errors import Internal, NotReady
from ganger_master.core import machine
from ganger_master.core.answers import Done, JobAnswer, Refused, SessionAnswer
from ganger_master.core.commands import Answer, CancelJob, Command, Observe, OpenSession, SubmitJob, Tick
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.settings import CoreSettings
from ganger_master.runtime.writer import Writer
from ganger_master.store.tables import Codec, Problem, StoreBatch, StoreError
from kit.memory_store import MemoryStore

SPEC = JobSpec(("true",), (Role("worker", 1, TaskShape(1)),))


class GatedStore(MemoryStore):
    """Memory whose commits wait at a gate while it is closed, and fail as often as told."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.failures = 0
        self.problem = Problem.FULL
        self.commits = 0

    def commit(self, batch: StoreBatch) -> None:
        assert self.gate.wait(10.0), "the gate stayed closed"
        if self.failures:
            self.failures -= 1
            raise StoreError(self.problem, "told to fail")
        self.commits += 1
        super().commit(batch)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def submission(number: int) -> SubmitJob:
    return SubmitJob(SPEC, f"uid-{number}", "ann", "")


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 20.0))


async def started(store: MemoryStore) -> Writer:
    clock = Clock()
    writer = Writer(store, CoreSettings(), clock, steady=clock)
    await writer.start()
    return writer


def test_answer_and_view_wait_for_the_commit() -> None:
    async def story() -> None:
        store = GatedStore()
        writer = await started(store)
        store.gate.clear()
        answer = asyncio.ensure_future(writer.submit(submission(1)))
        # Long enough for everything that does not wait for the gate.
        done, _ = await asyncio.wait({answer}, timeout=0.1)
        assert not done
        assert writer.committed.jobs == {}
        store.gate.set()
        assert await answer == JobAnswer(1)
        assert writer.committed.jobs[1].state is JobState.PENDING
        await writer.close()

    run(story())


def test_calls_that_come_together_share_a_commit() -> None:
    async def story() -> None:
        store = GatedStore()
        writer = await started(store)
        before = store.commits
        answers = await asyncio.gather(*(writer.submit(submission(n)) for n in range(100)))
        assert [answer for answer in answers if isinstance(answer, Refused)] == []
        assert store.commits - before <= 3
        await writer.close()

    run(story())


def test_failed_commit_refuses_every_caller_of_it_and_those_behind_and_starts_over() -> None:
    async def story() -> None:
        store = GatedStore()
        writer = await started(store)
        assert await writer.submit(submission(1)) == JobAnswer(1)
        store.gate.clear()
        store.failures = 1
        first = asyncio.ensure_future(writer.submit(submission(2)))
        await asyncio.wait({first}, timeout=0.05)
        behind = asyncio.ensure_future(writer.submit(submission(3)))
        await asyncio.wait({behind}, timeout=0.05)
        store.gate.set()
        for refused in (first, behind):
            with pytest.raises(NotReady, match="disk is full"):
                await refused
        # The number that was not kept is given again: nothing of the failed batch is left.
        while True:
            try:
                answer = await writer.submit(submission(4))
                break
            except NotReady as error:
                assert "the master cannot write to its store (told to fail; the disk is full" in str(error)  # noqa: PT017
                await asyncio.sleep(0.01)
        assert answer == JobAnswer(2)
        assert {n: job.uid for n, job in writer.committed.jobs.items()} == {1: "uid-1", 2: "uid-4"}
        await writer.close()

    run(story())


def test_master_that_starts_shows_every_element_that_its_store_holds() -> None:
    drive = Turns()
    drive.share()
    store, changes = MemoryStore(), drive.state.take_changes()
    store.commit(Codec().batch(changes.puts, changes.removes, ()))

    async def story() -> None:
        writer = await started(store)
        shown, kept = writer.committed, drive.state
        assert shown.sets == kept.gangs.sets != {}
        assert (shown.jobs, shown.gangs) == (kept.jobs, kept.gangs)
        assert shown.configuration_sets == kept.nodes.configuration_sets
        assert list(shown.nodes) == list(kept.nodes)
        await writer.close()

    run(story())


def test_commits_that_fail_cost_daemons_neither_session_nor_answers() -> None:
    async def story() -> None:
        store, clock = GatedStore(), Clock()
        writer = Writer(store, CoreSettings(), clock, steady=clock)
        await writer.start()
        opened = await writer.submit(OpenSession("n1", "machine-n1", SERVER))
        assert isinstance(opened, SessionAnswer)
        session = opened.session
        assert await writer.submit(Observe("n1", session, 1, 1)) == Done()
        assert await writer.submit(Answer("n1", session)) == Done()
        answered = writer.state.nodes.last_answer["n1"]
        # Until further notice the disk is full.
        store.failures = 1_000_000
        clock.now += 20.0
        for number in range(3):
            with pytest.raises(NotReady, match="disk is full"):
                await _accepted(writer, submission(number))
        # It says all again, for it cannot know what was heard, and there is no news in it.
        assert await _accepted(writer, Observe("n1", session, 2, 1)) == Done()
        node = writer.state.nodes["n1"]
        assert (node.session, node.heard, node.observation) == (session, True, 2)
        assert writer.state.view.row("n1").available
        assert writer.state.nodes.last_answer["n1"] == answered, "its silence is counted on"
        assert await _accepted(writer, Answer("n1", session)) == Done()
        store.failures = 0
        assert await _accepted(writer, submission(7)) == JobAnswer(1)
        await writer.close()

    run(story())


def test_the_store_is_read_ever_later_while_every_commit_fails(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        store = GatedStore()
        writer = await started(store)
        store.failures = 1_000_000
        began = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() - began < 2.0:
            await _tried(writer, submission(1))
            await asyncio.sleep(0.001)
        store.failures = 0
        assert await _accepted(writer, submission(2)) == JobAnswer(1)
        await writer.close()

    run(story())
    assert 3 <= caplog.text.count("commit failed") <= 5


@pytest.mark.parametrize(
    ("passed", "set_by"),
    [(0.0, 7_200.0), (0.0, -7_200.0), (7_200.0, 0.0)],
    ids=["set forward", "set back", "stood still"],
)
def test_master_whose_clock_was_set_or_that_stood_still_gives_no_node_up_for_it(passed: float, set_by: float) -> None:
    drive = Drive()
    store, changes = MemoryStore(), drive.state.take_changes()
    store.commit(Codec().batch(changes.puts, changes.removes, ()))

    async def story() -> None:
        wall, steady = Clock(), Clock()
        writer = Writer(store, CoreSettings(), wall, steady=steady)
        await writer.start()
        assert await writer.submit(submission(1)) == JobAnswer(1)
        (turn,) = writer.state.leases
        wall.now += passed + set_by
        steady.now += passed
        # The first one, even if it is the alarm of the node.
        await writer.submit(Tick())
        assert not writer.state.nodes["n1"].lost
        assert writer.state.nodes.last_answer == {"n1": wall.now}
        assert turn not in writer.state.leases
        assert writer.state.leases, "its job has another turn, by the new clock"
        # From here on silence is the node's own.
        for _ in range(35):
            wall.now += 20.0
            steady.now += 20.0
            await writer.submit(Tick())
        assert writer.state.nodes["n1"].lost
        await writer.close()

    run(story())


def test_a_master_that_stood_by_for_long_has_not_stood_still(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        wall, steady = Clock(), Clock()
        writer = Writer(MemoryStore(), CoreSettings(), wall, steady=steady)
        steady.now += 86_400.0
        # Its two clocks have drifted apart meanwhile.
        wall.now += 86_430.0
        await writer.start()
        assert await writer.submit(submission(1)) == JobAnswer(1)
        await writer.close()

    run(story())
    assert "clock was set" not in caplog.text


@pytest.mark.parametrize("goes_off", [False, True])
def test_the_lease_of_a_turn_begins_when_its_holder_is_told_and_not_before_the_commit(goes_off: bool) -> None:
    """Also if the alarm goes off meanwhile, for something else."""

    async def story() -> None:
        store, clock = GatedStore(), Clock()
        writer = Writer(store, CoreSettings(), clock, steady=clock)
        await writer.start()
        opened = await writer.submit(OpenSession("n1", "machine-n1", SERVER))
        assert isinstance(opened, SessionAnswer)
        assert await writer.submit(Observe("n1", opened.session, 1, 1)) == Done()
        with writer.lease_streams.opened("host", ()) as told:
            store.gate.clear()
            submitted = asyncio.ensure_future(writer.submit(submission(1)))
            await asyncio.wait({submitted}, timeout=0.05)
            (late,) = writer.state.leases.values()
            # What needs no commit is behind one that takes this long.
            answered = writer.submit(Answer("n1", opened.session))
            clock.now = late.expires + 1.0
            if goes_off:
                writer.enqueue(Tick(newest_sent=late.turn - 1))
                clock.now += 1.0
            store.gate.set()
            assert await submitted == JobAnswer(1)
            assert await answered == Done()
            batch = await asyncio.wait_for(told.get(), 5.0)
            assert batch is not None
            (turn,) = batch
            assert (turn.number, turn.turn) == (1, late.turn)
            assert turn.expires == clock.now + CoreSettings().turn_lease_s
            assert writer.state.leases == {turn.turn: turn}
        await writer.close()

    run(story())


def test_an_alarm_that_is_due_goes_off_though_a_batch_ends_before_the_loop_comes_to_it() -> None:
    async def story() -> None:
        store, clock = MemoryStore(), Clock()
        writer = Writer(store, CoreSettings(), clock, steady=clock)
        await writer.start()
        opened = await writer.submit(OpenSession("n1", "machine-n1", SERVER))
        assert isinstance(opened, SessionAnswer)
        assert await writer.submit(Observe("n1", opened.session, 1, 1)) == Done()
        assert await writer.submit(submission(1)) == JobAnswer(1)
        (turn,) = writer.state.leases.values()
        clock.now = turn.expires + 1.0
        # Says when to wake up for it: at once.
        await writer.submit(Answer("n1", opened.session))
        loop = asyncio.get_running_loop()
        busy_until = loop.time() + 0.02
        clock.now += 0.02
        behind = writer.submit(Answer("n1", opened.session))
        while loop.time() < busy_until:
            # Nothing of the loop goes on: the alarm becomes due, and the batch is sealed before it.
            pass
        await behind
        await asyncio.sleep(0)
        assert turn.turn not in writer.state.leases
        await writer.close()

    run(story())


def test_master_that_was_taken_over_stops() -> None:
    async def story() -> None:
        store = GatedStore()
        writer = await started(store)
        store.failures, store.problem = 1, Problem.FENCED
        with pytest.raises(NotReady):
            await writer.submit(submission(1))
        await asyncio.wait_for(writer.stopped.wait(), 5.0)
        await writer.close()

    run(story())


class OwnedStore(GatedStore):
    """Memory that another master may take over, or that cannot be read; counts the checks of its owner."""

    def __init__(self) -> None:
        super().__init__()
        self.checks = 0
        self.found: Problem | None = None

    def check_owner(self) -> None:
        assert self.gate.wait(10.0), "the gate stayed closed"
        self.checks += 1
        if self.found is not None:
            raise StoreError(self.found, "told to fail")


def test_master_without_calls_finds_that_it_was_taken_over_and_ends() -> None:
    async def story() -> None:
        store = OwnedStore()
        store.found = Problem.FENCED
        writer = await started(store)
        await asyncio.wait_for(writer.stopped.wait(), 5.0)
        assert writer.fenced is not None
        assert writer.fenced.problem is Problem.FENCED
        with pytest.raises(NotReady):
            await writer.submit(submission(1))
        await writer.close()

    run(story())


def test_one_check_of_the_store_serves_all_calls_that_wait_for_it() -> None:
    async def story() -> None:
        store = OwnedStore()
        writer = await started(store)
        ownership = writer.ownership
        await ownership.check()
        before = store.checks
        await ownership.confirm(ownership.now())
        assert store.checks == before, "the last check is young enough"
        store.gate.clear()
        later = ownership.now() + 1_000.0
        ownership.now = lambda: later
        calls = [asyncio.ensure_future(ownership.confirm(later)) for _ in range(100)]
        done, _ = await asyncio.wait(calls, timeout=0.1)
        assert not done
        store.gate.set()
        await asyncio.gather(*calls)
        assert store.checks == before + 1
        await writer.close()

    run(story())


def test_a_call_waits_for_a_check_that_begins_after_the_call_came() -> None:
    async def story() -> None:
        store, clock = OwnedStore(), Clock()
        writer = Writer(store, CoreSettings(), clock, steady=clock)
        store.gate.clear()
        before = writer.ownership.check()
        await asyncio.sleep(0)
        clock.now += 10.0
        call = asyncio.ensure_future(writer.ownership.confirm(clock.now))
        await asyncio.sleep(0)
        store.found = Problem.FENCED
        store.gate.set()
        await before
        with pytest.raises(NotReady, match="another master"):
            await call
        assert writer.stopped.is_set()
        writer.ownership.close()

    run(story())


def test_a_store_that_cannot_be_read_extends_no_lease_and_ends_no_master() -> None:
    async def story() -> None:
        store = OwnedStore()
        store.found = Problem.UNREADABLE
        writer = await started(store)
        with pytest.raises(NotReady, match="cannot be read"):
            await writer.ownership.confirm(writer.ownership.now())
        assert not writer.stopped.is_set()
        store.found = None
        await writer.ownership.confirm(writer.ownership.now())
        await writer.close()

    run(story())


def test_a_batch_that_cannot_be_laid_out_is_refused_whole_and_what_is_durable_stays() -> None:
    class Fussy(GatedStore):
        breaks = False

        def prepare(self, batch: StoreBatch) -> Callable[[], None]:
            if self.breaks:
                self.breaks = False
                raise TypeError("laid out wrong on purpose")
            return super().prepare(batch)

    async def story() -> None:
        store = Fussy()
        writer = await started(store)
        kept = await writer.submit(submission(1))
        assert isinstance(kept, JobAnswer)
        store.breaks = True
        answers = await asyncio.gather(*(writer.submit(submission(n)) for n in (2, 3)), return_exceptions=True)
        assert [type(answer) for answer in answers] == [NotReady, NotReady]
        for _ in range(1_000):
            if isinstance(await _tried(writer, submission(4)), JobAnswer):
                break
            await asyncio.sleep(0.01)
        assert [job.uid for job in writer.committed.jobs.values()] == ["uid-1", "uid-4"]
        await writer.close()

    run(story())


async def _accepted(writer: Writer, command: Command) -> object:
    """The answer of a writer that is ready; NotReady of one that could not make it durable."""
    while True:
        try:
            return await writer.submit(command)
        except NotReady as error:
            if str(error).startswith("not accepted"):
                raise
            await asyncio.sleep(0.01)


async def _tried(writer: Writer, command: SubmitJob) -> object:
    try:
        return await writer.submit(command)
    except NotReady as error:
        return error


def test_command_that_breaks_the_core_costs_its_caller_an_error_and_no_job(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        writer = await started(GatedStore())
        assert await writer.submit(submission(1)) == JobAnswer(1)
        whole = machine.advance

        def broken(state: Any, command: Any, now: float) -> Any:
            if isinstance(command, CancelJob):
                state.jobs.clear()
                raise AssertionError("a bug")
            return whole(state, command, now)

        monkeypatch.setattr(machine, "advance", broken)
        with pytest.raises(Internal):
            await writer.submit(CancelJob(1))
        for _ in range(1_000):
            if 1 in writer.state.jobs:
                break
            await asyncio.sleep(0.01)
        assert await writer.submit(submission(2)) == JobAnswer(2)
        await writer.close()

    run(story())
    assert "core failed" in caplog.text


def test_close_commits_what_was_accepted_and_refuses_the_rest() -> None:
    async def story() -> None:
        store = GatedStore()
        writer = await started(store)
        accepted = asyncio.ensure_future(writer.submit(submission(1)))
        await asyncio.sleep(0)
        await writer.close()
        assert await accepted == JobAnswer(1)
        with pytest.raises(NotReady, match="the master is stopping: try again"):
            await writer.submit(submission(2))
        assert any(row.table == "jobs" for row in store.load())

    run(story())
