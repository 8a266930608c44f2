"""docs/reference/states.md shows the transition table of the code, not an older one."""

from __future__ import annotations

from pathlib import Path

import pytest
from ganger.job_state import JobState
from ganger_master.core.gang_model import GangIntent, GangPhase
from ganger_master.core.lifecycle import TABLE, GangObservation

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "states.md"


def rendered() -> str:
    lines = [
        "| seen | " + " | ".join(intent.value for intent in GangIntent) + " |",
        "|---" * (len(GangIntent) + 1) + "|",
    ]
    lines += [
        f"| {seen.value} | " + " | ".join(TABLE[intent, seen].value for intent in GangIntent) + " |"
        for seen in GangObservation
    ]
    return "\n".join(lines)


def test_the_page_shows_the_table_of_the_code() -> None:
    assert rendered() in PAGE.read_text()


def test_every_pair_of_intent_and_sight_has_an_entry() -> None:
    assert set(TABLE) == {(intent, seen) for intent in GangIntent for seen in GangObservation}


@pytest.mark.parametrize("word", [*JobState, *GangPhase])
def test_the_page_names_every_state_and_phase(word: str) -> None:
    assert f"`{word}`" in PAGE.read_text()
