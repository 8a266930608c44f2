"""Decision logs of earlier masters: a master decides again what they decided.

Three are of real clusters with two nodes of four virtual GPUs and real PyTorch jobs, of 150 seconds each; the storm is
of the fault simulator. Paths were replaced in them. Their last lines have no digest of the final state: it changes with
every field that is stored.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from decision_log.kit import rerun_of
from ganger.cli.main import run

LOGS = Path(__file__).parent / "decision_logs"
# (log, commands, events of one kind)
COUNTS = [
    ("fifo", 148, ("GangApproved", 14)),
    ("ganger", 186, ("StartOffered", 13)),
    ("optimus", 279, ("ResizeBegun", 5)),
    ("storm", 1106, ("MoveBegun", 1)),
]


@pytest.mark.parametrize("name", [name for name, _, _ in COUNTS])
def test_a_recorded_master_is_replayed_without_a_difference(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", str(LOGS / f"{name}.jsonl.gz"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["differences"] == 0


@pytest.mark.parametrize(("name", "commands", "events"), COUNTS)
def test_a_decision_log_has_the_decisions_it_was_kept_for(name: str, commands: int, events: tuple[str, int]) -> None:
    decided = rerun_of(LOGS / f"{name}.jsonl.gz").decided
    kinds = [type(event).__name__ for one in decided for event in one.events]
    assert (len(decided), kinds.count(events[0])) == (commands, events[1])
