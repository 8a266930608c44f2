"""Counts the kills at named places and prints how much of the table they cover; prints what storms came to."""

from __future__ import annotations

from collections import Counter

import pytest
from system.kill_table import CHOSEN_PAIRS, PAIRS, PLACES, VICTIMS, Pair

KILLS = pytest.StashKey[Counter[Pair]]()
STORMS = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def kills(pytestconfig: pytest.Config) -> Counter[Pair]:
    return pytestconfig.stash.setdefault(KILLS, Counter())


@pytest.fixture(scope="session")
def storms(pytestconfig: pytest.Config) -> list[str]:
    """What is to be told of each, however it ended."""
    return pytestconfig.stash.setdefault(STORMS, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    storms = config.stash.get(STORMS, [])
    if storms:
        terminalreporter.section("storms")
        terminalreporter.line("\n".join(storms))
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
    wanted = CHOSEN_PAIRS if set(tried) <= set(CHOSEN_PAIRS) else PAIRS
    for victim in VICTIMS:
        missing = [f"{pair.place}" for pair in wanted if pair.victim == victim and not counts[pair]]
        if missing:
            terminalreporter.line(f"{victim} was not killed at {', '.join(missing)}")
