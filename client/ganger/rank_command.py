"""What each rank runs, as found in the command lines of `torchrun` (torch.distributed.run, torch.distributed.launch)
and of `accelerate launch`, with its configuration file. `launch_command` has the request that follows.

Variables of accelerate are those that it sets for its processes (accelerate.utils.launch).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from ganger.text import os_reason


@dataclass(frozen=True)
class RankCommand:
    """A launch command, taken apart.

    `program`: as its user calls it. `command`, `environment`: of each rank. `per_node`: ranks of a node; 0 for one on
    each GPU of the job. `nodes`: fewest and most. `replaced`: its flags for which Ganger has something of its own.
    """

    program: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    per_node: int = 1
    nodes: tuple[int, int] = (1, 1)
    is_on_cpu: bool = False
    max_restarts: int = 0
    replaced: tuple[str, ...] = ()

    @property
    def is_elastic(self) -> bool:
        return self.nodes[0] < self.nodes[1]


class FlagParser(argparse.ArgumentParser):
    """Parses the flags of another program. Only those that are given are in the result; each is known with hyphens and
    with underscores. Raises ValueError for others."""

    def __init__(self, program: str) -> None:
        super().__init__(program, add_help=False, argument_default=argparse.SUPPRESS)
        self.options: dict[str, str] = {}

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{self.prog}: {message}")

    def flag(self, name: str, *short: str, is_switch: bool = False) -> None:
        """Add the flag `--name`, which has a value unless it is a switch."""
        long = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}", f"--{name.replace('-', '_')}"))
        action = "store_true" if is_switch else "store"
        self.add_argument(*short, *long, dest=name.replace("-", "_"), action=action)
        self.options[name.replace("-", "_")] = f"--{name}"

    def script(self) -> None:
        """Add what follows the flags."""
        self.add_argument("training_script")
        self.add_argument("training_script_args", nargs=argparse.REMAINDER)

    def given(self, words: Sequence[str]) -> dict[str, Any]:
        return vars(self.parse_args(list(words)))

    def named(self, keys: Sequence[str]) -> tuple[str, ...]:
        """Return the flags of these keys, as users write them."""
        return tuple(self.options[key] for key in keys if key in self.options)


def python_beside(program: str, path: str, directory: str) -> str:
    """Return the Python that an installed program such as `torchrun` runs with: the one beside it, or the one that its
    first line names. "python" where neither is there. `path`: the variable PATH of the job."""
    found = os.path.join(directory, program) if os.sep in program else shutil.which(program, path=path or None)
    if not found:
        return "python"
    beside = os.path.join(os.path.dirname(found), "python")
    if os.access(beside, os.X_OK):
        is_first = os.sep not in program and shutil.which("python", path=path or None) == beside
        return "python" if is_first else beside
    try:
        with open(found, "rb") as file:
            first = file.readline(512).decode(errors="replace")
    except OSError:
        return "python"
    named = re.fullmatch(r"#!\s*(\S*python[0-9.]*)\s*", first)
    return named[1] if named else "python"


def python_words(python: str, script: str, arguments: Sequence[str], *, is_module: bool) -> tuple[str, ...]:
    """Return the command of a rank that runs a script or a module with unbuffered output, as torchrun does."""
    return (python, "-u", *(("-m",) if is_module else ()), script, *arguments)


def whole(text: object, flag: str, least: int) -> int:
    """Return a flag's value as a number. Raises ValueError."""
    try:
        number = int(str(text))
    except ValueError:
        number = least - 1
    if number < least:
        raise ValueError(f"{flag} {text}: must be a whole number, at least {least}")
    return number


# -- torchrun

