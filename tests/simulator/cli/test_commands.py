"""`ganger simulate` and `ganger compare` as a person and a script meet them, the hostile ones included."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil
import pytest
from ganger.cli.main import run
from ganger_master.policies import policy_named
from ganger_master.simulator.inputs import SwitchCosts
from kit.waiting import eventually
from simulator.cli import fakes

GANGER = [sys.executable, "-m", "ganger.cli.main"]
ONE_NODE = ["--nodes", "1", "--gpus-per-node", "2"]
GPUS_64 = ["--nodes", "8", "--gpus-per-node", "8"]
# On two GPUs, fifo: a, then b, then c. srtf: b takes the place of a as it comes, c goes on beside a after it.
HEADER = "job_id,submit_time_s,gpus,duration_s\n"
TRACE = """job_id,submit_time_s,gpus,duration_s,colour
a,0,1,100,red
b,10,2,50,red
c,20,1,60,blue
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: str | Path) -> tuple[int, str, str]:
        code = run(list(map(str, arguments)))
        out, err = capsys.readouterr()
        return code, out, err

    return call


Said = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("policy", "average", "makespan"), [("fifo", (100 + 140 + 190) / 3, 210), ("srtf", (150 + 50 + 100) / 3, 150)]
)
def test_simulate_gives_what_a_person_works_out(
    said: Said, trace: Path, policy: str, average: float, makespan: float
) -> None:
    code, out, _ = said("simulate", trace, *ONE_NODE, "--policy", policy, "--ideal", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["avg_jct_s"] == pytest.approx(average)
    assert found["makespan_s"] == pytest.approx(makespan)
    assert (found["jobs"], found["unfinished"], found["policy"]) == (3, 0, policy)
    assert found["gpu_utilization"] == pytest.approx(260 / (2 * makespan))
    assert {"p95_jct_s", "wall_s", "events", "peak_memory_bytes", "by_gang_size"} <= found.keys()
    assert found["cluster"]["gpus"] == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full device")
def test_a_run_whose_notes_cannot_be_written_ends_by_its_result(trace: Path, tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*GANGER, "simulate", trace, *ONE_NODE, "-p", "fifo", "--json", "--progress", "--csv", tmp_path / "out"],
            stdout=subprocess.PIPE,
            stderr=full,
            timeout=60,
        )
    assert done.returncode == 0
    assert json.loads(done.stdout)["jobs"] == 3
    assert (tmp_path / "out" / "jobs.csv").exists()


def test_simulate_prints_a_table_for_people_and_notes_beside_it(said: Said, trace: Path) -> None:
    code, out, err = said("simulate", trace, *ONE_NODE, "-p", "fifo")
    assert code == 0
    for word in ("average JCT", "makespan", "offered load", "first start", "1 node, 2 GPUs, 6 cores", "start 5s"):
        assert word in out
    assert "trace.csv: columns that were not read: colour" in err
    assert "models are drawn for 3 jobs of unknown model" in err


def test_the_load_is_stated_even_where_there_is_none(said: Said, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"{HEADER}a,5,1,9\nb,5,1,9\n")
    code, out, _ = said("simulate", path, *ONE_NODE, "-p", "fifo", "--ideal")
    assert code == 0
    assert "offered load               all jobs are submitted at once" in out
    _, out, _ = said("simulate", path, *ONE_NODE, "-p", "fifo", "--ideal", "--json")
    assert json.loads(out)["offered_load"] is None
    code, _, err = said("simulate", path, *ONE_NODE, "-p", "fifo", "--ideal", "--load", "1")
    assert code == 2
    assert "t.csv: jobs that are all submitted at once offer no load that could be scaled" in err


def test_switching_costs_time_where_it_is_not_ideal(said: Said, trace: Path) -> None:
    def average(*costs: str) -> float:
        flags = [word for cost in costs for word in ("--cost", cost)]
        code, out, _ = said("simulate", trace, *ONE_NODE, "-p", "fifo", "--json", *flags)
        assert code == 0
        return float(json.loads(out)["avg_jct_s"])

    free = average("start=0", "suspend=0s", "resume=0")
    assert free == pytest.approx((100 + 140 + 190) / 3)
    # a and b start once each; c waits for both and starts itself.
    assert average("start=1m") == pytest.approx(free + (60 + 120 + 180) / 3)


