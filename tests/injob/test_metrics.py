"""What a script reports by name: read as it was written, bounded, and nonsense is rejected."""

from __future__ import annotations

import math
import os
from pathlib import Path

import ganger
import pytest
from ganger.injob import metrics
from ganger.injob.metrics import ReportedMetric, checked
from ganger.injob.page import Page, page_path
from ganger.injob.page_layout import METRICS_FIRST, Word
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture(params=[True, False], ids=["mapped", "as a file"])
def page(tmp_path: Path, request: pytest.FixtureRequest) -> Page:
    return Page.create(page_path(str(tmp_path), 0), epoch=7, rank=0, world=1, mapped=bool(request.param))


def test_the_newest_value_of_each_name_is_read_with_its_step(page: Page) -> None:
    assert metrics.read(page) == ()
    metrics.write(page, {"accuracy": 0.5, "epoch": 1.0})
    page.set(Word.STEP, 9)
    metrics.write(page, {"accuracy": 0.75})
    assert metrics.read(page) == (ReportedMetric("accuracy", 0.75, 9), ReportedMetric("epoch", 1.0, 0))


def test_a_ninth_name_is_a_mistake_of_the_script_and_the_others_stand(page: Page) -> None:
    metrics.write(page, {f"m{number}": float(number) for number in range(8)})
    with pytest.raises(ValueError, match="a job can report under 8 names"):
        metrics.write(page, {"m8": 8.0})
    assert len(metrics.read(page)) == 8


def test_a_value_that_is_no_number_is_told_as_such(page: Page) -> None:
    metrics.write(page, {"error": math.inf, "loss": math.nan})
    error, loss = metrics.read(page)
    assert error.value == math.inf
    assert math.isnan(loss.value)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=64, max_size=64))
def test_whatever_a_job_writes_there_is_read_as_names_and_numbers(words: list[int]) -> None:
    class Fake:
        def metric_words(self) -> list[int]:
            return words

    for metric in metrics.read(Fake()):  # type: ignore[arg-type]
        assert metric.name.isidentifier()
        assert 0 <= metric.step < 1 << 62


def test_a_name_that_is_none_and_a_value_that_is_no_number_are_said_everywhere() -> None:
    for bad in ("a b", "", "x" * 33):
        with pytest.raises(ValueError, match="cannot name a metric"):
            checked({bad: 1})
    with pytest.raises(TypeError, match="metric a must be a number, not a str"):
        ganger.report(a="many")  # type: ignore[operator]


def test_a_report_goes_to_the_page_of_this_process_and_to_no_other(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GANGER_PAGE", raising=False)
    metrics.report(accuracy=0.1)
    monkeypatch.setenv("GANGER_PAGE", page.path)
    page.set(Word.PID, os.getpid() + 1)
    metrics.report(accuracy=0.2)
    assert metrics.read(page) == ()
    page.set(Word.PID, os.getpid())
    metrics.report(accuracy=0.3)
    assert metrics.read(page) == (ReportedMetric("accuracy", 0.3, 0),)
    monkeypatch.setenv("GANGER_PAGE", "/no/such/page")
    metrics.report(accuracy=0.4)


def test_a_line_that_changes_is_not_read(page: Page) -> None:
    metrics.write(page, {"accuracy": 0.5})
    page.set(METRICS_FIRST, 0)
    assert metrics.read(page) == ()
