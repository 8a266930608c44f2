"""What is seen of jobs that share devices: who is beside whom, and rates alone and together."""

from __future__ import annotations

from math import nan

import pytest
from ganger_master.core.model import (
    Claim,
    Gang,
    GangIntent,
    GangPhase,
    GangRole,
    JobRecord,
    JobSpec,
    JobState,
    LocalityLevel,
    Piece,
)
from ganger_master.planner.colocation_rates import ColocationRates
from ganger_master.planner.core_profiles import TrialPace
from msgspec.structs import replace

PACE = TrialPace(warm_s=30.0, settle_s=5.0, window_s=2.0, window_steps=5)


def job(number: int, epoch: int = 0, create_time: float = 1.0) -> JobRecord:
    return JobRecord(number, "", "", JobSpec(("x",), ()), create_time, epoch=epoch)


def running(
    number: int, mask: int, epoch: int = 1, cores: int = 4_000, intent: GangIntent = GangIntent.RUN
) -> tuple[JobRecord, Gang]:
    claim = Claim("n1", mask, (cores,), 1)
    gang = Gang(
        epoch,
        number,
        GangRole.ACTIVE,
        GangPhase.RUNNING,
        (Piece(claim, claim),),
        LocalityLevel.NODE,
        1.0,
        intent=intent,
    )
    return replace(job(number, epoch), state=JobState.HOLDING, running_since=1.0), gang


class Seen(ColocationRates):
    """Jobs that step at given rates, looked at every second."""

    def __init__(self) -> None:
        super().__init__(PACE)
        self.now = 100.0
        self.rates: dict[int, float] = {}
        self.steps: dict[int, float] = {}

    def runs(self, number: int, mask: int, epoch: int = 1, cores: int = 4_000, rate: float = 10.0) -> None:
        self.say(number, mask, epoch, cores, GangIntent.RUN)
        self.rates[number] = rate

    def rests(self, number: int, mask: int, epoch: int = 1) -> None:
        self.say(number, mask, epoch, 4_000, GangIntent.PARK)
        self.rates[number] = 0.0

    def say(self, number: int, mask: int, epoch: int, cores: int, intent: GangIntent) -> None:
        self.put(*running(number, mask, epoch, cores, intent), 7, self.now)

    def ends(self, number: int) -> None:
        self.put(replace(job(number), state=JobState.SUCCEEDED), None, 7, self.now)
        del self.rates[number]

    def go_on(self, seconds: float, use: float | None = None) -> None:
        for _ in range(int(seconds)):
            self.now += 1.0
            for number, rate in self.rates.items():
                self.steps[number] = self.steps.get(number, 0.0) + rate
                self.record(number, int(self.steps[number]), self.now, use, self.now)


def test_a_job_alone_is_measured_once_it_has_warmed_up() -> None:
    seen = Seen()
    seen.runs(1, 0b1)
    seen.go_on(31.0, use=0.5)
    assert seen.alone(1) == ()
    assert seen.utilisation(1) == 0.5
    # One window says nothing of how they scatter.
    seen.go_on(1.0)
    assert seen.alone(1) == ()
    seen.go_on(2.0)
    assert seen.alone(1) == seen.present(1) == (10.0, 10.0)
    assert seen.beside(1) == frozenset()
    seen.go_on(100.0)
    assert len(seen.alone(1)) == 16


def test_of_whom_nobody_knows_how_busy_it_is_its_device_is_taken_to_be() -> None:
    seen = Seen()
    seen.runs(1, 0b1)
    seen.go_on(40.0)
    assert seen.utilisation(1) == seen.utilisation(99) == 1.0


def test_who_comes_to_its_device_is_beside_it_and_both_are_measured_once_the_newcomer_has_warmed_up() -> None:
    seen = Seen()
    seen.runs(1, 0b01)
    seen.runs(2, 0b10, rate=20.0)
    seen.go_on(40.0)
    seen.runs(1, 0b01, cores=2_000, rate=8.0)
    seen.go_on(20.0)
    assert set(seen.alone(1)) == {10.0}, "with half of its cores it is not as alone"
    seen.runs(2, 0b01, epoch=3, rate=15.0)
    assert seen.beside(1) == {2}
    assert seen.beside(2) == {1}
    seen.go_on(30.0)
    assert seen.present(1) == seen.present(2) == ()
    seen.go_on(7.0)
    assert set(seen.present(1)) == {8.0}
    assert set(seen.present(2)) == {15.0}
    assert set(seen.alone(2)) == {20.0}


