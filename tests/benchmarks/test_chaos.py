"""`ganger bench chaos`: its schedule, its judges, and a short run in which parts of a real cluster are killed."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from ganger.v1.resources_pb2 import Claim
from ganger_master.cli import master

from benchmarks.chaos import EVERY_S, LEAST_KILLS, LEAST_S, MASTER_OPTIONS, PART_S, POLICIES, SEED, main
from benchmarks.chaos_plan import (
    KINDS,
    SCRIPT_LINES,
    WEIGHTS,
    beside,
    log_findings,
    next_kind,
    not_once,
    schedule,
    script_findings,
    step_findings,
)
from benchmarks.postgresql_server import why_no_postgresql
from benchmarks.witnesses import Death, Step


def step(number: int, attempt: int = 1, loss: float = 0.5) -> Step:
    began = 100 * attempt + number
    return Step("a", number, 0, attempt, "n1", (0,), 0, 1, loss.hex(), "", (), began, began + 1)


def printed(*steps: int) -> str:
    return "".join(f"step {number}\n" for number in steps)


def script(*lines: int) -> str:
    return "".join(f"line {number} of a\n" for number in lines)


WHOLE = tuple(range(1, SCRIPT_LINES + 1))


def test_a_seed_decides_the_schedule_and_every_part_is_a_victim_in_its_share() -> None:
    events = schedule(1, PART_S, EVERY_S)
    assert events == schedule(1, PART_S, EVERY_S) != schedule(2, PART_S, EVERY_S)
    assert [event.at_s for event in events] == sorted(event.at_s for event in events)
    assert events[0].at_s >= 0.0
    assert events[-1].at_s <= PART_S
    counts = Counter(event.part for event in events)
    assert set(counts) == set(WEIGHTS)
    assert counts["rank"] == pytest.approx(len(events) * WEIGHTS["rank"] / sum(WEIGHTS.values()), abs=8)
    kills = sum(not event.pause_s for number in range(3) for event in schedule(SEED + number, PART_S, EVERY_S))
    assert kills >= LEAST_KILLS
    assert len(POLICIES) * PART_S >= LEAST_S


@pytest.mark.parametrize("policy", POLICIES)
def test_the_options_of_each_policy_are_options_of_the_master(policy: str) -> None:
    known = {name for parameter in master.params for name in parameter.opts}
    assert {word for word in MASTER_OPTIONS[policy] if word.startswith("--")} <= known


def test_jobs_of_all_kinds_come_in_a_busy_phase_and_fewer_in_a_calm_one() -> None:
    def filled(at_s: float) -> Counter[str]:
        dice, alive = random.Random(1), Counter[str]()
        while kind := next_kind(dice, alive, at_s):
            alive[kind.name] += 1
        return alive

    assert filled(0.0) == {kind.name: kind.alive for kind in KINDS}
    assert "four" not in filled(50.0)
    assert filled(50.0)["one"] == 1


def test_a_job_joins_another_one_with_its_own_cores_and_memory() -> None:
    mover = Claim(node="nodes/n1", device_mask=1, millicores=[1000], memory_bytes=7)
    claim = beside(mover, Claim(node="nodes/n2", device_mask=4, millicores=[2000], memory_bytes=9))
    assert (claim.node, claim.device_mask, claim.shared_mask) == ("nodes/n2", 4, 4)
    assert (list(claim.millicores), claim.memory_bytes) == ([1000], 7)


def test_submissions_that_are_lost_or_there_twice_are_found() -> None:
    accepted = {"a": "jobs/1", "b": "jobs/2"}
    assert not_once(accepted, [("jobs/1", "a"), ("jobs/2", "b")]) == ([], [])
    lost, twice = not_once(accepted, [("jobs/1", "a"), ("jobs/3", "a")])
    assert len(lost) == len(twice) == 1


@pytest.mark.parametrize(
    ("steps", "deaths", "is_found"),
    [
        ([step(1), step(2), step(3)], [], False),
        ([step(1), step(2)], [], True),
        ([step(1), step(2), step(3, loss=0.25)], [], True),
        # Attempt 2 does step 2 again: only a rank's death explains that, and none after a checkpoint of it.
        ([step(1), step(2), step(2, 2), step(3, 2)], [], True),
        ([step(1), step(2), step(2, 2), step(3, 2)], [Death("a", 150, 1)], False),
        ([step(1), step(2), step(2, 2), step(3, 2)], [Death("a", 150, 2)], True),
    ],
)
def test_steps_lost_or_twice_and_other_results_are_found(
    steps: list[Step], deaths: list[Death], is_found: bool
) -> None:
    reference = [step(1), step(2), step(3)]
    assert bool(step_findings(steps, deaths, 3, 1, reference)) == is_found


@pytest.mark.parametrize(
    ("log", "deaths", "is_found"),
    [
        (printed(1, 2, 3), 0, False),
        ("other output\n" + printed(1, 2, 3), 0, False),
        (printed(1, 3), 0, True),
        (printed(1, 3), 1, False),
        (printed(1, 2, 2, 3), 1, True),
        (printed(2, 1, 3), 1, True),
    ],
)
def test_lines_that_a_log_lacks_or_has_twice_are_found(log: str, deaths: int, is_found: bool) -> None:
    assert bool(log_findings(log, 0, [step(1), step(2), step(3)], deaths)) == is_found


@pytest.mark.parametrize(
    ("log", "deaths", "is_found"),
    [
        (script(*WHOLE), 0, False),
        (script(*WHOLE[:-1]), 0, True),
        (script(1, 2, *WHOLE), 0, True),
        (script(1, 2, *WHOLE), 1, False),
        (script(1, 3, *WHOLE), 1, True),
        (script(*WHOLE[1:]), 1, True),
        ("", 1, True),
    ],
)
def test_scripts_that_began_again_or_did_not_end_are_found(log: str, deaths: int, is_found: bool) -> None:
    assert bool(script_findings(log, "a", deaths)) == is_found


@pytest.mark.system
@pytest.mark.torch
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(why_no_postgresql()), reason=why_no_postgresql())
def test_a_short_run_with_kills_loses_no_job_and_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = main(quick=True)
    assert found["ok"], found["missed"]
    assert found["figures"]["kills"] > 0
    assert found["figures"]["jobs"] > 5
