"""The flags that `ganger simulate` and `ganger compare` share. Help must answer at once: nothing heavy is imported."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import click
from ganger.console import Directory, Within
from ganger.units import parse_duration

from ganger_master.core.settings import quotas_of

Command = TypeVar("Command", bound=Callable[..., Any])


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic only in new clicks
    """Seconds of "90s", "2h30m", "1d" or a number."""

    name = "time"

    def __init__(self, is_positive: bool = False) -> None:
        self._is_positive = is_positive

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        try:
            seconds = parse_duration(value)
        except ValueError as error:
            self.fail(str(error), parameter, context)
        if self._is_positive and not seconds > 0:
            self.fail(f"{value!r} is no time above zero", parameter, context)
        return seconds


class Window(click.ParamType):  # type: ignore[type-arg]  # as above
    """Two times with ".." between them, the first before the second."""

    name = "window"

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> tuple[float, float]:
        if isinstance(value, tuple):
            return value
        first, dots, last = str(value).partition("..")
        try:
            window = (parse_duration(first or 0), parse_duration(last) if last else math.inf)
        except ValueError as error:
            self.fail(str(error), parameter, context)
        if not dots or window[0] >= window[1]:
            self.fail(f"{value!r} is no window: write for example 2d..9d, 2d.. or ..9d", parameter, context)
        return window


class MovesPerHour(Within):
    """A number of moves, or "auto": as the master takes them."""

    name = "number"

    def __init__(self) -> None:
        super().__init__(0, 3600)

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        return value if value == "auto" else super().convert(value, parameter, context)


class Amount(click.ParamType):  # type: ignore[type-arg]  # as above
    """A finite number above zero."""

    name = "number"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not 0 < number < math.inf:
            self.fail(f"{value!r} is not a number above zero", parameter, context)
        return number


class Listed(click.ParamType):  # type: ignore[type-arg]  # as above
    """Values separated by commas, each of one type; a tuple. `is_set`: none may be there twice."""

    def __init__(self, entry: click.ParamType, is_set: bool = True) -> None:  # type: ignore[type-arg]  # as above
        self._entry = entry
        self._is_set = is_set
        self.name = f"{entry.name},..."

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        texts = [text.strip() for text in str(value).split(",")]
        if not all(texts):
            self.fail(f"{value!r} has an empty entry", parameter, context)
        entries = tuple(self._entry.convert(text, parameter, context) for text in texts)
        for entry in entries:
            if self._is_set and entries.count(entry) > 1:
                self.fail(f"{entry} is there twice", parameter, context)
        return entries


def joined(
    context: click.Context, parameter: click.Parameter, values: tuple[tuple[Any, ...], ...]
) -> tuple[Any, ...] | None:
    """Return the sets of a `Listed` flag that may be given several times as one; None if it was not given."""
    entries = tuple(chain.from_iterable(values))
    for entry in entries:
        if entries.count(entry) > 1:
            raise click.BadParameter(f"{entry} is there twice", context, parameter)
    return entries or None


class QuotasType(click.ParamType):  # type: ignore[type-arg]  # as above
    """GPUs by user, as the master's flag of that name has them."""

    name = "quotas"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        try:
            return quotas_of(value)
        except ValueError as error:
            self.fail(str(error).removeprefix("quotas: "), parameter, context)


def _all_quotas(context: click.Context, parameter: click.Parameter, values: tuple[dict[str, int], ...]) -> Any:
    """Return the quotas of a flag that may be given several times as one mapping. Raises BadParameter."""
    found: dict[str, int] = {}
    for quotas in values:
        for user in found.keys() & quotas.keys():
            raise click.BadParameter(f"{user!r} twice: give each user one number", context, parameter)
        found |= quotas
    return found


class Pair(click.ParamType):  # type: ignore[type-arg]  # as above
    """A text and a value with a sign between them."""

    def __init__(self, sign: str, first: click.ParamType, second: click.ParamType) -> None:  # type: ignore[type-arg]
        self._sign, self._first, self._second = sign, first, second
        self.name = f"{first.name}{sign}{second.name}"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> tuple[Any, Any]:
        if isinstance(value, tuple):
            return value
        first, sign, second = str(value).partition(self._sign)
        if not sign or not first:
            form = (parameter.metavar if isinstance(parameter, click.Option) else None) or self.name
            self.fail(f"{value!r} is not of the form {form.removesuffix(',...')}", parameter, context)
        return (
            self._first.convert(first.strip(), parameter, context),
            self._second.convert(second.strip(), parameter, context),
        )


