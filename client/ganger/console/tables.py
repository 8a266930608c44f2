"""Tables: drawn by rich on a terminal, tab-free aligned columns everywhere else (no import, easy to cut and grep)."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

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
    "cancelled": "dim",
    "unknown": "dim",
}


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], empty: str = "") -> None:
    """Prints rows under headings, or `empty` (on stderr, so that scripts read nothing) if there are none."""
    if not rows:
        print(empty, file=sys.stderr)
    elif sys.stdout.isatty():
        _print_rich(headings, rows)
    else:
        print(aligned(headings, rows))


def print_pairs(pairs: Sequence[tuple[str, str]]) -> None:
    """Names and values below each other; pairs without a value are left out."""
    shown = [(name, value) for name, value in pairs if value]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        first, *more = value.splitlines() or [""]
        print(f"{name.ljust(width)}  {first}")
        for line in more:
            print(f"{' ' * width}  {line}")


def aligned(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table as plain text."""
    table = [headings, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(headings))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
    )


def cut(text: str, width: int = 60) -> str:
    """One line of at most `width` characters; whole if the output is no terminal."""
    text = " ".join(text.split())
    return text if len(text) <= width or not sys.stdout.isatty() else text[: width - 1] + "…"


def _print_rich(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.text import Text

    table = rich_table(headings, rows)
    console = Console(width=shutil.get_terminal_size().columns)
    console.print(table if rows else Text(""))


def rich_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> object:
    """A rich renderable of the table; words that are states are coloured."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    for heading in headings:
        table.add_column(heading, overflow="fold" if heading in ("REASON", "MESSAGE") else "ellipsis")
    for row in rows:
        # Text objects, not markup: a job's name may contain brackets.
        table.add_row(*(Text(cell, style=_STYLES.get(cell.lower().partition("(")[0].strip(), "")) for cell in row))
    return table
