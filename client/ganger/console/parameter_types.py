"""Types of command-line parameters: numbers within a range, and directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


class Within(click.FloatRange):
    """A number of a range. Click lets `nan` into every one, for it is neither below nor above."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        number: float = super().convert(value, parameter, context)
        if number != number:
            self.fail(f"{value!r} is not a number", parameter, context)
        return number


class Directory(click.Path):
    """A path that is not empty: an empty one, often of an unset variable, would mean the current directory."""

    def __init__(self, file_okay: bool = True) -> None:
        super().__init__(file_okay=file_okay, path_type=Path)

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        if value == "":
            self.fail("no directory is named", parameter, context)
        return super().convert(value, parameter, context)
