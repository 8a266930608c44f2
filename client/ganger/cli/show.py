"""`ganger queue`, `show`, `why` and `profile`: lists of jobs, all that is known of one, what it waits for, its rates.

The queue lists jobs with a gang and finished ones by number, then pending jobs in order.
"""

from __future__ import annotations

import re
import sys
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import click

from ganger.cli.options import (
    JobType,
    Selection,
    chooses_jobs,
    each_of,
    json_option,
    members_of,
    number,
    of_job_or_array,
    open_client,
    pairs,
)
from ganger.console import plain, print_json, print_line, print_pairs, print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ganger.v1.array_pb2 import Array
    from ganger.v1.job_pb2 import Job

_HEADINGS = ("JOB", "NAME", "USER", "STATE", "GPUS", "TIME", "PLACE", "PROGRESS", "NODES/REASON")
# Columns that a narrow terminal goes without before the reason is cut.
_SPARE = ("USER", "PLACE")
_NO_REASON = "the master reports no reasons for cores: it is of an older version"
# What STATE says, and in which states a job can be that reads so.
_HOLDING, _RESTING = ("HOLDING",), ("HOLDING", "SUSPENDED")
_STATES = {
    "pending": ("PENDING",),
    "held": ("PENDING",),
    "starting": _HOLDING,
    "running": _HOLDING,
    "waiting": _HOLDING,
    "parked": _HOLDING,
    "moving": _HOLDING,
    "resizing": _HOLDING,
    "stopping": _RESTING,
    "suspended": _RESTING[1:],
    "succeeded": ("SUCCEEDED",),
    "failed": ("FAILED",),
    "cancelled": ("CANCELLED",),
    "stopped": ("STOPPED",),
    # Every job with a gang, in any phase.
    "holding": _HOLDING,
}


