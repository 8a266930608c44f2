"""Tables: drawn by rich on a terminal, tab-free aligned columns everywhere else (no import, easy to cut and grep)."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

from ganger.console.safe_text import cells, visible

_STYLES = {
    "running": "green",
    "succeeded": "green",
    "ready": "green",
    "pending": "yellow",
    "starting": "yellow",
    "moving": "yellow",
    "stopping": "yellow",
    "draining": "yellow",
    "cordoned": "yellow",
    "suspended": "cyan",
    "parked": "cyan",
    "failed": "red",
    "lost": "red",
    "silent": "red",
    "cancelled": "dim",
    "unknown": "dim",
}


_GAP = 2
_LEAST_WIDTH = 6


def print_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], empty: str = "", spare: Sequence[str] = ()
) -> None:
    """Print rows under headings, or `empty` (on stderr, so that scripts read nothing) if there are none. `spare`:
    headings of columns that a terminal which is too narrow for all goes without, the first one first."""
    if not rows:
        print(empty, file=sys.stderr)
    elif sys.stdout.isatty():
        _print_rich(*without_spare(headings, rows, spare, shutil.get_terminal_size().columns))
    else:
        print(aligned(headings, rows))


def without_spare(
    headings: Sequence[str], rows: Sequence[Sequence[str]], spare: Sequence[str], available: int
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Return the table without spare columns: as many of them, in their order, as must go for the rest to fit."""
    for heading in spare:
        widths = _widths([headings, *rows])
        if sum(widths) + _GAP * (len(widths) - 1) <= available:
            break
        at = headings.index(heading)
        headings, *rows = [(*row[:at], *row[at + 1 :]) for row in (headings, *rows)]
    return headings, rows


def print_side_by_side(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table whose first column names what the others hold. Where a terminal is too narrow for all of them they
    come in groups, one below the other, each with the names: no figure is cut."""
    if not sys.stdout.isatty():
        print_table(headings, rows)
        return
    for number, group in enumerate(groups(_widths([headings, *rows]), shutil.get_terminal_size().columns)):
        if number:
            print()
        shown = [[row[column] for column in (0, *group)] for row in (headings, *rows)]
        print_table(shown[0], shown[1:])


def groups(widths: Sequence[int], available: int) -> list[range]:
    """The columns behind the first in as few runs as fit, beside the first, into a line; at least one in each."""
    found: list[range] = []
    start = 1
    while start < len(widths):
        end = start + 1
        while end < len(widths) and widths[0] + sum(widths[start : end + 1]) + _GAP * (end + 1 - start) <= available:
            end += 1
        found.append(range(start, end))
        start = end
    return found


def print_pairs(pairs: Sequence[tuple[str, str]]) -> None:
    """Names and values below each other; pairs without a value are left out."""
    shown = [(name, value) for name, value in pairs if value]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        first, *more = visible(value, lines=True).split("\n")
        print(f"{name.ljust(width)}  {first}")
        for line in more:
            print(f"{' ' * width}  {line}")


def aligned(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table as plain text."""
    table = [headings, *(tuple(map(visible, row)) for row in rows)]
    widths = _widths(table)
    return "\n".join(
        "  ".join(cell + " " * (width - cells(cell)) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    )


def _widths(table: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(cells, column)) for column in zip(*table, strict=True)]


def fitted(widths: Sequence[int], available: int) -> list[int]:
    """What is too wide for a line is taken from the widest columns; a line is one row, however long its texts."""
    result = list(widths)
    excess = sum(result) + _GAP * (len(result) - 1) - available
    for _ in range(max(0, excess)):
        widest = max(range(len(result)), key=lambda index: result[index])
        if result[widest] <= _LEAST_WIDTH:
            break
        result[widest] -= 1
    return result


def _print_rich(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console

    width = shutil.get_terminal_size().columns
    Console(width=width).print(rich_table(headings, rows, width))


def rich_table(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> object:
    """A rich renderable of the table, a line a row; words that are states are coloured."""
    from rich.table import Table
    from rich.text import Text

    rows = [tuple(map(visible, row)) for row in rows]
    table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    for heading, column in zip(headings, fitted(_widths([headings, *rows]), width), strict=True):
        table.add_column(heading, no_wrap=True, overflow="ellipsis", min_width=column, max_width=column)
    for row in rows:
        # Text objects, not markup: a job's name may contain brackets.
        table.add_row(*(Text(cell, style=_STYLES.get(cell.lower().partition("(")[0].strip(), "")) for cell in row))
    return table
