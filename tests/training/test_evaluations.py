"""Evaluations of unmodified scripts are seen: passes without a step in which gradients are off or no layer trains."""

from __future__ import annotations

from pathlib import Path

import pytest
from ganger.injob.page_layout import Word
from training.harness import Rank, write_script

pytestmark = pytest.mark.torch

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
model, measure = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches, held_out = (DataLoader(TensorDataset(torch.randn(count, 4)), batch_size=2) for count in (8, 12))

def train():
    model.train()
    for number, (x,) in enumerate(batches):
        measure(model(x), x).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()

def fit():
    for epoch in range(2):
        train()
        evaluate()
    train()

{evaluation}
fit()
"""
FORMS = {
    "without gradients": """
def evaluate():
    with torch.no_grad():
        for (x,) in held_out:
            measure(model(x), x)
""",
    "in a function for inference": """
@torch.inference_mode()
def evaluate():
    for (x,) in held_out:
        measure(model(x), x)
""",
    "without gradients for each batch": """
def evaluate():
    model.eval()
    for (x,) in held_out:
        with torch.no_grad():
            measure(model(x), x)
""",
    "with gradients that are not used": """
def evaluate():
    model.eval()
    for (x,) in held_out:
        measure(model(x), x)
""",
}


@pytest.mark.parametrize("form", FORMS)
def test_each_batch_of_an_evaluation_is_counted_and_no_batch_without_a_step_else(form: str, tmp_path: Path) -> None:
    rank = Rank(tmp_path, write_script(tmp_path, SCRIPT.format(evaluation=FORMS[form])), agent=True)
    assert rank.end() == 0, rank.output()
    assert rank.page.get(Word.EVALUATED) == 2 * 6
