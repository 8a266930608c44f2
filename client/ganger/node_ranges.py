"""Node names as ranges, as Slurm writes them: "gpu[01-08,10],login" stands for ten names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Final

from ganger.text import format_ranges

# More names than any cluster has nodes.
_MOST_NAMES: Final = 100_000
_PART: Final = re.compile(r"[^\[\],\s]+|\[[^\[\]]*\]")
_SPAN: Final = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_NUMBERED: Final = re.compile(r"(.*?)(\d+)", re.ASCII)


def expanded(text: str) -> tuple[str, ...]:
    """Return the names that a list of names and ranges stands for, each once. Raises ValueError."""
    found: dict[str, None] = {}
    for item in _items(text):
        parts = _PART.findall(item)
        if not parts or "".join(parts) != item:
            raise ValueError(f"{item!r} is no name of a node: write n1, or gpu[01-08,10] for several")
        choices = [_numbers(part, item) if part.startswith("[") else [part] for part in parts]
        for chosen in product(*choices):
            found["".join(chosen)] = None
            if len(found) > _MOST_NAMES:
                raise ValueError(f"{text[:60]!r} stands for more than {_MOST_NAMES} nodes")
    return tuple(found)


def _items(text: str) -> Iterator[str]:
    """Yield what commas outside of brackets separate."""
    depth, item = 0, ""
    for sign in text:
        depth += (sign == "[") - (sign == "]")
        if sign == "," and not depth:
            yield item.strip()
            item = ""
        else:
            item += sign
    if item.strip():
        yield item.strip()


def _numbers(bracket: str, item: str) -> list[str]:
    """Return the numbers that "[01-08,10]" stands for, with the zeros that they begin with."""
    found: list[str] = []
    for span in bracket[1:-1].split(","):
        match = _SPAN.fullmatch(span.strip())
        if match is None:
            raise ValueError(f"{item!r}: {span!r} is no number and no range such as 01-08")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first) or int(last) - int(first) >= _MOST_NAMES:
            raise ValueError(f"{item!r}: {span!r} is no range from a smaller to a larger number")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def compressed(names: Iterable[str]) -> str:
    """Return names as ranges, which `expanded` reads: "gpu[01-08,10],login"."""
    plain, numbered = [], []
    for name in sorted(set(names)):
        match = _NUMBERED.fullmatch(name)
        if match is None:
            plain.append(name)
        else:
            numbered.append((match[1], match[2]))
    # Numbers that begin with zeros go together with those of as many digits.
    padded = {(stem, len(digits)) for stem, digits in numbered if digits.startswith("0")}
    by_stem: dict[tuple[str, int], list[int]] = {}
    for stem, digits in numbered:
        width = len(digits) if (stem, len(digits)) in padded else 0
        by_stem.setdefault((stem, width), []).append(int(digits))
    found = []
    for (stem, width), numbers in by_stem.items():
        spans = format_ranges(sorted(numbers), width)
        found.append(f"{stem}{spans}" if spans.isdecimal() else f"{stem}[{spans}]")
    return ",".join(sorted(found + plain))
