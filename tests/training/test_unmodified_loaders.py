"""What an unmodified script's loaders keep by themselves comes back: generators and counters of datasets, samplers and
collate functions, reachable by nothing but the loader."""

from __future__ import annotations

from pathlib import Path

import pytest
from ganger.injob.page_layout import Word
from training.harness import ONLY_IN_PLACE, Rank, refused_checkpoint, run_in_parts_as_alone, write_script

pytestmark = pytest.mark.torch

HEAD = """
import os, random
import numpy, torch
from torch import nn
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, Subset, random_split
torch.set_num_threads(1)
torch.manual_seed(1); numpy.random.seed(1)
WORKERS = int(os.environ.get("WORKERS", "0"))
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def fit(x):
    loss = model(x).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    return loss

class Noisy(Dataset):
    def __init__(self, length=12):
        self.dice, self.draws, self.calls = random.Random(3), numpy.random.default_rng(4), 0
        self.x = torch.randn(length, 4, generator=torch.Generator().manual_seed(2))
    def __len__(self):
        return len(self.x)
    def __getitem__(self, index):
        self.calls += 1
        return self.x[index] + self.dice.random() + self.draws.normal() + 0.01 * self.calls

class Shuffled:
    def __init__(self, length):
        self.order, self.dice, self.passes = list(range(length)), random.Random(5), 0
    def __iter__(self):
        self.passes += 1
        self.dice.shuffle(self.order)
        yield from self.order[self.passes % 2:] + self.order[:self.passes % 2]

class Counted(Shuffled):
    def __len__(self):
        return len(self.order)

class Collate:
    def __init__(self):
        self.draws, self.calls = numpy.random.RandomState(6), 0
    def __call__(self, samples):
        self.calls += 1
        return torch.stack(samples) * (1 + 0.1 * self.draws.rand()) + 0.01 * self.calls
    def method(self, samples):
        return self(samples)

def train(loader, epochs=3, most=99):
    for epoch in range(epochs):
        number = 0
        for x in loader:
            if number == most:
                break
            loss = fit(x)
            print(epoch, number, loss.item().hex(), flush=True)
            number += 1
        print("end", epoch, flush=True)
"""

SCRIPTS = {
    "a dataset": "train(DataLoader(Noisy(), batch_size=3, shuffle=True, num_workers=WORKERS))",
    "a dataset of every pass's own": """
for epoch in range(3):
    for x in DataLoader(Noisy(), batch_size=3, shuffle=True, num_workers=WORKERS):
        print(epoch, fit(x).item().hex(), flush=True)
""",
    "parts of datasets": """
first, second = random_split(Noisy(8), [6, 2], generator=torch.Generator().manual_seed(1))
train(DataLoader(ConcatDataset([first, Subset(Noisy(), range(6))]), batch_size=3, shuffle=True, num_workers=WORKERS))
""",
    "a sampler": "train(DataLoader(Noisy(), batch_size=3, sampler=Counted(12), num_workers=WORKERS))",
    "a sampler without a length": "train(DataLoader(Noisy(), batch_size=3, sampler=Shuffled(12), num_workers=WORKERS))",
    "a batch sampler": """
train(DataLoader(Noisy(), batch_sampler=BatchSampler(Counted(12), 3, False), num_workers=WORKERS))
""",
    "a collate function": "train(DataLoader(Noisy(), batch_size=3, collate_fn=Collate(), num_workers=WORKERS))",
    "a method that collates": """
train(DataLoader(Noisy(), batch_size=3, collate_fn=Collate().method, num_workers=WORKERS))
""",
    "a generator": """
train(DataLoader(Noisy(), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(9), num_workers=WORKERS))
""",
    "an order in an array": """
class Ordered:
    def __init__(self):
        self.order = numpy.arange(12)
    def __len__(self):
        return 12
    def __iter__(self):
        numpy.random.shuffle(self.order)
        return iter(self.order.tolist())
train(DataLoader(Noisy(), batch_size=3, sampler=Ordered(), num_workers=WORKERS))
""",
    "passes that are left early": """
generator = torch.Generator().manual_seed(9)
train(DataLoader(Noisy(16), batch_size=3, sampler=Counted(16), generator=generator, num_workers=WORKERS), most=4)
""",
}


