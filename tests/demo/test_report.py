"""What the demo claims follows from what happened, and one thing that does not hold makes it fail."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from examples.demo.disturbed_run import Action, DisturbedRun, Example
from examples.demo.losses import Comparison
from examples.demo.programme import THREE_SUSPENDS_TWO_MOVES, find_examples, programme
from examples.demo.report import checks_of, is_ok, print_tables, write_report

EXAMPLE = Example("digits_cnn", "attached", Path("x.py"), 1, 100, (*THREE_SUSPENDS_TWO_MOVES, "repin"))
ACTIONS = [
    Action("suspend pause", 10, 0.01, "pids [1]", "pids [1]", 0.005),
    Action("suspend offload", 20, 0.02, "pids [1]", "pids [1]", 0.01),
    Action("move", 30, 0.2, "n1 [1]", "n2 [2]"),
    Action("suspend checkpoint", 40, 0.1, "pids [2]", "pids [3]", 0.3),
    Action("re-pin", 50, 0.001, "cores 0", "cores 1"),
    Action("move", 60, 0.2, "n2 [3]", "n3 [4]"),
]
SAME = Comparison(steps=100, differing=0, first_difference=None, same_weights=True, repeated=0)


def good() -> DisturbedRun:
    return DisturbedRun(
        EXAMPLE, list(ACTIONS), SAME, steps_per_second=100.0, rate_before_repin=100.0, rate_after_repin=99.0
    )


def failed(outcome: DisturbedRun) -> list[str]:
    return [check.name for check in checks_of([outcome], 5, 0, 60.0) if not check.ok]


def test_a_demo_in_which_all_went_well_is_ok() -> None:
    assert failed(good()) == []
    assert is_ok(checks_of([good()], 5, 0, 60.0))


def test_no_check_at_all_is_not_ok() -> None:
    assert not is_ok(())


@pytest.mark.parametrize(
    ("comparison", "name"),
    [
        (replace(SAME, differing=1, first_difference=7), "digits_cnn (attached): every loss bit-identical"),
        (replace(SAME, steps=99), "digits_cnn (attached): every loss bit-identical"),
        (replace(SAME, same_weights=False), "digits_cnn (attached): final weights bit-identical"),
        (replace(SAME, repeated=1), "digits_cnn (attached): no step repeated"),
    ],
)
def test_one_wrong_bit_fails_its_check(comparison: Comparison, name: str) -> None:
    outcome = good()
    outcome.comparison = comparison
    assert failed(outcome) == [name]


def test_an_action_left_out_fails_the_demo() -> None:
    outcome = good()
    del outcome.actions[0]
    assert "digits_cnn (attached): all planned actions done" in failed(outcome)
    assert "suspends at pause" in failed(outcome)


@pytest.mark.parametrize("after", ["n1 [9]", "n2 [1]"])
def test_a_move_that_changed_no_node_or_no_process_is_none(after: str) -> None:
    outcome = good()
    outcome.actions[2] = replace(outcome.actions[2], after=after)
    assert failed(outcome) == ["digits_cnn (attached): moved to another node and process"]


def test_an_example_in_trouble_fails_the_demo() -> None:
    assert not is_ok(checks_of([good(), DisturbedRun(EXAMPLE, trouble="it broke")], 5, 0, 60.0))


def test_the_report_holds_every_check_and_the_seed(tmp_path: Path) -> None:
    checks = checks_of([good()], 5, 1, 60.0)
    write_report(tmp_path / "build/demo.json", checks, [good()], 42)
    content = json.loads((tmp_path / "build/demo.json").read_text())
    assert content["ok"] is True
    assert content["seed"] == 42
    assert {frozenset(check) for check in content["checks"]} == {frozenset({"name", "ok", "figure", "unit"})}


def test_the_tables_show_cores_nodes_and_every_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    print_tables(checks_of([good()], 5, 1, 60.0), [good()])
    shown = capsys.readouterr().out
    for word in ("cores 0", "cores 1", "n1 [1]", "n2 [2]", "verdicts approved", "move pause"):
        assert word in shown


def test_every_example_is_suspended_three_times_and_moved_twice() -> None:
    for example in programme(find_examples()):
        assert example.script.is_file()
        assert sum(action in ("pause", "offload", "checkpoint") for action in example.actions) >= 3
        assert example.actions.count("move") >= 2


def test_a_directory_without_examples_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--examples"):
        find_examples(tmp_path)
