"""`torchrun` and `accelerate launch` lines become ranks of ours: what each rank runs, and the request that follows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from ganger.launch_command import agent_note, replaced_flags
from ganger.rank_command import from_accelerate, from_torchrun
from ganger.spec import make_spec
from ganger.v1.job_pb2 import JobSpec
from ganger.wire.errors import SpecInvalid

pytestmark = pytest.mark.usefixtures("scripts")
# Without a home there is no configuration file of accelerate.
ENVIRON = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}


def made(command: str | list[str], **more: Any) -> JobSpec:
    return make_spec({"command": command, "directory": ".", **more}, ENVIRON)


def request(spec: JobSpec) -> tuple[int, int, int]:
    """Tasks, GPUs of a task, nodes."""
    return spec.roles[0].tasks, spec.roles[0].shape.gpus, spec.nodes


def complaint(command: str | list[str], **more: Any) -> tuple[str, str]:
    with pytest.raises(SpecInvalid) as caught:
        made(command, **more)
    violation = caught.value.violations[0]
    return violation.field, violation.description


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("torchrun --nproc-per-node 2 train.py --lr 1", ["python", "-u", "train.py", "--lr", "1"]),
        ("torchrun --nproc_per_node=2 -m pkg.train -x", ["python", "-u", "-m", "pkg.train", "-x"]),
        ("torchrun --nproc-per-node 2 --no-python run-of-nodes a", ["run-of-nodes", "a"]),
        ("python -m torch.distributed.run --nproc-per-node=2 train.py", ["python", "-u", "train.py"]),
        ("/env/bin/python3.11 -X dev -m torch.distributed.run --nproc-per-node=2 train.py", None),
        ("python /env/bin/torchrun --standalone --nproc-per-node=2 train.py", ["python", "-u", "train.py"]),
        ("env A=1 torchrun --nproc-per-node 2 train.py", ["python", "-u", "train.py"]),
        (["sh", "-c", "exec torchrun --nproc-per-node 2 'my train.py'"], ["python", "-u", "my train.py"]),
        ("accelerate launch --num_processes 2 train.py", ["python", "-u", "train.py"]),
        ("accelerate-launch --num-processes 2 --multi-gpu -m train", ["python", "-u", "-m", "train"]),
        ("python -m accelerate.commands.launch --num_processes=2 train.py", ["python", "-u", "train.py"]),
    ],
)
def test_a_launch_command_in_any_usual_form_becomes_two_ranks_on_one_node(
    command: str | list[str], ranks: list[str] | None
) -> None:
    spec = made(command)

    assert request(spec) == (2, 1, 1)
    if ranks is not None:
        assert list(spec.command) == ranks
    else:
        assert spec.command[-1] == "train.py"
        assert spec.command[1] == "-u"


@pytest.mark.parametrize(
    "command",
    [
        ["bash", "-c", "cd x && torchrun --nproc-per-node 2 train.py"],
        ["bash", "-c", "torchrun --nproc-per-node $N train.py"],
        ["bash", "run.sh", "torchrun"],
        ["python", "train.py", "torchrun"],
        ["python", "-c", "print('torchrun')"],
        ["accelerate", "env"],
    ],
)
def test_a_command_that_is_not_understood_stays_one_task(command: list[str]) -> None:
    spec = made(command)

    assert list(spec.command) == command
    assert request(spec) == (1, 1, 0)


@pytest.mark.parametrize(
    ("command", "given", "expected"),
    [
        ("torchrun --nproc-per-node 4 t.py", {}, (4, 1, 1)),
        ("torchrun --nproc-per-node 4 t.py", {"gpus": "8"}, (4, 2, 1)),
        ("torchrun --nproc-per-node 4 t.py", {"gpus_per_task": 2}, (4, 2, 1)),
        ("torchrun --nproc-per-node 4 t.py", {"gpus": 0}, (4, 0, 1)),
        ("torchrun --nproc-per-node gpu t.py", {"gpus": 4}, (4, 1, 0)),
        ("torchrun --nnodes 2 --nproc-per-node 4 t.py", {}, (8, 1, 2)),
        ("torchrun --nnodes 1:4 --nproc-per-node 2 t.py", {"gpus": 6}, (6, 1, 0)),
        ("accelerate launch t.py", {"gpus": 2}, (2, 1, 0)),
        ("accelerate launch --cpu --num_processes 2 t.py", {}, (2, 0, 1)),
        ("accelerate launch --num_machines 2 --num_processes 8 t.py", {}, (8, 1, 2)),
    ],
)
def test_the_request_follows_from_the_flags(
    command: str, given: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    assert request(made(command, **given)) == expected


def test_a_range_of_nodes_makes_an_elastic_job() -> None:
    spec = made("torchrun --nnodes 1:4 --nproc-per-node 2 t.py")

    assert (spec.gpus_min, spec.gpus_max) == (2, 8)


@pytest.mark.parametrize(
    ("command", "given", "field", "part"),
    [
        ("torchrun --nproc-per-node 4 t.py", {"gpus": 2}, "gpus", "4 processes on 1 node, which cannot share 2 GPUs"),
        ("torchrun --nproc-per-node 4 t.py", {"gpus": "2:8"}, "gpus", "a range of nodes"),
        ("torchrun --nnodes 1:2 --nproc-per-node 2 t.py", {"gpus": "2:8"}, "gpus", "a range from 2 to 4 GPUs"),
        ("torchrun --nproc-per-node 4 t.py", {"tasks": 2, "gpus": 4}, "tasks", "each a task"),
        ("torchrun --nnodes 2 t.py", {"nodes": 4}, "nodes", "2 nodes"),
        ("torchrun --bogus t.py", {}, "command", "--bogus"),
        ("torchrun --virtual-local-rank t.py", {}, "command", "--virtual-local-rank"),
        ("torchrun --role trainer t.py", {}, "command", "--role"),
        ("torchrun --nproc-per-node many t.py", {}, "command", "--nproc-per-node many"),
        ("torchrun --nproc-per-node auto t.py", {"gpus": 0}, "gpus", "give a number"),
        ("accelerate launch --tpu t.py", {}, "command", "--tpu"),
        ("accelerate launch --use_megatron_lm t.py", {}, "command", "--use_megatron_lm"),
        ("accelerate launch --gpu_ids 0,1 t.py", {}, "command", "--gpu_ids"),
        ("accelerate launch --num_processes 3 --num_machines 2 t.py", {}, "command", "--num_processes 3"),
        ("accelerate launch --mixed_precision fp4 t.py", {}, "command", "fp4"),
        ("accelerate launch --config_file /nonexistent/c.yaml t.py", {}, "command", "/nonexistent/c.yaml"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(command: str, given: dict[str, Any], field: str, part: str) -> None:
    where, text = complaint(command, **given)

    assert where == field
    assert part in text


def test_restarts_of_torchrun_become_allowed_failures_unless_the_user_says_how_many() -> None:
    assert made("torchrun --max-restarts 3 t.py").max_failures == 3
    assert made("torchrun --max-restarts 3 t.py", max_failures=1).max_failures == 1


def test_a_launch_command_stays_one_tree_where_no_agent_is_wanted() -> None:
    spec = made("torchrun --nproc-per-node 2 t.py", agent="none")

    assert list(spec.command) == ["torchrun", "--nproc-per-node", "2", "t.py"]
    assert request(spec)[:2] == (1, 2)


def test_flags_that_mean_nothing_under_ganger_are_named_once() -> None:
    command = "torchrun --nproc-per-node 2 --rdzv-backend c10d --master_port 1234 t.py"

    note = replaced_flags({"command": command, "directory": "/tmp"})

    assert note == "--rdzv-backend, --master-port of torchrun are replaced by Ganger's own rendezvous, logs and cores"
    assert not replaced_flags({"command": "torchrun --nproc-per-node 2 t.py", "directory": "/tmp"})


def test_the_old_launcher_gives_each_script_its_local_rank(tmp_path: Path) -> None:
    import subprocess

    script = tmp_path / "show.py"
    script.write_text("import sys; print(sys.argv[1:])")
    spec = made(f"{sys.executable} -m torch.distributed.launch --nproc-per-node 2 {script} --lr 1")

    done = subprocess.run(list(spec.command), env={**ENVIRON, "LOCAL_RANK": "1"}, capture_output=True, text=True)

    assert done.stdout == "['--local-rank=1', '--lr', '1']\n", done.stderr


def test_variables_of_torchrun_count_as_its_flags() -> None:
    spec = made("torchrun t.py", environment={"PET_NPROC_PER_NODE": "4", "PET_NNODES": "2"})

    assert request(spec) == (8, 1, 2)


def test_a_variable_of_torchrun_that_is_zero_leaves_its_switch_off() -> None:
    environment = {"PET_STANDALONE": "0", "PET_NO_PYTHON": "0", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "4"}
    spec = made("torchrun t.py", environment=environment)

    assert request(spec) == (8, 1, 2)
    assert list(spec.command) == ["python", "-u", "t.py"]


@pytest.mark.torch
def test_every_flag_of_the_installed_torchrun_is_known() -> None:
    run = pytest.importorskip("torch.distributed.run")
    unknown = []
    for action in run.get_args_parser()._actions:
        for flag in action.option_strings:
            words = [flag] if action.nargs == 0 else [flag, "1"]
            try:
                from_torchrun("torchrun", [*words, "t.py"], "python", {})
            except ValueError as error:
                if "no equal" not in str(error) and flag not in ("-h", "--help", "--no-python", "--no_python"):
                    unknown.append(str(error))
    assert not unknown


CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 2
dynamo_config:
  dynamo_backend: INDUCTOR
fsdp_config:
  fsdp_version: 2
  reshard_after_forward: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
"""
LINES = [
    ["--num_processes", "2", "--multi_gpu", "--mixed_precision", "fp16", "--dynamo_backend", "inductor"],
    [
        "--num_processes",
        "2",
        "--use_fsdp",
        "--fsdp_sharding_strategy",
        "SHARD_GRAD_OP",
        "--fsdp_offload_params",
        "True",
    ],
    ["--num_processes", "2", "--use_fsdp", "--fsdp_version", "2", "--debug", "--num_cpu_threads_per_process", "3"],
    ["--config_file", "CONFIG"],
    ["--config_file", "CONFIG", "--mixed_precision", "no", "--fsdp_version", "1"],
]


