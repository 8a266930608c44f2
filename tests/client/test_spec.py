"""Descriptions become specs, and what is wrong with them is said all at once with paths."""

from __future__ import annotations

import shlex
import time
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from ganger.spec import load_job_file, make_spec
from ganger.spec_values import dependencies_text
from ganger.v1.job_pb2 import JobSpec
from ganger.v1.resources_pb2 import LEVEL_CLUSTER, LEVEL_NODE, LEVEL_RACK, LEVEL_UNSPECIFIED
from ganger.wire import times
from ganger.wire.errors import SpecInvalid
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("scripts")


def spec(**description: Any) -> JobSpec:
    return make_spec({"command": ["true"], **description}, environ={})


def wrong(**description: Any) -> dict[str, str]:
    with pytest.raises(SpecInvalid) as caught:
        make_spec(description, environ={})
    return {violation.field: violation.description for violation in caught.value.violations}


@pytest.mark.parametrize(
    ("description", "tasks", "gpus", "millicores"),
    [
        ({}, 1, 1, 0),
        ({"gpus": "4"}, 4, 1, 0),
        ({"gpus": 8, "gpus_per_task": 2}, 4, 2, 0),
        ({"gpus": 8, "tasks": 2}, 2, 4, 0),
        ({"tasks": 3}, 3, 1, 0),
        ({"gpus": 0, "tasks": 5}, 5, 0, 1_000),
        ({"gpus": 0, "cpus_per_task": "0.5"}, 1, 0, 500),
        ({"gpus": 4, "gpus_per_task": 2, "cpus_per_gpu": 3}, 2, 2, 6_000),
        ({"gpus": 2, "cpus_per_gpu": "auto"}, 2, 1, 0),
    ],
)
def test_counts_make_tasks(description: dict[str, Any], tasks: int, gpus: int, millicores: int) -> None:
    (role,) = spec(**description).roles
    assert (role.tasks, role.shape.gpus, role.shape.millicores) == (tasks, gpus, millicores)


def test_every_mistake_is_named_at_once() -> None:
    found = wrong(
        colour="red",
        gpus="two",
        memory="3Q",
        disk_mb_per_s="fast",
        time="soon",
        priority=5_000,
        locality="moon",
        environment={"GANGER_PAGE": "x"},
        scheduler="nothing",
        directory="/no/such/place",
        name="x" * 64,
        agent="maybe",
        preemptible="perhaps",
        movable="sometimes",
        weight="heavy",
        converges="soon",
    )
    expected = (
        "colour command gpus memory time priority locality environment scheduler directory name agent preemptible"
        " movable weight converges disk_mb_per_s"
    )
    assert set(found) == set(expected.split())
    assert "say what to run" in found["command"]


def test_mistakes_in_roles_have_paths() -> None:
    found = wrong(
        command="true",
        gpus=2,
        roles=[{"name": "worker", "tasks": 0, "gpus": 65}, {"name": "worker", "cpu": 1}, "x", {"memory": "?"}],
    )
    assert set(found) == {
        "gpus",
        "roles[0].tasks",
        "roles[0].gpus",
        "roles[1].name",
        "roles[1].cpu",
        "roles[2]",
        "roles[3].name",
        "roles[3].memory",
    }


def test_a_mistyped_key_of_a_role_is_named_with_the_one_that_is_meant() -> None:
    known = "command, cpus, disk_mb_per_s, environment, gpus, memory, name, net_mb_per_s, tasks"
    assert wrong(command="true", roles=[{"gpu": 1, "colour": "red"}]) == {
        "roles[0].gpu": "there is no such key; is it gpus?",
        "roles[0].colour": f"there is no such key; there are {known}",
    }


def test_a_role_may_have_a_command_and_variables_of_its_own() -> None:
    roles: list[dict[str, Any]] = [
        {"name": "ps", "command": "sh -c 'serve'", "environment": {"PORT": 7}},
        {"name": "worker", "gpus": 1},
    ]
    made = spec(roles=roles)
    (program,) = made.role_programs
    assert (program.role, list(program.command), dict(program.environment)) == (
        "ps",
        ["sh", "-c", "serve"],
        {"PORT": "7"},
    )
    assert list(made.command) == ["true"]


