"""The command line of `torchrun` (torch.distributed.run, torch.distributed.launch), taken apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ganger.rank_command import FlagParser, RankCommand, python_words, whole

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
    for name in ("standalone", "no-python", "run-path", "virtual-local-rank", "use-env"):
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
    by_variable = {
        key: environment[f"PET_{key.upper()}"] for key in parser.options if f"PET_{key.upper()}" in environment
    }
    given = {**by_variable, **parser.given(words)}
    if given.get("role") == "default":
        del given["role"]
    for key, why in _REFUSED.items():
        if key in given:
            raise ValueError(f"{program} {parser.options[key]}: Ganger has no equal of it: {why}")
    is_module, has_python = bool(given.get("module")), not given.get("no_python")
    if is_module and not has_python:
        raise ValueError(f"{program}: --no-python and --module do not go together")
    keys = [key for key in given if key not in _HONOURED]
    script, arguments = str(given["training_script"]), list(map(str, _list(given["training_script_args"])))
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


_HONOURED: Final = frozenset(
    [
        *("nnodes", "nproc_per_node", "max_restarts", "standalone", "module", "no_python", "run_path", "use_env"),
        *("training_script", "training_script_args"),
    ]
)


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


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
