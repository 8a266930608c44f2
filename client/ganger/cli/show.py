"""`ganger show`: all that is known of one job.

`ganger why`: the true blocker of a job, and when it may start, with what the estimate rests on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import click

from ganger.cli.job_selection import Selection, chooses_jobs, each_of, print_answers
from ganger.cli.options import JobType, array_of, json_option, number, open_client

if TYPE_CHECKING:
    from google.protobuf.timestamp_pb2 import Timestamp

    from ganger.client import Client
    from ganger.v1.array_pb2 import Array
    from ganger.v1.job_pb2 import Job


_LEVELS: Final = ("pause", "offload", "checkpoint", "move")


@click.command()
@chooses_jobs()
@json_option
def show(selection: Selection, as_json: bool) -> int:
    """Show all that is known of jobs, or of arrays and their members."""
    with open_client() as client:
        found, worst = each_of(selection.named(client, ended=True), lambda name: _found(client, name, as_json))
    if as_json:
        print_answers([_plain(one, members) for one, members, _ in found], selection)
        return worst
    for index, (one, members, report) in enumerate(found):
        if index:
            print()
        _print(one, members, report)
    return worst


def _found(client: Client, name: str, as_json: bool) -> tuple[Job | Array, list[Job], list[tuple[str, str]]]:
    """Return the job, or the array with its members by number; of a failed job the report. Raises ApiError."""
    from ganger.cli import failures
    from ganger.wire.errors import JobNotFound

    array = name
    if not name.startswith("arrays/"):
        try:
            job = client.get_job(name)
            return job, [], [] if as_json else failures.pairs(client, job)
        except JobNotFound as error:
            array = array_of(name, error)
    members = client.list_jobs(array=array)
    return client.get_array(array), sorted(members, key=lambda member: int(number(member.name))), []


def _plain(one: Job | Array, members: list[Job]) -> dict[str, Any]:
    from ganger.console import plain

    is_array = one.DESCRIPTOR.name == "Array"
    return {**plain(one), **({"members": [plain(member) for member in members]} if is_array else {})}


def _print(one: Job | Array, members: list[Job], report: list[tuple[str, str]]) -> None:
    from ganger.cli import job_table
    from ganger.console import print_pairs, print_table

    if one.DESCRIPTOR.name == "Job":
        print_pairs([*pairs(cast("Job", one)), *report])
        return
    print_pairs(job_table.array_facts(cast("Array", one)))
    print()
    print_table(*job_table.members_table(members))


def pairs(job: Job) -> list[tuple[str, str]]:
    """Return what `show` prints, as names and texts; empty texts are not shown."""
    import shlex

    from ganger.cli import job_table
    from ganger.job import FINISHED
    from ganger.units import format_duration, format_memory
    from ganger.wire import times

    def instant(time: Timestamp) -> str:
        return times.local_datetime(time).strftime("%Y-%m-%d %H:%M:%S") if time.seconds else ""

    gang, spec = job.gang, job.spec
    can = [level for level in _LEVELS if getattr(job.capabilities, f"can_{level}")]
    if job.capabilities.offload_by:
        can = [f"offload ({job.capabilities.offload_by})" if level == "offload" else level for level in can]
    sizes = job_table.sizes_text(job)
    missing = [f"not {_offer(level)}: {why}" for level, why in sorted(job.capabilities.missing.items())]
    return [
        ("job", f"{number(job.name)}  {job.uid}"),
        ("name", spec.display_name),
        ("array", _member(job)),
        ("user", job.user),
        ("state", job_table.state_text(job) + (f", place {job.queue_rank} in the queue" if job.queue_rank else "")),
        ("failure", _failure(job)),
        ("because", job.end_reason),
        ("trouble", job.trouble),
        ("concern", job.progress.stall_reason),
        ("waits for", "\n".join(f"{each.reason}: {each.message}" for each in job.blockers)),
        ("command", shlex.join(spec.command)),
        ("directory", spec.working_directory),
        ("tasks", "\n".join(_role(role, job_table.bounds(spec)) for role in spec.roles)),
        ("wants", _wants(job)),
        ("elastic", sizes),
        ("gang", "\n".join(_claim(claim, job_table.has_given_back(job)) for claim in gang.claims)),
        ("moves to", "\n".join(_claim(claim) for claim in gang.move_claims)),
        ("cores", "\n".join(job_table.cores(job))),
        ("locality", job_table.locality_text(gang.level)),
        ("epoch", f"{gang.epoch}, revision {job.revision}" if gang.epoch else ""),
        ("pids", " ".join(str(pid or "-") for pid in gang.pids) if any(gang.pids) else ""),
        ("stopped at", f"step {gang.stop_step}" if gang.stop_step else ""),
        ("progress", job_table.progress_text(job.progress)),
        ("evaluates", _evaluation(job)),
        ("reported", _reported(job)),
        ("waits for data", f"{job.progress.data_wait_share:.0%}" if job.progress.data_wait_share else ""),
        ("mechanism", _mechanism(job)),
        ("offers", "\n".join([", ".join(can), *missing]).strip() if job.state not in FINISHED else ""),
        ("checkpoint", _checkpoint(job)),
        ("failures", f"{job.failures}, {spec.max_failures} allowed" if job.failures or spec.max_failures else ""),
        ("preemptions", str(job.preemptions or "")),
        ("submitted", instant(job.create_time)),
        ("started", instant(job.start_time)),
        ("ended", instant(job.end_time)),
        ("time" if job.HasField("start_time") else "has waited", job_table.elapsed(job)),
        ("efficiency", job_table.efficiency(job)),
        ("time limit", format_duration(times.seconds(spec.time_limit)) if spec.HasField("time_limit") else ""),
        ("deadline", instant(spec.deadline)),
        ("gpu memory", format_memory(spec.gpu_memory_bytes) if spec.gpu_memory_bytes else ""),
        ("labels", " ".join(f"{name}={text}" for name, text in sorted(spec.labels.items()))),
    ]


def _member(job: Job) -> str:
    from ganger.cli.job_table import called, pairs

    if not job.HasField("array"):
        return ""
    given = pairs(job.array.member.parameters)
    return f"{called(job)}, one of {job.array.size}" + (f": {given}" if given else "")


def _evaluation(job: Job) -> str:
    progress = job.progress
    in_row = progress.evaluation.batches_in_row
    return f"{in_row} mini-batches since the last step" if progress.HasField("evaluation") else ""


def _reported(job: Job) -> str:
    from ganger.cli.job_table import value_text

    told = [f"{one.name} {value_text(one.value)} (step {one.step})" for one in job.progress.metrics]
    if job.array.rungs:
        told.append(f"at its rungs: {' '.join(map(value_text, job.array.rungs))}")
    return "\n".join(told)


def _offer(name: str) -> str:
    return "time slices" if name == "TURNS" else name.lower()


def _mechanism(job: Job) -> str:
    """Return the mechanism by which the job is stopped, saved and moved, and why stronger ones do not apply."""
    from ganger.units import format_duration
    from ganger.v1.job_pb2 import MECHANISM_SIGNAL, MECHANISM_UNSPECIFIED, Mechanism
    from ganger.wire import times

    def name_of(mechanism: Mechanism.ValueType) -> str:
        return Mechanism.Name(mechanism).removeprefix("MECHANISM_").lower()

    if not job.HasField("capabilities"):
        return ""
    spec, used = job.spec, job.capabilities.mechanism
    text = "not known yet" if used == MECHANISM_UNSPECIFIED else name_of(used)
    if used == MECHANISM_SIGNAL:
        text += f": SIG{spec.stop_signal}, then at most {format_duration(times.seconds(spec.stop_grace))} to exit"
    if spec.mechanism:
        text += " (--mechanism)" if spec.mechanism == used else f" ({name_of(spec.mechanism)} was asked for)"
    refused = [f"not {name_of(one.mechanism)}: {one.reason}" for one in job.capabilities.refused_mechanisms]
    return "\n".join([text, *refused])


def _failure(job: Job) -> str:
    if not job.HasField("failure"):
        return ""
    failure = job.failure
    # Without an exit code it never ran.
    code = f", exit code {failure.exit_code}" if failure.exit_code else ""
    return f"{failure.reason}: {failure.message} (rank {failure.rank}{code})"


def _role(role: object, bounds: str) -> str:
    from ganger.units import format_cores, format_memory
    from ganger.v1.resources_pb2 import Role

    assert isinstance(role, Role)
    shape = role.shape
    cores = f"{format_cores(shape.millicores)} cores" if shape.millicores else "cores by measurement"
    memory = format_memory(shape.memory_bytes) if shape.memory_bytes else "a share of memory"
    gpus = "1 GPU" if shape.gpus == 1 else f"{shape.gpus} GPUs" if shape.gpus else "no GPU"
    return f"{bounds or role.tasks} × {role.name}: {gpus}, {cores}, {memory}"


def _wants(job: Job) -> str:
    from ganger.cli.job_table import locality_text
    from ganger.units import format_duration
    from ganger.v1.resources_pb2 import LEVEL_CLUSTER
    from ganger.wire import times

    spec, locality, parts = job.spec, job.spec.locality, []
    if spec.device_type:
        parts.append(spec.device_type)
    if spec.nodes:
        parts.append(f"{spec.nodes} node{'s' * (spec.nodes > 1)}")
    if locality.wish:
        parts.append(f"{locality_text(locality.wish)} within {format_duration(times.seconds(locality.patience))}")
    if locality.widest not in (0, LEVEL_CLUSTER):
        parts.append(f"at most {locality_text(locality.widest)} apart")
    if spec.priority:
        parts.append(f"priority {spec.priority}")
    if spec.weight:
        parts.append(f"weight {spec.weight:g}")
    if spec.convergence.least_decrease:
        passes = f" in {spec.convergence.passes} passes" if spec.convergence.passes > 1 else ""
        parts.append(f"converges below {spec.convergence.least_decrease:g}{passes}")
    if spec.scheduler:
        parts.append(f"scheduler {spec.scheduler}")
    return ", ".join(parts)


def _claim(claim: object, has_given_back: bool = False) -> str:
    from ganger.cli.job_table import devices
    from ganger.units import format_cores, format_memory
    from ganger.v1.resources_pb2 import Claim

    assert isinstance(claim, Claim)
    sockets = [f"{format_cores(held)} on socket {index}" for index, held in enumerate(claim.millicores) if held]
    cores = "cores: " + ", ".join(sockets) if sockets else "no cores"
    arena = f" and {format_memory(claim.arena_bytes)} for state moved off the GPUs" if claim.arena_bytes else ""
    held = f"{'GPU' if claim.device_mask.bit_count() == 1 else 'GPUs'} {devices(claim.device_mask)}; "
    memory = f"{format_memory(claim.memory_bytes)} of memory{arena}"
    if has_given_back:
        return f"{number(claim.node)}: {memory}; GPUs and cores are given back"
    return f"{number(claim.node)}: {held if claim.device_mask else ''}{cores}; {memory}"


def _checkpoint(job: Job) -> str:
    from ganger.units import format_memory

    if not job.HasField("checkpoint"):
        return ""
    return f"step {job.checkpoint.step}, {format_memory(job.checkpoint.size_bytes)}, {job.checkpoint.path}"


@click.command()
@click.argument("job", type=JobType())
@click.option("--cpus", is_flag=True, help="Why it has the CPU cores that it has; `ganger profile` has the figures.")
@json_option
def why(job: str, cpus: bool, as_json: bool) -> None:
    """Print why a job waits or is suspended, and when it may start."""
    from ganger.cli import failures, job_table
    from ganger.console import print_json, print_line
    from ganger.job import FINISHED
    from ganger.units import format_duration
    from ganger.v1.job_pb2 import Gang, Job
    from ganger.wire.times import seconds

    with open_client() as client:
        answer = client.explain_job(job)
        report = [] if as_json or cpus else failures.lines(client, answer.job)
    if as_json:
        print_json(answer)
        return
    if cpus:
        print_line(answer.cores_reason or "the master reports no reasons for cores: it is of an older version")
        return
    rank = f", place {answer.job.queue_rank} in the queue" if answer.job.queue_rank else ""
    where = f" on {job_table.place(answer.job)}" if answer.job.state == Job.STATE_HOLDING else ""
    print_line(f"{job_table.job_sentence(answer.job)}{where}{rank}")
    for line in report:
        print_line(line)
    if answer.job.trouble:
        print_line(f"trouble: {answer.job.trouble}")
    if answer.deadline_advice:
        print_line(f"deadline: {answer.deadline_advice}")
    if answer.reserved_nodes:
        print_line(f"a place is kept for it on {', '.join(answer.reserved_nodes)}")
    for mover in answer.migration_steps:
        print_line(f"room is being made: {job_table.mover(mover)}")
    if not answer.blockers and (where or answer.job.state in FINISHED):
        # What a pending order waits for.
        if where and answer.job.gang.phase in (Gang.PHASE_STARTING, Gang.PHASE_STOPPING):
            print_line(answer.assumption)
        return
    # A running job does not wait because of them: they keep it from leaving its node.
    first = "but" if where else "because"
    for position, blocker in enumerate(answer.blockers):
        print_line(f"{first if position == 0 else 'and':>{len(first)}} {blocker.reason}: {blocker.message}")
        # The sentence carries the figures already where the master put them in.
        figures = " ".join(f"{name}={value}" for name, value in sorted(blocker.figures.items()))
        if figures and "=" not in blocker.message:
            print_line(f"          {figures}")
    if where:
        return
    if answer.HasField("start_before"):
        soonest, latest = format_duration(seconds(answer.start_after)), format_duration(seconds(answer.start_before))
        print_line(f"may start in {soonest} to {latest}, {answer.assumption}")
    elif answer.assumption:
        print_line(answer.assumption if not answer.blockers else f"start {answer.assumption}")
