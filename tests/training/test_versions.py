"""A job whose library is of another version than its page: refused if it asks for control, else without control."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ganger.injob.page import Page
from ganger.injob.page_layout import MAGIC, VERSION, PageOrderKind, Word
from training.harness import Rank

pytestmark = pytest.mark.torch

BOTH = f"has version {VERSION + 1}, this Ganger reads version {VERSION}"


@pytest.fixture
def other(tmp_path: Path) -> dict[str, str]:
    """The environment of a rank that was launched by another version."""
    path = tmp_path / "rank-0.page"
    page = Page.create(str(path), epoch=1, rank=0, world=1)
    page.write_order(1, PageOrderKind.RUN)
    page.set(Word.MAGIC, MAGIC << 16 | VERSION + 1)
    return {"GANGER_PAGE": str(path), "GANGER_JOB_DIR": str(tmp_path)}


def test_attach_refuses_a_page_of_another_version_naming_both(tmp_path: Path, other: dict[str, str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("import ganger\nganger.attach()\nprint('trained without control')\n")
    rank = Rank(tmp_path / "run", script, managed=False, environment=other)
    assert rank.end() == 1
    assert BOTH in rank.output()
    assert "trained" not in rank.output()


def test_a_script_that_asks_for_nothing_runs_without_control_and_says_so(other: dict[str, str]) -> None:
    code = "from ganger.injob.bootstrap import arm; arm(); print('trained')"
    done = subprocess.run([sys.executable, "-c", code], env=other, capture_output=True, text=True, check=True)
    assert done.stdout == "trained\n"
    assert done.stderr.startswith("ganger: this process runs without control: ")
    assert BOTH in done.stderr
