"""What the commands of the simulator share: their flags, and lines and progress on stderr beside the result.

Help must answer at once: nothing heavy is imported. Where stderr cannot be written (a full disk), the run continues
without its lines.
"""

from __future__ import annotations

import math
import os
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import click
from ganger.console import Directory, Parsed, Within
from ganger.text import os_failure, parse_duration

from ganger_master.core.settings import quotas_of
from ganger_master.core.tenancy import Partition, partitions_of, teams_of

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Command = TypeVar("Command", bound=Callable[..., Any])
Parse = Callable[[Any], Any]


def _positive_time(value: Any) -> float:
    seconds = parse_duration(value)
    if not seconds > 0:
        raise ValueError(f"{value!r} is no time above zero")
    return seconds


def _window(value: Any) -> tuple[float, float]:
    first, dots, last = str(value).partition("..")
    window = parse_duration(first or 0), parse_duration(last) if last else math.inf
    if not dots or window[0] >= window[1]:
        raise ValueError(f"{value!r} is no window: write for example 2d..9d, 2d.. or ..9d")
    return window


def amount(value: Any) -> float:
    """Return a finite number above zero."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"{value!r} is not a number above zero")
    return number


class MovesPerHour(Within):
    """A number of moves, or "auto": as the master takes them."""

    name = "number"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        return value if value == "auto" else super().convert(value, parameter, context)


def _pair(value: Any, *, form: str, sign: str = "=", first: Parse = str, second: Parse = str) -> tuple[Any, Any]:
    """Return a text and a value with a sign between them. `form`: how they are written, for people."""
    text, found, other = str(value).partition(sign)
    if not found or not text:
        raise ValueError(f"{value!r} is not of the form {form}")
    return first(text.strip()), second(other.strip())


def listed(value: Any, *, entry: Parse = str, is_set: bool = True) -> tuple[Any, ...]:
    """Return values separated by commas. `is_set`: none may be there twice."""
    texts = [text.strip() for text in str(value).split(",")]
    if not all(texts):
        raise ValueError(f"{value!r} has an empty entry")
    entries = tuple(map(entry, texts))
    return _distinct(entries) if is_set else entries


def _distinct(entries: tuple[Any, ...]) -> tuple[Any, ...]:
    for entry in entries:
        if entries.count(entry) > 1:
            raise ValueError(f"{entry} is there twice")
    return entries


def joined(context: click.Context, parameter: click.Parameter, values: tuple[tuple[Any, ...], ...]) -> Any:
    """Return the sets of a `listed` flag that may be given several times as one; None if it was not given."""
    try:
        return _distinct(tuple(chain.from_iterable(values))) or None
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def _quotas(value: Any) -> dict[str, int]:
    try:
        return quotas_of(value)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("quotas: ")) from error


def _settings(value: Any, table_name: str) -> dict[str, Any]:
    """Return a master's settings file that has a table of this name. Raises ValueError."""
    try:
        table = tomllib.loads(Path(value).read_text())
    except OSError as error:
        raise ValueError(os_failure(error)) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{value}: {error}") from error
    if table_name not in table:
        raise ValueError(f"{value} has no table [{table_name}.NAME]")
    return table


def _partitions(value: Any) -> dict[str, Partition]:
    return partitions_of(_settings(value, "partitions")["partitions"])


def _teams(value: Any) -> dict[str, Any]:
    """Return the options of a replay that a settings file gives: its teams, and the half-life of use."""
    table = _settings(value, "teams")
    found: dict[str, Any] = {"teams": teams_of(table["teams"])}
    if "usage_half_life" in table:
        found["usage_half_life_s"] = _positive_time(str(table["usage_half_life"]))
    return found


def _all_quotas(context: click.Context, parameter: click.Parameter, values: tuple[dict[str, int], ...]) -> Any:
    found: dict[str, int] = {}
    for quotas in values:
        for user in found.keys() & quotas.keys():
            raise click.BadParameter(f"{user!r} twice: give each user one number")
        found |= quotas
    return found