def test_help_names_every_cost(said: Said) -> None:
    _, out, _ = said("simulate", "--help")
    text = " ".join(out.split())
    for field in fields(SwitchCosts):
        assert field.name.removesuffix("_s") in text[text.index("--cost") : text.index("--seed")]


def test_what_is_listed_are_policies_and_what_may_follow_them(said: Said) -> None:
    code, out, _ = said("simulate", "--list-policies")
    assert code == 0
    names = [line.split()[0] for line in out.splitlines()]
    assert {"fifo", "fifo-backfill", "srtf", "srsf", "las", "las2d"} <= set(names)
    for name in names:
        policy_named(f"las{name}" if name.startswith("+") else name)
    assert {"+best-fit", "+tetris", "+shared", "+synergy-tune", "+defrag", "+elastic"} <= set(names)
    oracles = {line.split()[0] for line in out.splitlines() if "oracle" in line}
    assert {"srtf", "srsf"} <= oracles
    assert not {"fifo", "las", "las2d"} & oracles


def test_every_row_is_a_job_or_is_accounted_for(said: Said, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "job_id,submit_time_s,gpus,duration_s\na,0,1,5\nb,0,9,5\nc,1,0,5\nd,2,1,nan\ne,3,1,\nf,4,0.5,5\ng,5,1,5\na,6,1,1\n"
    )
    code, out, err = said("simulate", path, *ONE_NODE, "-p", "fifo", "--skip-mistakes", "--jobs", "1", "--json")
    assert code == 0
    trace = json.loads(out)["trace"]
    assert (trace["rows"], trace["jobs"], trace["not_asked_for"]) == (8, 1, 2)
    reasons = {found["what"]: found["first_lines"] for found in trace["left_out"]}
    assert sum(found["rows"] for found in trace["left_out"]) == 5
    assert reasons["needs more GPUs than the 2 of the cluster's servers"] == [3]
    assert reasons["asks for no GPU"] == [4]
    assert reasons["duration_s is not a finite number"] == [5]
    assert [found["first_lines"] for found in trace["changed"]] == [[7]]
    assert "t.csv: 8 rows: 1 job, 5 left out, 2 not asked for" in err
    assert "t.csv: left out: line 3: needs more GPUs" in err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("job_id,gpus,duration_s\na,1,1\n", ["line 1: there is no column submit_time_s or arrival_s"]),
        (f"{HEADER}a,-1,1,1\nb,1,1,nan\n", ["line 2: submit_time_s is negative", "line 3: duration_s is not a finite"]),
        (f"{HEADER}c,1,1,1\nc,2,1,1\n", ["line 3: job_id was there before"]),
        (
            f"{HEADER}c,-1,1,1\nc,2,1,1\nd,0,1,1\n",
            ["line 2: submit_time_s is negative", "line 3: job_id is that of another row, which has a mistake"],
        ),
        (f"{HEADER}a,1,9,1\n", ["no job to run is left", "line 2: needs more GPUs than the 2"]),
        (HEADER, ["no job to run is left"]),
        ("job_id,submit_time_s,gpus,model\na,1,1,unheard-of\n", ["--draw-durations", "no run time, and none follows"]),
        ("", ["the file is empty"]),
        ("\0\1\2", ["line 1: a zero byte"]),
        ("x" * 70_000, ["line 1: more than 65,536 characters"]),
    ],
)  # fmt: skip
def test_a_bad_trace_is_refused_with_its_lines(said: Said, tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    code, out, err = said("simulate", path, *ONE_NODE, "-p", "fifo")
    assert (code, out) == (2, "")
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.csv", *ONE_NODE], "nowhere.csv: cannot be read: no such file"),
        (["/", *ONE_NODE], "/: cannot be read: is a directory"),
        (["/dev/zero", *ONE_NODE], "zero: line 1"),
        (["example"], "name the cluster: --nodes N --gpus-per-node G, or --cluster FILE"),
        (["example", "--nodes", "3"], "--gpus-per-node: is needed"),
        (["example", "--nodes", "0", "--gpus-per-node", "1"], "--nodes: 0 is not a whole number"),
        (["example", *ONE_NODE, "--cluster", "c.yaml"], "--cluster describes all servers: leave out --nodes"),
        (["example", "--cluster", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
        (["example", *ONE_NODE, "-p", "las+elastic", "--rates", "profiles"], "grows: write las, not las+elastic"),
        (["example", *ONE_NODE, "-p", "gandiva", "--elastic", "4", "--ideal"], "no job grows with --ideal"),
        (["example", *ONE_NODE, "--load", "nan"], "'nan' is not a number above zero"),
        (["example", *ONE_NODE, "--load", "1", "--load-phases", "1h:1"], "exclude each other"),
        (["example", *ONE_NODE, "--load-phases", "0:1"], "no time above zero"),
        (["example", "--nodes", "9", "--gpus-per-node", "8", "--load-phases", "99d:1"], "the trace spans 578,783 s"),
        (["example", *ONE_NODE, "--window", "9d..2d"], "is no window"),
        (["example", *ONE_NODE, "--window", "2d"], "is no window"),
        (["example", *ONE_NODE, "--window", "9..99"], "'9' has no unit: write 9s, 9m or 9h"),
        (["example", *ONE_NODE, "--round", "300"], "'300' has no unit: write 300s, 300m or 300h"),
        (["example", *ONE_NODE, "--memory-per-node", "64"], "'64' has no unit: write 64M"),
        (["example", *ONE_NODE, "--window", "300d..400d"], "no job to run is left"),
        (["example", *ONE_NODE, "--where", "colour=red"], "no column colour to choose by"),
        (["example", *ONE_NODE, "--where", "a=1", "--where", "a=2"], "--where a is given twice"),
        (["example", *ONE_NODE, "--where", "colour"], "'colour' is not of the form COLUMN=TEXT"),
        (["example", *ONE_NODE, "--load-phases", "1h"], "'1h' is not of the form TIME:X"),
        (["example", *ONE_NODE, "--ideal", "-p", "srtf+best-fit"], "nothing is tuned: write srtf, not srtf+best-fit"),
        (["example", *ONE_NODE, "--ideal", "-p", "srtf+synergy-tune"], "nothing is tuned: write srtf"),
        (["example", *ONE_NODE, "--csv", ""], "'--csv': no directory is named"),
        (["example", *ONE_NODE, "--ideal", "--rates", "profiles"], "--ideal and --rates profiles exclude each other"),
        (["example", *ONE_NODE, "--ideal", "--cost", "start=3s"], "--ideal and --cost exclude each other"),
        (["example", *ONE_NODE, "--ideal", "--plan-every", "0"], "--ideal and --plan-every exclude each other"),
        (["example", *ONE_NODE, "--round", "9s", "--plan-every", "9s"], "--round and --plan-every exclude each other"),
        (["example", *ONE_NODE, "--profile", "5m"], "give --rates profiles too"),
        (["example", *ONE_NODE, "--rates", "profiles", "--profile", "5m"], "none of these policies uses profiles"),
        (["example", *ONE_NODE, "--elastic", "4"], "policies with +elastic give jobs other sizes: name one"),
        (["example", *ONE_NODE, "--ideal", "-p", "synergy"], "write las, not synergy"),
        (["example", *ONE_NODE, "--jobs", "1", "--draw", "1"], "exclude each other"),
        (["example", *ONE_NODE, "--draw", "9999"], "cannot sample 9,999"),
        (["example", *ONE_NODE, "--round", "0"], "no time above zero"),
        (["example", *ONE_NODE, "--cost", "stop=3s"], "no cost is named 'stop'; there are"),
        (["example", *ONE_NODE, "--cost", "start=-3"], "not a duration"),
        (["example", *ONE_NODE, "-p", "best"], "there is no policy 'best'; there are"),
        (["example", *ONE_NODE, "-p", "SRFT"], "there is no policy 'SRFT'; did you mean srtf?"),
        (["example", *ONE_NODE, "-p", "fifo+bestfit"], "no placement or tuning 'bestfit'; did you mean best-fit?"),
        (["example", *ONE_NODE, "-p", "las+defrag+defrag"], "'las+defrag+defrag' names defrag twice"),
        (["example", *ONE_NODE, "-p", "optimus", "--elastic", "0.5"], "--elastic: no job accepts less"),
        (["example", *ONE_NODE, "--quotas", "ann"], "'ann': write USER=GPUS, a number from 0 on, and *=GPUS for"),
        (["example", *ONE_NODE, "--quotas", "ann=-1,bob=few"], "'ann', 'bob': write USER=GPUS"),
        (["example", *ONE_NODE, "--quotas", "ann=1,bob=1,ann=2"], "'ann' twice: give each user one number"),
        (["example", *ONE_NODE, "--quotas", "*=1", "--quotas", "*=2"], "'*' twice: give each user one number"),
        (["example", *ONE_NODE, "--quotas", "*=0"], "more GPUs than the 0 of its user's quota"),
        (["example", *ONE_NODE, "--csv", "/etc/hostname"], "/etc/hostname is a file: name a directory"),
        (["example", *ONE_NODE, "--csv", "/proc/nothing"], "/proc/nothing: no such file"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_a_sentence(said: Said, arguments: list[str], words: str) -> None:
    code, out, err = said("simulate", "-p", "fifo", *arguments)
    assert words in err
    assert code in (2, 4)
    assert out == ""


OWNED = """job_id,submit_time_s,gpus,duration_s,user
a1,0,1,100,ann
a2,0,1,100,ann
a3,0,2,100,ann
b1,0,1,100,bob
c1,0,1,100,
"""


def test_quotas_are_given_as_to_a_master_and_jobs_that_can_never_run_are_left_out_with_a_note(
    said: Said, tmp_path: Path
) -> None:
    path = tmp_path / "owned.csv"
    path.write_text(OWNED)
    flags = ["simulate", path, "--nodes", "1", "--gpus-per-node", "8", "-p", "las", "--cost", "start=0"]
    code, out, _ = said(*flags, "--json")
    assert (code, json.loads(out)["makespan_s"], json.loads(out)["options"]["quotas"]) == (0, 100.0, {})
    code, out, err = said(*flags, "--quotas", "ann=1,*=3", "--json")
    found = json.loads(out)
    assert (code, found["jobs"], found["makespan_s"]) == (0, 4, 200.0)
    assert found["options"]["quotas"] == {"ann": 1, "*": 3}
    assert [each["what"] for each in found["trace"]["left_out"]] == ["needs more GPUs than the 1 of its user's quota"]
    assert "owned.csv: left out: line 4: needs more GPUs than the 1 of its user's quota" in err
    assert "owned.csv: changed: line 6: names no user: all such jobs together have *=3" in err
    _, out, err = said(*flags, "--quotas", "ann=2", "--quotas", "bob=4")
    assert "quotas                     ann=2, bob=4" in out
    assert "names no user: no quota bounds it" in err
    _, out, _ = said("compare", *flags[1:], "--quotas", "ann=2", "--json")
    assert [run["makespan_s"] for load in json.loads(out)["loads"] for run in load["runs"]] == [200.0]


def test_partitions_come_from_a_master_s_settings_file(said: Said, tmp_path: Path) -> None:
    path, settings = tmp_path / "parts.csv", tmp_path / "master.toml"
    path.write_text(
        "job_id,submit_time_s,gpus,duration_s,user,partition\n"
        "1,0,4,100,ann,batch\n2,0,4,100,ann,batch\n3,0,2,100,bob,own\n4,0,2,100,ann,own\n5,0,1,50,ann,\n"
    )
    flags = ["simulate", path, "--nodes", "2", "--gpus-per-node", "4", "-p", "las", "--cost", "start=0"]
    settings.write_text(
        '[partitions.batch]\nnodes = ["node-0"]\n[partitions.own]\nnodes = ["node-1"]\nusers = ["bob"]\n'
    )
    code, out, err = said(*flags, "--partitions", settings, "--json")
    found = json.loads(out)
    assert (code, found["jobs"], found["makespan_s"]) == (0, 4, 250.0), "those of batch come in turn on one node"
    assert found["options"]["partitions"]["own"]["users"] == ["bob"]
    assert "left out: line 5: may not be in partition own: the user may not use the partition" in err
    _, out, _ = said(*flags, "--partitions", settings)
    assert "partitions                 batch, own" in out
    for text, words in (
        ("policy = 7", "has no table [partitions.NAME]"),
        ("[partitions.a]\ngpus = -1", "'a' has gpus = -1"),
        ('[partitions.a]\nteams = ["b"]', "'a' is for team 'b', which [teams] does not have: give --teams, too"),
    ):
        settings.write_text(text)
        code, out, err = said(*flags, "--partitions", settings)
        assert (code, words in err) == (2, True), err
    settings.write_text("[partitions.a]\n")
    code, _, err = said(*flags[:-2], "--partitions", settings, "--ideal")
    assert (code, "--ideal and --partitions exclude each other" in err) == (2, True), err


def test_teams_come_from_a_master_s_settings_file(said: Said, tmp_path: Path) -> None:
    path, settings = tmp_path / "owned.csv", tmp_path / "master.toml"
    path.write_text(OWNED)
    flags = ["simulate", path, "--nodes", "1", "--gpus-per-node", "8", "-p", "las", "--cost", "start=0"]
    settings.write_text('policy = "las"\nusage_half_life = "1d"\n[teams.a]\nusers = ["ann", "bob"]\ngpus = 1\n')
    code, out, err = said(*flags, "--teams", settings, "--json")
    found = json.loads(out)
    assert (code, found["jobs"], found["makespan_s"]) == (0, 4, 300.0), "a3 needs two GPUs, the others come in turn"
    assert found["options"]["teams"] == {"a": {"users": ["ann", "bob"], "weight": 1.0, "gpus": 1}}
    assert found["options"]["usage_half_life_s"] == 86_400.0
    assert "left out: line 4: needs more GPUs than the 1 of its team's quota" in err
    _, out, _ = said(*flags, "--teams", settings)
    assert "teams                      a (weight 1, 1 GPU); half-life 86400s" in out
    for text, words in (
        ("policy = 7", "has no table [teams.NAME]"),
        ("[teams.a]", "'a' needs users"),
        ("= broken", "master.toml: "),
        ('[teams.a]\nusers = ["eve"]', "it has no job of the teams 'a', named by --teams; it has jobs of ann, bob"),
    ):
        settings.write_text(text)
        code, out, err = said(*flags, "--teams", settings)
        assert (code, out) == (2, "")
        assert words in err
    assert said(*flags, "--teams", tmp_path / "none")[0] == 2


def test_a_quota_of_a_user_without_jobs_is_a_mistake(said: Said, trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "owned.csv"
    path.write_text(OWNED)
    code, out, err = said("simulate", path, *ONE_NODE, "-p", "fifo", "--quotas", "ann=3,bop=3")
    assert (code, out) == (2, "")
    assert "owned.csv: it has no job of 'bop', named by --quotas; it has jobs of ann, bob" in err
    code, out, err = said("simulate", trace, *ONE_NODE, "-p", "fifo", "--quotas", "ann=3")
    assert (code, out) == (2, "")
    assert "its jobs name no user: all of them together are bounded by *=GPUS" in err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("servers: 3", "c.yaml: a cluster is a mapping with a list `servers`"),
        ("servers: [{nodes: -1, gpus_per_node: many, colour: red}]", "c.yaml: servers[0].colour: there is no such key"),
        ("{[", "c.yaml: not readable as YAML"),
        ("servers: [{nodes: 1, gpus_per_node: 0}]", "none of them has a GPU"),
        ("servers: &a [*a]", "c.yaml: servers[0]: not a mapping"),
        ("servers: [{nodes: &a [*a], gpus_per_node: 1}]", "servers[0].nodes: one value is wanted here, not a list"),
        ("servers: [{name: 2020-13-45}]", "c.yaml: not readable as YAML: month must be in 1..12"),
        ("[" * 100_000, "c.yaml: not readable as YAML"),
    ],
)
def test_a_bad_cluster_is_refused_with_its_place(said: Said, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    code, _, err = said("simulate", "example", "-p", "fifo", "--cluster", tmp_path / "c.yaml")
    assert code == 2
    assert words in err


def test_a_file_that_may_not_be_read_is_not_permitted(said: Said, trace: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    trace.chmod(0)
    code, _, err = said("simulate", trace, *ONE_NODE, "-p", "fifo")
    assert code == 6
    assert "trace.csv: cannot be read: permission denied" in err


def test_files_are_written_and_say_the_same_as_the_screen(said: Said, trace: Path, tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "out"
    code, out, _ = said("simulate", trace, *ONE_NODE, "-p", "srtf", "--ideal", "--json", "--csv", directory)
    assert code == 0
    with (directory / "figures.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert float(row["avg_jct_s"]) == json.loads(out)["avg_jct_s"]
    with (directory / "jobs.csv").open() as file:
        assert [(job["job_id"], job["end_s"]) for job in csv.DictReader(file)] == [
            ("a", "150"),
            ("b", "60"),
            ("c", "120"),
        ]
    assert (directory / "series.csv").read_text().startswith("series,time_s,value\n")
    assert (directory / "waiting.csv").read_text().count("srtf,as recorded,0,") == 2


def test_compare_puts_policies_side_by_side_at_each_load(said: Said, trace: Path, tmp_path: Path) -> None:
    """Named in one flag or in several."""
    flags = [*ONE_NODE, "--ideal", "--loads", "0.5", "--loads", "2", "--csv", tmp_path / "out"]
    code, out, _ = said("compare", trace, "-p", "fifo", "-p", "srtf", "--json", *flags)
    assert code == 0
    found = json.loads(out)
    assert [each["load"] for each in found["loads"]] == [0.5, 2.0]
    for at in found["loads"]:
        assert [one["policy"] for one in at["runs"]] == ["fifo", "srtf"]
        assert at["runs"][0]["offered_load"] == pytest.approx(at["load"])
        assert at["policies"]["srtf"]["avg_jct_s"] == {
            "mean": at["runs"][1]["avg_jct_s"],
            "half_width": None,
            "runs": 1,
        }
        assert at["policies"]["srtf"]["avg_jct_by_best"]["mean"] == 1.0
    calm, busy = (at["policies"]["fifo"]["avg_jct_by_best"]["mean"] for at in found["loads"])
    assert (calm, busy) == (1.0, pytest.approx((100 + 117.5 + 145) / (150 + 50 + 77.5)))
    names = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.csv")}
    assert {"figures.csv", "waiting.csv", "fifo_load_0.5/jobs.csv", "srtf_load_2/series.csv"} <= names


def test_each_seed_draws_its_own_run_times(said: Said, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(HEADER + "".join(f"{job},{600 * job},1,\n" for job in range(20)))
    code, out, err = said("compare", path, *ONE_NODE, "-p", "fifo", "--draw-durations", "--seeds", "3", "--json")
    assert code == 0, err
    assert "changed: lines 2, 3, 4, 5, 6 and 15 more: run time drawn at random" in err
    (at,) = json.loads(out)["loads"]
    assert len({run["avg_jct_s"] for run in at["runs"]}) == 3
    assert at["policies"]["fifo"]["avg_jct_s"]["half_width"] > 0


def test_what_tells_nothing_is_said(said: Said, trace: Path) -> None:
    """Seeds that draw nothing, and tunings where cores make no difference."""
    code, _, err = said("compare", trace, *ONE_NODE, "-p", "fifo,srtf+synergy-tune", "--seeds", "2")
    assert code == 0
    assert "every seed gave the same run, so ± has no meaning" in err
    assert "srtf+synergy-tune: cores and memory make no job faster at recorded rates" in err
    code, _, err = said("compare", trace, *ONE_NODE, "-p", "fifo,srtf", "--draw", "2", "--seeds", "2")
    assert code == 0
    assert "every seed" not in err
    assert "recorded rates" not in err


def test_compare_gives_intervals_over_seeds(said: Said) -> None:
    flags = [*GPUS_64, "--ideal", "--draw", "60", "--seeds", "2"]
    code, out, _ = said("compare", "example", "-p", "fifo-backfill,srtf", *flags)
    assert code == 0
    rows = {line[:26].strip(): line[26:] for line in out.splitlines()}
    assert rows["average JCT"].count("±") == 2
    assert "offered load" in rows
    assert "x best" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-p", "fifo,fifo"], "fifo is there twice"),
        (["-p", "fifo", "-p", "srtf,fifo"], "fifo is there twice"),
        (["-p", "fifo,,srtf"], "has an empty entry"),
        (["-p", "fifo,best"], "there is no policy 'best'"),
        (["-p", "fifo", "--loads", "1,0"], "'0' is not a number above zero"),
        (["-p", "fifo", "--seeds", "0"], "0 is not in the range"),
        (["-p", "fifo+defrag", "--moves-per-hour", "nan"], "'nan' is not a number"),
        (["-p", "fifo+defrag", "--moves-per-hour", "some"], "'some' is not a valid"),
        (["-p", "fifo", "--moves-per-hour", "auto"], "add +defrag to one"),
    ],
)
def test_compare_refuses_what_cannot_be(said: Said, trace: Path, arguments: list[str], words: str) -> None:
    code, out, err = said("compare", trace, *ONE_NODE, *arguments)
    assert (code, out) == (2, "")
    assert words in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-p", "las", "--quantum", "1m"], "--quantum is for policies with time slices"),
        (["-p", "gandiva", "--quantum", "0"], "--quantum"),
        (["-p", "gandiva", "--quantum", "1m", "--round", "5m"], "--round and --quantum exclude each other"),
        (["-p", "ganger", "--keep-place-after", "1m"], "--keep-place-after is for policies without a planner"),
    ],
)
def test_paces_that_no_policy_reads_are_refused(said: Said, trace: Path, arguments: list[str], words: str) -> None:
    code, out, err = said("simulate", trace, *ONE_NODE, *arguments)
    assert (code, out) == (2, "")
    assert words in err


def test_room_is_kept_for_a_gang_after_the_time_that_is_given(said: Said, tmp_path: Path) -> None:
    # One-GPU jobs of 50 s come every 5 s, and the gang of four finds no room until some of it is kept.
    rows = [f"{n},{5 * n},1,50" for n in range(40)]
    path = tmp_path / "stream.csv"
    path.write_text("\n".join(["job_id,submit_time_s,gpus,duration_s", *rows, "99,21,4,10"]))
    ends = []
    for after in ("10s", "60s"):
        flags = ["-p", "fifo-backfill", "--keep-place-after", after, "--csv", tmp_path / after]
        assert said("simulate", path, "--nodes", "1", "--gpus-per-node", "4", *flags)[0] == 0
        with (tmp_path / after / "jobs.csv").open() as file:
            ends.append(next(float(row["end_s"]) for row in csv.DictReader(file) if row["job_id"] == "99"))
    assert ends[0] < ends[1]


def test_a_time_slice_lasts_as_long_as_its_option_has_it(said: Said, tmp_path: Path) -> None:
    # The short one shares the GPU with the long one: it ends once it has had two slices, or one of its own length.
    path = tmp_path / "two.csv"
    path.write_text("job_id,submit_time_s,gpus,duration_s\n1,0,1,400\n2,10,1,20\n")
    found = []
    for quantum in ("30s", "2m"):
        flags = ["-p", "gandiva", "--quantum", quantum, "--nodes", "1", "--gpus-per-node", "1", "--json"]
        code, out, _ = said("simulate", path, *flags)
        assert code == 0
        found.append(json.loads(out)["avg_jct_s"])
    assert found[0] != found[1]


def test_moves_of_an_hour_may_be_auto_as_with_the_master(said: Said, trace: Path) -> None:
    flags = ["simulate", trace, *ONE_NODE, "-p", "fifo+defrag", "--json"]
    (_, usual, _), (code, out, _) = said(*flags), said(*flags, "--moves-per-hour", "auto")
    assert (code, json.loads(out)["avg_jct_s"]) == (0, json.loads(usual)["avg_jct_s"])


def test_a_run_that_dies_is_our_bug_and_named(said: Said, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ganger_master.simulator.run.simulate", fakes.killed_if_srtf)
    code, out, err = said("compare", trace, *ONE_NODE, "-p", "fifo,srtf")
    assert (code, out) == (7, "")
    assert "ganger: policy srtf, load as recorded, seed 0: its process was ended by SIGKILL" in err
    assert "Traceback" not in err


def test_plots_without_their_library_are_refused_before_anything_runs(
    said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, out, err = said("simulate", "example", *GPUS_64, "-p", "fifo", "--plots", tmp_path / "out")
    assert (code, out, err) == (4, "", "ganger: plots need Matplotlib: pip install 'ganger[plots]'\n")
    assert not (tmp_path / "out").exists()


def test_plots_of_several_loads_get_a_directory_each(said: Said, trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, _, _ = said("compare", trace, *ONE_NODE, "-p", "fifo,srtf", "--ideal", "--loads", "1,2", "--plots", tmp_path)
    assert code == 0
    assert {path.name for path in tmp_path.glob("load_*")} == {"load_1", "load_2"}
    assert len(list(tmp_path.glob("load_1/*.png"))) == 5


def processes(*arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    command = [*GANGER, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.fixture
def long_trace(tmp_path: Path) -> Path:
    """Minutes of simulation."""
    path = tmp_path / "long.csv"
    rows = "".join(f"{job},{job // 8},{job % 8 + 1},{500 + job % 977}\n" for job in range(40_000))
    path.write_text("job_id,submit_time_s,gpus,duration_s\n" + rows)
    return path


def test_ctrl_c_ends_a_comparison_and_all_its_processes(long_trace: Path) -> None:
    compare = processes("compare", long_trace, "-p", "srtf,srsf", *GPUS_64, "--ideal", start_new_session=True)
    workers: list[psutil.Process] = []

    def are_running() -> bool:
        workers[:] = [
            child for child in psutil.Process(compare.pid).children() if "spawn_main" in " ".join(child.cmdline())
        ]
        return len(workers) == 2

    eventually(are_running, what="both runs begin")
    # To all of them, as a terminal does.
    os.killpg(compare.pid, signal.SIGINT)
    out, err = compare.communicate(timeout=30)
    assert compare.returncode == 130
    assert out == ""
    assert "Traceback" not in err, err
    assert not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers)


def test_a_pipe_that_closes_is_no_error(trace: Path) -> None:
    simulate = processes("simulate", trace, *ONE_NODE, "-p", "fifo", "--json")
    assert simulate.stdout is not None
    assert simulate.stderr is not None
    simulate.stdout.close()
    err = simulate.stderr.read()
    simulate.stderr.close()
    assert simulate.wait(30) == 0
    assert "Traceback" not in err


def test_a_full_disk_leaves_no_half_file(tmp_path: Path) -> None:
    # A limit on the size of files is a disk that is full, for one process.
    script = f'ulimit -f 16; exec "$@" --csv {tmp_path}/out'
    command = [*GANGER, "simulate", "example", "-p", "fifo", "--nodes", "24", "--gpus-per-node", "8", "--ideal"]
    done = subprocess.run(["bash", "-c", script, "bash", *command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 4, done.stderr
    assert "average JCT" in done.stdout, "what was found is said before it is saved"
    assert f"{tmp_path}/out/jobs.csv: file too large" in done.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"figures.csv", "waiting.csv"}


def test_a_replay_loads_nothing_of_what_its_policy_does_not_do() -> None:
    script = (
        "import sys\nfrom ganger.cli.main import run\n"
        "run('simulate example -p srtf --ideal --jobs 2 --nodes 24 --gpus-per-node 8'.split())\n"
        "others = ('sharing_stage', 'migrate_stage', 'growth_stage', 'synergy_round', 'tune_stage', 'tetris_stage')\n"
        "others = ['ganger_master.planner.' + one for one in others]\n"
        "others += ['ganger_master.policies.tunings', 'yaml', 'scipy', 'numpy.ma']\n"
        "print([name for name in others if name in sys.modules])\n"
        "from importlib.util import find_spec\n"
        "print([name for name in others if find_spec(name) is None])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-2:] == ["[]", "[]"]


def test_help_of_both_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom ganger.cli.main import run\nrun(['simulate', '--help'])\nrun(['compare', '--help'])\n"
        "heavy = ('numpy', 'rich', 'yaml', 'grpc', 'asyncio', 'multiprocessing')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
