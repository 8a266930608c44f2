"""Progress of a run goes to stderr: only where it is wanted, and never much of it."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from itertools import count

import pytest
from ganger_master.simulator.flags import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def go_through(meter: ProgressBar) -> None:
    with meter:
        for done in range(1, 1001):
            meter(done, 1000)


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    with redirect_stderr(Terminal()) as terminal:
        go_through(ProgressBar("las2d", None, clock=count().__next__))
    assert "las2d" in terminal.getvalue()
    assert "/1000" in terminal.getvalue()


def test_a_pipe_gets_a_line_a_tenth_and_only_if_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    go_through(ProgressBar("las2d", None, clock=count().__next__))
    assert capsys.readouterr().err == ""
    go_through(ProgressBar("las2d", True, clock=count().__next__))
    assert capsys.readouterr().err.splitlines() == [f"las2d: {n * 100:,} of 1,000 jobs" for n in range(1, 11)]


def test_a_terminal_gets_nothing_if_not_wanted() -> None:
    with redirect_stderr(Terminal()) as terminal:
        go_through(ProgressBar("las2d", False, clock=count().__next__))
    assert terminal.getvalue() == ""


def test_between_two_looks_at_the_clock_nothing_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    go_through(ProgressBar("las2d", True, clock=lambda: 0.0))
    assert capsys.readouterr().err == ""