COUNTED = {
    "enumerate": """
for epoch in range(3):
    for number, x in enumerate(loader):
        print(epoch, number, fit(x).item().hex(), flush=True)
""",
    "enumerate from one, of a progress bar": """
def bar(batches):
    for batch in batches:
        yield batch
for epoch in range(3):
    for number, x in enumerate(bar(loader), 1):
        print(epoch, number, fit(x).item().hex(), flush=True)
""",
    "a progress bar of enumerate": """
def bar(batches):
    for batch in batches:
        yield batch
for epoch in range(3):
    for number, x in bar(enumerate(loader, start=1)):
        print(epoch, number, fit(x).item().hex(), flush=True)
""",
    "enumerate of enumerate": """
for epoch in range(3):
    for outer, (number, x) in enumerate(enumerate(loader, 5)):
        print(epoch, outer, number, fit(x).item().hex(), flush=True)
""",
    "enumerate over the passes": """
def endless():
    while True:
        yield from loader
steps = 0
for number, x in enumerate(endless()):
    if steps >= 12:
        break
    steps += 1
    print(number, fit(x).item().hex(), flush=True)
""",
}


ONCE = [name for name in COUNTED if name != "enumerate of enumerate"]


@pytest.mark.parametrize("name", [*ONCE, pytest.param("enumerate of enumerate", marks=pytest.mark.chaos)])
def test_batches_that_are_counted_by_enumerate_keep_their_numbers(tmp_path: Path, name: str) -> None:
    text = HEAD + "loader = DataLoader(Noisy(), batch_size=3, shuffle=True)\n" + COUNTED[name]
    # four steps a pass; the third process goes on in a pass that the second one has gone on with
    run_in_parts_as_alone(tmp_path, write_script(tmp_path, text), [2, 3, 4, 5, 10])


# Workers have copies of it.
IN_WORKERS = ("a dataset", "a sampler without a length", "a collate function", "passes that are left early")


BESIDE_WORKERS = [(name, 2) for name in IN_WORKERS if name != "a sampler without a length"]
LATER = pytest.param("a sampler without a length", 2, marks=pytest.mark.chaos)


@pytest.mark.parametrize(("name", "workers"), [*((name, 0) for name in SCRIPTS), *BESIDE_WORKERS, LATER])
def test_what_only_a_loader_knows_comes_back(tmp_path: Path, name: str, workers: int) -> None:
    script = write_script(tmp_path, HEAD + SCRIPTS[name])
    # four steps a pass
    run_in_parts_as_alone(tmp_path, script, [1, 4, 5, 10], environment={"WORKERS": str(workers)})


HELD = """
checks = DataLoader(Noisy(), batch_size=6)
loader = DataLoader(Noisy(), batch_size=3, shuffle=True)
{before}
for epoch in range(3):
    for x in loader:
        loss = fit(x)
        print(epoch, loss.item().hex(), flush=True)
    {after}
"""


def test_an_unfinished_pass_that_is_held_while_others_go_on_is_not_taken_for_a_place_to_come_back_to(
    tmp_path: Path,
) -> None:
    script = write_script(tmp_path, HEAD + HELD.format(before="", after="held = iter(checks); x = next(held)"))
    first = Rank(tmp_path / "first", script, agent=True, stop_at=3, checkpoint=tmp_path / "one")
    assert first.end() == 75, "nothing is held yet"
    rank = Rank(tmp_path / "run", script, agent=True, stop_at=7, checkpoint=tmp_path / "two")
    message = refused_checkpoint(rank)
    assert "it takes batches from several loaders at once" in message
    assert rank.page.get(Word.CAPABILITIES) == ONLY_IN_PLACE
    assert not (tmp_path / "two").exists()


def test_an_iterator_that_nothing_was_taken_from_does_not_interfere(tmp_path: Path) -> None:
    script = write_script(tmp_path, HEAD + HELD.format(before="held = iter(checks)", after="held = iter(checks)"))
    run_in_parts_as_alone(tmp_path, script, [2, 5, 8, 9])