def test_who_is_left_alone_is_measured_alone_again() -> None:
    seen = Seen()
    seen.runs(1, 0b1)
    seen.go_on(40.0)
    seen.runs(2, 0b1, epoch=2)
    seen.go_on(40.0)
    for leaves in (lambda: seen.rests(2, 0b1, epoch=2), lambda: seen.ends(2)):
        seen.runs(2, 0b1, epoch=2)
        assert seen.beside(1) == {2}
        leaves()
        assert seen.beside(1) == frozenset()
    seen.rates[1] = 12.0
    seen.go_on(20.0)
    assert set(seen.present(1)) == {12.0}
    assert seen.alone(1)[-1] == 12.0


def test_turns_add_up_and_who_goes_on_in_place_need_not_warm_up_again() -> None:
    seen = Seen()
    seen.runs(1, 0b1)
    seen.go_on(33.0)
    assert seen.alone(1) == (), "of one window nobody knows how it scatters"
    for _ in range(3):
        seen.rests(1, 0b1)
        seen.go_on(10.0)
        seen.runs(1, 0b1)
        seen.go_on(7.0)
    assert len(seen.alone(1)) == 1 + 3


def test_gangs_on_several_devices_are_beside_all_who_are_on_one_of_them() -> None:
    seen = Seen()
    seen.runs(1, 0b0011)
    seen.runs(2, 0b0110)
    seen.runs(3, 0b0100)
    assert [seen.beside(number) for number in (1, 2, 3)] == [{2}, {1, 3}, {2}]
    seen.keep(lambda number: number != 2, seen.now)
    assert [seen.beside(number) for number in (1, 2, 3)] == [frozenset()] * 3


def test_another_job_of_the_same_number_is_another_one() -> None:
    seen = Seen()
    seen.runs(1, 0b1)
    seen.go_on(40.0)
    job = JobRecord(1, "", "", JobSpec(("x",), ()), 50.0, state=JobState.PENDING)
    seen.put(replace(job, create_time=60.0), None, 8, seen.now)
    assert seen.alone(1) == ()
    assert seen.signature(1) == "0000000000000008"


def in_turns(seen: Seen, seconds: float, says_since: bool = True) -> None:
    """Six seconds with its device and six without, again and again; it does ten steps a second, and while it rests its
    last one is told all the time."""
    claim = Claim("n1", 0b1, (4_000,), 1)
    piece = (Piece(claim, claim),)
    gang = Gang(
        1, 1, GangRole.ACTIVE, GangPhase.RUNNING, piece, LocalityLevel.NODE, 1.0, intent=GangIntent.RUN, node_set=3
    )
    job = JobRecord(1, "", "", JobSpec(("x",), ()), 1.0, state=JobState.HOLDING, epoch=1, running_since=1.0)
    seen.put(job, gang, 7, seen.now)
    steps, last_s, since_s = 0, 0.0, nan
    for second in range(int(seconds)):
        seen.now += 1.0
        if second % 12 < 6:
            since_s = seen.now - 0.9 if second % 12 == 0 else since_s
            steps, last_s = steps + 10, seen.now
        seen.record(1, steps, last_s, 0.3, seen.now, since_s if says_since else nan)


def test_who_takes_turns_is_measured_in_them_and_its_rests_are_no_part_of_it() -> None:
    seen = Seen()
    in_turns(seen, 120.0)
    assert len(seen.alone(1)) > 4
    assert set(seen.alone(1)) == {10.0}
    assert (seen.beside(1), seen.utilisation(1)) == (frozenset(), pytest.approx(0.3))


def test_of_whom_nobody_says_when_its_turns_began_nothing_is_measured_in_them() -> None:
    seen = Seen()
    in_turns(seen, 120.0, says_since=False)
    assert seen.alone(1) == seen.present(1) == ()
