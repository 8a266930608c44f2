"""A script that gives no seed draws the same numbers in every attempt of its job; a seed of its own holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from training.harness import Rank

pytestmark = pytest.mark.torch

DRAWS = """
import random
import numpy
import torch
{seeds}
order = list(range(20))
random.shuffle(order)
print(order, random.random(), numpy.random.permutation(9), numpy.random.default_rng({seed}).random())
print(torch.randperm(9).tolist(), torch.nn.Linear(2, 1).weight.tolist())
print(numpy.random.default_rng({seed}).random())
"""
OWN = DRAWS.format(seeds="random.seed(3); numpy.random.seed(4); torch.manual_seed(5)", seed=5)
NONE = DRAWS.format(seeds="", seed="")


def _draws(tmp_path: Path, name: str, text: str, job: str | None) -> str:
    script = tmp_path / "draw.py"
    script.write_text(text)
    managed = {"agent": True, "environment": {"GANGER_JOB_ID": job}} if job else {"managed": False}
    rank = Rank(tmp_path / name, script, **managed)
    assert rank.end() == 0, rank.output()
    return rank.output()


def test_each_attempt_of_a_job_draws_the_same_and_another_job_does_not(tmp_path: Path) -> None:
    first = _draws(tmp_path, "first", NONE, "7")
    assert _draws(tmp_path, "second", NONE, "7") == first
    assert _draws(tmp_path, "other", NONE, "8") != first
    one, _, two = (line.split()[-1] for line in first.splitlines())
    assert one != two, "two generators of a script are not the same"


def test_a_seed_of_the_script_holds(tmp_path: Path) -> None:
    assert _draws(tmp_path, "managed", OWN, "7") == _draws(tmp_path, "alone", OWN, None)
