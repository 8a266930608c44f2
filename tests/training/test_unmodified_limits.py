"""What the agent offers depends on the script: what it cannot bring back it does not offer, and says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from ganger.injob.page_layout import Capability, PageOrderKind, PageParkLevel, PageState, Word
from training.harness import ONLY_IN_PLACE, Rank, run_in_parts_as_alone, write_script

pytestmark = pytest.mark.torch

EVERYTHING = ONLY_IN_PLACE | Capability.CHECKPOINT | Capability.REPLAY

HEAD = """
import copy, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
torch.manual_seed(1)
model = nn.Linear(4, 4)
data = TensorDataset(torch.randn(12, 4))
"""
LOOP = """
for epoch in range(2):
    for (x,) in DataLoader(data, batch_size=2, shuffle=True):
        loss = model(x).square().mean()
        loss.backward()
        {step}
        print(loss.item().hex(), flush=True)
"""
STEP = "optimizer.step(); optimizer.zero_grad()"
SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"

SCRIPTS = {
    "one optimizer": (SGD + LOOP.format(step=STEP), EVERYTHING, 12),
    "several optimizers": (
        "first = torch.optim.SGD([model.weight], lr=0.1)\nsecond = torch.optim.Adam([model.bias], lr=0.1)\n"
        + LOOP.format(step="first.step(); second.step(); first.zero_grad(); second.zero_grad()"),
        EVERYTHING,
        12,
    ),
    "an average of the weights": (
        SGD
        + "average = copy.deepcopy(model)\n"
        + LOOP.format(step=STEP + "; average.weight.data.lerp_(model.weight, .1)"),
        EVERYTHING,
        12,
    ),
    "no loader": (
        SGD + "for n in range(8):\n    model(data[n][0]).square().mean().backward()\n    " + STEP,
        ONLY_IN_PLACE,
        8,
    ),
}


def _script(tmp_path: Path, text: str) -> Path:
    return write_script(tmp_path, HEAD + text)


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_optimizer_step_with_its_fetch_is_one_boundary_and_the_capabilities_fit(tmp_path: Path, name: str) -> None:
    text, capabilities, steps = SCRIPTS[name]
    rank = Rank(tmp_path / "run", _script(tmp_path, text), agent=True)
    assert rank.end() == 0, rank.output()
    assert rank.page.get(Word.CAPABILITIES) == capabilities
    # after the last step there may be nothing that tells the agent of it
    assert rank.page.get(Word.STEP) in (steps, steps - 1)


@pytest.mark.parametrize("name", ["several optimizers", "an average of the weights"])
def test_state_beyond_one_model_and_one_optimizer_comes_back(tmp_path: Path, name: str) -> None:
    script = _script(tmp_path, SCRIPTS[name][0] + "\nprint(sum(p.sum() for p in model.parameters()).item().hex())\n")
    run_in_parts_as_alone(tmp_path, script, [5])


def test_an_optimizer_written_by_hand_makes_the_script_opaque(tmp_path: Path) -> None:
    # the agent looks at loops once an optimizer exists, here one that never steps
    by_hand = "with torch.no_grad():\n            for p in model.parameters(): p -= 0.1 * p.grad; p.grad = None"
    text = SGD + LOOP.format(step=by_hand).replace("range(2)", "range(200)").replace(
        "print(loss.item().hex(), flush=True)", ""
    )
    rank = Rank(tmp_path / "run", _script(tmp_path, text), agent=True)
    assert rank.end() == 0, rank.output()
    assert rank.page.get(Word.CAPABILITIES) == Capability.OPAQUE
    assert rank.page.get(Word.STEP) == 0


def test_with_the_agent_switched_off_the_page_is_left_alone(tmp_path: Path) -> None:
    script = _script(tmp_path, SCRIPTS["one optimizer"][0])
    rank = Rank(tmp_path / "run", script, agent=True, environment={"GANGER_AGENT": "none"})
    assert rank.end() == 0, rank.output()
    assert rank.page.get(Word.LOCK) == rank.page.get(Word.HELLO_TIME) == rank.page.get(Word.STEP) == 0


SCALED = """
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
data.tensors[0][7] = float("inf")  # in one batch of each epoch
for epoch in range(2):
    for (x,) in DataLoader(data, batch_size=2, shuffle=True):
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(loss.item().hex(), scaler.get_scale(), flush=True)
"""


@pytest.mark.parametrize("stop", [3, 4, 8])
def test_a_skipped_step_of_a_gradient_scaler_moves_no_boundary_out_of_place(tmp_path: Path, stop: int) -> None:
    printed = run_in_parts_as_alone(tmp_path, _script(tmp_path, SGD + SCALED), [stop])
    assert sum(line[0] in "in" for line in printed.splitlines()) == 2, "two batches overflow"


def test_no_suspend_and_safe_point_hold_back_and_let_through(tmp_path: Path) -> None:
    text = (
        SGD
        + """
import ganger
job = ganger.attach(model=model, optimizer=optimizer)
sizes = []
job.on_resize(lambda old, new: sizes.append((old, new)))
for epoch in job.epochs(1):
    for (x,) in job.dataloader(data, global_batch=2):
        model(x).square().mean().backward()
        optimizer.step()
        with (job.no_suspend() if job.step_count in (2, 3) else open("/dev/null")):
            job.step()
        job.safe_point()
        print(job.step_count, flush=True)
print(sizes)
"""
    )
    script = _script(tmp_path, text)
    # step 3 and 4 are made inside no_suspend, so the third boundary is step 5
    part = tmp_path / "run"
    (part / "orders").mkdir(parents=True)
    rank = Rank(part, script, order=PageOrderKind.WAIT)
    rank.wait_word(Word.STATE, PageState.READY)
    rank.order(2, PageOrderKind.STOP, PageParkLevel.PAUSE, stop=2)
    assert rank.reached(2) == 0
    rank.order(3, PageOrderKind.RUN)
    assert rank.end() == 0, rank.output()
    assert rank.output() == "1\n2\n3\n4\n5\n6\n[]\n"
    assert rank.page.get(Word.STEP) == 4
