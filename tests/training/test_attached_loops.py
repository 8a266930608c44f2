"""Loops that people write around `job.dataloader`: stopped and gone on, each ends bit for bit as if never stopped.

The script draws in the main process wherever it can, so that a generator that is put back too often, too late or not
at all changes the numbers; it prints in its epochs' ends what its loop's body made.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ganger.injob.page import GangPages
from ganger.injob.page_layout import EXIT_NO_STATE, Capability, Word
from ganger.protocol.stop_rules import stop_step
from training.harness import ONLY_IN_PLACE, Rank, run_in_parts_as_alone, write_script

pytestmark = pytest.mark.torch

HEAD = """
import random
import ganger, torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(1)
random.seed(2)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

class Noisy(torch.utils.data.Dataset):
    def __init__(self, length):
        self.data = torch.randn(length, 4)
    def __len__(self):
        return len(self.data)
    def __getitem__(self, index):
        return self.data[index] + 0.1 * torch.rand(4) + random.random()

train, other, held_out = Noisy(10), Noisy(6), Noisy(8)
job = ganger.attach(model=model, optimizer=optimizer, seed=3)
loader = job.dataloader(train, global_batch=2, shuffle=True)
validation = job.dataloader(held_out, global_batch=2, shuffle=True)

def fit(x, *more):
    loss = model(x + sum(more)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    print("step", job.step_count + 1, loss.item().hex(), flush=True)
    return loss

def validate(most):
    model.eval()
    for number, x in enumerate(validation):
        if number == most:
            break
        print("validation", number, model(x).square().mean().item().hex(), flush=True)
    model.train()
"""

LOOPS = {
    "a validation that is left early": """
for epoch in job.epochs(3):
    for x in loader:
        loss = fit(x)
        job.step(loss)
    validate(2)
    print("epoch", epoch, loss.item().hex(), flush=True)
""",
    "a whole validation in the middle of a pass": """
for epoch in job.epochs(3):
    for number, x in enumerate(loader):
        if job.step_count % 5 == 2:
            validate(9)
        loss = fit(x)
        job.step(loss)
    print("epoch", epoch, loss.item().hex(), flush=True)
""",
    "a look at the first batch": """
x = next(iter(loader))
y = next(iter(validation))
print("shapes", x.shape, y.shape, flush=True) if job.step_count == 0 else None
for epoch in job.epochs(3):
    for x in loader:
        loss = fit(x)
        job.step(loss)
    validate(1)
    print("epoch", epoch, loss.item().hex(), flush=True)
""",
    "a look at the first batch of every epoch": """
for epoch in job.epochs(3):
    shape = next(iter(validation)).shape
    for x in loader:
        loss = fit(x)
        job.step(loss)
    print("epoch", epoch, loss.item().hex(), shape, flush=True)
""",
    "two loaders side by side, one of them endless": """
second = job.dataloader(other, global_batch=2, shuffle=True)
def endless():
    while True:
        yield from second
more = endless()
for epoch in job.epochs(3):
    for x in loader:
        loss = fit(x, next(more))
        job.step(loss)
    print("epoch", epoch, loss.item().hex(), flush=True)
""",
    "an iterator that is held and was begun before": """
second = job.dataloader(other, global_batch=1, shuffle=True)
more = iter(second)
first = next(more)
for epoch in job.epochs(1):
    for x in loader:
        loss = fit(x, next(more))
        job.step(loss)
    print("epoch", epoch, loss.item().hex(), flush=True)
""",
    "a zip": """
second = job.dataloader(other, global_batch=1, shuffle=True)
for epoch in job.epochs(3):
    for x, y in zip(loader, second):
        loss = fit(x, y)
        job.step(loss)
    print("epoch", epoch, loss.item().hex(), flush=True)
""",
    "a loader that every epoch makes anew": """
for epoch in job.epochs(3):
    for x in job.dataloader(other, global_batch=2, shuffle=True):
        loss = fit(x)
        job.step(loss)
    print("epoch", epoch, loss.item().hex(), flush=True)
""",
    "what is left of a sum after the pass": """
for epoch in job.epochs(3):
    optimizer.zero_grad()
    for number, x in enumerate(loader):
        loss = model(x).square().mean()
        loss.backward()
        print("batch", loss.item().hex(), flush=True)
        if number % 2 == 1:
            optimizer.step(); optimizer.zero_grad()
            job.step(loss)
    optimizer.step(); optimizer.zero_grad()
    job.step(loss)
    print("epoch", epoch, loss.item().hex(), flush=True)
""",
    "one step after a whole pass": """
for epoch in job.epochs(4):
    optimizer.zero_grad()
    for x in loader:
        loss = model(x).square().mean()
        loss.backward()
    optimizer.step()
    print("step", loss.item().hex(), flush=True)
    job.step(loss)
""",
    "passes of one batch": """
whole = job.dataloader(train, global_batch=10, shuffle=True)
for epoch in job.epochs(5):
    for x in whole:
        loss = fit(x)
        job.step(loss)
    print("epoch", epoch, loss.item().hex(), torch.rand(()).item().hex(), flush=True)
""",
    "no loader, but steps": """
for step in job.steps(8):
    loss = fit(torch.randn(2, 4) + step)
    job.step(loss)
print("loss", loss.item().hex(), flush=True)
""",
    "a loader read through steps": """
batches = iter(loader)
for step in job.steps(8):
    try:
        x = next(batches)
    except StopIteration:
        batches = iter(loader)
        x = next(batches)
    loss = fit(x)
    job.step(loss)
print("loss", loss.item().hex(), flush=True)
""",
    "a position of its own": """
class Batches:
    def __init__(self):
        self.epoch = self.number = 0
    def state_dict(self):
        return {"epoch": self.epoch, "number": self.number}
    def load_state_dict(self, state):
        self.epoch, self.number = state["epoch"], state["number"]
    def __iter__(self):
        while self.number < 4:
            self.number += 1
            yield train[self.number + self.epoch]
        self.epoch, self.number = self.epoch + 1, 0
own = job.register("batches", Batches(), position=True)
loss = None
for epoch in job.epochs(3):
    for x in own:
        loss = fit(x)
        job.step(loss)
    print("epoch", epoch, own.epoch, flush=True)
""",
}
STEPS = {
    "an iterator that is held and was begun before": 5,
    "what is left of a sum after the pass": 9,
    "a loader that every epoch makes anew": 9,
    "one step after a whole pass": 4,
    "passes of one batch": 5,
    "no loader, but steps": 8,
    "a loader read through steps": 8,
    "a position of its own": 12,
}


def _script(tmp_path: Path, text: str) -> Path:
    return write_script(tmp_path, HEAD + text)


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_is_stopped_after_every_step_in_turn_goes_on_alike(tmp_path: Path, name: str) -> None:
    stops = list(range(1, STEPS.get(name, 15)))
    run_in_parts_as_alone(tmp_path, _script(tmp_path, LOOPS[name]), stops, agent=False)


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_is_only_watched_counts_all_its_steps(tmp_path: Path, name: str) -> None:
    rank = Rank(tmp_path / "run", _script(tmp_path, LOOPS[name]))
    assert rank.end() == 0, rank.output()
    assert rank.page.get(Word.STEP) == STEPS.get(name, 15)
    assert rank.page.get(Word.CAPABILITIES) & Capability.CHECKPOINT


NOT_FOUND_AGAIN = {
    "batches of its own": (
        """
batches = torch.utils.data.DataLoader(train, batch_size=2)
for epoch in job.epochs(4):
    for x in batches:
        job.step(fit(x))
""",
        "its batches come from no job.dataloader",
    ),
    "batches of its own after a validation": (
        """
for epoch in job.epochs(4):
    validate(9)
    for number in range(20):
        job.step(fit(train[number % 10]))
""",
        "its batches come from no job.dataloader",
    ),
    "no loop of ours": (
        """
while job.step_count < 20:
    job.step(fit(torch.randn(2, 4)))
""",
        "its batches come from no job.dataloader",
    ),
    "two passes in an epoch": (
        """
for epoch in job.epochs(3):
    for twice in range(2):
        for x in loader:
            job.step(fit(x))
""",
        "it makes steps in more than one pass of an epoch",
    ),
    "two loops": (
        """
for warmup in job.epochs(1):
    for x in loader:
        job.step(fit(x))
for epoch in job.epochs(3):
    for x in loader:
        job.step(fit(x))
""",
        "it trains in more than one loop",
    ),
}


@pytest.mark.parametrize("name", NOT_FOUND_AGAIN)
def test_where_a_restart_would_repeat_steps_it_is_not_offered(tmp_path: Path, name: str) -> None:
    text, reason = NOT_FOUND_AGAIN[name]
    rank = Rank(tmp_path / "run", _script(tmp_path, text))
    assert rank.end() == 0, rank.output()
    assert rank.page.get(Word.CAPABILITIES) == ONLY_IN_PLACE | Capability.FIVE_LINE
    assert rank.output().count("ganger: this job can be paused, but neither moved nor saved: " + reason) == 1
    steps = [line.split()[1] for line in rank.output().splitlines() if line.startswith("step")]
    assert steps == [str(number + 1) for number in range(len(steps))]
    assert len(steps) >= 20, "each loop is run to its end"


def test_a_state_of_such_a_script_that_is_carried_elsewhere_all_the_same_is_not_restored(tmp_path: Path) -> None:
    script = _script(tmp_path, NOT_FOUND_AGAIN["batches of its own"][0])
    part, shards = tmp_path / "part", tmp_path / "checkpoint"
    assert Rank(part, script, stop_at=7, checkpoint=shards).end() == 75
    again = Rank(tmp_path / "again", script, restore={"kind": "checkpoint", "path": str(shards), "step": 7})
    assert again.end() == EXIT_NO_STATE, again.output()
    assert "job.dataloader" in json.loads((tmp_path / "again/rank-0.error.json").read_text())["message"]


@pytest.mark.parametrize("step", [14, 15])
def test_a_stop_that_comes_with_the_last_step_finds_training_finished(tmp_path: Path, step: int) -> None:
    script = _script(tmp_path, LOOPS["a validation that is left early"])
    directory = tmp_path / "run"
    ranks = [Rank(directory, script, rank=rank, world=2, stop_at=step) for rank in range(2)]
    assert [rank.end() for rank in ranks] == [0, 0], "".join(rank.output() for rank in ranks)
    points = GangPages(str(directory), 2, [rank.page for rank in ranks]).points(2)
    assert points is not None
    step = stop_step(points)
    assert step is not None, "the order is over"
    assert any(point.done and (point.ack is None or point.step < step) for point in points), "no rank stopped"