@pytest.mark.torch
@pytest.mark.parametrize("line", LINES, ids=" ".join)
def test_ranks_of_accelerate_get_the_variables_that_accelerate_sets(
    line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = pytest.importorskip("accelerate.commands.launch")
    from accelerate.utils.launch import prepare_multi_gpu_env

    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    words = [str(config) if word == "CONFIG" else word for word in line] + ["t.py"]
    monkeypatch.setattr("os.environ", dict(ENVIRON))
    args, _, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))
    theirs = {name: text for name, text in prepare_multi_gpu_env(args).items() if name not in ENVIRON}
    # their default of one thread would overrule the cores that the job gets
    if "--num_cpu_threads_per_process" not in line:
        theirs.pop("OMP_NUM_THREADS")

    ours = from_accelerate(words, "python", ENVIRON, str(tmp_path))

    assert dict(ours.environment) == theirs
    assert ours.per_node == 2


def test_a_configuration_file_of_accelerate_gives_what_the_line_does_not(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "t.py").touch()

    spec = made("accelerate launch --config_file config.yaml --mixed_precision no t.py", directory=str(tmp_path))

    assert request(spec) == (2, 1, 1)
    assert spec.environment["ACCELERATE_MIXED_PRECISION"] == "no"
    assert spec.environment["ACCELERATE_DYNAMO_BACKEND"] == "INDUCTOR"
    assert spec.environment["FSDP_VERSION"] == "2"
    assert spec.environment["FSDP_RESHARD_AFTER_FORWARD"] == "false"


ROLES = (
    "the whole job is suspended wherever it is, not between two steps, and can be saved or moved only as process images"
)


@pytest.mark.parametrize(
    ("commands", "more", "note"),
    [
        ({"cache": "redis-server", "worker": "python train.py"}, {}, f"role cache runs no Python: {ROLES}"),
        (
            {"cache": "redis-server", "board": "/usr/bin/board", "worker": "/env/bin/python3.11 train.py"},
            {},
            f"roles cache and board run no Python: {ROLES}",
        ),
        ({"cache": "redis-server", "worker": "python train.py"}, {"agent": "none"}, ""),
        ({"cache": "redis-server", "worker": "bash run.sh"}, {}, ""),
        ({"ps": "python train.py", "worker": "python train.py"}, {}, ""),
        ({"worker": "bash run.sh"}, {}, ""),
    ],
)
def test_what_a_role_without_python_costs_the_others_is_said(
    commands: dict[str, str], more: dict[str, Any], note: str
) -> None:
    roles = [{"name": name, "cpus": 1, "command": command.split()} for name, command in commands.items()]
    assert agent_note(make_spec({"roles": roles, "directory": ".", **more}, ENVIRON)) == note