def test_a_role_may_have_a_range_of_tasks_and_starts_with_the_fewest() -> None:
    made = spec(roles=[{"name": "ps", "tasks": "1:3"}, {"name": "worker", "tasks": "2:4", "gpus": 1}])
    assert [(role.tasks, role.tasks_min, role.tasks_max) for role in made.roles] == [(1, 1, 3), (2, 2, 4)]
    assert (made.gpus_min, made.gpus_max) == (0, 0)


def test_the_range_of_an_only_role_with_gpus_is_one_of_gpus() -> None:
    made = spec(roles=[{"name": "worker", "tasks": "2:4", "gpus": 2}])
    assert (made.gpus_min, made.gpus_max, made.roles[0].tasks, made.roles[0].tasks_max) == (4, 8, 2, 0)


@pytest.mark.parametrize("tasks", ["0:2", "3:2", "2:2", "1:", "1-4", "1:20000"])
def test_a_range_of_tasks_that_is_none_is_refused(tasks: str) -> None:
    assert set(wrong(command="true", roles=[{"name": "ps", "tasks": tasks}, {"name": "worker"}])) == {"roles[0].tasks"}


def test_a_range_of_tasks_does_not_go_with_a_number_of_nodes() -> None:
    roles = [{"name": "ps", "tasks": "1:3"}, {"name": "worker"}]
    assert "does not go with a range of tasks" in wrong(command="true", nodes=2, roles=roles)["nodes"]


def test_a_job_whose_roles_all_have_commands_needs_none() -> None:
    roles = [{"name": "ps", "command": ["sh", "-c", "ps"]}, {"name": "worker", "command": ["true"]}]
    made = make_spec({"roles": roles}, environ={})
    assert list(made.command) == ["sh", "-c", "ps"]
    assert "say what to run" in wrong(roles=[roles[0], {"name": "worker"}])["command"]


def test_a_mistake_in_the_program_of_a_role_has_its_path() -> None:
    found = wrong(
        command="true",
        roles=[
            {"name": "a", "command": "no-such-file.sh", "environment": {"GANGER_PAGE": "x"}},
            {"name": "b", "command": 7, "environment": "x"},
        ],
    )
    assert set(found) == {"roles[0].environment", "roles[1].command", "roles[1].environment"}
    assert set(wrong(command="true", roles=[{"name": "a", "command": "train.yaml"}])) == {"roles[0].command"}


def test_a_mistake_in_a_flag_is_called_by_the_flag() -> None:
    with pytest.raises(SpecInvalid) as caught:
        make_spec({"command": ["x"], "gpus": "7", "gpus_per_task": "2"}, origins={"gpus_per_task": "--gpus-per-task"})
    assert [violation.field for violation in caught.value.violations] == ["--gpus-per-task"]


def test_locality_alone_is_a_demand_and_with_tolerance_a_wish() -> None:
    assert (spec().locality.widest, spec().locality.wish) == (LEVEL_UNSPECIFIED, LEVEL_UNSPECIFIED)
    assert (spec(locality="node").locality.widest, spec(locality="node").locality.wish) == (LEVEL_NODE, 0)
    wish = spec(locality="node", tolerance="rack", patience="5m").locality
    assert (wish.widest, wish.wish, times.seconds(wish.patience)) == (LEVEL_RACK, LEVEL_NODE, 300)
    assert spec(tolerance="cluster").locality.widest == LEVEL_CLUSTER
    assert "locality" in wrong(command="x", locality="rack", tolerance="node")
    assert "patience" in wrong(command="x", patience="5m")


def test_only_what_a_script_needs_is_captured_and_more_on_demand() -> None:
    environ = {"PATH": "/bin", "AWS_SECRET_ACCESS_KEY": "s", "OMP_NUM_THREADS": "64", "NCCL_DEBUG": "INFO"}
    made = make_spec({"command": "x", "environment": {"OMP_PROC_BIND": "true", "N": 3}}, environ=environ)
    assert dict(made.environment) == {"PATH": "/bin", "NCCL_DEBUG": "INFO", "OMP_PROC_BIND": "true", "N": "3"}


