"""What may be attached to a job, and how often."""

from __future__ import annotations

from pathlib import Path

import pytest
from training.harness import Rank

pytestmark = pytest.mark.torch

TWICE = """
import ganger, torch
for part in ("generator", "discriminator"):
    job = ganger.attach(model=torch.nn.Linear(1, 1))
    print(part)
"""


def test_a_second_attach_is_refused_for_only_one_of_two_would_be_saved(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TWICE)
    rank = Rank(tmp_path / "managed", script)
    assert rank.end() == 1
    assert "attach was called twice in one job: name all models and optimizers in one call" in rank.output()
    assert "discriminator\n" not in rank.output()


def test_outside_ganger_attach_controls_nothing_however_often_it_is_called(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TWICE)
    rank = Rank(tmp_path / "alone", script, managed=False)
    assert rank.end() == 0
    assert rank.output() == "generator\ndiscriminator\n"
