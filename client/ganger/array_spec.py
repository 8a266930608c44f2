"""A job array as people describe it, by flags or the key `array` of a job file, as the wire's request.

All that is wrong is found at once, together with what is wrong with the job itself.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ganger.spec import make_spec
from ganger.spec_values import shortened, whole_number
from ganger.text import counted, meant
from ganger.v1.array_pb2 import ArrayMember, StopRule
from ganger.v1.job_service_pb2 import CreateArrayRequest
from ganger.wire.errors import SpecInvalid, Violation

MEMBERS_LIMIT = 1_000
_KEYS = ("grid", "list", "indices", "at_once", "stop")
# Fields of a rule that are not named as the key that users write.
_RULE_FIELDS = {"first": "first_rung", "every": "rung_interval"}
_STOP_KEYS = ("rule", "metric", "goal", "resource", "first", "factor", "every", "bound")
# Of steps or another resource, as the master has it.
_LARGEST = 1e15
_LIMITED = re.compile(r"(.*?)%(\d{1,9})", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")
_RANGE = re.compile(r"(\d{1,10})(?:-(\d{1,10})(?::(\d{1,10}))?)?")


def make_array(
    description: Mapping[str, Any],
    environ: Mapping[str, str] | None = None,
    origins: Mapping[str, str] | None = None,
    wrong: Sequence[Violation] = (),
) -> CreateArrayRequest:
    """Return the request of a description with the key `array` (docs/reference/cli.md).

    `wrong` are violations that the caller has found already. Raises SpecInvalid with all violations.
    """
    violations = [*wrong]
    request = CreateArrayRequest()
    try:
        _fill(request, description["array"])
    except _WrongError as error:
        violations.extend(error.violations)
    if description.get("scheduler"):
        violations.append(Violation("scheduler", "does not go with an array"))
    try:
        request.spec.CopyFrom(make_spec({k: v for k, v in description.items() if k != "array"}, environ, origins))
    except SpecInvalid as error:
        violations.extend(error.violations)
        if not error.violations:
            raise
    if violations:
        raise SpecInvalid("the array cannot be submitted as described", violations=violations)
    return request


def from_flags(words: Sequence[str], stop: str | None, present: Any) -> tuple[dict[str, Any], list[Violation]]:
    """The key `array` of these flags, put over what the file has there: `--array lr=0.1,0.01 --array batch=32,64%4`,
    `--array 0-15%4`, `--stop halving,metric=accuracy,goal=max,first=100`. And what is wrong with them."""
    result = dict(present) if isinstance(present, Mapping) else {}
    violations: list[Violation] = []
    named: set[str] = set()
    for word in words:
        limited = _LIMITED.fullmatch(word)
        if limited is not None:
            word, result["at_once"] = limited[1], int(limited[2])
        name, equals, values = word.partition("=")
        if equals and name in named:
            violations.append(Violation("--array", f"{name} is given twice: write --array {name}=A,B,... once"))
        named.update([name] if equals else [])
        if equals and "" in values.split(","):
            violations.append(Violation("--array", f"{word!r}: a value is missing; empty ones go into a job file"))
        if equals:
            result.setdefault("grid", {})
            result["grid"] = {**result["grid"], name: values.split(",")}
        elif word:
            result["indices"] = word
        elif limited is None:
            violations.append(Violation("--array", "write NAME=VALUE,VALUE..., or indices such as 0-15, or %4"))
    if stop is not None:
        rule, *more = stop.split(",")
        result["stop"] = {"rule": rule}
        for pair in more:
            key, equals, value = pair.partition("=")
            if not equals or key == "rule" or key not in _STOP_KEYS:
                known = ", ".join(_STOP_KEYS[1:])
                violations.append(Violation("--stop", f"{pair!r}: write RULE,KEY=VALUE,...; keys are {known}"))
            elif key in result["stop"]:
                violations.append(Violation("--stop", f"{key} is given twice"))
            else:
                result["stop"][key] = value
    return result, violations


class _WrongError(Exception):
    def __init__(self, violations: Sequence[Violation]) -> None:
        super().__init__()
        self.violations = violations


def _fill(request: CreateArrayRequest, array: Any) -> None:
    if not isinstance(array, Mapping):
        raise _WrongError([Violation("array", f"must be a mapping of {', '.join(_KEYS)}")])
    unknown = [str(key) for key in array if key not in _KEYS]
    violations = [Violation(f"array.{key}", f"there is no such key; {meant(key, _KEYS)}") for key in unknown]

    def read(key: str, parse: Callable[[Any], Any]) -> Any:
        if array.get(key) is None:
            return None
        try:
            return parse(array[key])
        except _WrongError as error:
            violations.extend(error.violations)
        except ValueError as error:
            violations.append(Violation(f"array.{key}", str(error)))
        return None

    given = [key for key in ("grid", "list", "indices") if array.get(key) is not None]
    if len(given) != 1:
        what = f"not {' and '.join(given)} together" if given else "say what its members differ in"
        violations.append(Violation("array", f"one of grid, list and indices: {what}"))
    members = read("grid", _grid) or read("list", _listed) or read("indices", _indices)
    at_once, rule = read("at_once", whole_number(1, MEMBERS_LIMIT)), read("stop", _rule)
    if violations:
        raise _WrongError(violations)
    request.members.extend(members or ())
    request.max_concurrent = at_once or 0
    if rule is not None:
        request.rule.CopyFrom(rule)


def _grid(value: Any) -> list[ArrayMember]:
    """Every combination; the last parameter changes fastest."""
    if not isinstance(value, Mapping) or not value:
        raise ValueError("must be a mapping of names to lists of values")
    named: list[list[tuple[str, str]]] = []
    for name, values in value.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ValueError(f"{name}: must be a list of values")
        counts = Counter(_text(name, one) for one in values)
        if twice := [shortened(text) for text, count in counts.items() if count > 1]:
            raise ValueError(f"{name}: {', '.join(twice)} {'is' if len(twice) == 1 else 'are'} there twice")
        named.append([(_name(name), text) for text in counts])
    size = math.prod(map(len, named))
    if size > MEMBERS_LIMIT:
        raise ValueError(f"makes {counted(size, 'job')}, more than {MEMBERS_LIMIT}")
    combined = itertools.product(*named)
    return [ArrayMember(index=index, parameters=dict(pairs)) for index, pairs in enumerate(combined)]


def _listed(value: Any) -> list[ArrayMember]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not 0 < len(value) <= MEMBERS_LIMIT:
        raise ValueError(f"must be a list of 1 to {MEMBERS_LIMIT} mappings of names to values")
    members = []
    for index, one in enumerate(value):
        if not isinstance(one, Mapping):
            raise ValueError(f"[{index}] must be a mapping of names to values")
        parameters = {_name(name): _text(name, text) for name, text in one.items()}
        members.append(ArrayMember(index=index, parameters=parameters))
    return members


def _indices(value: Any) -> list[ArrayMember]:
    """ "0-15", "1-9:2", "0,3,7"."""
    indices: list[int] = []
    for part in str(value).split(","):
        found = _RANGE.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"{part!r} is neither a number nor a range such as 0-15 or 1-9:2")
        first = int(found[1])
        last, step = int(found[2] or first), int(found[3] or 1)
        if last < first or step < 1 or last >= 1 << 31:
            raise ValueError(f"{part!r} is not a range that rises, of numbers below 2^31")
        if len(indices) + (last - first) // step + 1 > MEMBERS_LIMIT:
            raise ValueError(f"makes more than {MEMBERS_LIMIT} jobs")
        indices.extend(range(first, last + 1, step))
    if len(set(indices)) != len(indices):
        raise ValueError("names an index twice")
    return [ArrayMember(index=index) for index in indices]


def _rule(value: Any) -> StopRule:
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a mapping of {', '.join(_STOP_KEYS)}")
    unknown = [str(key) for key in value if key not in _STOP_KEYS]
    wrong = [Violation(f"array.stop.{key}", f"there is no such key; {meant(key, _STOP_KEYS)}") for key in unknown]
    kinds = [name.removeprefix("KIND_").lower() for name in StopRule.Kind.keys()[1:]]
    rule = str(value.get("rule", "")).lower()
    goal = str(value.get("goal", "min")).lower()
    if rule not in kinds:
        wrong.append(Violation("array.stop.rule", f"{rule!r} is not a rule; there are {', '.join(kinds)}"))
    if goal not in ("min", "max"):
        wrong.append(Violation("array.stop.goal", f"must be min or max, not {goal!r}"))
    numbers: dict[str, float] = {}
    for key in ("first", "factor", "every", "bound"):
        if value.get(key) is None:
            continue
        try:
            numbers[key] = float(value[key])
        except (TypeError, ValueError):
            numbers[key] = math.nan
        if not math.isfinite(numbers[key]) or isinstance(value[key], bool):
            wrong.append(Violation(f"array.stop.{key}", f"must be a number, not {value[key]!r}"))
    if not 0 < numbers.get("first", 1.0) <= _LARGEST:
        wrong.append(Violation("array.stop.first", "must be more than zero, at most 1e15"))
    if rule in ("halving", "asha") and not 1 < numbers.get("factor", 2.0) <= 1_000:
        wrong.append(Violation("array.stop.factor", "must be more than 1, at most 1000"))
    if not 0 <= numbers.get("every", 0.0) <= _LARGEST:
        wrong.append(Violation("array.stop.every", "must not be below zero, at most 1e15"))
    if "first" not in numbers:
        wrong.append(Violation("array.stop.first", "missing: say at which step, or other resource, to compare first"))
    if rule == "threshold" and "bound" not in numbers:
        wrong.append(Violation("array.stop.bound", "missing: say what value is too bad to go on"))
    names = {key: str(value.get(key, default)) for key, default in (("metric", "loss"), ("resource", "step"))}
    unfit = {key: name for key, name in names.items() if not _NAME.fullmatch(name)}
    wrong += [
        Violation(f"array.stop.{key}", f"{name[:40]!r} is not the name of a metric") for key, name in unfit.items()
    ]
    if wrong:
        raise _WrongError(wrong)
    kind = StopRule.Kind.Value(f"KIND_{rule.upper()}")
    fields = {_RULE_FIELDS.get(key, key): number for key, number in numbers.items()}
    return StopRule(kind=kind, higher_is_better=goal == "max", **names, **fields)  # type: ignore[arg-type]  # by name


def _name(value: Any) -> str:
    if value in ("index", "INDEX", "SIZE", "PARAMETERS"):
        raise ValueError(f"{value!r} cannot be the name of a parameter: it stands for what each member has of its own")
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError(f"{str(value)[:40]!r} cannot be the name of a parameter: letters, digits, underscores")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, (str, int, float)):
        raise ValueError(f"{name}: must be texts or numbers, not {value!r}")
    try:
        str(value).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name}: {value!r} is not UTF-8") from None
    return str(value)