def test_a_line_is_split_into_words_without_a_shell() -> None:
    assert list(spec(command="python 'a b.py' $HOME").command) == ["python", "a b.py", "$HOME"]
    assert "command" in wrong(command="python 'a")
    assert "command" in wrong(command=["x" * 70_000])


@pytest.mark.parametrize(
    ("line", "sign"),
    [
        ("python train.py && python eval.py", "'&&'"),
        ("python train.py > out.txt", "'>'"),
        ("cat data|python train.py", "'|'"),
        ("python train.py;", "';'"),
        ("python prepare.py\npython train.py\n", "a second line"),
    ],
)
def test_what_only_a_shell_would_do_is_not_handed_to_the_program_as_words(line: str, sign: str) -> None:
    told = wrong(command=line)["command"]
    assert told.startswith(f"has {sign}, and no shell runs it")
    assert told.endswith("write for example [sh, -c, '... && ...']")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("python train.py \\\n  --lr 0.1\n", ["python", "train.py", "--lr", "0.1"]),
        ("\npython train.py\n  \n", ["python", "train.py"]),
        ("python -c 'print(1)\nprint(2)'", ["python", "-c", "print(1)\nprint(2)"]),
        ("sh -c 'a && b > c'", ["sh", "-c", "a && b > c"]),
        ("grep a\\|b --x='|' #1", ["grep", "a|b", "--x=|", "#1"]),
    ],
)
def test_what_is_quoted_or_goes_on_in_the_next_line_is_words(line: str, words: list[str]) -> None:
    assert list(spec(command=line).command) == words


@given(st.text("ab'\"\\ \t#=-{}$*", max_size=12))
def test_other_lines_are_split_as_a_shell_does(line: str) -> None:
    try:
        expected = shlex.split(line)
    except ValueError:
        return
    if expected and expected[0]:
        assert list(spec(command=line).command) == expected


def test_a_key_that_is_nearly_one_is_told_which() -> None:
    assert wrong(command="x", gpuss=1, gpu_kind=1, zebra=1) == {
        "gpuss": "there is no such key; is it gpus?",
        "gpu_kind": wrong(command="x", gpu_kind=1)["gpu_kind"],
        "zebra": wrong(command="x", zebra=1)["zebra"],
    }
    assert (
        "there are after, agent, array, checkpoint_copies, checkpoint_every, close_connections"
        in wrong(command="x", zebra=1)["zebra"]
    )
    assert wrong(command="x", array="0-3") == {"array": "a job has none: submit it as an array"}


def test_a_mistake_of_any_length_is_told_in_a_line() -> None:
    told = wrong(command="x", gpus=[["x"] * 100] * 100)["gpus"]
    assert len(told) < 400
    assert told.startswith("must be a whole number from 0 to 65536, not [['x'")


def test_more_nodes_than_tasks_are_found_before_the_master_is_asked() -> None:
    assert spec(nodes=2, gpus=2).nodes == 2
    told = {"nodes": "5 nodes are more than there are tasks (2): each has one at least"}
    assert wrong(command="x", nodes=5, gpus=2) == told


def test_a_label_has_a_name() -> None:
    assert wrong(command="x", labels={"": "b"}) == {"labels": "a label has no name: write NAME=VALUE"}


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("job.yaml", "command: [x]\ngpus: 1\ngpus: 2\n", "gpus is given twice (at line 3, column 1)"),
        ("job.yaml", "labels: {a: b, a: c}\n", "a is given twice (at line 1, column 16)"),
        ("job.yaml", "1: 2\n", "the key 1 is no text"),
        ("job.yaml", "deadline: 2026-02-30\n", "is not YAML: day is out of range for month"),
        ("job.yaml", "gpus: " + "9" * 5_000, "is not YAML: Exceeds the limit"),
        ("job.yaml", "gpus: " + "[" * 50_000, "is not YAML: brackets without end: maximum recursion depth"),
        ("job.toml", "gpus = " + "9" * 5_000, "is not TOML: Exceeds the limit"),
        ("job.toml", "gpus = " + "[" * 50_000, "is not TOML: maximum recursion depth"),
    ],
)
def test_what_a_file_cannot_mean_is_a_sentence(tmp_path: Path, name: str, text: str, told: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SpecInvalid) as caught:
        load_job_file(tmp_path / name)
    assert told in str(caught.value)


