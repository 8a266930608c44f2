"""Numbers on the command line."""

from __future__ import annotations

from typing import Any

import click


class Within(click.FloatRange):
    """A number of a range. Click lets `nan` into every one, for it is neither below nor above."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        number: float = super().convert(value, parameter, context)
        if number != number:
            self.fail(f"{value!r} is not a number", parameter, context)
        return number
