"""`make programs`: what of a program's work is compared, and what its table has."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
from ganger_daemon.images.criu import choose_images

from benchmarks.programs import trial
from benchmarks.programs.__main__ import keep, summary_of, try_all
from benchmarks.programs.catalogue import CATALOGUE, WRITTEN
from benchmarks.programs.digests import digests_of
from benchmarks.programs.inputs import INPUTS
from benchmarks.programs.page import page_of
from benchmarks.programs.program import Program
from benchmarks.programs.trial import Order, Outcome, ProgramError, Rooms
from benchmarks.programs.written_scripts import SCRIPTS

ANY = Program("any", "a program", ("python", "any.py"))
ORDERS = (Order("offload"), Order("checkpoint"), Order("move"))
NEED_TORCH_ALONE = ("sqlite-log", "torchrun-2", "tensor-parallel")


def outcome(orders: Sequence[Order] = ORDERS, state: str = "SUCCEEDED", files: str = "", log: str = "") -> Outcome:
    return Outcome(
        "any", "a program", "written anew", "torch 2", "image", orders=[*orders], state=state, files=files, log=log
    )


def test_every_program_has_a_script_or_a_source_and_its_inputs_are_known() -> None:
    names = [program.name for program in CATALOGUE]
    assert len(names) == len({*names})
    assert {program.name for program in WRITTEN} == {*SCRIPTS}
    assert {name.partition(":")[0] for program in CATALOGUE for name in program.inputs} <= {*INPUTS}


def test_scripts_that_are_written_anew_can_be_compiled() -> None:
    for name, text in SCRIPTS.items():
        compile(text, name, "exec")


def test_inputs_are_the_same_in_every_run(tmp_path: Path) -> None:
    for name, make in INPUTS.items():
        if name == "pictures" and find_spec("PIL") is None:
            continue
        for run in ("first", "second"):
            (tmp_path / run / name).mkdir(parents=True)
            make(tmp_path / run / name)
        assert digests_of(tmp_path / "first" / name)
    assert digests_of(tmp_path / "first") == digests_of(tmp_path / "second")


def test_one_different_byte_of_a_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    before = digests_of(tmp_path)
    (tmp_path / "a").write_bytes(b"2")
    assert digests_of(tmp_path) != before


def test_databases_are_compared_by_their_rows(tmp_path: Path) -> None:
    found = []
    for rows in ((1, 2), (1, 2), (1, 3)):
        path = tmp_path / "runs.db"
        path.unlink(missing_ok=True)
        with sqlite3.connect(path) as opened:
            opened.execute("create table loss (value)")
            opened.executemany("insert into loss values (?)", [(row,) for row in rows])
        found.append(digests_of(tmp_path)["runs.db"])
    assert found[0] == found[1] != found[2]


def test_times_in_names_of_files_are_left_out(tmp_path: Path) -> None:
    for time in ("1764291600", "1764291700"):
        place = tmp_path / time / f"CartPole__{time}"
        place.mkdir(parents=True)
        (place / "model").write_bytes(b"1")
    assert digests_of(tmp_path / "1764291600") == digests_of(tmp_path / "1764291700")


def test_lines_of_a_log_are_compared_without_those_of_the_agent_or_what_the_expression_leaves_out() -> None:
    log = "ganger: this job can be paused\niter 1: loss 2.5, time 3 ms\r\niter 2: loss 2.25, time 9 ms\n"
    assert trial.compared_lines(ANY, log) == ["iter 1: loss 2.5, time 3 ms", "iter 2: loss 2.25, time 9 ms"]
    losses = Program("any", "a program", ("python",), log=r"iter \d+: loss [\d.]+")
    assert trial.compared_lines(losses, log) == ["iter 1: loss 2.5", "iter 2: loss 2.25"]


def test_a_repeated_and_a_missing_line_are_differences() -> None:
    assert trial.first_difference(["1", "2"], ["1", "2"]) == ""
    assert "+2" in trial.first_difference(["1", "2"], ["1", "2", "2"])
    assert "-2" in trial.first_difference(["1", "2"], ["1"])


def test_a_job_that_succeeds_with_another_result_is_wrong_and_one_that_fails_is_not_right() -> None:
    assert outcome().is_complete
    assert outcome(files="1 files differ: final.pt").is_wrong
    assert outcome(log="2 lines alone, 3 under Ganger").is_wrong
    failed = outcome(state="FAILED", files="1 files differ: final.pt")
    assert not failed.is_wrong
    assert not failed.is_identical
    for missing in range(3):
        orders = [order for place, order in enumerate(ORDERS) if place != missing]
        assert outcome(orders).is_identical
        assert not outcome(orders).is_complete


def test_the_page_counts_what_moved_and_names_what_was_refused() -> None:
    refused = outcome([*ORDERS[:2], Order("move", refusal="it is connected to 10.0.0.1:443")])
    page = page_of([outcome(), refused], {"cpus": 2, "cpu": "x", "kernel": "6"})
    assert "**2 of 2 ended as alone, 1 of them moved; 0 succeeded with another result.**" in page
    assert "move: it is connected to 10.0.0.1:443" in page


def test_the_page_names_the_commit_and_the_day_of_its_rows() -> None:
    first, second = (dataclasses.replace(outcome(), commit=commit, day="2026-11-28") for commit in ("1a2b", "3c4d"))
    machine = {"cpus": 2, "cpu": "x", "kernel": "6"}
    assert "`make programs` on 2026-11-28 at commit 1a2b: 2 CPUs" in page_of([first, first], machine)
    mixed = " ".join(page_of([first, dataclasses.replace(second, program="other")], machine).split())
    assert "on 2026-11-28 at commit 1a2b (any), on 2026-11-28 at commit 3c4d (other)" in mixed


def test_rows_of_a_run_in_which_commits_were_not_recorded_are_kept(tmp_path: Path) -> None:
    first, second = (program.name for program in CATALOGUE[:2])
    keep(dataclasses.replace(outcome(), program=first), tmp_path)
    path = tmp_path / "programs.json"
    kept = json.loads(path.read_text())
    for name in ("commit", "day"):
        del kept["programs"][0][name]
    path.write_text(json.dumps(kept))
    keep(dataclasses.replace(outcome(), program=second, commit="1a2b", day="2026-11-28"), tmp_path)
    assert "at an earlier commit, not recorded" in " ".join((tmp_path / "programs.md").read_text().split())


def test_a_program_that_is_tried_again_takes_the_place_of_its_row(tmp_path: Path) -> None:
    first, second = (program.name for program in CATALOGUE[:2])
    for name, state in ((second, "SUCCEEDED"), (first, "FAILED"), (first, "SUCCEEDED")):
        keep(dataclasses.replace(outcome(state=state), program=name), tmp_path)
    rows = json.loads((tmp_path / "programs.json").read_text())["programs"]
    assert [(row["program"], row["state"]) for row in rows] == [(first, "SUCCEEDED"), (second, "SUCCEEDED")]
    assert "2 of 2 ended as alone" in (tmp_path / "programs.md").read_text()


def test_expressions_of_a_log_keep_the_numbers_of_a_line() -> None:
    lines = {
        "nanogpt": "iter 3: loss 4.1671, time 57 ms",
        "dqn": "step 3 episode 5 reward 9",
        "fsdp2": "step 5 loss 4.2",
    }
    for name, line in lines.items():
        program = next(program for program in CATALOGUE if program.name == name)
        assert "3" in " ".join(trial.compared_lines(program, line)) or "4.2" in " ".join(
            trial.compared_lines(program, line)
        )


def test_a_program_without_its_checkout_is_refused_by_the_name_of_the_repository(tmp_path: Path) -> None:
    program = next(program for program in CATALOGUE if program.source and not program.is_packaged)
    with pytest.raises(ProgramError, match=program.source):
        Rooms(Path(sys.executable), tmp_path, tmp_path).version_of(program)


@pytest.mark.chaos
@pytest.mark.system
@pytest.mark.torch
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(choose_images().unavailable), reason=f"no images: {choose_images().unavailable}")
def test_programs_that_are_suspended_twice_and_moved_end_with_the_same_bytes_as_alone(tmp_path: Path) -> None:
    chosen = [program for program in CATALOGUE if program.name in NEED_TORCH_ALONE]
    outcomes = try_all(chosen, Rooms(Path(sys.executable), None, tmp_path))
    assert [summary_of(one) for one in outcomes if not one.is_complete] == []