def test_what_a_file_takes_from_another_place_in_it_may_be_given_again(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("environment: &e {A: x, B: y}\nlabels: {<<: *e, A: z}\n")
    assert load_job_file(tmp_path / "job.yaml")["labels"] == {"A": "z", "B": "y"}


def test_never_is_an_interval_of_checkpoints() -> None:
    assert times.seconds(spec(checkpoint_every="never").checkpoint_interval) == -1
    assert times.seconds(spec(checkpoint_every="10m").checkpoint_interval) == 600
    assert not spec().HasField("checkpoint_interval")
    assert spec(preemptible=False).HasField("preemptible")
    assert spec(movable=False).HasField("movable")


def test_a_range_of_gpus_makes_an_elastic_job_that_asks_for_the_fewest() -> None:
    made = spec(gpus="2:8")
    assert (made.roles[0].tasks, made.gpus_min, made.gpus_max) == (2, 2, 8)
    made = spec(gpus="4:8", gpus_per_task=2)
    assert (made.roles[0].tasks, made.roles[0].shape.gpus, made.gpus_min, made.gpus_max) == (2, 2, 4, 8)
    assert (spec(gpus="2").gpus_min, spec(gpus=2).gpus_max) == (0, 0)


@pytest.mark.parametrize(
    ("description", "key", "text"),
    [
        ({"gpus": "8:2"}, "gpus", "from fewer to more"),
        ({"gpus": "2:2"}, "gpus", "from fewer to more"),
        ({"gpus": "0:2"}, "gpus", "a range like 2:8"),
        ({"gpus": "2:"}, "gpus", "a range like 2:8"),
        ({"gpus": "a:b"}, "gpus", "a range like 2:8"),
        ({"gpus": "2:7", "gpus_per_task": 2}, "gpus", "7 GPUs cannot be shared out by 2"),
        ({"gpus": "2:8", "tasks": 2}, "tasks", "does not go with a range"),
        ({"gpus": "2:8", "nodes": 2}, "nodes", "does not go with a range"),
        ({"gpus": "2:20000"}, "gpus", "20000 tasks are more than"),
    ],
)
def test_a_range_that_makes_no_sense_is_named_with_its_key(description: dict[str, Any], key: str, text: str) -> None:
    found = wrong(**description)
    assert [path for path, why in found.items() if text in why] == [key], found


def test_a_range_in_a_yaml_file_is_no_number_to_the_base_of_sixty(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("command: [x]\ngpus: 2:8\npriority: 12\nmax_failures: 0\ntime: 1:30:00\n")
    found = load_job_file(file)
    assert (found["gpus"], found["priority"], found["max_failures"], found["time"]) == ("2:8", 12, 0, "1:30:00")
    assert make_spec(found, environ={}).time_limit.seconds == 5_400


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("job.yaml", "command: [python, train.py]\ngpus: 2\nmemory: 1G\ndirectory: sub\n"),
        ("job.toml", 'command = ["python", "train.py"]\ngpus = 2\nmemory = "1G"\ndirectory = "sub"\n'),
    ],
)
def test_files_of_both_kinds_say_the_same(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").touch()
    (tmp_path / name).write_text(text)
    made = make_spec(load_job_file(tmp_path / name), environ={})
    assert (made.roles[0].tasks, made.roles[0].shape.memory_bytes) == (2, 1 << 30)
    assert made.working_directory == str(tmp_path / "sub")


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.yaml", "a: [1"), ("a.toml", "a = "), ("a.yaml", "- 1"), ("a.txt", "a: 1"), ("a.yaml", "1: 2")],
)
def test_an_unreadable_file_is_a_sentence(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SpecInvalid, match=name.replace(".", r"\.")):
        load_job_file(tmp_path / name)
    with pytest.raises(SpecInvalid, match="cannot read"):
        load_job_file(tmp_path / "missing.yaml")


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
keys = st.sampled_from(
    [
        "name",
        "command",
        "gpus",
        "gpus_per_task",
        "tasks",
        "roles",
        "nodes",
        "cpus_per_gpu",
        "memory",
        "gpu_memory",
        "cpus_per_task",
        "max_failures",
        "agent",
        "preemptible",
        "scheduler",
        "locality",
        "tolerance",
        "patience",
        "priority",
        "time",
        "environment",
        "labels",
        "checkpoint_every",
    ]
)


@given(st.dictionaries(keys, anything, max_size=6))
def test_whatever_is_written_makes_a_spec_or_violations(description: dict[str, Any]) -> None:
    try:
        made = spec(**description)
    except SpecInvalid as error:
        violations = error.violations
    else:
        made.SerializeToString()
        return
    assert violations


def test_what_no_system_call_could_carry_is_named_with_its_key() -> None:
    found = wrong(
        command=["x", "a\0b"],
        name="two\nlines",
        directory="/a\0b",
        environment={"A": "\udcff", "B": None, "C D": "x"},
        gpu_type="\udcff",
        labels={"a": "\0"},
    )
    assert {"command", "name", "directory", "environment", "gpu_type", "labels"} <= set(found)


@pytest.mark.parametrize(
    ("given_types", "kept"), [("a100", "a100"), ("a100, h100", "a100,h100"), ("", ""), ("h100,a100", "h100,a100")]
)
def test_gpu_types_are_kept_in_order_of_preference(given_types: str, kept: str) -> None:
    assert spec(gpu_type=given_types).device_type == kept


@pytest.mark.parametrize(("given_types", "why"), [("a100,", "names an empty type"), ("a,b,a", "names a type twice")])
def test_wrong_gpu_types_are_named(given_types: str, why: str) -> None:
    assert why in wrong(gpu_type=given_types)["gpu_type"]


def test_a_home_directory_in_a_file_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "job.yaml").write_text("command: x\ndirectory: ~/\n")
    assert load_job_file(tmp_path / "job.yaml")["directory"] == str(tmp_path.resolve())