# The store, the addresses, the logs, the signals and the cores of the ranks are Ganger's.
_REPLACED: Final = (
    *("rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "node-rank", "master-addr", "master-port"),
    *("local-addr", "monitor-interval", "start-method", "event-log-handler", "log-dir", "local-ranks-filter"),
    *("duplicate-stdout-filters", "duplicate-stderr-filters", "numa-binding", "signals-to-handle", "shutdown-timeout"),
)
_REPLACED_SHORT: Final = (("redirects", "-r"), ("tee", "-t"))
_REFUSED: Final = {
    "logs_specs": "log files are Ganger's own (`ganger logs --rank K`)",
    "virtual_local_rank": "each rank has its number on the node and sees its own GPU",
    "role": "all ranks have the role default",
}
_HONOURED: Final = frozenset(
    {"nnodes", "nproc_per_node", "max_restarts", "standalone", "module", "no_python", "run_path", "use_env"}
    | {"training_script", "training_script_args"}
)
_SWITCHES: Final = ("standalone", "no-python", "run-path", "virtual-local-rank", "use-env")
_BY_GPUS: Final = ("gpu", "auto")
# A shell becomes the script, so that the script is the rank: only there is the number of the rank known.
_WITH_LOCAL_RANK: Final = 's=$1; shift; exec "$0" -u "$s" "--local-rank=$LOCAL_RANK" "$@"'
_MODULE_WITH_LOCAL_RANK: Final = 's=$1; shift; exec "$0" -u -m "$s" "--local-rank=$LOCAL_RANK" "$@"'


def _parser(program: str) -> FlagParser:
    parser = FlagParser(program)
    for name in ("nnodes", "nproc-per-node", "max-restarts", "logs-specs", "role", *_REPLACED):
        parser.flag(name)
    for name, short in _REPLACED_SHORT:
        parser.flag(name, short)
    parser.flag("module", "-m", is_switch=True)
    for name in _SWITCHES:
        parser.flag(name, is_switch=True)
    parser.script()
    return parser


def from_torchrun(
    program: str, words: Sequence[str], python: str, environment: Mapping[str, str], *, is_old: bool = False
) -> RankCommand:
    """Return what each rank of `torchrun WORDS` runs. `is_old`: it is torch.distributed.launch, which gives the script
    the argument --local-rank. `environment`: of the job; PET_NNODES and the like are flags of torchrun, too.

    Raises ValueError for flags that are none, or that Ganger has no equal of."""
    parser = _parser(program)
    variables = {key: environment.get(f"PET_{key.upper()}") for key in parser.options}
    # "0" leaves a switch off
    switches = {"module", *(name.replace("-", "_") for name in _SWITCHES)}
    off = {key for key, value in variables.items() if value is None or (key in switches and value == "0")}
    given = {**{key: value for key, value in variables.items() if key not in off}, **parser.given(words)}
    if given.get("role") == "default":
        del given["role"]
    for key, why in _REFUSED.items():
        if key in given:
            raise ValueError(f"{program} {parser.options[key]}: Ganger has no equal of it: {why}")
    is_module, has_python = bool(given.get("module")), not given.get("no_python")
    if is_module and not has_python:
        raise ValueError(f"{program}: --no-python and --module do not go together")
    keys = [key for key in given if key not in _HONOURED]
    script, arguments = str(given["training_script"]), list(map(str, given["training_script_args"]))
    python = environment.get("PYTHON_EXEC") or python
    if is_old and not given.get("use_env"):
        if not has_python:
            raise ValueError(f"{program}: --no-python goes with --use-env")
        shell = _MODULE_WITH_LOCAL_RANK if is_module else _WITH_LOCAL_RANK
        command = ("sh", "-c", shell, python, script, *arguments)
    elif has_python:
        command = python_words(python, script, arguments, is_module=is_module)
    else:
        command = (script, *arguments)
    return RankCommand(
        program=program,
        command=command,
        per_node=_per_node(str(given.get("nproc_per_node", "1"))),
        nodes=(1, 1) if given.get("standalone") else _nodes(str(given.get("nnodes", "1"))),
        max_restarts=whole(given.get("max_restarts", 0), "--max-restarts", 0),
        replaced=parser.named(keys),
    )


def _per_node(text: str) -> int:
    if text in _BY_GPUS:
        return 0
    if not text.isdigit():
        raise ValueError(f"--nproc-per-node {text}: give a number, or gpu for one process on each GPU of the job")
    return whole(text, "--nproc-per-node", 1)


def _nodes(text: str) -> tuple[int, int]:
    least, colon, most = text.partition(":")
    found = whole(least, "--nnodes", 1), whole(most if colon else least, "--nnodes", 1)
    if found[0] > found[1]:
        raise ValueError(f"--nnodes {text}: a range goes from fewer to more nodes")
    return found


_ACCELERATE_SWITCHES: Final = (
    *("cpu", "multi_gpu", "use_deepspeed", "use_fsdp", "use_parallelism_config", "no_python", "debug", "quiet"),
    *("dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation", "same_network"),
    *("enable_cpu_affinity", "use_megatron_lm", "tpu", "tpu_cluster", "tpu_use_sudo", "fp8_use_autocast_during_eval"),
)
_ACCELERATE_VALUES: Final = (
    *("config_file", "mixed_precision", "num_processes", "num_machines", "num_cpu_threads_per_process"),
    *("dynamo_backend", "dynamo_mode", "gpu_ids", "machine_rank", "main_process_ip", "main_process_port", "tee"),
    *("log_dir", "role", "rdzv_backend", "rdzv_conf", "max_restarts", "monitor_interval", "mpirun_hostfile"),
    *("main_training_function", "vm", "env", "aws_access_key_id", "aws_secret_access_key"),
    *("deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter", "deepspeed_multinode_launcher"),
)
_ACCELERATE_REPLACED: Final = frozenset(
    [
        *("machine_rank", "main_process_ip", "main_process_port", "tee", "log_dir", "rdzv_backend", "rdzv_conf"),
        *("monitor_interval", "same_network", "enable_cpu_affinity", "deepspeed_hostfile"),
        *("deepspeed_exclusion_filter", "deepspeed_inclusion_filter", "deepspeed_multinode_launcher"),
    ]
)
_ACCELERATE_REFUSED: Final = {
    "tpu": "there are no TPUs",
    "tpu_cluster": "there are no TPUs",
    "vm": "there are no TPUs",
    "mpirun_hostfile": "ranks are started by Ganger, not by mpirun",
    "use_megatron_lm": "Megatron-LM starts and numbers its ranks by itself",
    "aws_access_key_id": "jobs do not run on SageMaker",
    "aws_secret_access_key": "jobs do not run on SageMaker",
}
# Flag, its default, and the variable where the name is another one; None: not set unless given.
_FSDP: Final = (
    *(("fsdp_version", "1"), ("fsdp_sharding_strategy", "FULL_SHARD"), ("fsdp_reshard_after_forward", "true")),
    *(("fsdp_offload_params", "false"), ("fsdp_min_num_params", "100000000"), ("fsdp_auto_wrap_policy", None)),
    *(("fsdp_transformer_layer_cls_to_wrap", None), ("fsdp_backward_prefetch", None), ("fsdp_state_dict_type", None)),
    *(("fsdp_forward_prefetch", "false"), ("fsdp_use_orig_params", "true")),
    *(("fsdp_cpu_ram_efficient_loading", "true"), ("fsdp_sync_module_states", "true")),
    *(("fsdp_activation_checkpointing", "false"), ("fsdp_activation_checkpointing_offload", "false")),
    ("fsdp_ignored_modules", None),
)
_FSDP_NAMES: Final = {"fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP"}
# Values that accelerate writes in small letters.
_SMALL: Final = frozenset(
    [
        *("fsdp_reshard_after_forward", "fsdp_offload_params", "fsdp_forward_prefetch", "fsdp_use_orig_params"),
        *("fsdp_cpu_ram_efficient_loading", "fsdp_sync_module_states", "fsdp_activation_checkpointing"),
        *("fsdp_activation_checkpointing_offload", "gradient_clipping", "offload_optimizer_device"),
        *("offload_param_device", "zero3_init_flag", "zero3_save_16bit_model"),
    ]
)
_DEEPSPEED: Final = {
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_optimizer_nvme_path": "",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "offload_param_nvme_path": "",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "deepspeed_moe_layer_cls_names": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
}
_FP8: Final = {
    "fp8_backend": None,
    "fp8_use_autocast_during_eval": "False",
    "fp8_margin": "0",
    "fp8_interval": "1",
    "fp8_format": "HYBRID",
    "fp8_amax_history_len": "1024",
    "fp8_amax_compute_algo": "most_recent",
    "fp8_opt_level": "O2",
    "fp8_enable_fsdp_float8_all_gather": "true",
    "fp8_pad_inner_dim": "true",
}
_PARALLELISM: Final = {
    "dp_replicate_size": "1",
    "dp_shard_size": "1",
    "tp_size": "1",
    "cp_size": "1",
    "cp_backend": "torch",
    "cp_comm_strategy": "allgather",
    "sp_size": "1",
    "sp_backend": "deepspeed",
}
_PRECISIONS: Final = ("no", "fp16", "bf16", "fp8")


def from_accelerate(words: Sequence[str], python: str, environment: Mapping[str, str], directory: str) -> RankCommand:
    """Return what each rank of `accelerate launch WORDS` runs. `environment`: of the job; `directory`: where it runs.

    Raises ValueError for flags that are none, or that Ganger has no equal of, and for a configuration file that cannot
    be read."""
    parser = _accelerate_parser()
    given = parser.given(words)
    values = {**_from_file(given, environment, directory), **given}
    for key, why in _ACCELERATE_REFUSED.items():
        if values.get(key):
            raise ValueError(f"accelerate launch {parser.options[key]}: Ganger has no equal of it: {why}")
    if str(values.get("gpu_ids") or "all") != "all":
        raise ValueError("accelerate launch --gpu_ids: a job has the GPUs that it is given: say how many (--gpus)")
    if values.get("role", "default") != "default":
        raise ValueError("accelerate launch --role: all ranks have the role default")
    nodes = whole(values.get("num_machines") or 1, "--num_machines", 1)
    ranks = values.get("num_processes")
    per_node = 0 if ranks is None else whole(ranks, "--num_processes", 1)
    if per_node % nodes:
        raise ValueError(f"--num_processes {ranks} cannot be shared out over --num_machines {nodes}")
    is_on_cpu = bool(values.get("cpu") or values.get("use_cpu"))
    script, arguments = str(values["training_script"]), list(map(str, values["training_script_args"]))
    is_module, has_python = bool(values.get("module")), not values.get("no_python")
    if is_module and not has_python:
        raise ValueError("accelerate launch: --no_python and --module do not go together")
    command = python_words(python, script, arguments, is_module=is_module) if has_python else (script, *arguments)
    return RankCommand(
        program="accelerate launch",
        command=command,
        environment=_variables(values, is_on_cpu),
        per_node=per_node // nodes or (1 if is_on_cpu else 0),
        nodes=(nodes, nodes),
        is_on_cpu=is_on_cpu,
        max_restarts=whole(values.get("max_restarts") or 0, "--max_restarts", 0),
        replaced=parser.named([key for key in given if key in _ACCELERATE_REPLACED]),
    )


def _accelerate_parser() -> FlagParser:
    parser = FlagParser("accelerate launch")
    for name in _ACCELERATE_SWITCHES:
        parser.flag(name, is_switch=True)
    parser.flag("module", "-m", is_switch=True)
    parallelism = [f"parallelism_config_{name}" for name in _PARALLELISM]
    fp8 = [name for name in _FP8 if name not in _ACCELERATE_SWITCHES]
    for name in (*_ACCELERATE_VALUES, *(flag for flag, _ in _FSDP), *_DEEPSPEED, *fp8, *parallelism):
        parser.flag(name)
    parser.script()
    return parser


def _from_file(given: Mapping[str, Any], environment: Mapping[str, str], directory: str) -> dict[str, Any]:
    """Return the values of the configuration file by the names of flags: of the one that is named, else of the user's
    own, which `accelerate config` writes, if it is there."""
    path = given.get("config_file")
    if path is None:
        cache = environment.get("XDG_CACHE_HOME") or os.path.join(environment.get("HOME", ""), ".cache")
        home = environment.get("HF_HOME") or os.path.join(cache, "huggingface")
        found = [os.path.join(home, "accelerate", f"default_config.{end}") for end in ("yaml", "json")]
        path = next((one for one in found if os.path.isfile(one)), None)
        if path is None or given.get("cpu"):
            return {}
    path = os.path.join(directory, os.path.expanduser(str(path)))
    import yaml  # Only here: most commands have no such file

    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file) if path.endswith(".json") else yaml.safe_load(file)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"accelerate launch --config_file {path}: cannot be read: {os_reason(error)}") from None
    if not isinstance(content, dict):
        raise ValueError(f"accelerate launch --config_file {path}: is no mapping")
    return _flattened(content, path)


