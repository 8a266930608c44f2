"""Log lines of the programs: one format to write and to read."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
from ganger.program_setup import FORMAT_VARIABLE, read_line, set_up_log
from ganger.text import visible
from hypothesis import given
from hypothesis import strategies as st

log = logging.getLogger("ganger_daemon.gang")


@pytest.fixture(autouse=True)
def former_log() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def written(form: str, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    monkeypatch.setenv(FORMAT_VARIABLE, form)
    stream = io.StringIO()
    set_up_log("daemon", "info", stream)
    return stream


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_line_has_its_time_level_program_event_and_fields(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = written(form, monkeypatch)
    log.warning("gang %s", "launched", extra={"job": "jobs/7", "why": 'it said "no = 1"'})
    log.debug("left out")
    (line,) = stream.getvalue().splitlines()
    fields = read_line(line)
    assert fields.pop("time").endswith("Z")
    assert fields == {
        "level": "warning",
        "program": "daemon",
        "event": "gang launched",
        "logger": "ganger_daemon.gang",
        "job": "jobs/7",
        "why": 'it said "no = 1"',
    }


def test_a_line_for_people_begins_with_what_they_look_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = written("text", monkeypatch)
    log.info("gang launched", extra={"job": "jobs/7", "epoch": 3})
    _, _, rest = stream.getvalue().partition(" ")
    assert rest == 'level=info program=daemon event="gang launched" logger=ganger_daemon.gang job=jobs/7 epoch=3\n'


def test_a_traceback_stays_readable_and_is_one_field_of_a_json_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for form in ("text", "json"):
        stream = written(form, monkeypatch)
        try:
            raise ValueError("a\x1b[31m")
        except ValueError:
            log.exception("failed")
        assert "\x1b" not in stream.getvalue()
        if form == "text":
            assert stream.getvalue().splitlines()[-1] == "ValueError: a\\x1b[31m"
        else:
            assert json.loads(stream.getvalue())["exception"].endswith("ValueError: a\x1b[31m")


def test_a_format_that_there_is_not_is_named_and_lines_are_text(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = written("xml", monkeypatch)
    fields = read_line(stream.getvalue())
    assert (fields["event"], fields[FORMAT_VARIABLE], fields["use"]) == (
        "unknown log format",
        "xml",
        "text or json",
    )


@pytest.mark.parametrize("line", ["", "{", "[1]", '{"a": 1}', "Traceback (most recent call last):", "x=1", "{" * 9999])
def test_a_line_of_something_else_has_no_fields(line: str) -> None:
    assert read_line(line) == {}


@given(value=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_no_value_ends_a_line_commands_a_terminal_or_becomes_another_field(value: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stream = written("text", patch)
        log.info(value, extra={"job": value, "last": "1"})
    (line,) = stream.getvalue().split("\n")[:-1]
    assert visible(line) == line
    fields = read_line(line)
    assert set(fields) == {"time", "level", "program", "event", "logger", "job", "last"}
    assert fields["last"] == "1"