class _StateChoice(click.Choice[str]):
    """A state as STATE has it; those of Slurm are refused with ours."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from ganger.cli.slurm import STATES

        if ours := STATES.get(str(value).upper()):
            self.fail(f"{value} is a state of Slurm: write {ours}", param, ctx)
        return super().convert(value, param, ctx)


@click.command()
@click.option("--all", "-a", "everything", is_flag=True, help="Finished jobs too.")
@click.option(
    "--state",
    "-s",
    "states",
    multiple=True,
    metavar="STATE",
    type=_StateChoice(tuple(_STATES), case_sensitive=False),
    help="Only jobs in this state, members of arrays among them; holding: jobs that have a gang. Repeat for more.",
)
@click.option("--user", "-u", default="", help="Only this user's.")
@click.option("--partition", "-p", metavar="NAME", default="", help="Only jobs of this partition.")
@click.option("--name", metavar="TEXT", default="", help="Only jobs submitted with this --name.")
@click.option("--label", "-l", "labels", multiple=True, metavar="NAME=VALUE", help="Only jobs with this label.")
@click.option("--limit", "-n", type=click.IntRange(1), default=1_000, show_default=True, help="At most so many.")
@click.option("--members", "-r", is_flag=True, help="The members of arrays one by one, not folded into a line.")
@json_option
def queue(
    everything: bool,
    states: tuple[str, ...],
    user: str,
    partition: str,
    name: str,
    labels: tuple[str, ...],
    limit: int,
    members: bool,
    as_json: bool,
) -> None:
    """List jobs; without options those that have not ended. A job array is one line."""
    from ganger.cli import job_table
    from ganger.v1.job_pb2 import Job

    chosen_labels, wrong = pairs("--label", labels)
    if wrong:
        raise click.UsageError("; ".join(f"{field}: {what}" for field, what in wrong))
    wanted = [
        [Job.State.Value(f"STATE_{each}") for each in sorted({each for state in states for each in _STATES[state]})]
    ]
    if not states and not everything:
        # Jobs that hold devices come first, so that a long queue never cuts them off.
        wanted = [[Job.STATE_HOLDING, Job.STATE_SUSPENDED], [Job.STATE_PENDING]]
    # A filter holds for jobs: of an array, for some members perhaps.
    members = members or bool(states or name or chosen_labels or partition)
    with open_client() as client:
        arrays = [] if members else client.list_arrays(user, live=not everything)
        room = max(0, limit - len(arrays))
        found: list[Job] = []
        for group in wanted:
            listed = client.list_jobs(group, user, fold_arrays=not members, name=name, labels=chosen_labels)
            fitting = (
                job for job in listed if (not states or _is_in(job, states)) and partition in ("", job.spec.partition)
            )
            found += islice(fitting, max(0, room + 1 - len(found)))
        jobs = sorted(found[:room], key=job_table.order)
        # Jobs may name a partition that the settings no longer have: they are listed.
        if partition and not jobs:
            from ganger.cli.partitions import check_partition

            check_partition(partition, client.list_partitions())
    if len(found) + len(arrays) > limit:
        print(f"only {limit} are listed, those that wait or have ended from the newest: --limit N", file=sys.stderr)
    arrays = sorted(arrays[:limit], key=lambda array: int(number(array.name)))
    if as_json:
        print_json([*jobs, *arrays])
        return
    is_chosen = everything or states or name or chosen_labels or partition
    _print_queue(jobs, arrays, "no jobs" if is_chosen else "no live jobs; --all shows the others")


def _print_queue(jobs: Sequence[Job], arrays: Sequence[Array], empty: str) -> None:
    """Print jobs and arrays as a table, with a column of partitions if there are some."""
    from ganger.cli import job_table

    rows: list[tuple[str, ...]] = [
        (
            job_table.called(job),
            job_table.label(job),
            job_table.column(job.user),
            job_table.state_text(job),
            job_table.gpus_text(job),
            job_table.elapsed(job),
            str(job.queue_rank or ""),
            job_table.progress_column(job),
            job_table.note(job),
        )
        for job in jobs
    ]
    rows += [job_table.array_row(array) for array in arrays]
    headings: tuple[str, ...] = _HEADINGS
    named = [*[job.spec.partition for job in jobs], *[array.partition for array in arrays]]
    if any(named):
        partitions = map(job_table.column, named)
        rows = [(*row[:3], inside, *row[3:]) for row, inside in zip(rows, partitions, strict=True)]
        headings = (*headings[:3], "PARTITION", *headings[3:])
    print_table(headings, rows, empty, _SPARE)


def _is_in(job: Job, states: tuple[str, ...]) -> bool:
    from ganger.cli.job_table import state_text

    # "parked(OFFLOAD)", "running, in turn", "waiting for its turn"
    word = re.split(r"\W", state_text(job), maxsplit=1)[0]
    return word in states or ("holding" in states and job.state == job.STATE_HOLDING)


@click.command()
@chooses_jobs()
@json_option
def show(selection: Selection, as_json: bool) -> int:
    """Show all that is known of jobs, or of arrays and their members."""
    with open_client() as client:

        def of_job(name: str) -> tuple[Job, list[tuple[str, str]]]:
            from ganger.cli.job_details import failure_pairs

            job = client.get_job(name)
            return job, [] if as_json else failure_pairs(client, job)

        def of_array(name: str) -> tuple[Array, list[Job]]:
            members = members_of(client, name)
            return client.get_array(name), members

        names = selection.named(client, ended=True)
        found, worst = each_of(names, lambda name: of_job_or_array(name, of_job, of_array))
    if as_json:
        selection.print_answers([_plain(one, more) for one, more in found])
        return worst
    for index, (one, more) in enumerate(found):
        if index:
            print()
        _print(one, more)
    return worst


def _plain(one: Job | Array, members: list[Any]) -> dict[str, Any]:
    is_array = one.DESCRIPTOR.name == "Array"
    return {**plain(one), **({"members": [plain(member) for member in members]} if is_array else {})}


def _print(one: Job | Array, more: list[Any]) -> None:
    from ganger.cli import job_details, job_table

    if one.DESCRIPTOR.name == "Job":
        print_pairs([*job_details.pairs(cast("Job", one)), *more])
        return
    print_pairs(job_table.array_facts(cast("Array", one)))
    print()
    print_table(*job_table.members_table(more))


@click.command()
@click.argument("job", type=JobType())
@click.option(
    "--cpus", is_flag=True, help="Why it has its CPU cores and host memory; `ganger profile` has the figures."
)
@json_option
def why(job: str, cpus: bool, as_json: bool) -> None:
    """Print why a job waits or is suspended, and when it may start."""
    from ganger.cli import job_table
    from ganger.cli.job_details import failure_lines
    from ganger.job import FINISHED
    from ganger.v1.job_pb2 import Gang, Job
    from ganger.wire.times import seconds

    with open_client() as client:
        answer = client.explain_job(job)
        report = [] if as_json or cpus else failure_lines(client, answer.job)
    if as_json:
        print_json(answer)
        return
    if cpus:
        print_line(" ".join(filter(None, (answer.cores_reason or _NO_REASON, answer.memory_reason))))
        return
    rank = f", place {answer.job.queue_rank} in the queue" if answer.job.queue_rank else ""
    where = f" on {job_table.place(answer.job)}" if answer.job.state == Job.STATE_HOLDING else ""
    print_line(f"{job_table.job_sentence(answer.job)}{where}{rank}")
    for line in report:
        print_line(line)
    unjudged = job_table.unjudged(answer.job)
    for name, text in (
        ("trouble", answer.job.trouble),
        ("idle", job_table.idle_text(answer.job)),
        ("stop rule", unjudged),
        ("deadline", answer.deadline_advice),
    ):
        if text:
            print_line(f"{name}: {text}")
    if answer.kept_nodes:
        print_line(f"a place is kept for it on {', '.join(answer.kept_nodes)}")
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
    if where:
        return
    if answer.HasField("start_before"):
        when = job_table.span_text(seconds(answer.start_after), seconds(answer.start_before))
        print_line(f"may start {when}, {answer.assumption}")
    elif answer.assumption:
        print_line(answer.assumption if not answer.blockers else f"start {answer.assumption}")


@click.command()
@click.argument("job", type=JobType())
@json_option
def profile(job: str, as_json: bool) -> None:
    """Show the measured rates of a job by CPU cores, the fitted curve, and the number of cores chosen by it; and the
    host memory that it was measured to use."""
    from ganger.cli.job_details import memory_rows, memory_text, plot, rate_rows

    with open_client() as client:
        answer = client.explain_job(job)
    curve = answer.cores_curve if answer.HasField("cores_curve") else None
    if as_json:
        found = None if curve is None else plain(curve)
        memory = {"memory_reason": answer.memory_reason, "memory": memory_text(answer.job.progress)}
        print_json({"job": job, "cores_reason": answer.cores_reason, "cores_curve": found, **memory})
        return
    for one in [] if curve is None else [curve, *curve.other_phases]:
        if one.phase:
            print_line(f"{one.phase}:")
        print_table(("CORES", "STEPS/S", "FITTED", "SOURCE"), list(rate_rows(one)), "not measured yet")
        print_line("")
        for line in plot(one) if one.points else []:
            print_line(line)
        print_line("")
        if one.memory_points:
            print_table(("MEMORY", "STEPS/S", "CORES", "SOURCE"), list(memory_rows(one)), "")
            print_line("")
    print_line(answer.cores_reason or _NO_REASON)
    if answer.memory_reason:
        print_line(answer.memory_reason)
    if text := memory_text(answer.job.progress):
        print_line(f"Now: {text}.")
