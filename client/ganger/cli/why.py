"""`ganger why`: the true blocker of a job, and when it may start, with what the estimate rests on."""

from __future__ import annotations

import click

from ganger.cli.options import JobType, json_option, open_client


@click.command()
@click.argument("job", type=JobType())
@json_option
def why(job: str, as_json: bool) -> None:
    """Print why a job waits or is suspended, and when it may start."""
    from ganger.cli import failure_report, job_lines
    from ganger.console.json_output import print_json
    from ganger.console.safe_text import print_line
    from ganger.job import FINISHED
    from ganger.units import format_duration
    from ganger.v1.job_pb2 import Gang, Job

    with open_client() as client:
        answer = client.explain_job(job)
        report = [] if as_json else failure_report.lines(client, answer.job)
    if as_json:
        print_json(answer)
        return
    rank = f", place {answer.job.queue_rank} in the queue" if answer.job.queue_rank else ""
    where = f" on {job_lines.place(answer.job)}" if answer.job.state == Job.STATE_HOLDING else ""
    print_line(f"{job_lines.sentence(answer.job)}{where}{rank}")
    for line in report:
        print_line(line)
    if answer.job.trouble:
        print_line(f"trouble: {answer.job.trouble}")
    if answer.deadline_advice:
        print_line(f"deadline: {answer.deadline_advice}")
    if answer.kept_nodes:
        print_line(f"a place is kept for it on {', '.join(answer.kept_nodes)}")
    for mover in answer.movers:
        print_line(f"room is being made: {job_lines.mover(mover)}")
    if not answer.blockers and (where or answer.job.state in FINISHED):
        # Of an order on its way: what it waits for.
        if where and answer.job.gang.phase in (Gang.PHASE_STARTING, Gang.PHASE_STOPPING):
            print_line(answer.assumption)
        return
    # Of one that runs it is no cause: it is to leave its node, and cannot yet.
    first = "but" if where else "because"
    for position, blocker in enumerate(answer.blockers):
        print_line(f"{first if position == 0 else 'and':>{len(first)}} {blocker.reason}: {blocker.message}")
        # The sentence carries the figures already where the master put them in.
        figures = " ".join(f"{name}={value}" for name, value in sorted(blocker.figures.items()))
        if figures and "=" not in blocker.message:
            print_line(f"          {figures}")
    if where:
        return
    if answer.start_before_seconds > 0:
        soonest, latest = format_duration(answer.start_after_seconds), format_duration(answer.start_before_seconds)
        print_line(f"may start in {soonest} to {latest}, {answer.assumption}")
    elif answer.assumption:
        print_line(answer.assumption if not answer.blockers else f"start {answer.assumption}")
