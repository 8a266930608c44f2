"""What `ganger show`, `why`, `profile` and `submit --dry-run` print of one job: its facts, how it failed, its rates by
cores; and before its submission the keys of a job file, as a master would accept them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from grpc import StatusCode

from ganger.cli import job_table
from ganger.cli.metric_plot import TextPlot
from ganger.cli.options import number
from ganger.console import enum_text, print_json, print_pairs
from ganger.job import FINISHED
from ganger.spec_values import dependencies_text
from ganger.text import counted, format_cores, format_duration, format_memory
from ganger.v1.job_pb2 import MECHANISM_SIGNAL, MECHANISM_UNSPECIFIED, Job, JobSpec, Mechanism, Progress
from ganger.v1.job_service_pb2 import CreateArrayRequest
from ganger.v1.resources_pb2 import LEVEL_CLUSTER, Claim, Role, TaskShape
from ganger.v1.scheduling_pb2 import CoresCurve, CurvePoint
from ganger.wire import times
from ganger.wire.errors import ApiError

if TYPE_CHECKING:
    from ganger.client import Client

_LEVELS = ("pause", "offload", "checkpoint", "move")
# Of the log of a failed job.
_LINES = 10
_LINE_CHARACTERS = 500
_TAIL_BYTES = 8 * 1024


def pairs(job: Job) -> list[tuple[str, str]]:
    """Return what `show` prints, as names and texts; empty texts are not shown."""
    gang, spec = job.gang, job.spec
    can = [level for level in _LEVELS if getattr(job.capabilities, f"can_{level}")]
    if job.capabilities.offload_by:
        can = [f"offload ({job.capabilities.offload_by})" if level == "offload" else level for level in can]
    offers = {"TURNS": "time slices"}
    missing = [f"not {offers.get(name, name.lower())}: {why}" for name, why in sorted(job.capabilities.missing.items())]
    saved = f"step {job.checkpoint.step}, {format_memory(job.checkpoint.size_bytes)}, {job.checkpoint.path}"
    if job.checkpoint.nodes:
        saved += f" on the disk of {' and '.join(map(number, job.checkpoint.nodes))}"
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
        ("idle", job_table.idle_text(job)),
        ("waits for", "\n".join(f"{each.reason}: {each.message}" for each in job.blockers)),
        ("command", shlex.join(spec.command)),
        *role_programs(spec),
        ("directory", spec.working_directory),
        ("tasks", "\n".join(role_text(role, job_table.bounds(spec)) for role in spec.roles)),
        ("wants", _wants(job)),
        ("elastic", job_table.sizes_text(job)),
        ("gang", "\n".join(_claim(claim, spec.roles, job_table.has_given_back(job)) for claim in gang.claims)),
        ("moves to", "\n".join(_claim(claim, spec.roles) for claim in gang.move_claims)),
        ("cores", "\n".join(job_table.cores(job))),
        ("locality", job_table.locality_text(gang.level)),
        ("epoch", f"{gang.epoch}, revision {job.revision}" if gang.epoch else ""),
        ("attempt", str(job.attempt) if job.attempt > 1 else ""),
        ("pids", " ".join(str(pid or "-") for pid in gang.pids) if any(gang.pids) else ""),
        ("stopped at", f"step {gang.stop_step}" if gang.stop_step else ""),
        ("progress", job_table.progress_column(job)),
        ("remaining", _remaining(job)),
        ("evaluates", _evaluates(job.progress)),
        ("reported", _reported(job)),
        ("stop rule", job_table.unjudged(job)),
        ("waits for data", f"{job.progress.data_wait_share:.0%}" if job.progress.data_wait_share else ""),
        ("memory", memory_text(job.progress)),
        ("mechanism", _mechanism(job)),
        ("offers", "\n".join([", ".join(can), *missing]).strip() if job.state not in FINISHED else ""),
        ("checkpoint", saved if job.HasField("checkpoint") else ""),
        ("failures", f"{job.failures}, {spec.max_failures} allowed" if job.failures or spec.max_failures else ""),
        ("preemptions", str(job.preemptions or "")),
        ("submitted", job_table.instant(job.create_time)),
        ("started", job_table.instant(job.start_time)),
        ("ended", job_table.instant(job.end_time)),
        ("time" if job_table.has_run(job) else "has waited", job_table.elapsed(job)),
        ("efficiency", job_table.efficiency(job)),
        ("time limit", format_duration(times.seconds(spec.time_limit)) if spec.HasField("time_limit") else ""),
        ("deadline", job_table.instant(spec.deadline)),
        ("scheduled at", _scheduled_at(job)),
        ("gpu memory", format_memory(spec.gpu_memory_bytes) if spec.gpu_memory_bytes else ""),
        ("labels", " ".join(f"{name}={text}" for name, text in sorted(spec.labels.items()))),
    ]


def memory_text(progress: Progress) -> str:
    """Return the measured working set, and how much of its files is read again; empty where nothing is measured."""
    if not progress.working_set_bytes:
        return ""
    text = f"working set {format_memory(progress.working_set_bytes)}"
    if not progress.HasField("refault_bytes_per_s"):
        return f"{text}; whether its page cache is too small is not measured"
    again = f"{format_memory(int(progress.refault_bytes_per_s))}/s of files read again"
    return f"{text}; {again}, which the page cache had no room for"


def _evaluates(progress: Progress) -> str:
    if not progress.HasField("evaluation"):
        return ""
    return f"{counted(progress.evaluation.batches_in_row, 'mini-batch')} since the last step"


def _remaining(job: Job) -> str:
    """Return the estimate with its range, and how many of such ranges held the truth; empty without one."""
    if not job.HasField("remaining_time"):
        return ""
    found = job.remaining_time
    spans = found.expected, found.low, found.high
    expected, low, high = [format_duration(round(times.seconds(span))) for span in spans]
    if found.is_guess:
        return f"about {expected}, a guess: neither its losses nor a number of epochs show its end yet"
    record = f"; {found.held_ranges} of {found.judged_ranges} such ranges held" if found.judged_ranges else ""
    within = f"{low} to {high}" if found.HasField("high") else f"at least {low}"
    return f"about {expected} with what it has ({within}{record})"


def _scheduled_at(job: Job) -> str:
    if not job.spec.is_scheduled_at_epochs:
        return ""
    if job.progress.step and not job.progress.training_epochs:
        return "any step, as it reports no epochs (job.epochs(n) in its script does)"
    return "ends of its epochs"


def _member(job: Job) -> str:
    if not job.HasField("array"):
        return ""
    given = job_table.pairs(job.array.member.parameters)
    return f"{job_table.called(job)}, one of {job.array.size}" + (f": {given}" if given else "")


def _reported(job: Job) -> str:
    texts = [f"{one.name} {job_table.value_text(one.value)} (step {one.step})" for one in job.progress.metrics]
    if job.array.rungs:
        texts.append(f"at its rungs: {' '.join(map(job_table.value_text, job.array.rungs))}")
    return "\n".join(texts)


def _mechanism(job: Job) -> str:
    if not job.HasField("capabilities"):
        return ""
    spec, used = job.spec, job.capabilities.mechanism
    text = "not known yet" if used == MECHANISM_UNSPECIFIED else enum_text(Mechanism, used)
    if used == MECHANISM_SIGNAL:
        text += f": SIG{spec.stop_signal}, then at most {format_duration(times.seconds(spec.stop_grace))} to exit"
    if spec.mechanism:
        text += (
            " (--mechanism)" if spec.mechanism == used else f" ({enum_text(Mechanism, spec.mechanism)} was asked for)"
        )
    refused = [
        f"not {enum_text(Mechanism, one.mechanism)}: {one.reason}" for one in job.capabilities.refused_mechanisms
    ]
    return "\n".join([text, *refused])


def _failure(job: Job) -> str:
    if not job.HasField("failure"):
        return ""
    failure = job.failure
    # Without an exit code it never ran.
    code = f", exit code {failure.exit_code}" if failure.exit_code else ""
    return f"{failure.reason}: {failure.message} (rank {failure.rank}{code})"


def role_text(role: Role, bounds: str) -> str:
    """Return one role as a line; `bounds`: the range of tasks of a job with a range of GPUs, or empty."""
    shape = role.shape
    cores = counted(format_cores(shape.millicores), "core") if shape.millicores else "cores by measurement"
    memory = format_memory(shape.memory_bytes) if shape.memory_bytes else "a share of memory"
    gpus = counted(shape.gpus, "GPU") if shape.gpus else "no GPU"
    tasks = f"{role.tasks} ({role.tasks_min} to {role.tasks_max})" if role.tasks_max else bounds or str(role.tasks)
    return f"{tasks} × {role.name}: {', '.join([gpus, cores, memory, *bandwidth_texts(shape)])}"


def role_programs(spec: JobSpec) -> list[tuple[str, str]]:
    """Return lines about the programs of roles that have their own."""
    return [
        (f"{what} of {program.role}", text)
        for program in spec.role_programs
        for what, text in (
            ("command", shlex.join(program.command)),
            ("environment", " ".join(sorted(program.environment))),
        )
        if text
    ]


def bandwidth_texts(of: TaskShape | Claim) -> list[str]:
    """Return the named bandwidth as texts, "disk 500 MB/s"."""
    pairs = (("disk", of.disk_mb_per_s), ("network", of.net_mb_per_s))
    return [f"{name} {amount} MB/s" for name, amount in pairs if amount]


def _wants(job: Job) -> str:
    spec, locality, convergence = job.spec, job.spec.locality, job.spec.convergence
    within = f"within {format_duration(times.seconds(locality.patience))}"
    passes = f" in {convergence.passes} passes" if convergence.passes > 1 else ""
    wishes = [
        (spec.partition, f"partition {spec.partition}"),
        (spec.device_type, spec.device_type),
        (spec.nodes, counted(spec.nodes, "node")),
        (locality.wish, f"{job_table.locality_text(locality.wish)} {within}"),
        (locality.widest not in (0, LEVEL_CLUSTER), f"at most {job_table.locality_text(locality.widest)} apart"),
        (spec.priority, f"priority {spec.priority}"),
        (spec.weight, f"weight {spec.weight:g}"),
        (convergence.least_decrease, f"converges below {convergence.least_decrease:g}{passes}"),
        (spec.scheduler, f"scheduler {spec.scheduler}"),
    ]
    return ", ".join([text for is_wished, text in wishes if is_wished])


def _claim(claim: Claim, roles: Sequence[Role], has_given_back: bool = False) -> str:
    sockets = [f"{format_cores(held)} on socket {index}" for index, held in enumerate(claim.millicores) if held]
    cores = "cores: " + ", ".join(sockets) if sockets else "no cores"
    arena = f" and {format_memory(claim.arena_bytes)} for state moved off the GPUs" if claim.arena_bytes else ""
    held = f"{'GPU' if claim.device_mask.bit_count() == 1 else 'GPUs'} {job_table.devices(claim.device_mask)}; "
    memory = "; ".join([f"{format_memory(claim.memory_bytes)} of memory{arena}", *bandwidth_texts(claim)])
    if has_given_back:
        return f"{number(claim.node)}: {memory}; GPUs and cores are given back"
    counts = zip(roles, claim.tasks, strict=False) if len(roles) > 1 else ()
    tasks = "".join([f"{count} × {role.name}; " for role, count in counts if count])
    return f"{number(claim.node)}: {tasks}{held if claim.device_mask else ''}{cores}; {memory}"


def failure_pairs(client: Client, job: Job) -> list[tuple[str, str]]:
    """Return names and texts for `show`: "ran on" and "log of rank K"; none for a job that has not failed."""
    if job.state != job.STATE_FAILED:
        return []
    try:
        nodes = _places(client, job)
    except ApiError as error:
        nodes = f"unknown: {error.message}"
    if not nodes and not job.HasField("start_time"):
        return [("ran on", "no node: it was never given a place")]
    return [("ran on", nodes), (f"log of rank {job.failure.rank}", _last_lines(client, job))]


def failure_lines(client: Client, job: Job) -> list[str]:
    """Return the same as lines of text, for `why` and `history`."""
    found: list[str] = []
    for name, text in failure_pairs(client, job):
        first, *more = text.split("\n")
        found += [f"{name}: {first}"] if not more else [f"{name} ends:", *[f"  {line}" for line in (first, *more)]]
    return found


def _places(client: Client, job: Job) -> str:
    """Return the nodes of the attempt that failed, "n1, n2"; "" for a job that was never given a gang."""
    nodes = ""
    for event in client.list_events(job.name):
        if event.kind == "gang_approved":
            nodes = event.figures.get("nodes", "")
            if event.figures.get("epoch") == str(job.failure.epoch):
                break
    return ", ".join(nodes.split())


def _last_lines(client: Client, job: Job) -> str:
    try:
        data = b"".join([chunk.data for chunk in client.read_log(job.name, job.failure.rank, -_TAIL_BYTES)])
    except ApiError as error:
        return f"cannot be read: {error.message}"
    written = data.decode(errors="replace").rstrip("\n").split("\n")
    if len(data) >= _TAIL_BYTES and len(written) > 1:
        # The first line is cut.
        written = written[1:]
    return "\n".join([line[:_LINE_CHARACTERS] for line in written[-_LINES:]]) or "nothing was written"


def rate_rows(curve: CoresCurve) -> Iterator[tuple[str, ...]]:
    fitted = {point.cores: point.steps_per_s for point in curve.fitted}
    for point in curve.points:
        text = f"{fitted[point.cores]:.4g}" if point.cores in fitted else ""
        yield f"{point.cores:g}", f"{point.steps_per_s:.4g}", text, "series" if point.is_inherited else "this job"


def memory_rows(curve: CoresCurve) -> Iterator[tuple[str, ...]]:
    for point in curve.memory_points:
        source = "series" if point.is_inherited else "this job"
        yield format_memory(point.memory_bytes), f"{point.steps_per_s:.4g}", f"{point.cores:g}", source


def plot(curve: CoresCurve) -> list[str]:
    """Return lines with rates over cores: `*` measured, `o` inherited from the series, `.` fitted, `|` theta."""
    every: list[CurvePoint] = [*curve.points, *curve.fitted]
    most_cores = max(point.cores for point in every)
    most_rate = max(point.steps_per_s for point in every)
    if not (most_cores > 0.0 and most_rate > 0.0):
        return []

    canvas = TextPlot((0.0, most_cores), (0.0, most_rate))
    if curve.fitted:
        canvas.upright(curve.sweet_point, "|")
    for before, after in zip(curve.fitted, curve.fitted[1:], strict=False):
        # A line between two whole numbers of cores.
        for at in range(canvas.column(before.cores), canvas.column(after.cores) + 1):
            cores = canvas.at(at)
            share = min(1.0, max(0.0, (cores - before.cores) / (after.cores - before.cores)))
            canvas.put(cores, before.steps_per_s + share * (after.steps_per_s - before.steps_per_s), ".")
    for point in curve.points:
        canvas.put(point.cores, point.steps_per_s, "o" if point.is_inherited else "*")
    legend = "steps/s by cores for each GPU: * measured, o of its series, . fitted, | theta"
    return [*canvas.lines(), legend]


# -- a job that would be submitted -------------------------------------------------------------------------------------

# Of the members of an array.
_MEMBERS_SHOWN = 3


_UNCHECKED = "only the description is checked, as"


def print_dry_run(found: JobSpec | CreateArrayRequest, request_id: str | None, as_json: bool) -> None:
    """Print a job or an array in place of submitting it; where a master answers, with the partition and the time limit
    that it would get. Raises ApiError where the submission would be refused."""
    spec = found if isinstance(found, JobSpec) else found.spec
    if note := _settle(found, spec, request_id):
        print(f"note: {note}", file=sys.stderr)
    if as_json:
        print_json(found)
        return
    print_pairs([*([] if isinstance(found, JobSpec) else _array_pairs(found)), *_spec_pairs(spec)])


def _array_pairs(request: CreateArrayRequest) -> list[tuple[str, str]]:
    members = [
        f"{one.index}: {job_table.pairs(one.parameters)}".rstrip(": ") for one in request.members[:_MEMBERS_SHOWN]
    ]
    more = len(request.members) - len(members)
    return [
        ("array", counted(len(request.members), "job")),
        ("members", "\n".join([*members, *([f"and {more} more"] if more else [])])),
        ("at_once", str(request.max_concurrent or "")),
        ("stop", job_table.rule_text(request.rule) if request.HasField("rule") else ""),
    ]


def _spec_pairs(spec: JobSpec) -> list[tuple[str, str]]:
    """Return the keys of a job file with the values of this job; empty where it has none."""
    gpus = f"{spec.gpus_min}:{spec.gpus_max}" if spec.gpus_max else str(job_table.gpus(spec))
    locality, every = spec.locality, times.seconds(spec.checkpoint_interval)
    passes = f",{spec.convergence.passes}" if spec.convergence.passes > 1 else ""
    return [
        ("name", spec.display_name),
        ("command", shlex.join(spec.command)),
        *role_programs(spec),
        ("directory", spec.working_directory),
        ("environment", " ".join(sorted(spec.environment))),
        ("gpus", gpus),
        ("tasks", "\n".join(role_text(role, job_table.bounds(spec)) for role in spec.roles)),
        ("partition", spec.partition),
        ("gpu_type", spec.device_type),
        ("gpu_memory", format_memory(spec.gpu_memory_bytes) if spec.gpu_memory_bytes else ""),
        ("nodes", str(spec.nodes or "")),
        ("locality", job_table.locality_text(locality.wish or locality.widest)),
        ("tolerance", job_table.locality_text(locality.widest) if locality.wish else ""),
        ("patience", _time(locality, "patience")),
        ("priority", str(spec.priority or "")),
        ("weight", f"{spec.weight:g}" if spec.weight else ""),
        ("converges", f"{spec.convergence.least_decrease:g}{passes}" if spec.HasField("convergence") else ""),
        ("time", _time(spec, "time_limit")),
        ("deadline", job_table.instant(spec.deadline)),
        ("max_failures", str(spec.max_failures or "")),
        ("checkpoint_copies", str(spec.checkpoint_copies or "")),
        ("checkpoint_every", "never" if every < 0 else _time(spec, "checkpoint_interval")),
        ("preemptible", "false" if spec.HasField("preemptible") and not spec.preemptible else ""),
        ("movable", "false" if spec.HasField("movable") and not spec.movable else ""),
        ("schedule_at", "epoch" if spec.is_scheduled_at_epochs else ""),
        ("after", dependencies_text(spec.dependencies)),
        ("scheduler", spec.scheduler),
        ("agent", "none" if spec.agent == JobSpec.AGENT_NONE else ""),
        ("mechanism", enum_text(Mechanism, spec.mechanism) if spec.mechanism else ""),
        ("must_move", "true" if spec.is_move_required else ""),
        ("close_connections", "true" if spec.closes_connections else ""),
        ("signal", spec.stop_signal),
        ("grace", _time(spec, "stop_grace")),
        ("distributed", "true" if spec.distributed else ""),
        ("labels", job_table.pairs(spec.labels)),
    ]


def _time(message: object, field: str) -> str:
    is_set = message.HasField(field)  # type: ignore[attr-defined]  # every message has it
    return format_duration(times.seconds(getattr(message, field))) if is_set else ""


def _settle(found: JobSpec | CreateArrayRequest, spec: JobSpec, request_id: str | None) -> str:
    """Have the master judge the submission, and put the partition and the time limit that the job would get into its
    spec. Return what its author has to know. Raises ApiError if the submission would be refused."""
    from ganger.cli.options import open_client
    from ganger.wire.endpoints import EndpointError
    from ganger.wire.errors import ApiError, DeadlineExceeded, NotReady, Unreachable

    with ExitStack() as stack:
        try:
            job = stack.enter_context(open_client()).validate(found, request_id=request_id)
        except (EndpointError, Unreachable, DeadlineExceeded, NotReady):
            return f"{_UNCHECKED} no master answers"
        except ApiError as error:
            if error.code is StatusCode.UNIMPLEMENTED:
                return f"{_UNCHECKED} the master is of an older version"
            raise
    spec.partition = job.spec.partition
    if job.spec.HasField("time_limit"):
        spec.time_limit.CopyFrom(job.spec.time_limit)
    return f"--request-id {request_id} was used for {job.name}: no other is submitted" if job.name else ""