def _flattened(content: Mapping[str, Any], path: str) -> dict[str, Any]:
    if str(content.get("compute_environment", "LOCAL_MACHINE")) != "LOCAL_MACHINE":
        raise ValueError(f"{path}: compute_environment {content['compute_environment']}: Ganger has no equal of it")
    kind = str(content.get("distributed_type", "NO")).rpartition(".")[2].upper()
    known = {"NO": "", "MULTI_CPU": "use_cpu", "MULTI_GPU": "multi_gpu", "DEEPSPEED": "use_deepspeed"}
    known |= {"FSDP": "use_fsdp", "XLA": "tpu", "TPU": "tpu", "MEGATRON_LM": "use_megatron_lm"}
    if kind not in known:
        raise ValueError(f"{path}: distributed_type {kind}: Ganger has no equal of it")
    values: dict[str, Any] = {known[kind]: True} if known[kind] else {}
    if kind == "NO":
        values["num_processes"] = 1
    if isinstance(content.get("dynamo_backend"), str):
        values["dynamo_backend"] = content["dynamo_backend"]
    for name, value in content.items():
        prefix = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_"}.get(name, "")
        if isinstance(value, Mapping):
            values |= {f"{prefix}{str(key).removeprefix(prefix)}": item for key, item in value.items()}
            if name == "parallelism_config" and value:
                values["use_parallelism_config"] = True
            if name == "deepspeed_config":
                values["deepspeed_fields"] = ",".join(map(str, value))
        elif value is not None and name not in ("compute_environment", "distributed_type"):
            values.setdefault(name, value)
    if values.get("num_processes") == -1:
        raise ValueError(f"{path}: has no num_processes: give --num_processes")
    return values


