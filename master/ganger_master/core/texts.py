"""Texts from outside that are kept: cut to a length that a person reads."""

from __future__ import annotations

from typing import Final

# Characters of a text that is shown to people.
TEXT_MOST: Final = 1_000


def cut(text: str, most: int = TEXT_MOST) -> str:
    """The text, or its beginning with a mark that there was more."""
    return text if len(text) <= most else f"{text[: most - 3]}..."
