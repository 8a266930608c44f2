"""Counts the kills at named places and prints how much of the table they cover."""

from __future__ import annotations

from collections import Counter

import pytest
from system.kill_table import PAIRS, PLACES, VICTIMS, Pair

KILLS = pytest.StashKey[Counter[Pair]]()


@pytest.fixture(scope="session")
def kills(pytestconfig: pytest.Config) -> Counter[Pair]:
    return pytestconfig.stash.setdefault(KILLS, Counter())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = config.stash.get(KILLS, None)
    if counts is None:
        return
    tried = [pair for pair in PAIRS if counts[pair]]
    terminalreporter.section("kills at named places")
    terminalreporter.line(
        f"{len(tried)} of {len(PAIRS)} pairs of a place and a victim, each of them at least"
        f" {min((counts[pair] for pair in tried), default=0)} times, {sum(counts.values())} kills;"
        f" {len(PLACES) * len(VICTIMS) - len(PAIRS)} pairs make no sense (tests/system/kill_table.py says why)"
    )
    for victim in VICTIMS:
        missing = [f"{pair.place}" for pair in PAIRS if pair.victim == victim and not counts[pair]]
        if missing:
            terminalreporter.line(f"{victim} was not killed at {', '.join(missing)}")
