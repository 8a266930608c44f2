"""`ganger submit`: flags and a job file become one description; all its errors are reported together.

`ganger update`: change the requests of jobs and arrays that were submitted before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ganger.cli.options import (
    Selection,
    chooses_jobs,
    each_of,
    json_option,
    number,
    of_job_or_array,
    open_client,
    pairs,
)
from ganger.console import CommandError, ExitCode, print_json, print_line, report
from ganger.text import counted

if TYPE_CHECKING:
    from ganger.client import Client
    from ganger.v1.job_pb2 import Job, JobSpec
    from ganger.v1.job_service_pb2 import CreateArrayRequest, JobUpdate, UpdateArrayResponse
    from ganger.wire.errors import Violation

_LEVELS = "nvlink, switch, socket, node, rack, fabric, cluster"


class _Submission(click.Command):
    """A command that reports its own options after the job's command, where they are passed to that command."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        rest = super().parse_args(context, args)
        command = context.params.get("command") or ()
        is_marked = "--" in given[: len(given) - len(command)]
        if is_marked or context.resilient_parsing:
            return rest
        own = {name for parameter in self.params for name in parameter.opts if name.startswith("--")}
        words = dict.fromkeys(word.partition("=")[0] for word in command[1:])
        if mistaken := [word for word in words if word in own]:
            verb = "goes" if len(mistaken) == 1 else "go"
            click.echo(
                f"note: {', '.join(mistaken)} after the command {verb} to the command;"
                " options of ganger come before it",
                err=True,
            )
        return rest


