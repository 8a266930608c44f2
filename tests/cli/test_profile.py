"""`ganger profile` and `ganger why --cpus`, against canned answers."""

from __future__ import annotations

import json

import pytest
from ganger.v1 import scheduling_pb2
from kit.canned import Call, CannedMaster

Output = pytest.CaptureFixture[str]
REASON = "Job 1 has 3 cores for its GPU on n1. That is the fewest with 99% of its best rate."


def measured(master: CannedMaster) -> scheduling_pb2.CoresCurve:
    """Let the master have a curve of job 1 that is flat from three cores."""
    curve = master.explanation.cores_curve
    curve.job, curve.sweet_point = "jobs/1", 3.0
    for cores, rate in ((1, 10.0), (3, 30.0), (8, 30.5)):
        curve.points.add(cores=cores, steps_per_s=rate, is_inherited=cores == 8)
    for cores in range(1, 9):
        curve.fitted.add(cores=cores, steps_per_s=10.0 * min(cores, 3))
    master.explanation.cores_reason = REASON
    return curve


def test_the_profile_has_the_points_with_the_fit_a_plot_and_the_reason(
    call: Call, master: CannedMaster, capsys: Output
) -> None:
    measured(master)
    assert call("profile", "1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["1", "10", "10", "this", "job"],
        ["3", "30", "30", "this", "job"],
        ["8", "30.5", "30", "series"],
    ]
    drawn = lines[5:17]
    assert drawn[0].startswith("30.5 |")
    assert drawn[0].endswith("o")
    theta = drawn[-1].index("|", 6)
    assert all(line[theta] == "|" for line in drawn[1:]), "theta is a vertical line"
    assert "*" in drawn[0][theta] + drawn[1][theta]
    assert any("*" in line[:theta] for line in drawn[5:]), "one core is far below"
    assert lines[-1] == REASON


def test_the_profile_has_the_rates_with_less_page_cache_and_why_of_cores_the_reason_for_the_memory(
    call: Call, master: CannedMaster, capsys: Output
) -> None:
    curve = measured(master)
    master.explanation.memory_reason = "Of host memory it holds 16G on n1."
    for gib, rate, inherited in ((2, 5.0, False), (16, 30.0, True)):
        curve.memory_points.add(cores=3, steps_per_s=rate, is_inherited=inherited, memory_bytes=gib << 30)
    assert call("profile", "1") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    at = lines.index(["MEMORY", "STEPS/S", "CORES", "SOURCE"])
    assert lines[at + 1 : at + 3] == [["2G", "5", "3", "this", "job"], ["16G", "30", "3", "series"]]
    assert call("why", "--cpus", "1") == 0
    assert capsys.readouterr().out == f"{REASON} Of host memory it holds 16G on n1.\n"


@pytest.mark.parametrize(
    ("working_set", "refaults_per_s", "line"),
    [
        (0, None, ""),
        (3 << 30, None, "Now: working set 3G; whether its page cache is too small is not measured."),
        (3 << 30, 0.0, "Now: working set 3G; 0/s of files read again, which the page cache had no room for."),
        (3 << 30, 5e6, "Now: working set 3G; 4.8M/s of files read again, which the page cache had no room for."),
    ],
)
def test_the_profile_ends_with_the_memory_that_the_job_holds_and_uses(
    call: Call, master: CannedMaster, capsys: Output, working_set: int, refaults_per_s: float | None, line: str
) -> None:
    master.explanation.cores_reason, master.explanation.memory_reason = REASON, "Of host memory it holds 8G on n1."
    progress = master.explanation.job.progress
    progress.working_set_bytes = working_set
    if refaults_per_s is not None:
        progress.refault_bytes_per_s = refaults_per_s
    assert call("profile", "1") == 0
    lines = [REASON, "Of host memory it holds 8G on n1.", *([line] if line else [])]
    assert capsys.readouterr().out.splitlines() == lines


def test_the_profile_as_json_has_the_curve_or_null(call: Call, master: CannedMaster, capsys: Output) -> None:
    assert call("profile", "1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["cores_curve"] is None
    measured(master)
    assert call("profile", "1", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cores_reason"] == REASON
    assert [point["cores"] for point in found["cores_curve"]["points"]] == [1.0, 3.0, 8.0]


def test_a_profile_without_measurements_and_why_of_cores_print_the_reason_alone(
    call: Call, master: CannedMaster, capsys: Output
) -> None:
    master.explanation.cores_reason = REASON
    assert call("profile", "1") == 0
    assert capsys.readouterr().out == f"{REASON}\n"
    assert call("why", "--cpus", "1") == 0
    assert capsys.readouterr().out == f"{REASON}\n"


def test_a_master_of_an_older_version_reports_no_reasons(call: Call, master: CannedMaster, capsys: Output) -> None:
    assert call("why", "1", "--cpus") == 0
    assert "older version" in capsys.readouterr().out