def _variables(values: Mapping[str, Any], is_on_cpu: bool) -> dict[str, str]:
    """Return the variables that accelerate sets for its processes."""
    precision = str(values.get("mixed_precision") or "no").lower()
    if precision not in _PRECISIONS:
        raise ValueError(f"--mixed_precision {precision}: there are {', '.join(_PRECISIONS)}")
    found = {
        "ACCELERATE_MIXED_PRECISION": precision,
        "ACCELERATE_DYNAMO_BACKEND": str(values.get("dynamo_backend") or "no").upper(),
        "ACCELERATE_DYNAMO_MODE": str(values.get("dynamo_mode") or "default"),
    }
    for switch in ("use_fullgraph", "use_dynamic", "use_regional_compilation"):
        found[f"ACCELERATE_DYNAMO_{switch.upper()}"] = str(bool(values.get(f"dynamo_{switch}")))
    if is_on_cpu:
        found["ACCELERATE_USE_CPU"] = "True"
    if values.get("debug"):
        found["ACCELERATE_DEBUG_MODE"] = "true"
    if values.get("num_cpu_threads_per_process"):
        found["OMP_NUM_THREADS"] = str(values["num_cpu_threads_per_process"])
    if precision == "fp8":
        found |= _named(values, _FP8.items(), lambda name: f"ACCELERATE_{name.upper()}")
    if not is_on_cpu:
        found |= _of_plugins(values, precision)
    return found


