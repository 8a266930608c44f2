"""`ganger simulate` and `ganger compare`: replay a trace on a cluster under one policy, or under several.

All arguments are checked before the simulation starts. Heavy imports are inside functions, so that help is fast.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from ganger.console import CommandError, ExitCode, Parsed
from ganger.program_setup import one_thread_each

from ganger_master.core.settings import DEFAULT_POLICY
from ganger_master.simulator.flags import (
    CLUSTER,
    LOAD_PHASES,
    ProgressBar,
    amount,
    joined,
    listed,
    say,
    shared_flags,
)

if TYPE_CHECKING:
    from ganger_master.simulator.inputs import Load, Material, ReplayOptions, SwitchCosts
    from ganger_master.simulator.parallel_runs import RunCell
    from ganger_master.simulator.report.figures import Figures
    from ganger_master.simulator.report.outcomes import Run
    from ganger_master.simulator.traces.servers import Servers

_Value = TypeVar("_Value")
_SIDE_BY_SIDE = (DEFAULT_POLICY, "fifo-backfill", "fifo")


def _list_policies(context: click.Context, _: click.Parameter, is_wanted: bool) -> None:
    if is_wanted:
        _import_numpy()
        from ganger_master.policies import EXTRA_STAGES, NAMES, policy_named
        from ganger_master.policies.placements import PLACEMENTS
        from ganger_master.policies.tunings.catalogue import TUNINGS

        for name in NAMES:
            is_oracle = policy_named(name).order.knows_durations
            click.echo(f"{name}  (an oracle: it uses recorded run times)" if is_oracle else name)
        # Parts that may follow a plus.
        for name in PLACEMENTS:
            click.echo(f"+{name}  (where gangs go)")
        for name in TUNINGS:
            click.echo(f"+{name}  (cores and memory)")
        for name, extra in EXTRA_STAGES.items():
            click.echo(f"+{name}  ({extra.summary})")
        context.exit()


@click.command()
@click.argument("trace")
@click.option(
    "--policy",
    "-p",
    metavar="NAME",
    default=DEFAULT_POLICY,
    show_default=True,
    help="How jobs are scheduled, such as fifo or las2d.",
)
@click.option(
    "--list-policies", is_flag=True, is_eager=True, expose_value=False, callback=_list_policies, help="Name them all."
)
@click.option(
    "--load", type=Parsed(amount), metavar="X", help="Squeeze or stretch the times of submission to offer this load."
)
@LOAD_PHASES
@shared_flags
def simulate(
    trace: str, policy: str, load: float | None, load_phases: tuple[tuple[float, float], ...] | None, **flags: Any
) -> None:
    """Replay the jobs of TRACE in virtual time and print how they fared.

    TRACE is a CSV file with the columns job_id, submit_time_s, gpus, duration_s (docs/reference/traces.md), "-" for
    standard input, or "example": a week of a real cluster that comes with Ganger.
    """
    if load is not None and load_phases:
        raise click.UsageError("--load and --load-phases exclude each other")
    experiment = _Experiment(trace, (policy,), flags)
    from ganger.console import print_pairs, print_table
    from ganger.program_setup import settled

    from ganger_master.simulator.inputs import Load
    from ganger_master.simulator.report import files
    from ganger_master.simulator.report.figures import details, figures, unbounded_load_row, waiting_by_size
    from ganger_master.simulator.run import simulate as replay

    source = experiment.material()
    given_load = Load(load, load_phases or ())
    options = experiment.options(flags["seed"])
    with _explained():
        jobs = experiment.jobs(source, given_load, flags["seed"])
        with ProgressBar(policy, flags["progress"]) as meter, settled():
            run = replay(jobs, source.servers, policy, options, meter)
    found = figures(run)
    with _whether_read_or_not():
        if flags["as_json"]:
            _print_json(files.simulated(source, given_load, options, found))
        else:
            print_pairs(experiment.headline(source, given_load) + unbounded_load_row(found) + details(found))
            print()
            print_table(*waiting_by_size(found))
    experiment.save([(given_load, run, found)])


@click.command()
@click.argument("trace")
@click.option(
    "--policies",
    "-p",
    type=Parsed(listed),
    metavar="NAME,...",
    default=(_SIDE_BY_SIDE,),
    multiple=True,
    callback=joined,
    help=f"Such as fifo,las2d,srtf; default: {','.join(_SIDE_BY_SIDE)}.",
)
@click.option(
    "--loads",
    type=Parsed(partial(listed, entry=amount)),
    metavar="X,...",
    multiple=True,
    callback=joined,
    help="Squeeze or stretch the times of submission to offer these.",
)
@LOAD_PHASES
@click.option(
    "--seeds", type=click.IntRange(1, 1000), default=1, metavar="N", help="Runs of each, with seeds from --seed on."
)
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Runs at a time; default: one for each core.")
@shared_flags
def compare(
    trace: str,
    policies: tuple[str, ...],
    loads: tuple[float, ...] | None,
    load_phases: tuple[tuple[float, float], ...] | None,
    seeds: int,
    workers: int | None,
    **flags: Any,
) -> None:
    """Replay the jobs of TRACE under several policies at once and print them side by side.

    TRACE is as for `ganger simulate`, which also names the policies. With several seeds each figure is a mean with its
    95 % confidence interval.
    """
    if loads and load_phases:
        raise click.UsageError("--loads and --load-phases exclude each other")
    experiment = _Experiment(trace, policies, flags)
    from ganger.console import print_pairs, print_side_by_side

    from ganger_master.simulator.inputs import Load
    from ganger_master.simulator.parallel_runs import RunCell
    from ganger_master.simulator.report import files
    from ganger_master.simulator.report.figures import figures, side_by_side

    source = experiment.material()
    given_loads = [Load(phases=load_phases)] if load_phases else [Load(load) for load in loads or (None,)]
    for load in given_loads:
        # A load that cannot be offered is refused before anything runs.
        experiment.jobs(source, load, flags["seed"])
    numbers = range(flags["seed"], flags["seed"] + seeds)
    cells = [RunCell(policy, load, seed) for load in given_loads for seed in numbers for policy in policies]
    runs = _in_processes(experiment, source, cells, workers or len(os.sched_getaffinity(0)))
    found = {cell: figures(runs[cell]) for cell in cells}
    groups = [
        (load, {policy: [found[RunCell(policy, load, seed)] for seed in numbers] for policy in policies})
        for load in given_loads
    ]
    if seeds > 1 and all(_are_alike(runs_of) for _, group in groups for runs_of in group.values()):
        say("every seed gave the same run, so ± has no meaning: with --draw N each takes other jobs")
    with _whether_read_or_not():
        if flags["as_json"]:
            _print_json(files.compared(source, experiment.options(flags["seed"]), groups))
        else:
            print_pairs(experiment.headline(source, *given_loads))
            for _, group in groups:
                print()
                print_side_by_side(*side_by_side(group))
    experiment.save([(cell.load, runs[cell], found[cell]) for cell in cells])


def _are_alike(runs: Sequence[Figures]) -> bool:
    """Return whether the runs differ in nothing but their seeds and the time that they took."""
    return len({(run.avg_jct_s, run.p95_jct_s, run.makespan_s, run.avg_waiting_s) for run in runs}) == 1


def _in_processes(
    experiment: _Experiment, source: Material, cells: Sequence[RunCell], workers: int
) -> dict[RunCell, Run]:
    from ganger_master.simulator.parallel_runs import RunError, run_all
    from ganger_master.simulator.run import simulate as replay

    ended = dict.fromkeys(cells, 0)
    runs: dict[RunCell, Run] = {}
    with ProgressBar(f"{len(cells)} runs", experiment.flags["progress"]) as meter:

        def progress(cell: RunCell, jobs: int) -> None:
            ended[cell] = jobs
            meter(sum(ended.values()), len(cells) * source.jobs_of_a_run)

        every = run_all(cells, source, lambda cell: experiment.options(cell.seed), replay, workers, progress)
        try:
            # Closed whatever happens, Ctrl-C included: that ends the processes.
            with _explained(), closing(every):
                for cell, run in every:
                    runs[cell] = run
                    progress(cell, len(run.outcomes))
        except RunError as error:
            print(error.details, end="", file=sys.stderr)
            raise CommandError(str(error), ExitCode.BUG) from error
    return runs


class _Experiment:
    """The options of both commands, without policies and loads; they are validated when it is made."""

    def __init__(self, trace: str, policies: Sequence[str], flags: Mapping[str, Any]) -> None:
        self.flags = flags
        self._trace = trace
        self._policies = policies
        _import_numpy()
        _check_policies(policies, flags["ideal"], flags["rates"])
        _check_flags(flags, policies)
        self._costs = _costs(flags["costs"])
        self._servers = _servers(flags)
        self._make_directories()

    def options(self, seed: int) -> ReplayOptions:
        from ganger_master.simulator.inputs import ReplayOptions

        flags = self.flags
        named = {
            name: flags[name]
            for name in ("plan_every_s", "keep_place_after_s", "quantum_s", "profile_s", "moves_per_hour")
            if flags[name] not in (None, "auto")
        }
        return ReplayOptions(
            ideal=flags["ideal"],
            round_s=flags["round_s"],
            costs=self._costs,
            seed=seed,
            rates=flags["rates"],
            quotas=flags["quotas"],
            **(flags["teams"] or {}),
            partitions=flags["partitions"] or {},
            **named,
        )

    def material(self) -> Material:
        """Read the trace, and report on stderr what became of its rows."""
        from ganger_master.policies import Tune, policy_named
        from ganger_master.simulator.inputs import TraceSelection, material, notes
        from ganger_master.simulator.traces.reader import RowFilter

        flags = self.flags
        wanted = RowFilter(flags["window"], _named(flags["where"], "--where"), flags["skip_mistakes"])
        part = TraceSelection(
            wanted,
            flags["jobs"],
            flags["draw"],
            flags["draw_durations"],
            flags["ideal"],
            flags["elastic"],
            flags["quotas"],
            (flags["teams"] or {}).get("teams", {}),
            flags["partitions"] or {},
        )
        with _explained(), ProgressBar(f"reading {Path(self._trace).name}", flags["progress"], "MB", 1e-6) as meter:
            source = material(self._trace, self._servers, part, meter)
        for line in notes(source, self.flags["ideal"]):
            say(line)
        stages = {name: policy_named(name).stage(Tune) for name in self._policies}
        # The default measures cores besides all else.
        tuned = [name for name, tune in stages.items() if tune is not None and not tune.tuning.keeps_requests]
        if tuned and flags["rates"] == "recorded":
            say(f"{', '.join(tuned)}: cores and memory make no job faster at recorded rates (--rates profiles)")
        return source

    def jobs(self, source: Material, load: Load, seed: int) -> Any:
        from ganger_master.simulator.inputs import jobs_at

        try:
            return jobs_at(source, load, seed)
        except ValueError as error:
            raise click.UsageError(f"{source.trace}: {error}") from error

    def headline(self, source: Material, *loads: Load) -> list[tuple[str, str]]:
        from ganger_master.simulator.inputs import cluster_in_words, limits_if_any, options_in_words

        return [
            ("trace", f"{source.trace}, load {', '.join(map(str, loads))}"),
            ("cluster", cluster_in_words(source.servers)),
            ("switching", options_in_words(self.options(0))),
            *limits_if_any(self.options(0)),
        ]

    def save(self, runs: Sequence[tuple[Load, Run, Figures]]) -> None:
        """Write the files that the options request."""
        from ganger_master.simulator.report.files import save_figures, save_plots, save_run

        directory: Path | None = self.flags["csv"]
        if directory is not None:
            save_figures([(str(load), figures) for load, _, figures in runs], directory)
            for place, (_, run, _) in zip(_places(directory, runs), runs, strict=True):
                save_run(run, place)
            say(f"wrote {directory}")
        directory = self.flags["plots"]
        if directory is not None:
            # The runs of the first seed, each load's in a directory of its own if there are several.
            loads = list(dict.fromkeys(load for load, _, _ in runs))
            for load in loads:
                place = directory / _name(f"load {load}") if len(loads) > 1 else directory
                save_plots([run for other, run, _ in runs if other == load and run.seed == self.flags["seed"]], place)
            say(f"wrote {directory}")

    def _make_directories(self) -> None:
        from ganger_master.simulator.report.files import check_plots, made_ready

        with _explained():
            if self.flags["plots"] is not None:
                check_plots()
            for directory in (self.flags["csv"], self.flags["plots"]):
                if directory is not None:
                    made_ready(directory)


def _places(directory: Path, runs: Sequence[tuple[Load, Run, Figures]]) -> Iterator[Path]:
    """Yield a directory for each run, named after what differs between them; the directory itself for one run."""
    names = [(run.policy, f"load {load}", f"seed {run.seed}") for load, run, _ in runs]
    differ = [len(set(column)) > 1 for column in zip(*names, strict=True)]
    for parts in names:
        named = [part for part, is_named in zip(parts, differ, strict=True) if is_named]
        yield directory / _name(" ".join(named)) if named else directory


def _name(text: str) -> str:
    return "".join(sign if sign.isalnum() or sign in "-+." else "_" for sign in text)


def _check_policies(names: Sequence[str], is_ideal: bool, rates: str) -> None:
    from ganger_master.policies import Grow, ShareByTimeSlices, Tune, policy_named

    for name in names:
        try:
            policy = policy_named(name)
        except KeyError as error:
            raise click.UsageError(str(error.args[0])) from error
        if rates == "profiles" and policy.has(Grow) and not policy.has(ShareByTimeSlices):
            without = name.replace("+elastic", "")
            text = "with --rates profiles no host memory is kept for a state that is carried over, so no job grows"
            raise click.UsageError(f"{text}: write {without}, not {name}")
        if is_ideal and ("+" in name or policy.has(Tune)):
            order = name.partition("+")[0] if "+" in name else policy.order.name
            raise click.UsageError(f"with --ideal any free GPUs serve and nothing is tuned: write {order}, not {name}")


def _check_flags(flags: Mapping[str, Any], policies: Sequence[str]) -> None:
    """Refuse flags that exclude each other, and a flag without effect beside the others."""
    from ganger_master.core.tenancy import unknown_teams
    from ganger_master.policies import Grow, ResizeByOptimus, ShareByTimeSlices, SliceNewcomers, policy_named

    chosen = [policy_named(name) for name in policies]
    resizes, grows = any(policy.has(ResizeByOptimus) for policy in chosen), any(policy.has(Grow) for policy in chosen)
    given = {name for name, value in flags.items() if value is not None and value is not False and value != ()}
    is_ideal, by_profiles = flags["ideal"], flags["rates"] == "profiles"
    if "elastic" in given and flags["elastic"] < 1:
        raise click.UsageError("--elastic: no job accepts less than its own size alone: give 1 or more")
    if "elastic" in given and not (resizes or grows):
        text = "--elastic: only optimus, gandiva and policies with +elastic give jobs other sizes: name one of them"
        raise click.UsageError(text)
    # A job resizes only if host memory can hold its state, and servers with GPUs only have none.
    if "elastic" in given and (is_ideal or by_profiles) and not resizes:
        text = "no job grows with --ideal or --rates profiles: there is no host memory for a state that is carried over"
        raise click.UsageError(text)
    for one, other, why in (
        ("jobs", "draw", ""),
        ("ideal", "profiles", ": an ideal cluster has only GPUs"),
        ("ideal", "costs", ": ideal switching costs nothing"),
        ("ideal", "partitions", ": an ideal cluster has GPUs and no nodes"),
        ("ideal", "plan_every_s", ": an ideal cluster plans at every event"),
        ("round_s", "plan_every_s", ": plans are made as often as rounds begin"),
        ("round_s", "quantum_s", ": time slices fill rounds"),
    ):
        if {one, other} <= given | ({"profiles"} if by_profiles else set()):
            first, second = (_FLAGS.get(name, f"--{name}") for name in (one, other))
            raise click.UsageError(f"{first} and {second} exclude each other{why}")
    if strangers := unknown_teams(flags["partitions"] or {}, (flags["teams"] or {}).get("teams", {})):
        raise click.UsageError(f"--partitions: {strangers}: give --teams, too")
    if "moves_per_hour" in given and not any(policy.migrates for policy in chosen):
        raise click.UsageError("--moves-per-hour is for policies that move running jobs: add +defrag to one")
    if "profile_s" in given and not resizes:
        if not by_profiles:
            raise click.UsageError("--profile is the time that profiles take: give --rates profiles too")
        if not any(policy.tunes_by_profiles for policy in chosen):
            raise click.UsageError("--profile: none of these policies uses profiles: add +synergy-tune to one")
    if "keep_place_after_s" in given and all(policy.is_planned for policy in chosen):
        raise click.UsageError("--keep-place-after is for policies without a planner: name one, such as fifo-backfill")
    if "quantum_s" in given and not any(policy.has(ShareByTimeSlices, SliceNewcomers) for policy in chosen):
        raise click.UsageError("--quantum is for policies with time slices: name one, such as ganger or gandiva")


# Flags whose parameter has another name.
_FLAGS = {
    "profiles": "--rates profiles",
    "costs": "--cost",
    "plan_every_s": "--plan-every",
    "round_s": "--round",
    "quantum_s": "--quantum",
}


def _costs(given: Sequence[tuple[str, float]]) -> SwitchCosts:
    from dataclasses import fields, replace

    from ganger_master.simulator.inputs import SwitchCosts

    known = {field.name.removesuffix("_s"): field for field in fields(SwitchCosts)}
    costs = _named(given, "--cost")
    for name in costs:
        if name not in known:
            there_are = ", ".join(f"{name}={field.default:g}s" for name, field in known.items())
            raise click.UsageError(f"no cost is named {name!r}; there are, with their defaults: {there_are}")
    return replace(SwitchCosts(), **{known[name].name: seconds for name, seconds in costs.items()})


def _named(pairs: Sequence[tuple[str, _Value]], flag: str) -> dict[str, _Value]:
    for name, _ in pairs:
        if sum(name == other for other, _ in pairs) > 1:
            raise click.UsageError(f"{flag} {name} is given twice")
    return dict(pairs)


def _servers(flags: Mapping[str, Any]) -> Servers:
    from ganger_master.simulator.traces.servers import servers_from_file, servers_from_flags

    given = {name: flags[name] for name in CLUSTER if flags[name] is not None}
    path: Path | None = flags["cluster"]
    if path is not None and given:
        raise click.UsageError(f"--cluster describes all servers: leave out --{next(iter(given)).replace('_', '-')}")
    if path is None and not given:
        raise click.UsageError("name the cluster: --nodes N --gpus-per-node G, or --cluster FILE")
    with _explained():
        return servers_from_flags(**given) if path is None else servers_from_file(path)


@contextmanager
def _explained() -> Iterator[None]:
    from ganger_master.simulator.report.files import PlotsUnavailable
    from ganger_master.simulator.traces.rows import TraceError
    from ganger_master.simulator.traces.servers import ServersFileError

    try:
        yield
    except (TraceError, ServersFileError) as error:
        is_forbidden = isinstance(error.__cause__, PermissionError)
        raise CommandError(str(error), ExitCode.NOT_PERMITTED if is_forbidden else ExitCode.USAGE) from error
    except PlotsUnavailable as error:
        raise CommandError(str(error)) from error
    except MemoryError as error:
        raise CommandError("out of memory: take a part of the trace (--window, --jobs), or fewer --workers") from error


@contextmanager
def _whether_read_or_not() -> Iterator[None]:
    """Ignore a closed standard output (head, less), so that files are written all the same."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_json(value: Mapping[str, Any]) -> None:
    json.dump(value, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def _import_numpy() -> None:
    """Import NumPy with one thread: it reads the number of threads only when it is imported."""
    with one_thread_each():
        import numpy  # noqa: F401
