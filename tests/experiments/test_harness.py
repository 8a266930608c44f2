"""What runs the experiments: every claim is answered for, and none of them lies about how it went. (5 s)"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from ganger.cli.main import run as ganger
from ganger_master.simulator.report.figures import Interval
from kit import experiments as fakes

from experiments.experiment import CoreUse, Experiment, MeasuredRows, Setting
from experiments.journal import Journal, code_files
from experiments.paper_claims import PaperClaim, claims, meets, shortfalls
from experiments.registry import EXPERIMENTS, UNRUN
from experiments.results import HEADINGS, Result, as_cells, as_json, document
from experiments.runner import run

NOWHERE = Setting(Path("nowhere"), Path("nowhere"))


def claim(name: str) -> PaperClaim:
    return PaperClaim(
        name, "a claim", "a paper", {"figure": 3.0}, {"figure": {"at_least": 3.0}}, {"figure": {"above": 4.0}}
    )


def results(
    tmp_path: Path, *experiments: Experiment, is_saved: bool = False, is_anew: bool = False
) -> dict[str, Result]:
    by_name = {experiment.name: experiment for experiment in experiments}
    claimed = [claim(name) for name in by_name]
    made = run(claimed, by_name, {}, NOWHERE, tmp_path, 2, is_saved=is_saved, is_anew=is_anew)
    return {result.claim.name: result for result in made}


def test_every_claim_of_the_dossier_has_an_experiment_or_a_reason() -> None:
    assert list(claims()) == [f"B{number}" for number in range(1, 26)]
    assert sorted([*EXPERIMENTS, *UNRUN]) == sorted(claims())
    assert all(experiment.name == name for name, experiment in EXPERIMENTS.items())
    assert all(len(reason) > 20 for reason in UNRUN.values())


def test_every_claim_says_whose_it_is_and_when_it_holds() -> None:
    for known in claims().values():
        assert known.title
        assert known.source
        assert known.paper
        assert known.holds


def test_what_was_run_is_judged_and_its_rows_are_kept(tmp_path: Path) -> None:
    told = as_json(results(tmp_path, fakes.GOOD)["good"])
    assert told["ours"] == {"figure": 4.0}
    assert (told["holds"], told["beats"], told["load"], told["seeds"]) == (True, False, 0.9, 2)
    assert told["interval"]["figure"] == pytest.approx(12.706, rel=1e-3)
    rows = [json.loads(line) for line in (tmp_path / "good.jsonl").read_text().splitlines()]
    assert [(row["seed"], row["figure"]) for row in rows] == [(0, 3.0), (1, 5.0)]
    assert told["cpu_s"] == pytest.approx(sum(row["cpu_s"] for row in rows))


def test_saved_rows_conclude_the_same_and_are_not_measured_again(tmp_path: Path) -> None:
    results(tmp_path, fakes.GOOD)
    again = Experiment("good", fakes.by_seed, fakes.fails, fakes.mean_figure, core=CoreUse.WHOLE)
    found = results(tmp_path, again, fakes.DIES, is_saved=True)
    assert as_json(found["good"])["ours"] == {"figure": 4.0}
    assert "there is no dies.jsonl" in as_json(found["dies"])["skipped"]


def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    """One seed of two was measured before the process of the other died, and a line was cut off."""
    assert results(tmp_path, fakes.DIES)["dies"].failed
    journal = tmp_path / "parts" / "dies.jsonl"
    journal.write_text(journal.read_text() + '{"of": "')
    went_on = Experiment("dies", fakes.by_seed, fakes.fails_at_seed_zero, fakes.mean_figure, core=CoreUse.WHOLE)
    found = results(tmp_path, went_on)
    assert as_json(found["dies"])["ours"] == {"figure": 4.0}
    assert len((tmp_path / "dies.jsonl").read_text().splitlines()) == 2


def test_what_is_asked_for_anew_is_measured_anew(tmp_path: Path) -> None:
    results(tmp_path, fakes.GOOD)
    again = Experiment("good", fakes.by_seed, fakes.fails, fakes.mean_figure, core=CoreUse.WHOLE)
    assert results(tmp_path, again)["good"].holds
    assert "no good" in results(tmp_path, again, is_anew=True)["good"].failed


def test_other_data_are_measured_anew(tmp_path: Path) -> None:
    data = tmp_path / "data.csv"
    data.write_text("one")
    here = Setting(tmp_path, tmp_path)
    needs = Experiment(
        "good",
        fakes.by_seed,
        fakes.more_with_the_seed,
        fakes.mean_figure,
        core=CoreUse.WHOLE,
        needs=(("traces", "data.csv"),),
    )
    Journal(tmp_path / "good.jsonl", needs, here).add({"seed": 0}, [{"figure": 1.0}])
    assert Journal(tmp_path / "good.jsonl", needs, here).rows({"seed": 0}) == [{"figure": 1.0}]
    assert Journal(tmp_path / "good.jsonl", needs, here).rows({"seed": 1}) is None
    data.write_text("another")
    assert Journal(tmp_path / "good.jsonl", needs, here).rows({"seed": 0}) is None


@pytest.mark.parametrize(
    ("experiment", "what"), [(fakes.DIES, "dies seed=1: .*SIGKILL"), (fakes.FAILS, "fails seed=.*no good")]
)
def test_an_experiment_whose_worker_dies_has_failed_and_the_others_go_on(
    tmp_path: Path, experiment: Experiment, what: str
) -> None:
    found = results(tmp_path, experiment, fakes.GOOD)
    told = as_json(found[experiment.name])
    assert (told["ours"], told["holds"], told["beats"]) == (None, None, None)
    assert re.match(what, told["failed"])
    assert found["good"].holds


def test_an_experiment_without_its_data_is_skipped_with_the_file(tmp_path: Path) -> None:
    told = as_json(results(tmp_path, fakes.NEEDS)["needs"])
    assert "no_such_trace.csv" in told["skipped"]
    assert (told["ours"], told["holds"]) == (None, None)


@pytest.mark.parametrize(
    ("criterion", "is_met"),
    [
        ({"a": {"at_least": 1.0}}, True),
        ({"a": {"above": 1.0}}, False),
        ({"a": {"at_most": 1.0}, "b": {"below": 2.0}}, False),
        ({"a": {"at_least": 0.0, "at_most": 2.0}, "b": {"at_most": 2.0}}, True),
    ],
)
def test_a_criterion_is_met_by_means_within_all_its_limits(
    criterion: dict[str, dict[str, float]], is_met: bool
) -> None:
    assert meets(criterion, {"a": 1.0, "b": Interval(2.0, 5.0, 3)}) is is_met


def test_a_figure_without_a_measurement_is_an_error() -> None:
    with pytest.raises(KeyError):
        meets({"c": {"at_least": 1.0}}, {"a": 1.0})


def test_no_figure_that_is_not_known_meets_anything() -> None:
    for comparison in ("at_least", "at_most", "above", "below"):
        assert not meets({"a": {comparison: 1.0}}, {"a": math.nan})
    told = as_json(Result(claim("x"), CoreUse.WHOLE, MeasuredRows({"figure": math.nan}, 1)))
    assert told["ours"] == {"figure": None}
    json.dumps(told, allow_nan=False)


def test_figures_that_fall_short_are_named_with_their_distance() -> None:
    criterion = {"a": {"at_least": 2.0}, "b": {"below": 5.0}, "c": {"at_most": 1.0}}
    assert shortfalls(criterion, {"a": 1.5, "b": 5.0, "c": 1.0}) == [
        "a by 0.5 (1.5, at least 2)",
        "b by 0 (5, below 5)",
    ]
    told = as_json(Result(claim("x"), CoreUse.WHOLE, MeasuredRows({"figure": 1.0}, 1)))
    assert told["core_ran"] == "yes"
    assert told["short_by"] == {"to hold": ["figure by 2 (1, at least 3)"], "to beat": ["figure by 3 (1, above 4)"]}


def test_every_row_of_the_page_that_falls_short_gives_the_distance_and_the_reason() -> None:
    page = (Path(__file__).parents[2] / "docs/measurements/reproduce.md").read_text()
    rows = [dict(zip(HEADINGS, line.split(" | "), strict=True)) for line in page.splitlines() if line[:3] == "| B"]
    assert len(rows) == len(claims())
    for row in rows:
        name = row["name"].removeprefix("| ")
        assert row["core ran"] == EXPERIMENTS[name].core, name
        if "no" in (row["holds"], row["beats"]):
            assert row["short by"].startswith("to "), name
            assert len(row["why"]) > 20, name


def test_a_measurement_is_of_the_code_of_all_packages() -> None:
    names = {name for _, name in code_files()}
    expected = {"ganger/__init__.py", "ganger_master/simulator/run.py", "experiments/scale.py", "benchmarks/move.py"}
    assert expected <= names


def test_no_result_beats_a_claim_without_a_bound() -> None:
    modest = PaperClaim("x", "a claim", "a paper", {"figure": 1.0}, {"figure": {"at_least": 1.0}}, {})
    assert as_json(Result(modest, CoreUse.WHOLE, MeasuredRows({"figure": 2.0}, 1)))["beats"] is None


def test_table_and_page_say_what_was_left_out() -> None:
    made = [
        Result(claim("ran"), CoreUse.ARITHMETIC, MeasuredRows({"figure": 3.5}, 5, load={"one": 0.5})),
        Result(claim("left"), CoreUse.WHOLE, skipped="no way | to run it"),
    ]
    short = "to beat: figure by 0.5 (3.5, above 4)"
    cells = ("ran", "a claim", "arithmetic only", "yes", "no", short, "figure 3", "figure 3.5", "one 0.50", "")
    assert as_cells(made[0]) == cells
    assert as_cells(made[1])[2:5] == ("yes", "skipped", "skipped")
    page = document(made, "2026-01-01")
    assert "of 2 claims 1 were run" in page
    assert all(line.replace("\\|", "").count("|") == len(HEADINGS) + 1 for line in page.splitlines() if line[:1] == "|")


Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    def call(*arguments: str | Path) -> tuple[int, str, str]:
        code = ganger(["reproduce", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_command_refuses_what_it_does_not_know(said: Said) -> None:
    code, _, err = said("--only", "B99")
    assert code == 2
    assert "no claim 'B99'; there are B1, B2" in err
    for arguments in ((), ("--all", "--only", "B1")):
        code, _, err = said(*arguments)
        assert code == 2
        assert "either --all, or --only NAME" in err
    assert said("--all", "--saved", "--anew")[0] == 2


def test_page_that_could_not_be_written_is_refused_before_anything_is_measured(said: Said, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, out, err = said("--all", "--rows", tmp_path / "rows", "--document", tmp_path / "file" / "page.md")
    assert (code, out) == (4, "")
    assert "not a directory" in err
    assert not (tmp_path / "rows").exists()


def test_command_lists_every_claim(said: Said) -> None:
    code, out, _ = said("--list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(claims())
    code, out, _ = said("--list", "--json")
    assert code == 0
    told = json.loads(out)
    assert [each["name"] for each in told] == list(claims())
    assert {each["core_ran"] for each in told} == {"yes", "planner only", "approval only", "arithmetic only"}


def test_command_tells_all_of_a_claim_in_lines_as_wide_as_the_terminal(
    said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    code, out, _ = said("--only", "B1", "--saved", "--traces", tmp_path, "--rows", tmp_path)
    assert code == 0
    assert max(map(len, out.splitlines()[:-2])) <= 60
    text = " ".join(out.split())
    assert "holds skipped" in text
    assert "profile_ps_speed_dl2.csv" in text
    assert out.splitlines()[-1].split()[:5] == ["B1", "arithmetic", "only", "skipped", "skipped"]


def test_command_prints_a_json_list_of_what_was_asked(said: Said, tmp_path: Path) -> None:
    code, out, _ = said(
        "--only",
        "B1",
        "--quick",
        "--json",
        "--traces",
        tmp_path,
        "--rows",
        tmp_path,
        "--document",
        tmp_path / "page.md",
    )
    assert code == 0
    (told,) = json.loads(out)
    assert {"name", "source", "paper", "ours", "holds", "beats", "skipped", "quick"} <= set(told)
    assert "profile_ps_speed_dl2.csv" in told["skipped"]
    assert (tmp_path / "page.md").read_text().startswith("# ")
