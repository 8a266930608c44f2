"""The example on the page works as it stands there."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from ganger.cluster.placement import candidates
from ganger.cluster.refusals import Reason, Refusal
from ganger.scheduling import DefaultScheduler, JobScheduler, PlacementLease
from ganger.scheduling.cli import scheduler
from kit.clusters import cluster, gang
from msgspec.structs import replace as moved

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "job-schedulers.md"


def turn(waited: float = 0.0, number: int = 1) -> PlacementLease:
    return PlacementLease(number, "jobs/1", 1, gang(1), 0.5, waited_s=waited)


def example() -> JobScheduler:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, type[JobScheduler]] = {"__name__": "far_apart"}  # type: ignore[dict-item]
    exec(code, names)
    return names["FarApart"]()


def test_example_stays_away_from_other_jobs_for_a_minute() -> None:
    view = cluster(2)
    view.take(candidates(view, gang(1)).candidates[0][0], 1)
    assert {claims[0].node for claims in example().propose(turn(), view).candidates} == {"s1"}
    assert "s0" in {claims[0].node for claims in example().propose(turn(waited=60), view).candidates}


def test_default_leaves_alone_what_was_kept_for_others_until_its_next_turn() -> None:
    view, default = cluster(2), DefaultScheduler()
    assert default.propose(turn(), view).candidates[0][0].node == "s0"
    again = default.on_rejected(turn(), view, [Refusal(Reason.KEPT, node="s0", job="jobs/9")])
    assert again is not None
    assert {claims[0].node for claims in again.candidates} == {"s1"}
    passed = default.on_rejected(turn(), view, [Refusal(Reason.KEPT, node="s1", job="jobs/9")])
    assert passed is not None
    assert (passed.candidates, passed.blockers[0].job) == ((), "jobs/9")
    assert default.propose(turn(number=2), view).candidates[0][0].node == "s0"


def test_default_remembers_in_its_next_turn_what_was_kept_for_others() -> None:
    view, default = cluster(2), DefaultScheduler()
    assert default.propose(turn(), view).candidates[0][0].node == "s0"
    default.on_rejected(turn(), view, [Refusal(Reason.KEPT, node="s0", job="jobs/9")])
    assert default.propose(turn(number=2), view).candidates[0][0].node == "s1"


def test_default_passes_at_once_where_no_other_place_would_help() -> None:
    strict = Refusal(Reason.PROTECTED, job="jobs/1", detail="the queue is strict")
    answer = DefaultScheduler().on_rejected(turn(), cluster(2), [strict])
    assert answer is not None
    assert answer.blockers == (strict,)


@pytest.mark.parametrize("name", ["nothing", "no.such.module:Class", "json:JSONDecoder", "json:Nothing"])
def test_scheduler_that_cannot_be_loaded_is_refused_before_anything_runs(name: str) -> None:
    path = list(sys.path)
    result = CliRunner().invoke(scheduler, ["run", name, "--job", "jobs/1"])
    sys.path[:] = path
    assert result.exit_code == 2
    assert name in result.output


def test_the_default_scheduler_requests_the_planners_suggestion_and_another_place_once_that_is_refused() -> None:
    view, default = cluster(2), DefaultScheduler()
    (claims, *_) = default.propose(turn(), view).candidates
    (elsewhere,) = [(moved(claims[0], node=node),) for node in ("s0", "s1") if node != claims[0].node]
    suggesting = replace(turn(number=2), parked=claims, suggested=elsewhere)
    assert default.propose(suggesting, view).candidates == (elsewhere,), "the planner knows where the job is parked"
    kept = Refusal(Reason.KEPT, node=elsewhere[0].node)
    again = default.on_rejected(suggesting, view, [kept])
    assert again is not None
    assert elsewhere not in again.candidates
    assert claims in again.candidates