# Values are texts here: ganger.spec reads them, so that flags and files follow the same rules and errors come at once.
@click.command(cls=_Submission, context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.option("--file", "-F", "file", type=click.Path(dir_okay=False, path_type=Path), help="Job file, YAML or TOML.")
@click.option("--name", "-n", metavar="TEXT", help="A label; need not be unique.")
@click.option(
    "--gpus",
    "-g",
    metavar="N",
    help="GPUs in all; one task each unless --gpus-per-task is given; 2:8 for any number between. Default 1.",
)
@click.option("--gpus-per-task", metavar="M", help="GPUs of one task (one process).")
@click.option("--tasks", metavar="T", help="Tasks; needed with --gpus 0 for more than one.")
@click.option("--partition", "-p", metavar="NAME", help="Use only nodes of this partition (`ganger partitions`).")
@click.option("--gpu-type", metavar="TYPES", help="Take only GPUs of these types, the first with room: a100,h100.")
@click.option("--gpu-memory", metavar="SIZE", help="Most memory a GPU will use, to reserve what OFFLOAD needs.")
@click.option("--nodes", metavar="N", help="Use exactly so many nodes; 0: any number.")
@click.option("--cpus-per-gpu", metavar="N|auto", help="Cores beside each GPU; auto (default) measures.")
@click.option("--cpus-per-task", metavar="N|auto", help="Cores of each task.")
@click.option("--memory", metavar="SIZE", help="Host memory of each task, e.g. 16G.")
@click.option("--disk-mb-per-s", metavar="N", help="Disk bandwidth of each task, in megabytes (10^6) per second.")
@click.option("--net-mb-per-s", metavar="N", help="Network bandwidth of each task, in megabytes (10^6) per second.")
@click.option("--locality", metavar="LEVEL", help=f"How close together its GPUs should be: {_LEVELS}.")
@click.option("--tolerance", metavar="LEVEL", help="How far apart they may be; default: as --locality, else anywhere.")
@click.option("--patience", metavar="TIME", help="How long to wait for --locality before taking --tolerance [10m].")
@click.option("--priority", metavar="N", help="-1000 to 1000; higher goes first.")
@click.option("--weight", metavar="W", help="Its share where jobs share GPUs, 0.01 to 100. Default 1.")
@click.option(
    "--converges", metavar="PART[,PASSES]", help="Converged once each of PASSES passes lowers its loss by less."
)
@click.option("--time", "-t", metavar="TIME", help="Stop it after running so long, e.g. 2h30m.")
@click.option("--deadline", metavar="TIME", help="By when it should end: 2026-12-24T18:00, 18:00, or 6h from now.")
@click.option(
    "--after", metavar="[ok|notok|any|each:]JOB,...", help="Start only after jobs have ended so; alone: have succeeded."
)
@click.option("--max-failures", metavar="N", help="Restarts after failures of its own.")
@click.option("--checkpoint-every", metavar="TIME|never", help="Interval of checkpoints to storage.")
@click.option(
    "--checkpoint-copies", metavar="1|2", help="Without shared storage: nodes that keep each checkpoint. [default: 1]"
)
@click.option("--not-preemptible", is_flag=True, help="Never suspend or move it unless a person asks.")
@click.option("--schedule-at", metavar="step|epoch", help="epoch: plans stop or move it at ends of its epochs only.")
@click.option("--no-move", is_flag=True, help="Never move it for another job's sake.")
@click.option("--scheduler", metavar="MODULE:CLASS", help="Your own job scheduler, started with the job.")
@click.option("--agent", metavar="automatic|none", help="none: inject nothing into the script.")
@click.option("--mechanism", metavar="image|adapter|replay|signal|none", help="Stop and move it by this one only.")
@click.option("--must-move", is_flag=True, help="Fail at its first step if it turns out that it cannot be moved.")
@click.option("--close-connections", is_flag=True, help="Its image may close TCP connections to outside of the job.")
@click.option("--signal", metavar="SIG[@SECONDS]", help="At this signal the script saves itself and exits, e.g. TERM.")
@click.option("--grace", metavar="TIME", help="How long it may take to exit after --signal. Default 60s.")
@click.option("--requeue", is_flag=True, help="With --signal, and its default: start it again after such an exit.")
@click.option("--distributed", is_flag=True, help="Set torchrun's variables (RANK, ...) for a single task, too.")
@click.option("--wrap", metavar="TEXT", help="Run this line with the shell, e.g. 'prepare.sh && python train.py'.")
@click.option("--env", "-e", "variables", multiple=True, metavar="NAME[=VALUE]", help="Set or pass on a variable.")
@click.option("--label", "-l", "labels", multiple=True, metavar="NAME=VALUE", help="A label to find it by.")
@click.option(
    "--array",
    "arrays",
    multiple=True,
    metavar="NAME=A,B,...|0-9|%N",
    help="One job for each value, for each combination if repeated; {NAME} in the command is replaced. %N: N at once.",
)
@click.option("--stop", metavar="RULE,KEY=VALUE,...", help="Stops the worse members: halving, asha, median, threshold.")
@click.option("--directory", "-C", metavar="PATH", help="Working directory. Default: this one.")
@click.option("--request-id", metavar="ID", help="Repeat it to submit at most once.")
@click.option("--follow", "-f", is_flag=True, help="Print its log until it ends; ctrl-C leaves it running.")
@click.option("--dry-run", is_flag=True, help="Have the master judge the job and print it; submit nothing.")
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def submit(
    file: Path | None,
    variables: tuple[str, ...],
    labels: tuple[str, ...],
    arrays: tuple[str, ...],
    stop: str | None,
    not_preemptible: bool,
    no_move: bool,
    distributed: bool,
    must_move: bool,
    close_connections: bool,
    requeue: bool,
    wrap: str | None,
    request_id: str | None,
    follow: bool,
    dry_run: bool,
    as_json: bool,
    command: tuple[str, ...],
    **flags: str | None,
) -> int:
    """Submit a job: `ganger submit --gpus 2 -- python train.py --epochs 3`.

    Flags win over the job file. The working directory and the part of the environment a training script needs are
    captured; --env adds to it.
    """
    from ganger.spec import load_job_file, make_spec

    description = load_job_file(file) if file else {}
    origins = _merge(description, flags)
    _print_letter_notes(flags, variables)
    _set_command(description, origins, wrap, command)
    switches = (
        ("preemptible", not_preemptible, False),
        ("movable", no_move, False),
        *(("distributed", distributed, True), ("must_move", must_move, True)),
        ("close_connections", close_connections, True),
        ("requeue", requeue, True),
    )
    description.update({key: value for key, is_given, value in switches if is_given})
    wrong: list[Violation] = []
    for key, (given, mistakes) in (("environment", _variables(variables)), ("labels", pairs("--label", labels))):
        if given:
            description[key] = _with_pairs(description.get(key), given)
        wrong += mistakes
    if arrays or stop is not None:
        from ganger.array_spec import from_flags

        description["array"], mistakes = from_flags(arrays, stop, description.get("array"))
        wrong += mistakes
    if description.get("array") is not None:
        if follow:
            raise click.UsageError("--follow goes with one job: `ganger logs -f 7_0` follows a member")
        from ganger.array_spec import make_array

        request = make_array(description, None, origins, wrong)
        _print_notes(description, request.spec)
        return _submit_array(request, request_id, dry_run, as_json)
    spec = make_spec(description, None, origins, wrong)
    _print_notes(description, spec)
    return _submit_job(spec, request_id, follow, dry_run, as_json)


def _print_letter_notes(flags: dict[str, str | None], variables: tuple[str, ...]) -> None:
    """Print what letters mean that are others' in Slurm: before the description is read, which their values fail."""
    from ganger.cli.slurm import letter_notes

    for note in letter_notes(flags.get("directory"), variables):
        print(f"note: {note}", file=sys.stderr)


def _print_notes(description: dict[str, Any], spec: JobSpec) -> None:
    """Print what a submission does that its author may not expect."""
    for note in _notes(description, spec):
        print(f"note: {note}", file=sys.stderr)


def _notes(description: dict[str, Any], spec: JobSpec) -> Iterator[str]:
    from ganger.cli.slurm import foreign_program, ignored_directives
    from ganger.launch_command import agent_note, replaced_flags

    if (name := str(description.get("name", ""))).isdigit():
        yield f"--name (-n) {name} is a label; Slurm's -n is --tasks here"
    if replaced := replaced_flags(description):
        yield replaced
    if ignored := ignored_directives(spec.command, spec.working_directory):
        yield ignored
    if foreign := foreign_program(spec.command):
        yield foreign
    if without := agent_note(spec):
        yield without


def _submit_job(spec: JobSpec, request_id: str | None, follow: bool, dry_run: bool, as_json: bool) -> int:
    if dry_run:
        return _dry_run(spec, request_id, as_json)
    with open_client() as client:
        job = client.submit_spec(spec, request_id=request_id)
        if as_json:
            print_json(job.message)
        else:
            # Scripts take the number from stdout; the hint is for people.
            print(f"submitted job {job.id}", flush=True)
        if spec.HasField("deadline"):
            _print_advice(client, job.name)
        if job.scheduler_log is not None:
            print(f"ganger: {spec.scheduler} places it, and writes to {job.scheduler_log}", file=sys.stderr)
        if follow:
            from ganger.cli.logs import follow_job

            return follow_job(client, job.name)
    if not as_json and sys.stdout.isatty():
        print(f"  ganger logs -f {number(job.name)}    ganger why {number(job.name)}", file=sys.stderr)
    return 0


def _dry_run(found: JobSpec | CreateArrayRequest, request_id: str | None, as_json: bool) -> int:
    from ganger.cli.job_details import print_dry_run

    print_dry_run(found, request_id, as_json)
    return 0


def _submit_array(request: CreateArrayRequest, request_id: str | None, dry_run: bool, as_json: bool) -> int:
    if dry_run:
        return _dry_run(request, request_id, as_json)
    with open_client() as client:
        array = client.submit_array(request, request_id=request_id)
    if as_json:
        print_json(array)
        return 0
    print(f"submitted array {number(array.name)} of {counted(array.size, 'job')}", flush=True)
    if sys.stdout.isatty():
        print(f"  ganger show {number(array.name)}    ganger queue", file=sys.stderr)
    return 0


def _print_advice(client: Client, name: str) -> None:
    """Print whether the job can meet its deadline. Errors are ignored: the job is accepted already."""
    from ganger.wire.errors import ApiError

    try:
        advice = client.explain_job(name).deadline_advice
    except ApiError as error:
        advice = f"nothing is known of it: {error}"
    print(f"ganger: deadline: {advice}", file=sys.stderr)


def _merge(description: dict[str, Any], flags: dict[str, str | None]) -> dict[str, str]:
    """Puts the flags over the file's keys and returns what each such key is called in errors."""
    origins: dict[str, str] = {}
    for key, value in flags.items():
        if value is not None:
            description[key] = value
            origins[key] = f"--{key.replace('_', '-')}"
    return origins


def _set_command(
    description: dict[str, Any], origins: dict[str, str], wrap: str | None, command: tuple[str, ...]
) -> None:
    if wrap is not None:
        if command:
            raise click.UsageError("give --wrap or a command, not both")
        if not wrap.strip():
            raise click.UsageError("--wrap is empty: give the line that the shell is to run")
        description["command"] = ["sh", "-c", wrap]
        # As Slurm names such a job: the name of the shell would be that of them all.
        description.setdefault("name", "wrap")
        origins["command"] = "--wrap"
    elif command:
        description["command"] = list(command)
        origins["command"] = "COMMAND"


def _with_pairs(present: Any, added: dict[str, str]) -> Any:
    # What is not a mapping stays as it is: the parser complains of it together with everything else.
    return {**present, **added} if isinstance(present, dict) else added if present is None else present


def _variables(texts: tuple[str, ...]) -> tuple[dict[str, str], list[Violation]]:
    import os

    from ganger.wire.errors import Violation

    found: dict[str, str] = {}
    wrong = []
    for text in texts:
        name, equals, value = text.partition("=")
        if equals or name in os.environ:
            found[name] = value if equals else os.environ[name]
        else:
            wrong.append(Violation("--env", f"there is no variable {name} here; write --env {name}=VALUE"))
    return found, wrong


# Of members that are as before so many are named.
_NAMED = 3


# Values are texts here, as in `submit`.
@click.command()
# --name is what the jobs are to be called.
@chooses_jobs(has_name=False)
@click.option("--priority", metavar="N", help="-1000 to 1000; higher goes first.")
@click.option("--time", "-t", metavar="TIME|never", help="Stop it after running so long in all, e.g. 2h30m.")
@click.option("--name", "-n", metavar="TEXT", help="A label; need not be unique.")
@click.option("--partition", "-p", metavar="NAME", help="Use only nodes of this partition; '' for the default.")
@click.option("--gpu-type", metavar="TYPES", help="Take only GPUs of one of these types; '' for any.")
@click.option("--locality", metavar="LEVEL", help="How close together its GPUs should be, as in `submit`.")
@click.option("--tolerance", metavar="LEVEL", help="How far apart they may be. Give these three together.")
@click.option("--patience", metavar="TIME", help="How long to wait for --locality before taking --tolerance [10m].")
@click.option("--memory", metavar="SIZE", help="Host memory of each task; 0 for a share.")
@click.option("--cpus-per-gpu", metavar="N|auto", help="Cores beside each GPU.")
@click.option("--request-id", metavar="ID", help="Repeat it to update at most once.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask, also where it ends a job at once.")
@json_option
def update(selection: Selection, request_id: str | None, yes: bool, as_json: bool, **flags: str | None) -> int:
    """Change the request of a job or an array: `ganger update 7 --priority 5 --time 4h`.

    Priority, time and name of any job that has not ended, the rest of one that has never started; of an array, of every
    member that has not ended. All of it or nothing. A job that has run for longer than its new time is ended, after
    you have confirmed it.
    """
    from ganger.spec import make_update

    given = {key: value for key, value in flags.items() if value is not None}
    if not given:
        raise click.UsageError("say what to change, for example --priority 5")
    wanted = make_update(given, {key: f"--{key.replace('_', '-')}" for key in given})
    with open_client() as client:

        def change(name: str) -> Job | UpdateArrayResponse:
            message = _confirmed(client, name, wanted, request_id, yes)
            if not as_json:
                _print_updated(message, given)
            return message

        updated, worst = each_of(selection.named(client), change)
    for message in updated:
        if refused := _refused(message):
            worst = max(worst, ExitCode(report(CommandError(refused))))
    if as_json:
        print_json(updated)
    return worst


def _confirmed(
    client: Client, name: str, wanted: JobUpdate, request_id: str | None, yes: bool
) -> Job | UpdateArrayResponse:
    """Update it; where that ends a job at once, ask first. Without a terminal the refusal is reported as it is."""
    from ganger.wire.errors import UpdateEndsJob

    def change(may_end: bool) -> Job | UpdateArrayResponse:
        how: dict[str, Any] = {"request_id": request_id, "may_end": may_end}
        return of_job_or_array(
            name,
            lambda job: client.update_job(job, wanted, **how),
            lambda array: client.update_array(array, wanted, **how),
        )

    try:
        return change(yes)
    except UpdateEndsJob as error:
        if not sys.stdin.isatty():
            raise
        effect = error.message.partition(";")[0]
        if not click.confirm(f"{effect}. End it?", err=True):
            raise CommandError(f"{name} is as it was") from None
        return change(True)


def _print_updated(message: Job | UpdateArrayResponse, given: dict[str, str]) -> None:
    from ganger.cli.job_table import job_sentence
    from ganger.v1.job_pb2 import Job

    what = "".join(f", {key.replace('_', ' ')} {value}" for key, value in given.items())
    if isinstance(message, Job):
        place = f", place {message.queue_rank} in the queue" if message.queue_rank else ""
        print_line(f"{job_sentence(message)}{place}{what}")
        return
    print_line(f"array {number(message.array.name)}: {counted(message.updated, 'job')} updated{what}")


def _refused(message: Job | UpdateArrayResponse) -> str:
    """Return the members of an array that an update refused, with reasons; "" if it refused none."""
    from ganger.v1.job_pb2 import Job

    if isinstance(message, Job) or not message.refused:
        return ""
    lines = [f"  {one.reason}: {one.message}" for one in message.refused[:_NAMED]]
    if len(message.refused) > _NAMED:
        lines.append(f"  and {len(message.refused) - _NAMED} more")
    heading = f"{counted(len(message.refused), 'job')} of array {number(message.array.name)} refused"
    return "\n".join([f"{heading}:", *lines])