def _of_plugins(values: Mapping[str, Any], precision: str) -> dict[str, str]:
    found: dict[str, str] = {}
    if values.get("use_fsdp"):
        found["ACCELERATE_USE_FSDP"] = "true"
        found |= _named(values, _FSDP, lambda name: _FSDP_NAMES.get(name, name.upper()))
    if values.get("use_deepspeed"):
        fields = [text for text in (values.get("deepspeed_fields"),) if text]
        fields += ["mixed_precision"] if values.get("deepspeed_fields") and precision != "no" else []
        found["ACCELERATE_USE_DEEPSPEED"] = "true"
        found["ACCELERATE_CONFIG_DS_FIELDS"] = ",".join(fields).lower()
        known = [(name, None) for name, variable in _DEEPSPEED.items() if variable]
        found |= _named(values, known, lambda name: _DEEPSPEED[name])
    if values.get("use_parallelism_config"):
        found["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
        sizes = [(f"parallelism_config_{name}", default) for name, default in _PARALLELISM.items()]
        found |= _named(values, sizes, str.upper)
    return found


def _named(values: Mapping[str, Any], flags: Any, variable: Callable[[str], str]) -> dict[str, str]:
    given = {name: str(value) for name, default in flags if (value := values.get(name, default)) is not None}
    return {variable(name): text.lower() if name in _SMALL else text for name, text in given.items()}
