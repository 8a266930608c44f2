"""Count words for people that are said of jobs: `PYTHONPATH=tools python -m guards.person_words [--most N] [--lines]`.

A job is a thing (PLAIN, §1.2). Read are product, protos, tests and documentation, also the words in identifiers
(`moves_nobody`, `_NobodyReads`). Lines that speak of people stand in `people.txt` beside this module, as
`FILE<tab>LINE`; a line there that no file has any more is reported, too. Exit code 1 if more than N places are found.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from guards.source_files import REPOSITORY, tracked_files

PERSON_WORDS = frozenset(
    {"who", "whom", "whoever", "whomever", "nobody", "somebody", "anybody", "everybody"},
)
SUFFIXES = (".py", ".proto", ".md", ".toml", ".yaml", ".sh", ".txt", "Makefile", "run")
PEOPLE = Path(__file__).with_name("people.txt")
# What names the words to look for them.
_OWN = (
    "tools/guards/",
    "tests/contracts/test_guards.py",
    "CONTRIBUTING.md",
    "docs/design/009-one-scheduler-renames.md",
)
# Words in prose, in snake_case and in CamelCase.
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


class PersonWord(NamedTuple):
    """A place with such a word. `text`: its line, without indentation."""

    file: str
    line: int
    word: str
    text: str


def person_words(file: str, text: str) -> Iterator[PersonWord]:
    """Yield every person word of a file."""
    for number, line in enumerate(text.splitlines(), 1):
        for word in _WORD.findall(line):
            if word.lower() in PERSON_WORDS:
                yield PersonWord(file, number, word.lower(), line.strip())


def allowed_lines(text: str) -> set[tuple[str, str]]:
    """Return the lines (file, line without indentation) of an allow-list; `#` begins a comment line."""
    rows = [line.partition("\t") for line in text.splitlines() if line and not line.startswith("#")]
    return {(file, line.strip()) for file, _, line in rows}


def without_people(found: Iterable[PersonWord], allowed: Collection[tuple[str, str]]) -> list[PersonWord]:
    """Return the places that are not on the allow-list."""
    return [one for one in found if (one.file, one.text) not in allowed]


def stale_lines(allowed: Iterable[tuple[str, str]], found: Iterable[PersonWord]) -> list[tuple[str, str]]:
    """Return the lines of the allow-list that no file has any more."""
    return sorted(set(allowed) - {(one.file, one.text) for one in found})


def room_of(file: str) -> str:
    """Return `tests`, `docs` or `product`."""
    return "tests" if file.startswith("tests/") else "docs" if file.endswith(".md") else "product"


def main(arguments: list[str] | None = None) -> int:
    """Print the counts by file, most first, and by room."""
    parser = argparse.ArgumentParser(prog="guards.person_words", description="Count words for people said of jobs.")
    parser.add_argument("--most", type=int, default=0, metavar="N", help="places that are allowed (default 0)")
    parser.add_argument("--lines", action="store_true", help="print every line instead of counts by file")
    options = parser.parse_args(arguments)
    files = [name for name in tracked_files(REPOSITORY, suffixes=SUFFIXES) if not name.startswith(_OWN)]
    everything = [one for name in files for one in person_words(name, (REPOSITORY / name).read_text())]
    allowed = allowed_lines(PEOPLE.read_text())
    found = without_people(everything, allowed)
    stale = stale_lines(allowed, everything)
    if options.lines:
        print("\n".join(f"{one.file}:{one.line}: {one.text}" for one in found))
    else:
        print("\n".join(f"{count:5} {file}" for file, count in Counter(one.file for one in found).most_common()))
    rooms = Counter(room_of(one.file) for one in found)
    print(f"person words: {len(found)} (" + ", ".join(f"{room} {rooms[room]}" for room in sorted(rooms)) + ")")
    for file, line in stale:
        print(f"people.txt: {file} has no such line any more: {line}")
    return int(len(found) > options.most or bool(stale))


if __name__ == "__main__":
    sys.exit(main())