_TIME, _LONGER = Parsed(parse_duration), Parsed(_positive_time)
_WHERE = Parsed(partial(_pair, form="COLUMN=TEXT"))
_COST = Parsed(partial(_pair, form="NAME=TIME", second=parse_duration))
_PHASE = partial(_pair, form="TIME:X", sign=":", first=_positive_time, second=amount)
CLUSTER = ("nodes", "gpus_per_node", "gpu_type", "gpu_memory", "topology", "cores_per_node", "memory_per_node")
# Names, type, metavar and help of each flag that both commands have, in the order in which --help shows them.
_SHARED: tuple[tuple[str, Any, str | None, str, dict[str, Any]], ...] = (
    ("--nodes", click.INT, "N", "Servers of the cluster, all alike.", {}),
    ("--gpus-per-node", click.INT, "G", "GPUs of each.", {}),
    ("--gpu-type", click.STRING, "TYPE", "What they are called, for traces that request types.", {}),
    ("--gpu-memory", click.STRING, "SIZE", "Of each GPU; default: 16G.", {}),
    ("--topology", click.STRING, "SxG", "Sockets by GPUs of each, such as 2x4.", {}),
    ("--cores-per-node", click.STRING, "C", "Default: 3 for each GPU.", {}),
    ("--memory-per-node", click.STRING, "SIZE", "Default: 62.5GB for each GPU.", {}),
    ("--cluster", click.Path(path_type=Path), "FILE", "YAML file of several kinds of servers.", {}),
    ("--window", Parsed(_window), "FROM..TO", "Only jobs submitted then, on the trace's clock.", {}),
    ("--where", _WHERE, "COLUMN=TEXT", "Only rows that hold this text.", {"multiple": True}),
    ("--jobs", click.IntRange(min=1), "N", "Only the first N jobs.", {}),
    ("--draw", click.IntRange(min=1), "N", "Only N jobs drawn at random, others for each seed.", {}),
    ("--draw-durations", None, None, "Give jobs without any run time one at random.", {"is_flag": True}),
    (
        "--elastic",
        Parsed(amount),
        "X",
        "Jobs that the trace gives one size accept 1 to X times its GPUs (optimus, gandiva, +elastic).",
        {},
    ),
    ("--skip-mistakes", None, None, "Leave rows with mistakes out instead of refusing the trace.", {"is_flag": True}),
    ("--ideal", None, None, "Any free GPUs serve any gang, and nothing costs time.", {"is_flag": True}),
    ("--round round_s", _LONGER, "TIME", "Decide only at multiples of this time.", {}),
    (
        "--rates",
        click.Choice(["recorded", "profiles"]),
        None,
        "How fast jobs go: as recorded, or as published profiles of their models give by cores, memory, distance.",
        {"default": "recorded", "show_default": True},
    ),
    (
        "--profile profile_s",
        _TIME,
        "TIME",
        "With --rates profiles, or optimus: how long it takes to profile a job; default: 8m.",
        {},
    ),
    ("--plan-every plan_every_s", _TIME, "TIME", "Least time between two plans that stop jobs; 0: none.", {}),
    (
        "--keep-place-after keep_place_after_s",
        _TIME,
        "TIME",
        "For policies without a planner: wait after which room is kept for a gang; default: 2m.",
        {},
    ),
    (
        "--quantum quantum_s",
        _LONGER,
        "TIME",
        "Length of a time slice, for policies that have them; default: 1m, and at least fifty switches.",
        {},
    ),
    (
        "--moves-per-hour",
        MovesPerHour(0, 3600),
        "N",
        "For +defrag: most moves of a node in an hour that no pending job needs; auto (default): in all as many as"
        " GPUs are in use.",
        {},
    ),
    (
        "--quotas",
        Parsed(_quotas),
        "USER=GPUS,...",
        "GPUs that a user may hold at once, as for a master; *=GPUS: every other user.",
        {"multiple": True, "callback": _all_quotas},
    ),
    (
        "--teams",
        Parsed(_teams),
        "FILE",
        "A master's settings file, of which [teams] and usage_half_life count: weights and limits of teams.",
        {},
    ),
    (
        "--partitions",
        Parsed(_partitions),
        "FILE",
        "A master's settings file, of which [partitions] count; jobs are in those of the trace's column partition.",
        {},
    ),
    (
        "--cost costs",
        _COST,
        "NAME=TIME",
        "What switching costs, such as start=5s; start, suspend, resume, offload, restore or move.",
        {"multiple": True},
    ),
    ("--seed", click.IntRange(min=0), "N", "Decides what is drawn: models, samples; default: 0.", {"default": 0}),
    ("--json as_json", None, None, "Print one JSON object.", {"is_flag": True}),
    ("--csv", Directory(), "DIR", "Write figures, jobs and use over time there.", {}),
    ("--plots", Directory(), "DIR", "Draw pictures there (needs ganger[plots]).", {}),
    ("--progress/--no-progress", None, None, "Print how far it is; default: on a terminal.", {"default": None}),
)

LOAD_PHASES = click.option(
    "--load-phases",
    type=Parsed(partial(listed, entry=_PHASE, is_set=False)),
    metavar="TIME:X,...",
    help="Offer one load after another, such as 8h:0.2,8h:0.9.",
)


def shared_flags(command: Command) -> Command:
    """Give a command all shared flags."""
    for names, kind, metavar, text, more in reversed(_SHARED):
        command = click.option(*names.split(), type=kind, metavar=metavar, help=text, **more)(command)
    return command


def say(text: str) -> None:
    """Print a line on stderr, as far as possible."""
    with ignoring_stderr_errors():
        print(text, file=sys.stderr, flush=True)


@contextmanager
def ignoring_stderr_errors() -> Iterator[None]:
    """Redirect stderr to the null device if writing to it fails."""
    try:
        yield
    except OSError:
        # Buffered text would fail again when Python flushes at exit.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)


_SECONDS_BETWEEN_LOOKS = 0.1
_TENTHS = 10


class ProgressBar:
    """Progress on stderr: a bar on a terminal, elsewhere a line per tenth. Call it with the amount done and the total.

    `is_shown`: None: only on a terminal. `unit`, `scale`: amounts are shown as amount x scale in units.
    """

    def __init__(
        self,
        what: str,
        is_shown: bool | None,
        unit: str = "jobs",
        scale: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._unit = unit
        self._scale = scale
        self._clock = clock
        self._is_terminal = sys.stderr.isatty()
        self._is_shown = self._is_terminal if is_shown is None else is_shown
        self._next = clock() + _SECONDS_BETWEEN_LOOKS
        self._tenths = 0
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            with ignoring_stderr_errors():
                self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        # Called for each job, so all but the clock reading must be rare.
        if not self._is_shown or (now := self._clock()) < self._next:
            return
        self._next = now + _SECONDS_BETWEEN_LOOKS
        done, total = round(done * self._scale), round(total * self._scale)
        if self._is_terminal:
            with ignoring_stderr_errors():
                self._draw(done, total)
        elif (tenths := _TENTHS * done // max(total, 1)) > self._tenths:
            self._tenths = tenths
            say(f"{self._what}: {done:,} of {total:,} {self._unit}")

    def _draw(self, done: int, total: int) -> None:
        if self._bar is None or self._task is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn(self._unit),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                # The bar disappears: the lasting output is the result only.
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._task = self._bar.add_task(self._what, total=total)
            self._bar.start()
        self._bar.update(self._task, completed=done, total=total)
