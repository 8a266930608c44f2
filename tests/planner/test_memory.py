"""What a planner remembers goes on in the next one: the same values, the same decisions, and nothing of a bad note."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from math import inf
from random import Random
from typing import Any

import msgspec
import pytest
from core.elastic_worlds import elastic
from ganger_master.core.plan_changes import Goal
from ganger_master.estimators.speed import UNKNOWN_DEVICE, ColocationTrial, Contention, Pressure, forecast, learn
from ganger_master.planner.colocations import Colocations
from ganger_master.planner.context import PlanDraft
from ganger_master.planner.memory import PlannerMemory, Unusable, noted, packed, recalled
from ganger_master.planner.migration_plans import MigrationMemory
from ganger_master.planner.rate_registry import ProgressReport, RateRegistry
from ganger_master.planner.sharing_stage import Shared
from ganger_master.policies.trials import TrialPace
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect
from planner import test_colocation_rates, test_packs_pass
from planner.test_growth_stage import IDLE_S, WINDOW_S, Planned
from planner.test_moves import Moved, full, slower_together, together
from planner.test_packs_pass import HALF, SLOWER, Tried

POLICY, NOW = "gandiva", 1_000.0


def no_job(number: int) -> float | None:
    return None


def anew(memory: PlannerMemory) -> PlannerMemory:
    """As the next planner knows it."""
    found = recalled(noted(packed(memory), POLICY, NOW), POLICY, NOW + 1.0, no_job)
    assert isinstance(found, PlannerMemory), found
    return found


def scalar(kind: inspect.Type, dice: Random) -> Any:
    """Return a random value of a type without parts."""
    match kind:
        case inspect.IntType():
            return dice.getrandbits(dice.choice([1, 7, 63]))
        case inspect.FloatType():
            return dice.choice([0.0, -inf, inf, dice.uniform(-1e12, 1e12)])
        case inspect.StrType():
            return dice.choice(["", "nodes/n1", "größer", "\0"])
        case inspect.BoolType():
            return dice.random() < 0.5
        case inspect.NoneType():
            return None
        case inspect.EnumType(cls=cls):
            return dice.choice(list(cls))
    raise NotImplementedError(kind)


def value(kind: inspect.Type, dice: Random) -> Any:
    """Return a random value of any type of the memory, with content in every field that is compared by value."""

    def of(kind: inspect.Type) -> Any:
        return value(kind, dice)

    match kind:
        case inspect.UnionType(types=types):
            return of(dice.choice(types))
        case inspect.TupleType(item_types=types):
            return tuple([of(one) for one in types])
        case inspect.VarTupleType(item_type=one):
            return (of(one), of(one))
        case inspect.ListType(item_type=one):
            return [of(one)]
        case inspect.FrozenSetType(item_type=one):
            return frozenset([of(one), of(one)])
        case inspect.DictType(value_type=inspect.DataclassType(cls=cls)) if cls is Contention:
            return {}
        case inspect.DictType(key_type=key, value_type=one):
            return {of(key): of(one), of(key): of(one)}
        case inspect.DataclassType(cls=cls) if cls is PlanDraft:
            return None
        case inspect.DataclassType(cls=cls, fields=fields) | inspect.StructType(cls=cls, fields=fields):
            return cls(**{one.name: of(one.type) for one in fields})
    return scalar(kind, dice)


@pytest.mark.parametrize("seed", range(8))
def test_every_value_comes_back_as_it_was(seed: int) -> None:
    memory = value(inspect.type_info(PlannerMemory), Random(seed))
    assert isinstance(memory, PlannerMemory)
    assert all(getattr(memory, field.name) != getattr(PlannerMemory(), field.name) for field in fields(PlannerMemory))
    assert anew(memory) == memory


def test_what_was_learned_of_contention_says_the_same_afterwards() -> None:
    load = (Pressure(0.5, 1e9), Pressure(0.6, 1e9))
    known = learn(UNKNOWN_DEVICE, [ColocationTrial(load, (0.8, 0.7))])
    (after,) = anew(
        PlannerMemory(Shared(colocations=Colocations(contention={"gpu": known})))
    ).shared.colocations.contention.values()
    assert forecast(load, 1e11, after) == forecast(load, 1e11, known) != forecast(load, 1e11)


def test_what_the_pass_beside_it_said_last_is_not_noted_but_asked_for_anew() -> None:
    assert anew(PlannerMemory(moving=MigrationMemory(found=PlanDraft()))) == PlannerMemory()


# -- bad notes


def note(**more: Any) -> bytes:
    """Of a planner that knew job 7, which was submitted at 5."""
    seen = RateRegistry()
    seen.put(test_colocation_rates.job(7, create_time=5.0), None, 0, NOW)
    memory = packed(PlannerMemory(rates=seen.remembered))
    return noted(memory, **{"policy": POLICY, "now": NOW, **more})


def changed(at: int, value: object) -> bytes:
    fields = msgspec.msgpack.decode(note())
    fields[at] = value
    return msgspec.msgpack.encode(fields)


def of_another_check() -> bytes:
    fields = msgspec.msgpack.decode(note())
    memory = bytearray(fields[-1])
    memory[len(memory) // 2] ^= 1
    fields[-1] = bytes(memory)
    return msgspec.msgpack.encode(fields)


BAD = {
    "nothing": (b"", "it is damaged"),
    "half of one": (note()[: len(note()) // 2], "it is damaged"),
    "one byte less": (note()[:-1], "it is damaged"),
    "one byte more": (note() + b"\0", "it is damaged"),
    "text": (b'{"packs": []}', "it is damaged"),
    "zeros": (bytes(4096), "it is damaged"),
    "another bit": (of_another_check(), "it is damaged: its sum is another one"),
    "of another program": (changed(0, "another"), "it is no note of a planner"),
    "of no time": (changed(3, float("nan")), "it is no note of a planner"),
    "of another version": (changed(1, 1), "it is of another version of the planner"),
    "of another policy": (note(policy="las"), "it is of policy las"),
    "of a time to come": (note(now=NOW + 3_600.0), "it is of 3600 seconds from now: clocks were set back"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_note_is_refused_and_it_is_said_why(what: str) -> None:
    data, why = BAD[what]
    found = recalled(data, POLICY, NOW, no_job)
    assert isinstance(found, Unusable)
    assert found.why.startswith(why)


@pytest.mark.parametrize(("create_time", "is_same"), [(5.0, True), (None, True), (6.0, False)])
def test_a_note_of_another_cluster_is_told_by_when_its_jobs_were_submitted(
    create_time: float | None, is_same: bool
) -> None:
    found = recalled(note(), POLICY, NOW, lambda number: create_time)
    assert isinstance(found, PlannerMemory) is is_same
    if isinstance(found, Unusable):
        assert found.why == "it is of another cluster, where jobs/7 was another one"


@given(st.binary(max_size=64), st.integers(0, 4096))
def test_no_garbage_is_taken_for_a_note_or_raises(garbage: bytes, at: int) -> None:
    good = note()
    at %= len(good)
    torn = good[:at] + garbage + good[at + len(garbage) :]
    found = recalled(torn, POLICY, NOW, no_job)
    assert isinstance(found, Unusable) or packed(found) == packed(recalled_of(good))


def recalled_of(data: bytes) -> PlannerMemory:
    found = recalled(data, POLICY, NOW, no_job)
    assert isinstance(found, PlannerMemory)
    return found


# -- sizes


def grown(rates: dict[int, float]) -> tuple[Planned, int]:
    """An elastic job that has one GPU more, and was measured with it, but not judged."""
    drive = Planned(rates=rates)
    number = drive.running(elastic(1, 1, 4))
    assert drive.grows(number) == 2
    return drive, number


def with_another_planner(drive: Planned, memory: PlannerMemory) -> None:
    drive.growing = memory.growing
    drive.speeds = RateRegistry(TrialPace(settle_s=5.0, window_s=WINDOW_S, window_steps=2))
    drive.speeds.recall(memory.rates)


def of(drive: Planned) -> PlannerMemory:
    return anew(PlannerMemory(growing=drive.growing, rates=drive.speeds.remembered))


@pytest.mark.parametrize(("rate", "keeps"), [(19.0, True), (12.0, False)])
def test_a_size_on_trial_is_judged_by_the_planner_that_comes_after(rate: float, keeps: bool) -> None:
    drive, number = grown({1: 10.0, 2: rate, 3: 27.0, 4: 34.0})
    with_another_planner(drive, of(drive))
    found = drive.plan()
    assert [(one.number, one.goal, one.kept) for one in found.findings] == [(number, Goal.GROW, keeps)]
    # What was not worth it is not tried again at once by the one after that, either.
    if not keeps:
        drive.finish_resize(number)
        with_another_planner(drive, of(drive))
        for _ in range(3):
            drive.trains(IDLE_S)
            assert drive.plan().changes == ()


def test_without_a_note_it_would_keep_its_size_unjudged() -> None:
    drive, _ = grown({1: 10.0, 2: 12.0, 3: 13.0, 4: 14.0})
    with_another_planner(drive, PlannerMemory())
    drive.trains(100.0)
    assert drive.plan().findings == ()


# -- co-locations


@pytest.mark.parametrize(("rates", "keeps"), [(SLOWER, True), (HALF, False)])
def test_a_pack_on_trial_is_judged_by_the_planner_that_comes_after(rates: tuple[float, ...], keeps: bool) -> None:
    drive = Tried()
    (guest,) = [number for kind, number in drive.plan(test_packs_pass.Seen()) if kind == "MOVE"]
    drive.move_in(guest)
    drive.colocations = anew(PlannerMemory(Shared(colocations=drive.colocations))).shared.colocations
    assert drive.plan(drive.together(rates)) == ([] if keeps else [("SUSPEND", guest)])
    assert [one.kept for one in drive.found] == [keeps] * 2
    # And such a pair is left alone by the next one, too.
    known = anew(PlannerMemory(Shared(colocations=drive.colocations))).shared.colocations
    assert (
        sum([colocation.is_kept for colocation in known.present]),
        len(known.present),
        len(known.failed.notes),
    ) == ((1, 1, 0) if keeps else (0, 0, 1))


def test_a_pack_of_which_the_note_does_not_know_is_taken_apart_though_the_rates_alone_are_known() -> None:
    drive = Tried()
    (guest,) = [number for kind, number in drive.plan(test_packs_pass.Seen()) if kind == "MOVE"]
    drive.move_in(guest)
    drive.colocations = Colocations()
    assert drive.plan(drive.together(SLOWER)) == [("SUSPEND", guest)]


# -- what was measured


class Restarted(test_colocation_rates.SteppingJobs):
    """Jobs that continue while no planner runs."""

    def after(self, seconds: float) -> Restarted:
        next_one = Restarted()
        next_one.recall(anew(PlannerMemory(rates=self.remembered)).rates)
        next_one.now, next_one.rates = self.now + seconds, dict(self.rates)
        next_one.steps = {number: steps + seconds * self.rates[number] for number, steps in self.steps.items()}
        return next_one


def test_a_job_that_continues_unchanged_keeps_its_measurements() -> None:
    seen = Restarted()
    seen.runs(1, 0b1)
    seen.go_on(100.0, use=0.25)
    seen.runs(2, 0b1, rate=5.0)
    seen.go_on(60.0)
    seen = seen.after(7.0)
    for number in (1, 2):
        seen.runs(number, 0b1, rate=seen.rates[number])
    assert (seen.alone(1), seen.alone(2), seen.utilisation(1)) == ((10.0,) * 16, (), 0.25)
    assert (seen.neighbours(1), seen.neighbours(2)) == (frozenset({2}), frozenset({1}))
    before = len(seen.present(2))
    assert before > 4
    seen.go_on(3.0)
    assert len(seen.present(2)) > before
    assert set(seen.present(2)) == {5.0}
    # Its device is told from all others.
    seen.ends(2)
    assert seen.neighbours(1) == frozenset()


def test_a_job_that_moved_meanwhile_and_the_jobs_it_left_are_measured_anew() -> None:
    seen = Restarted()
    for number in (1, 2):
        seen.runs(number, 0b1)
    seen.go_on(100.0)
    seen = seen.after(7.0)
    seen.runs(1, 0b1)
    seen.runs(2, 0b10, epoch=2)
    assert (seen.present(1), seen.present(2)) == ((), ())
    assert (seen.neighbours(1), seen.neighbours(2)) == (frozenset(), frozenset())


def test_all_that_is_measured_goes_on_where_it_was() -> None:
    def told(seen: RateRegistry) -> None:
        job, gang = test_colocation_rates.running(1, 0b1)
        seen.put(job, gang, 7, 50.0)

    def heard(seen: RateRegistry, steps: range) -> None:
        for step in steps:
            seen.record(
                1,
                ProgressReport(10 * step, 100.0 + step, use=0.5, loss=1.0 / (1 + step), passes=step // 20),
                100.0 + step,
            )

    whole, first, second = (RateRegistry(test_colocation_rates.PACE) for _ in range(3))
    for seen in (whole, first, second):
        seen.weighs_sizes = True
    told(whole)
    heard(whole, range(200))
    told(first)
    heard(first, range(90))
    second.recall(anew(PlannerMemory(rates=first.remembered)).rates)
    told(second)
    heard(second, range(90, 200))
    assert second.received_s == {1: 199.0}
    # As bytes: times that were not reported are NaN, and equal to nothing.
    assert packed(PlannerMemory(rates=second.remembered)) == packed(PlannerMemory(rates=whole.remembered))


# -- moves


def test_a_move_that_did_not_help_is_undone_by_the_planner_that_comes_after() -> None:
    drive, pair, source = slower_together()
    drive.moving = anew(PlannerMemory(moving=drive.moving)).moving
    assert drive.proposed() == [("MOVE", pair)]
    assert [one.kept for one in drive.findings] == [False]
    assert drive.state.gangs[drive.job(pair).next_epoch].purpose.goal is Goal.UNDO
    assert drive.state.gangs[drive.job(pair).next_epoch].nodes == source


def test_a_job_returns_when_its_place_is_free_across_restarts_of_the_planner() -> None:
    drive, pair, source = slower_together()
    taken = drive.submit(together(4))
    assert ("START", taken) in drive.proposed()
    drive.runs(taken)
    drive.now += 60.0
    drive.moving = anew(PlannerMemory(moving=drive.moving)).moving
    assert drive.proposed() == []
    drive.moving = anew(PlannerMemory(moving=drive.moving)).moving
    drive.ends(taken)
    assert drive.proposed() == [("MOVE", pair)]
    assert drive.state.gangs[drive.job(pair).next_epoch].nodes == source


def swapped(between: Callable[[Moved], None]) -> Moved:
    """Two that were in the way of a gang rest for it; `between` any two passes something else happens."""
    drive, numbers = full()
    low = [numbers[0], numbers[4]]
    large = drive.submit(together(2))
    between(drive)
    assert sorted(drive.proposed()) == [("SUSPEND", number) for number in low]
    between(drive)
    for number in low:
        drive.rests(number)
    between(drive)
    ((kind, moved),) = drive.proposed()
    assert (kind, moved not in low) == ("MOVE", True)
    between(drive)
    drive.moves(moved)
    between(drive)
    assert drive.proposed() == [("START", large)]
    between(drive)
    drive.runs(large)
    ended = next(n for n in numbers if n not in (*low, moved) and drive.node_of(n) == drive.node_of(large))
    drive.ends(ended)
    between(drive)
    ((kind, back),) = drive.proposed()
    assert (kind, back in low) == ("MOVE", True)
    drive.moves(back)
    return drive


def test_a_job_parked_for_another_resumes_across_restarts_of_the_planner() -> None:
    def restart(drive: Moved) -> None:
        drive.moving = anew(PlannerMemory(moving=drive.moving)).moving

    swapped(restart)


def test_an_old_note_of_any_moment_moves_no_job_again() -> None:
    notes: list[bytes] = []
    drive = swapped(lambda drive: notes.append(packed(PlannerMemory(moving=drive.moving))))
    assert len({*notes}) == 3, "before, meanwhile and after"
    for one in notes:
        drive.moving = anew(msgspec.msgpack.decode(one, type=PlannerMemory)).moving
        assert drive.proposed() == []
        assert drive.moving.plans == ()
        assert drive.findings == ()