@pytest.mark.parametrize("seconds", [-120, 120])
@pytest.mark.parametrize(("form", "step_s"), [("%H:%M", 60), ("%H:%M:%S", 1)])
def test_hours_and_minutes_are_the_next_such_time_of_day_and_no_duration(form: str, step_s: int, seconds: int) -> None:
    before = datetime.now().astimezone()
    text = (before + timedelta(seconds=seconds)).strftime(form)
    found = times.local_datetime(spec(deadline=text).deadline)
    assert found.strftime(form) == text
    assert found.second == 0 or step_s == 1
    # Today if it lies ahead, else tomorrow; a day has up to 25 hours.
    least, most = (0, 3_600) if seconds > 0 else (22 * 3_600, 25 * 3_600)
    assert least <= found.timestamp() - before.timestamp() <= most


def test_a_time_of_day_in_a_file_is_one_too(tmp_path: Path) -> None:
    files = {"job.yaml": "command: x\ndeadline: 18:00\n", "job.toml": "command = 'x'\ndeadline = 18:00:00\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        made = make_spec(load_job_file(tmp_path / name), environ={})
        assert times.local_datetime(made.deadline).strftime("%H:%M") == "18:00"


def test_a_deadline_is_a_time_or_so_long_from_now() -> None:
    assert times.unix_s(spec(deadline="2100-01-02T03:04:05+00:00").deadline) == 4_102_542_245.0
    # Without a zone, that of this machine.
    midnight = datetime(2100, 1, 2, tzinfo=UTC).replace(tzinfo=None)
    for text in ("2100-01-02", date(2100, 1, 2), midnight):
        assert times.unix_s(spec(deadline=text).deadline) == midnight.timestamp()
    before = time.time()
    assert before + 5_400 <= times.unix_s(spec(deadline="1h30m").deadline) <= time.time() + 5_400
    assert not spec().HasField("deadline")


@pytest.mark.parametrize(
    ("deadline", "why"),
    [
        ("tomorrow", "'tomorrow' is neither a time nor a duration: write for example 2026-12-24T18:00, 18:00 or 6h"),
        ("2001-01-01", "2001-01-01 00:00:00 has passed"),
        ("0s", "'0s' is neither a time nor a duration: write for example 2026-12-24T18:00, 18:00 or 6h"),
        ("24:00", "'24:00' is no time of day; a duration is written 90m or 2h30m"),
        (" 9:75", "'9:75' is no time of day; a duration is written 90m or 2h30m"),
        (True, "True is neither a time nor a duration: write for example 2026-12-24T18:00, 18:00 or 6h"),
    ],
)
def test_an_absurd_deadline_is_refused(deadline: object, why: str) -> None:
    assert wrong(command=["true"], deadline=deadline) == {"deadline": why}


@pytest.mark.parametrize(("said", "meant"), [("0.02", (0.02, 1)), ("0.02,3", (0.02, 3)), (0.5, (0.5, 1))])
def test_what_its_owner_takes_for_converged_goes_along(said: object, meant: tuple[float, int]) -> None:
    found = spec(converges=said).convergence
    assert (found.least_decrease, found.passes) == meant


@pytest.mark.parametrize("said", ["0", "1", "-0.1", "2%", "0.02,0", "0.02,1001", "0.02,x", "nan", True])
def test_what_is_no_part_of_a_loss_is_no_convergence(said: object) -> None:
    assert "must be PART or PART,PASSES" in wrong(converges=said)["converges"]


@pytest.mark.parametrize("deadline", ["2096-03-25T02:30", "2096-03-25T02:30:00"])
def test_a_deadline_in_the_hour_that_a_clock_change_leaves_out_is_refused(
    deadline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    try:
        assert wrong(command=["true"], deadline=deadline) == {
            "deadline": "2096-03-25 02:30:00 does not exist here: clocks are put forward over it; "
            "write another time, or its zone"
        }
        assert spec(deadline="2096-03-25T03:30").deadline == spec(deadline="2096-03-25T01:30Z").deadline
        assert spec(deadline="2096-03-25T02:30+01:00").HasField("deadline")
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("name", "arguments", "hint"),
    [
        ("job.yaml", [], "job.yaml is a job file, not a program: submit it with --file job.yaml"),
        ("train.py", ["--lr", "0.1"], "not a program that can be executed: write python train.py --lr 0.1"),
        ("run.sh", [], "not a program that can be executed: write bash run.sh"),
        ("job.sbatch", [], "write bash job.sbatch, and give what its #SBATCH lines ask for as flags"),
    ],
)
def test_a_file_that_is_no_program_is_refused_with_what_to_write(
    tmp_path: Path, name: str, arguments: list[str], hint: str
) -> None:
    path = tmp_path / name
    path.write_text("#!/bin/sh\n")
    found = wrong(command=[name, *arguments], directory=str(tmp_path))
    assert found["command"].endswith(hint)
    path.chmod(0o755)
    here = f"./{name}"
    assert list(spec(command=[here, *arguments], directory=str(tmp_path)).command) == [here, *arguments]


def test_an_executable_file_without_a_slash_is_refused_with_what_to_write(tmp_path: Path) -> None:
    for name in ("train.py", "prepare"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
        found = wrong(command=[name, "--lr", "0.1"], directory=str(tmp_path))
        assert found["command"] == f"{name} is not in PATH: write ./{name} --lr 0.1"


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        (".", ". is a directory: name the program that the job is to run"),
        ("src", "src is a directory: name the program that the job is to run"),
        ("./plain", "./plain is not a program that can be executed: write `chmod +x ./plain`, or name its interpreter"),
        ("plain", "plain is not a program that can be executed: write `chmod +x plain`, or name its interpreter first"),
        ("bin/plan", "/bin/plan: correct its name, or --directory"),
        ("./plian", "/plian; plain is there"),
    ],
)
def test_a_command_that_cannot_run_is_refused_where_that_is_known(tmp_path: Path, word: str, hint: str) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "plain").touch()
    assert hint in wrong(command=[word, "-v"], directory=str(tmp_path))["command"]