CLUSTER = ("nodes", "gpus_per_node", "gpu_type", "gpu_memory", "topology", "cores_per_node", "memory_per_node")
_PART_OF_CLUSTER = {
    "nodes": (click.INT, "N", "Servers of the cluster, all alike."),
    "gpus_per_node": (click.INT, "G", "GPUs of each."),
    "gpu_type": (click.STRING, "TYPE", "What they are called, for traces that request types."),
    "gpu_memory": (click.STRING, "SIZE", "Of each GPU; default: 16G."),
    "topology": (click.STRING, "SxG", "Sockets by GPUs of each, such as 2x4."),
    "cores_per_node": (click.STRING, "C", "Default: 3 for each GPU."),
    "memory_per_node": (click.STRING, "SIZE", "Default: 62.5GB for each GPU."),
}
_SHARED: list[Callable[[Any], Any]] = [
    *(
        click.option(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)
        for name, (kind, metavar, text) in _PART_OF_CLUSTER.items()
    ),
    click.option(
        "--cluster", type=click.Path(path_type=Path), metavar="FILE", help="YAML file of several kinds of servers."
    ),
    click.option("--window", type=Window(), metavar="FROM..TO", help="Only jobs submitted then, on the trace's clock."),
    click.option(
        "--where",
        type=Pair("=", click.STRING, click.STRING),
        multiple=True,
        metavar="COLUMN=TEXT",
        help="Only rows that hold this text.",
    ),
    click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Only the first N jobs."),
    click.option(
        "--draw", type=click.IntRange(min=1), metavar="N", help="Only N jobs drawn at random, others for each seed."
    ),
    click.option("--draw-durations", is_flag=True, help="Give jobs without any run time one at random."),
    click.option(
        "--elastic",
        type=Amount(),
        metavar="X",
        help="Jobs that the trace gives one size accept 1 to X times its GPUs (optimus, gandiva, +elastic).",
    ),
    click.option("--skip-mistakes", is_flag=True, help="Leave rows with mistakes out instead of refusing the trace."),
    click.option("--ideal", is_flag=True, help="Any free GPUs serve any gang, and nothing costs time."),
    click.option(
        "--round",
        "round_s",
        type=Duration(is_positive=True),
        metavar="TIME",
        help="Decide only at multiples of this time.",
    ),
    click.option(
        "--rates",
        type=click.Choice(["recorded", "profiles"]),
        default="recorded",
        show_default=True,
        help="How fast jobs go: as recorded, or as published profiles of their models give by cores, memory, distance.",
    ),
    click.option(
        "--profile",
        "profile_s",
        type=Duration(),
        metavar="TIME",
        help="With --rates profiles, or optimus: how long it takes to profile a job; default: 8m.",
    ),
    click.option(
        "--plan-every",
        "plan_every_s",
        type=Duration(),
        metavar="TIME",
        help="Least time between two plans that stop jobs; 0: none.",
    ),
    click.option(
        "--reserve-after",
        "reserve_after_s",
        type=Duration(),
        metavar="TIME",
        help="For policies without a planner: wait after which room is kept for a gang; default: 2m.",
    ),
    click.option(
        "--quantum",
        "quantum_s",
        type=Duration(is_positive=True),
        metavar="TIME",
        help="Length of a time slice, for policies that have them; default: 1m, and at least fifty switches.",
    ),
    click.option(
        "--moves-per-hour",
        type=MovesPerHour(),
        metavar="N",
        help="For +defrag: most moves of a node in an hour that no pending job needs; auto (default): in all as many as"
        " GPUs are in use.",
    ),
    click.option(
        "--quotas",
        type=QuotasType(),
        metavar="USER=GPUS,...",
        multiple=True,
        callback=_all_quotas,
        help="GPUs that a user may hold at once, as for a master; *=GPUS: every other user.",
    ),
    click.option(
        "--cost",
        "costs",
        type=Pair("=", click.STRING, Duration()),
        multiple=True,
        metavar="NAME=TIME",
        help="What switching costs, such as start=5s; start, suspend, resume, offload, restore or move.",
    ),
    click.option(
        "--seed",
        type=click.IntRange(min=0),
        default=0,
        metavar="N",
        help="Decides what is drawn: models, samples; default: 0.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
    click.option("--csv", type=Directory(), metavar="DIR", help="Write figures, jobs and use over time there."),
    click.option("--plots", type=Directory(), metavar="DIR", help="Draw pictures there (needs ganger[plots])."),
    click.option("--progress/--no-progress", default=None, help="Print how far it is; default: on a terminal."),
]


LOAD_PHASES = click.option(
    "--load-phases",
    type=Listed(Pair(":", Duration(is_positive=True), Amount()), is_set=False),
    metavar="TIME:X,...",
    help="Offer one load after another, such as 8h:0.2,8h:0.9.",
)


def shared_flags(command: Command) -> Command:
    """Return all shared flags, in the order in which --help shows them."""
    for option in reversed(_SHARED):
        command = option(command)
    return command
