"""Settings that are tables by name, `[teams.NAME]` and `[partitions.NAME]`: as a table of tables, or its TOML.

All mistakes are reported at once, each with the name of its table, the value and what to write.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

# More GPUs than any cluster has; counts of GPUs are 64-bit on the wire.
MOST_GPUS: Final = 10**9
# Most letters of a name that an operator gives.
NAME_LIMIT: Final = 63
_Made = TypeVar("_Made")


def is_plain_name(text: str) -> bool:
    """Return whether a text can name what an operator makes: letters, digits, '.', '_' and '-', at most 63."""
    return 0 < len(text) <= NAME_LIMIT and all(sign.isalnum() or sign in "._-" for sign in text)


class NamedTable:
    """One table. Values that are wrong read as their default, and add a sentence to `wrong`."""

    def __init__(self, name: str, values: Mapping[str, object], wrong: list[str]) -> None:
        self.name, self._values, self._wrong = name, values, wrong

    def get(self, key: str) -> object:
        return self._values.get(key)

    def refuse(self, sentence: str) -> None:
        """Add a mistake: what follows the name of the table in a sentence."""
        self._wrong.append(f"{self.name!r} {sentence}")

    def number(self, key: str, least: float, most: float, default: Any, kinds: type | tuple[type, ...] = int) -> Any:
        """Return a number of these types, from `least` to `most`."""
        value = self._values.get(key)
        # Tested positively, because NaN is neither more nor less.
        if value is None or (not isinstance(value, bool) and isinstance(value, kinds) and least <= value <= most):  # type: ignore[operator]
            return default if value is None else value
        bounds = " to ".join([str(bound) if isinstance(bound, int) else f"{bound:g}" for bound in (least, most)])
        self.refuse(f"has {key} = {value!r}: write a number from {bounds}")
        return default

    def gpus(self, key: str = "gpus") -> int | None:
        """Return a limit on GPUs; None: any number."""
        found: int | None = self.number(key, 0, MOST_GPUS, None)
        return found

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key, default)
        if type(value) is bool:
            return value
        self.refuse(f"has {key} = {value!r}: write true or false")
        return default

    def names(self, key: str) -> tuple[str, ...]:
        """Return a list of names, each once; empty if there is none."""
        value = self._values.get(key, ())
        if isinstance(value, list | tuple) and all(isinstance(one, str) and one for one in value):
            return tuple(dict.fromkeys(value))
        self.refuse(f'has {key} = {value!r}: write a list of names, ["ann", "bob"]')
        return ()


def tables_of(
    value: object, noun: str, keys: tuple[str, ...], make: Callable[[NamedTable], _Made]
) -> tuple[dict[str, _Made], list[str]]:
    """Return what `make` makes of each table, by name, and all mistakes. noun: what one table describes ("team")."""
    if isinstance(value, str):
        try:
            value = tomllib.loads(value)
        except (ValueError, RecursionError) as error:
            return {}, [str(error)]
    if not isinstance(value, Mapping):
        return {}, [f"{value!r} is no table of {noun}s"]
    wrong: list[str] = []
    found = {}
    for name, values in value.items():
        if not is_plain_name(name):
            wrong.append(f"{name!r} is no name of a {noun}: use letters, digits, '.', '_' and '-'")
        table = NamedTable(name, values if isinstance(values, Mapping) else {}, wrong)
        if not isinstance(values, Mapping):
            table.refuse(f"is no table with {keys[0]}")
            continue
        if unknown := sorted(values.keys() - set(keys)):
            table.refuse(f"has {', '.join(map(repr, unknown))}: a {noun} has {', '.join(keys)}")
        found[name] = make(table)
    return found, wrong
