"""Compare the decisions of replays with recorded ones: `PYTHONPATH=tools python -m guards.replay_digests`.

Each replay (`guards.replays`) runs through the simulator and gives two lists of lines, each with a digest:

* *commands*: every command given to the core, in order.
* *happened*: approved gangs, releases, moves, resizes, suspensions, changes of cores, and ends, with time, job and
  claims. The order within one instant does not count, nor do causes and revisions.

Lines hold names as they were when the digests were recorded: a rename gets a row in `NAMES` and changes no digest.
Fields at their defaults and texts for people are left out. Other versions of NumPy or SciPy may decide otherwise: the
file of digests has those that it was made with.

    --record FILE        write the digests; `tools/guards/replay_digests.json` holds those of before
    --compare FILE       exit 1 if a replay differs, and name it
    --only NAME[,NAME]   run these replays
    --write NAME FILE    write the lines of a replay, for `--explain` on another version
    --explain NAME FILE  print the first lines that differ from a file of `--write`
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from hashlib import blake2b
from importlib.metadata import version
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, Final
from unittest import mock

import msgspec
import numpy as np
from ganger.cluster.resources import STORED_NAMES
from ganger_master.core import machine
from ganger_master.simulator.run import simulate
from msgspec import Struct

from guards.replays import REPLAYS, ReplayCase

# Names of today -> names in the recorded lines: of commands, events, fields ("field", or "Class.field") and enum
# members.
NAMES: Final[Mapping[str, str]] = {**STORED_NAMES, "kept_places": "promises"}

# Texts for people.
_TEXTS: Final = frozenset({"reason", "detail"})
# What counts of the events, under their recorded names.
_HAPPENED: Final[Mapping[str, tuple[str, ...]]] = {
    "GangApproved": ("number", "claims"),
    "GangReleased": ("number",),
    "MoveBegun": ("number", "claims"),
    "ResizeBegun": ("number", "claims"),
    "CoresChanged": ("number", "claims", "repin"),
    "JobSuspended": ("number", "level"),
    "JobResumed": ("number",),
    "JobCancelled": ("number",),
}
_END: Final = ("job", "outcome", "device_mask")

# Of a struct: name in the recorded lines -> value; texts, and fields at their defaults, are not there.
_Fields = dict[str, Any]


def recorded_name(name: str, kind: str = "") -> str:
    """Return the name that recorded lines have for a name of today; `kind`: the class of a field."""
    return NAMES.get(f"{kind}.{name}", NAMES.get(name, name))


@cache
def _layout(kind: type[Struct]) -> tuple[tuple[str, str, Any], ...]:
    """Return (attribute, recorded name, default) of the fields that lines show."""
    found = []
    for one in msgspec.structs.fields(kind):
        default = one.default if one.default_factory is msgspec.NODEFAULT else one.default_factory()
        found.append((one.name, recorded_name(one.name, kind.__name__), default))
    return tuple(found)


def fields_of(value: Struct) -> _Fields:
    """Return the fields of a struct in canonical form, by recorded name; a tag counts as a field."""
    found: _Fields = {}
    config = value.__struct_config__
    if config.tag is not None and config.tag_field is not None:
        found[recorded_name(config.tag_field)] = config.tag
    for attribute, name, default in _layout(type(value)):
        part = getattr(value, attribute)
        is_text = name in _TEXTS and isinstance(part, str)
        if not is_text and (part is not default) and part != default:
            found[name] = canonical(part)
    return found


def canonical(value: Any) -> Any:
    """Return a value whose `repr` is the same in every process: structs, mappings and sets are sorted."""
    if isinstance(value, Enum):
        return recorded_name(value.name, type(value).__name__)
    if value is None or isinstance(value, bool | int | str | bytes):
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Struct):
        return tuple(sorted(fields_of(value).items()))
    if isinstance(value, Mapping):
        return tuple(sorted([(canonical(key), canonical(part)) for key, part in value.items()], key=repr))
    if isinstance(value, AbstractSet):
        return tuple(sorted(map(canonical, value), key=repr))
    if isinstance(value, Iterable):
        return tuple(map(canonical, value))
    raise TypeError(f"{type(value).__name__} has no canonical form: {value!r}")


@dataclass
class ReplayLines:
    """The lines of one replay."""

    commands: list[str] = field(default_factory=list)
    happened: list[str] = field(default_factory=list)

    def digests(self) -> dict[str, list[int | str]]:
        """Return number and digest of the lines of both lists."""
        return {name: [len(lines), digest_of(lines)] for name, lines in vars(self).items()}

    def text(self) -> str:
        return "".join([f"{name} {line}\n" for name, lines in vars(self).items() for line in lines])

    @classmethod
    def of_text(cls, text: str) -> ReplayLines:
        found = cls()
        for line in text.splitlines():
            name, _, rest = line.partition(" ")
            vars(found)[name].append(rest)
        return found


def digest_of(lines: Iterable[str]) -> str:
    digest = blake2b(digest_size=12)
    for line in lines:
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


def command_line(time_s: float, command: Struct) -> str:
    return f"{time_s!r} {recorded_name(type(command).__name__)} {canonical(command)!r}"


def happened_lines(time_s: float, command: Struct, events: Iterable[Struct]) -> Iterator[tuple[float, str]]:
    """Yield (time in seconds, line) for the ends that a command reports, and for the events that count."""
    if recorded_name(type(command).__name__) == "Observe":
        report = fields_of(command)
        for gang in map(dict, report.get("gangs", ())):
            if gang["phase"] == "ENDED":
                yield time_s, f"End node={report['node']!r} {_shown(gang, _END)}"
    for event in events:
        kind = recorded_name(type(event).__name__)
        assert kind != "RowsChanged", "a replay here has no time slices"
        if kind in _HAPPENED:
            parts = fields_of(event)
            yield parts["time"], f"{kind} {_shown(parts, _HAPPENED[kind])}"


def _shown(parts: Mapping[str, Any], names: Iterable[str]) -> str:
    return " ".join([f"{name}={parts.get(name)!r}" for name in names])


def lines_of(case: ReplayCase) -> ReplayLines:
    """Run a replay and return its lines."""
    found = ReplayLines()
    timed: list[tuple[float, str]] = []
    advance = machine.advance

    def tapped(state: Any, command: Any, now: float) -> Any:
        found.commands.append(command_line(now, command))
        answer, events = advance(state, command, now)
        timed.extend(happened_lines(now, command, events))
        return answer, events

    jobs = case.workload()
    with mock.patch.object(machine, "advance", tapped):
        simulate(jobs, case.servers, case.policy, case.options)
    for time_s, lines in groupby(sorted(timed), key=lambda one: one[0]):
        found.happened.extend([f"{time_s!r} {line}" for _, line in lines])
    assert len(found.happened) >= len(jobs) > 0, "the simulator no longer gives its commands to `machine.advance`"
    return found


def first_difference(before: Sequence[str], now: Sequence[str], around: int = 2) -> str:
    """Return the first lines that differ, with what came before them; empty if all are equal."""
    for place, (one, other) in enumerate(zip_longest(before, now)):
        if one != other:
            common = "".join([f"    {line}\n" for line in before[max(place - around, 0) : place]])
            return f"line {place + 1}:\n{common}  - {one or '(end)'}\n  + {other or '(end)'}"
    return ""


def differences(recorded: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return one text for each replay whose digests differ from the recorded ones."""
    texts = []
    for name, digests in found.items():
        before = recorded.get(name)
        if before is None:
            texts.append(f"{name}: not recorded")
            continue
        parts = [
            f"{part} ({before[part][0]} before, {digests[part][0]} now)"
            for part in digests
            if before[part] != digests[part]
        ]
        if parts:
            texts.append(f"{name}: {', '.join(parts)}")
    return texts