@pytest.mark.parametrize("word", ["/opt/of-nodes/python", "python-of-nodes", "./{program}"])
def test_a_program_that_nodes_may_have_is_no_mistake(tmp_path: Path, word: str) -> None:
    assert list(spec(command=[word], directory=str(tmp_path)).command) == [word]


@pytest.mark.parametrize("name", ["jbo.yaml", "no/job.yml", "job.tmol", "train.sbtach", "train.slurm"])
def test_a_job_file_that_is_not_there_is_no_command(tmp_path: Path, name: str) -> None:
    found = wrong(command=[name], directory=str(tmp_path))
    assert found["command"] == (
        f"there is no file {tmp_path / name}; a job file is submitted with --file, a script with its interpreter"
    )
    if "/" not in name:
        assert list(spec(command=[name, "x"], directory=str(tmp_path)).command) == [name, "x"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "python tarin.py --lr 3",
            "there is no file {0}/tarin.py; train.py is there: correct its name, or --directory;",
        ),
        (
            "python3.11 -u nothere.py",
            "there is no file {0}/nothere.py: correct its name, or --directory; if only nodes",
        ),
        ("bash sub/job.sh", "there is no file {0}/sub/job.sh: correct its name"),
        ("sh train.py/job.sh", "there is no file {0}/train.py/job.sh: correct its name"),
        ("torchrun --nproc-per-node 2 nothere.py", "there is no file {0}/nothere.py: correct its name"),
        ("python train.py nothere.py", ""),
        ("python /only/on/the/nodes.py", ""),
        ("python -m train", ""),
        ("python -c pass", ""),
        ("python", ""),
        ("python -", ""),
        ("python -W ignore train.py", ""),
        ("python {script}.py", ""),
        ("bash -c 'python nothere.py'", ""),
        ("cat nothere.py", ""),
    ],
)
def test_a_script_that_is_not_in_the_directory_of_the_job_is_refused(line: str, told: str) -> None:
    if told:
        assert wrong(command=line)["command"].startswith(told.format(Path.cwd()))
    else:
        assert spec(command=line).command


