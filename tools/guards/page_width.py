"""Report lines of documentation over 100 columns: `PYTHONPATH=tools python -m guards.page_width`.

Read are the pages in `docs/`, `examples/` and the root. Rows of tables, code blocks, and lines that one long word
fills (a link) are not counted. Exit code 1 if there is a longer line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple

from guards.source_files import REPOSITORY, tracked_files

MOST_COLUMNS = 100


class WideLine(NamedTuple):
    file: str
    line: int
    columns: int


def is_page(name: str) -> bool:
    """Tell whether a Markdown file is documentation of ours (texts of others come with traces and papers)."""
    return "/" not in name or name.startswith(("docs/", "examples/"))


def wide_lines(file: str, text: str, most: int = MOST_COLUMNS) -> Iterator[WideLine]:
    """Yield the lines of prose of a page with more than `most` columns that could be broken."""
    in_code = False
    for number, line in enumerate(text.splitlines(), 1):
        in_code ^= line.lstrip().startswith("```")
        is_table = line.lstrip().startswith("|")
        if len(line) > most and not in_code and not is_table and len(line.split(maxsplit=2)) > 2:
            yield WideLine(file, number, len(line))


if __name__ == "__main__":
    FILES = [name for name in tracked_files(REPOSITORY, suffixes=(".md",)) if is_page(name)]
    WIDE = [one for name in FILES for one in wide_lines(name, (REPOSITORY / name).read_text())]
    print("".join(f"{one.file}:{one.line}: {one.columns} columns\n" for one in WIDE), end="")
    print(f"lines of documentation over {MOST_COLUMNS} columns: {len(WIDE)}")
    sys.exit(bool(WIDE))