def record_text(found: Mapping[str, Any]) -> str:
    """Return the file of digests, a line for each replay."""
    made_with = {"python": platform.python_version(), "numpy": version("numpy"), "scipy": version("scipy")}
    rows = ",\n".join([f"  {json.dumps(name)}: {json.dumps(digests)}" for name, digests in found.items()])
    return f'{{\n "made_with": {json.dumps(made_with)},\n "replays": {{\n{rows}\n }}\n}}\n'


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "guards.replay_digests", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", type=Path, metavar="FILE")
    parser.add_argument("--compare", type=Path, metavar="FILE")
    parser.add_argument("--only", metavar="NAME[,NAME]")
    parser.add_argument("--write", nargs=2, metavar=("NAME", "FILE"))
    parser.add_argument("--explain", nargs=2, metavar=("NAME", "FILE"))
    options = parser.parse_args(arguments)
    names = options.only.split(",") if options.only else list(REPLAYS)
    asked = [*names, *[one[0] for one in (options.write, options.explain) if one]]
    if unknown := [name for name in asked if name not in REPLAYS]:
        parser.error(f"there is no replay {unknown[0]!r}; there are {', '.join(REPLAYS)}")
    if options.write:
        name, file = options.write
        Path(file).write_text(lines_of(REPLAYS[name]).text())
        return 0
    if options.explain:
        name, file = options.explain
        return _explain(ReplayLines.of_text(Path(file).read_text()), lines_of(REPLAYS[name]))
    found = {}
    for name in names:
        began = time.process_time()
        found[name] = lines_of(REPLAYS[name]).digests()
        shown = "  ".join([f"{part} {count:>6} {digest}" for part, (count, digest) in found[name].items()])
        print(f"{name:<34} {shown}  {time.process_time() - began:5.1f} s", flush=True)
    if options.record:
        options.record.write_text(record_text(found))
    if options.compare:
        texts = differences(json.loads(options.compare.read_text())["replays"], found)
        print("\n".join([*texts, f"{len(texts)} of {len(found)} replays differ from {options.compare}"]))
        return bool(texts)
    return 0


def _explain(before: ReplayLines, now: ReplayLines) -> int:
    texts = [
        f"{name}, {first_difference(vars(before)[name], lines)}"
        for name, lines in vars(now).items()
        if vars(before)[name] != lines
    ]
    print("\n".join(texts) or "all lines are equal")
    return bool(texts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