def test_a_mistyped_job_file_is_refused_with_the_name_of_the_one_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").touch()
    assert "; job.yaml is there;" in wrong(command=["jbo.yaml"], directory=str(tmp_path))["command"]


def test_a_command_for_a_shell_in_one_word_is_refused_with_what_to_write() -> None:
    assert wrong(command=["./prepare && python train.py"]) == {
        "command": "'./prepare && python train.py' is one word, and no shell runs it: "
        "write it as several, or --wrap './prepare && python train.py'"
    }
    assert "--wrap 'sh prepare.sh'" in wrong(command=["sh prepare.sh"])["command"]
    assert "is one word, and no shell runs it" in wrong(command=["sh prepare.sh && " * 300])["command"]
    assert list(spec(command=["\x01" * 60_000]).command) == ["\x01" * 60_000]
    assert list(spec(command=["a program with spaces"]).command) == ["a program with spaces"]
    assert list(spec(command=["grep", "a && b"]).command) == ["grep", "a && b"]
    assert list(spec(command=["nowhere.py"]).command) == ["nowhere.py"], "it may be there where the job runs"


def test_a_variable_that_no_program_can_be_started_with_is_named() -> None:
    with pytest.raises(SpecInvalid) as wrong:
        make_spec({"command": ["true"], "environment": {"BIG": "\N{GRINNING FACE}" * 32_768}}, {})
    (violation,) = wrong.value.violations
    assert violation.field == "environment"
    assert violation.description.startswith("BIG: must be at most 131070 bytes")
    fits = make_spec({"command": ["true"], "environment": {"BIG": "x" * 131_067}}, {})
    assert len(fits.environment["BIG"]) == 131_067


