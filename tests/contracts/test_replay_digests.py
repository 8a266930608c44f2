"""Replays decide as they did before the restructuring; what counts as the same decision, and what does not."""

from __future__ import annotations

import json
from enum import Enum

import pytest
from guards import replay_digests
from guards.replay_digests import (
    ReplayLines,
    command_line,
    differences,
    first_difference,
    happened_lines,
    lines_of,
)
from guards.replays import REPLAYS
from guards.source_files import REPOSITORY
from msgspec import Struct

RECORDED = json.loads((REPOSITORY / "tools/guards/replay_digests.json").read_text())["replays"]
# The others are compared by `python -m guards.replay_digests --compare`: two minutes.
QUICK = (
    "costs/backfill",
    "costs/ganger-alone+packs",
    "ideal/tiresias",
    "types/fifo+locality",
    "defrag/tiresias+defrag",
)


@pytest.mark.parametrize("name", QUICK)
def test_a_replay_gives_the_recorded_commands_and_happenings(name: str) -> None:
    assert differences(RECORDED, {name: lines_of(REPLAYS[name]).digests()}) == []


def test_every_replay_is_recorded() -> None:
    assert list(RECORDED) == list(REPLAYS)
    assert len(REPLAYS) == 37


class Color(Enum):
    RED = 1


class Part(Struct):
    share: float
    reason: str = ""
    weight: float = 1.0


class Paint(Struct):
    number: int
    parts: tuple[Part, ...] = ()
    color: Color | None = None
    names: frozenset[str] = frozenset()
    reason: str = "none"


class Hue(Enum):
    CRIMSON = 1


class Coat(Struct):
    hue: Hue
    job: int


def test_a_line_shows_what_is_no_default_and_no_text_for_people() -> None:
    command = Paint(7, (Part(0.1, "because"), Part(1.0, weight=2.0)), Color.RED, frozenset({"b", "a"}), "why not")
    assert command_line(1.5, command) == (
        "1.5 Paint (('color', 'RED'), ('names', ('a', 'b')), ('number', 7), "
        "('parts', ((('share', 0.1),), (('share', 1.0), ('weight', 2.0)))))"
    )
    assert command_line(1.5, Paint(7)) == "1.5 Paint (('number', 7),)"


def test_a_rename_with_a_row_in_the_table_changes_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    before = command_line(2.0, Paint(3, color=Color.RED))
    assert command_line(2.0, Coat(Hue.CRIMSON, 3)) != before
    names = {"Coat": "Paint", "hue": "color", "Coat.job": "number", "CRIMSON": "RED"}
    monkeypatch.setattr(replay_digests, "NAMES", names)
    replay_digests._layout.cache_clear()
    assert command_line(2.0, Coat(Hue.CRIMSON, 3)) == before
    replay_digests._layout.cache_clear()


def test_a_tagged_union_gives_the_lines_of_the_struct_with_a_kind_that_it_replaces() -> None:
    class Change(Struct):
        kind: str
        number: int
        level: int = 0

    class Stop(Struct, tag_field="kind", tag="STOP"):
        number: int
        level: int

    assert replay_digests.fields_of(Stop(4, 2)) == replay_digests.fields_of(Change("STOP", 4, 2))


def test_an_approved_gang_counts_with_time_job_and_claims_but_not_with_its_cause() -> None:
    class Tick(Struct):
        pass

    class GangApproved(Struct):
        time: float
        cause: str
        number: int
        claims: tuple[str, ...]

    one, other = (happened_lines(5.0, Tick(), [GangApproved(5.0, cause, 3, ("n1",))]) for cause in ("ann", "planner"))
    assert list(one) == list(other) == [(5.0, "GangApproved number=3 claims=('n1',)")]


def test_the_first_line_that_differs_is_shown_after_the_lines_before_it() -> None:
    assert first_difference(["a", "b", "c"], ["a", "b", "c"]) == ""
    assert first_difference(["a", "b", "c"], ["a", "x", "c"]) == "line 2:\n    a\n  - b\n  + x"
    assert first_difference(["a"], ["a", "b"]) == "line 2:\n    a\n  - (end)\n  + b"


def test_a_replay_that_decides_otherwise_is_named_with_the_list_that_differs() -> None:
    before, now = ReplayLines(["one", "two"], ["start"]), ReplayLines(["one"], ["start"])
    assert differences({"a/b": before.digests()}, {"a/b": before.digests()}) == []
    assert differences({"a/b": before.digests()}, {"a/b": now.digests()}) == ["a/b: commands (2 before, 1 now)"]
    assert differences({}, {"a/b": now.digests()}) == ["a/b: not recorded"]


def test_the_lines_of_a_replay_come_back_from_their_file() -> None:
    lines = ReplayLines(["1.0 Tick ()", "2.0 Tick ()"], ["1.0 End job=3"])
    assert ReplayLines.of_text(lines.text()) == lines
