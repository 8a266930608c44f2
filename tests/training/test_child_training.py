"""Training in a process that the launched one started: no order is obeyed there, and the page gives the reason."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from ganger.injob.page_layout import Capability, Opaque, Word
from training.harness import Rank

pytestmark = pytest.mark.torch

TRAIN = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps=6):
    for (x,) in DataLoader(TensorDataset(torch.randn(2 * steps, 4)), batch_size=2):
        model(x).square().mean().backward()
        optimizer.step(); optimizer.zero_grad()
"""
FORKED = """
import multiprocessing
processes = [multiprocessing.Process(target=train) for _ in range({processes})]
{before}
for process in processes: process.start(); {join}
for process in processes: process.join()
assert not any(process.exitcode for process in processes)
"""


def _run(tmp_path: Path, text: str) -> Rank:
    script = tmp_path / "train.py"
    script.write_text(TRAIN + text)
    return Rank(tmp_path / "run", script, agent=True)


def _reason(rank: Rank) -> str:
    return str(json.loads((rank.directory / "rank-0.no-BOUNDARIES.json").read_text())["message"])


def test_a_forked_child_that_trains_makes_the_rank_opaque_and_its_steps_are_counted(tmp_path: Path) -> None:
    rank = _run(tmp_path, FORKED.format(processes=1, before="", join=""))
    assert rank.end() == 0, rank.output()
    assert rank.page.get(Word.OPAQUE) == Opaque.TRAINS_IN_CHILD
    assert rank.page.get(Word.CAPABILITIES) == Capability.OPAQUE
    assert rank.page.get(Word.STEP) == 6
    assert rank.page.get(Word.HELLO_TIME)
    assert "exec python train.py" in _reason(rank)


def test_the_steps_of_one_child_are_counted_where_several_train(tmp_path: Path) -> None:
    rank = _run(tmp_path, FORKED.format(processes=3, before="", join=""))
    assert rank.end() == 0, rank.output()
    assert rank.page.get(Word.OPAQUE) == Opaque.SEVERAL_TRAIN
    assert rank.page.get(Word.STEP) == 6
    assert _reason(rank) == "several of its processes train"


def test_a_rank_that_trains_beside_a_child_that_trains_is_opaque_for_good(tmp_path: Path) -> None:
    rank = _run(tmp_path, FORKED.format(processes=1, before="train(3)", join="process.join(); train(3)"))
    assert rank.end() == 0, rank.output()
    assert rank.page.get(Word.OPAQUE) == Opaque.SEVERAL_TRAIN
    assert rank.page.get(Word.LOCK) == rank.process.pid


def test_workers_of_a_loader_train_nothing(tmp_path: Path) -> None:
    text = "for _ in DataLoader(TensorDataset(torch.randn(4, 4)), num_workers=2): pass\ntrain()"
    rank = _run(tmp_path, text)
    assert rank.end() == 0, rank.output()
    assert rank.page.get(Word.OPAQUE) == Opaque.NO
    assert rank.page.get(Word.CAPABILITIES) & Capability.CHECKPOINT


@pytest.mark.parametrize("attach", ["", "import ganger\njob = ganger.attach(model=model, optimizer=optimizer)"])
def test_a_command_that_starts_a_script_has_a_child_that_trains(tmp_path: Path, attach: str) -> None:
    rank = _started_by_a_command(tmp_path, TRAIN + attach + "\ntrain()\n")
    assert rank.end() == 0, rank.output()
    assert rank.page.get(Word.OPAQUE) == Opaque.TRAINS_IN_CHILD
    assert rank.page.get(Word.STEP) == 6


def test_a_child_that_trains_does_not_begin_anew_where_a_state_is_to_be_brought_back(tmp_path: Path) -> None:
    text = TRAIN + "train(1)\nprint('has trained', flush=True)\n"
    rank = _started_by_a_command(tmp_path, text, restore={"kind": "checkpoint", "path": str(tmp_path), "step": 3})
    assert rank.end() != 0
    assert "has trained" not in rank.output()
    assert "a state can only be brought back there" in (rank.directory / "rank-0.error.json").read_text()


def _started_by_a_command(tmp_path: Path, text: str, **options: object) -> Rank:
    """A rank that is no Python of ours, but for what starts it: its child gets the agent by sitecustomize."""
    from ganger.injob.bootstrap import prepare_inject_directory

    (tmp_path / "train.py").write_text(text)
    (tmp_path / "command.py").write_text(
        "import os, subprocess, sys\n"
        "from ganger.injob.process_identity import start_ticks\n"
        "from ganger.injob.page import Page, Word\n"
        "page = Page.open(os.environ['GANGER_PAGE'])\n"
        "page.set(Word.START_TICKS, start_ticks(os.getpid())); page.set(Word.PID, os.getpid())\n"
        "subprocess.call([sys.executable, sys.argv[1]])\n"
    )
    path = os.pathsep.join([prepare_inject_directory(str(tmp_path / "inject")), os.environ.get("PYTHONPATH", "")])
    return Rank(
        tmp_path / "run", tmp_path / "command.py", [tmp_path / "train.py"], environment={"PYTHONPATH": path}, **options
    )