@pytest.mark.parametrize(
    ("description", "field", "instead"),
    [
        ({"time": "10"}, "time", "10s, 10m or 10h"),
        ({"time": 3600}, "time", "3600s, 3600m or 3600h"),
        ({"signal": "TERM", "grace": 30}, "grace", "30s, 30m or 30h"),
        ({"locality": "node", "tolerance": "rack", "patience": "5"}, "patience", "5s, 5m or 5h"),
        ({"checkpoint_every": 600}, "checkpoint_every", "600s, 600m or 600h"),
        ({"deadline": "6"}, "deadline", "write for example 2026-12-24T18:00, 18:00 or 6h"),
        ({"memory": 2000}, "memory", "2000M (MiB, as in Slurm), 2000G or 2000B (bytes)"),
        ({"gpu_memory": "80"}, "gpu_memory", "80M (MiB, as in Slurm), 80G or 80B (bytes)"),
        ({"roles": [{"gpus": 1, "memory": "16"}]}, "roles[0].memory", "16M (MiB, as in Slurm), 16G or 16B (bytes)"),
    ],
)
def test_an_amount_without_a_unit_is_refused_with_what_to_write(
    description: dict[str, Any], field: str, instead: str
) -> None:
    told = wrong(command="true", **description)
    assert list(told) == [field]
    assert told[field].endswith(instead)


@pytest.mark.parametrize(
    ("description", "signal", "grace_s"),
    [
        ({"signal": "TERM"}, "TERM", 60),
        ({"signal": "SIGUSR1", "grace": "5m", "requeue": True}, "USR1", 300),
        ({"signal": "usr2@90"}, "USR2", 90),
        ({"signal": "B:USR1@300"}, "USR1", 300),
        ({"signal": 15}, "TERM", 60),
        ({}, "", 0),
    ],
)
def test_a_signal_is_read_as_slurm_writes_it(description: dict[str, Any], signal: str, grace_s: float) -> None:
    made = spec(**description)
    assert (made.stop_signal, times.seconds(made.stop_grace)) == (signal, grace_s)


@pytest.mark.parametrize(
    ("description", "field", "text"),
    [
        ({"signal": "KILL"}, "signal", "not a signal that a script can handle"),
        ({"signal": "99"}, "signal", "not a signal"),
        ({"signal": "TERM@soon"}, "signal", "not a signal"),
        ({"signal": "TERM@10", "grace": "20s"}, "grace", "give one of them"),
        ({"grace": "20s"}, "grace", "goes with the signal"),
        ({"requeue": True}, "requeue", "goes with the signal"),
        ({"signal": "TERM", "requeue": False}, "requeue", "always requeued"),
        ({"mechanism": "signal"}, "mechanism", "name the signal"),
        ({"mechanism": "magic"}, "mechanism", "there are image, adapter, replay, signal, none"),
        ({"mechanism": "replay", "agent": "none"}, "mechanism", "not injected"),
        ({"mechanism": "none", "must_move": True}, "must_move", "cannot be moved"),
        ({"mechanism": "image", "gpus": 2, "nodes": 2}, "nodes", "of one node"),
    ],
)
def test_a_mechanism_that_cannot_work_is_refused(description: dict[str, Any], field: str, text: str) -> None:
    assert text in wrong(command=["true"], **description)[field]


def test_a_job_of_the_image_mechanism_takes_one_node() -> None:
    assert spec(mechanism="image", gpus=2).nodes == 1
    assert spec(gpus=2).nodes == 0


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("7", "ok:7"),
        ("7:8", "ok:7,ok:8"),
        (7, "ok:7"),
        ("ok:7:8,any:9", "ok:7,ok:8,any:9"),
        ("afterok:7,afternotok:8,afterany:9,aftercorr:10", "ok:7,notok:8,any:9,each:10"),
        (["ok:7", 8], "ok:7,ok:8"),
        (["jobs/7", "any:arrays/8:jobs/9"], "ok:7,any:8,any:9"),
    ],
    ids=str,
)
def test_dependencies_are_read_as_they_are_written_in_slurm_too(given: object, text: str) -> None:
    assert dependencies_text(spec(after=given).dependencies) == text


@pytest.mark.parametrize("given", ["", "ok", "ok:", "ok:7_1", "nodes/7", "after:7", "soon:7", "ok:0", "-1", True])
def test_a_dependency_that_names_no_job_or_condition_is_refused(given: object) -> None:
    assert (
        "is no dependency: write a number, or one of ok, notok, any, each"
        in wrong(command=["true"], after=given)["after"]
    )
