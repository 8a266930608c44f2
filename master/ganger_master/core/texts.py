"""Texts about jobs. Those from outside are cut to a length that a person reads."""

from __future__ import annotations

from typing import Final

# Characters of a text that is shown to people.
TEXT_MOST: Final = 1_000

# Why a job is suspended although no user has suspended it.
END_UNKNOWN: Final = (
    "the database was restored from a backup, and what became of the job since is not known: `ganger resume` runs it "
    "(again), `ganger cancel` ends it"
)
FOUND_AT_REST: Final = "it was found at rest after a restore of the database: `ganger resume` lets it go on"


def cut(text: str, most: int = TEXT_MOST) -> str:
    """Return the text, or its beginning with a mark that there was more."""
    return text if len(text) <= most else f"{text[: most - 3]}..."
