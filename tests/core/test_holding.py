"""Under any sequence of commands no piece is held twice, gangs are placed whole, and all that was held is freed."""

from __future__ import annotations

from core.drive import GIB, Drive, job_of
from ganger.cluster.resources import Claim, NodeRow
from ganger.job_state import JobState
from ganger_master.core.answers import Approved, Rejected
from ganger_master.core.commands import CancelJob, ResumeJob, SuspendJob
from ganger_master.core.gang_model import GangIntent, GangPhase, ObservedPhase
from ganger_master.core.job_model import SuspendLevel
from ganger_master.core.settings import CoreSettings
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

NODES = 2


class Holding(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(["fifo", "backfill"]))
    def join(self, policy: str) -> None:
        self.drive = Drive(NODES, CoreSettings(policy=policy))
        self.empty = self.rows()
        # The oracle: what each job was granted, and how much of it it still has.
        self.granted: dict[int, tuple[Claim, ...]] = {}
        self.stale: list[tuple[int, tuple[Claim, ...]]] = []

    def rows(self) -> dict[str, NodeRow]:
        return dict(self.drive.state.rows)

    def pick(self, index: int, state: JobState) -> int:
        numbers = [n for n, job in self.drive.state.jobs.items() if job.state is state and job.ending is None]
        return numbers[index % len(numbers)] if numbers else 0

    @rule(gpus=st.integers(1, 6), memory=st.sampled_from([4, 12, 30]))
    def submit(self, gpus: int, memory: int) -> None:
        if len(self.drive.state.jobs.live) < 8:
            number = self.drive.submit(job_of(gpus, memory * GIB // gpus))
            self.stale += [(number, place) for place in self.drive.places(number)]

    @rule(index=st.integers(0, 7), in_turn=st.booleans(), old=st.booleans())
    def request(self, index: int, in_turn: bool, old: bool) -> None:
        number = self.pick(index, JobState.PENDING)
        if not number:
            return
        places = [place for of, place in self.stale if of == number] if old else self.drive.places(number)
        before = self.rows()
        parked = self.drive.job(number).epoch
        answer = self.drive.request(number, *places, turn=None if in_turn else 0)
        if isinstance(answer, Approved):
            assert not parked or answer.epoch >= parked
            self.granted[number] = places[answer.candidate]
            gang = self.drive.state.gangs[answer.epoch]
            assert [piece.held for piece in gang.pieces] == list(places[answer.candidate])
        else:
            assert isinstance(answer, Rejected)
            assert self.rows() == before

    @rule(index=st.integers(0, 7))
    def step(self, index: int) -> None:
        number = self.pick(index, JobState.HOLDING)
        if number and not self.drive.job(number).next_epoch:
            self.drive.runs(number)

    @rule(index=st.integers(0, 7), level=st.sampled_from([SuspendLevel.PAUSE, SuspendLevel.OFFLOAD]))
    def suspend(self, index: int, level: SuspendLevel) -> None:
        number = self.pick(index, JobState.HOLDING)
        if not number or self.drive.job(number).next_epoch:
            return
        gang = self.drive.state.gangs[self.drive.job(number).epoch]
        if gang.phase is not GangPhase.RUNNING:
            return
        self.drive.step(SuspendJob(number, level))
        if self.drive.state.gangs[gang.epoch].intent is not GangIntent.PARK:
            return
        self.drive.seen(number, gang.epoch, ObservedPhase.PARKED, 7)
        assert self.drive.job(number).suspended_level is level
        for piece in self.drive.state.gangs[gang.epoch].pieces:
            assert piece.held is not None
            # Its arena and its processes stay where they are, whatever else it gives up.
            kept = (piece.held.memory_bytes, piece.held.arena_bytes)
            assert kept == (piece.claim.memory_bytes, piece.claim.arena_bytes)
            assert piece.held.device_mask == (0 if level is SuspendLevel.OFFLOAD else piece.claim.device_mask)

    @rule(index=st.integers(0, 7))
    def resume(self, index: int) -> None:
        number = self.pick(index, JobState.SUSPENDED)
        if number:
            self.drive.step(ResumeJob(number))

    @rule(index=st.integers(0, 7), state=st.sampled_from([JobState.PENDING, JobState.HOLDING, JobState.SUSPENDED]))
    def cancel(self, index: int, state: JobState) -> None:
        number = self.pick(index, state)
        if number:
            self.drive.step(CancelJob(number))

    @rule()
    def daemons_tell_what_is_left(self) -> None:
        """Gangs that are to stop are gone, the others as they were."""
        for node in [f"n{number}" for number in range(1, NODES + 1)]:
            alive = [gang for gang in self.drive.on(node) if gang.intent is not GangIntent.STOP]
            told = [self.drive.reported(gang, node) or self.drive.report(gang, _first(gang.intent)) for gang in alive]
            self.drive.observe(node, *told)

    @invariant()
    def no_device_is_held_twice(self) -> None:
        if not hasattr(self, "drive"):
            return
        used: dict[str, int] = {}
        for gang in self.drive.state.gangs.values():
            for piece in gang.pieces:
                if piece.held is not None:
                    assert not used.get(piece.claim.node, 0) & piece.held.device_mask
                    used[piece.claim.node] = used.get(piece.claim.node, 0) | piece.held.device_mask
        for node, row in self.rows().items():
            assert row.free_mask == 0b1111 & ~used.get(node, 0)

    def teardown(self) -> None:
        if not hasattr(self, "drive"):
            return
        for number in list(self.drive.state.jobs.live):
            self.drive.step(CancelJob(number))
        self.daemons_tell_what_is_left()
        assert not self.drive.state.gangs
        assert self.rows() == self.empty


def _first(intent: GangIntent) -> ObservedPhase:
    return ObservedPhase.PREPARED if intent is GangIntent.PREPARE else ObservedPhase.STARTING


TestHolding = Holding.TestCase
TestHolding.settings = settings(max_examples=30, stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow])
