"""What an unmodified script keeps beside its models comes back too; where its own loops cannot, it is not offered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ganger.injob.page_layout import EXIT_NO_STATE, EXIT_YIELDED, PageParkLevel, Word
from training.harness import (
    ONLY_IN_PLACE,
    Rank,
    offered_no_checkpoint,
    refused_checkpoint,
    run_in_parts_as_alone,
    write_script,
)

pytestmark = pytest.mark.torch

HEAD = """
import collections, copy, os, random, types
import numpy, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 4))
data = TensorDataset(torch.randn(24, 4), torch.randn(24, 4))
"""

SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"

# every kind of place and value, in one script: six steps a pass
EVERYWHERE = """
class Meter:
    def __init__(self): self.reset()
    def reset(self): self.sum, self.count = 0.0, 0
    def add(self, value): self.sum += value; self.count += 1

class Counting(nn.Module):
    def __init__(self): super().__init__(); self.inner = model; self.calls = 0
    def forward(self, x): self.calls += 1; return self.inner(x)

network = Counting()
temperature = torch.ones(1, requires_grad=True)
optimizer = torch.optim.SGD([*network.parameters(), temperature], lr=0.1, momentum=0.9)
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
schedule = torch.optim.lr_scheduler.SequentialLR(
    optimizer, [warmup, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 14)], milestones=[4])
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
loader, checks = DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=8)
draws, dice, torch_draws = numpy.random.default_rng(7), random.Random(3), torch.Generator().manual_seed(4)
legacy = numpy.random.RandomState(5)
recent, counts, by_kind = collections.deque(maxlen=5), collections.Counter(), collections.defaultdict(list)
average = {name: value.clone() for name, value in network.state_dict().items()}
mixed = {"model": network, "steps": 0}
options = types.SimpleNamespace(steps=0)
state_of_run = os.getpid()  # another number in every process, and to be left alone
best, history, global_step = float("inf"), [], 0

def one_pass(epoch):
    global global_step
    meter, total, i = Meter(), torch.zeros(4), -1
    for x, y in loader:
        i += 1
        noise = draws.normal() + dice.random() + legacy.rand() + torch.rand((), generator=torch_draws).item()
        loss = (network(x + 0.01 * noise) * temperature - y).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step(); schedule.step()
        global_step += 1
        if i % 4 == 0:
            seldom = loss
        meter.add(loss.item()); recent.append(loss.item()); counts[i] += 1; by_kind["loss"].append(i)
        mixed["steps"] += 1; options.steps += 1; total += y.sum(0)
        for name, value in network.state_dict().items():
            average[name] = 0.9 * average[name] + 0.1 * value
        print(epoch, i, global_step, meter.count, loss.item().hex(), seldom.item().hex(), sum(recent).hex(), flush=True)
    return meter.sum, total

def main():
    global best
    for epoch in range(3):
        network.train()
        mean, total = one_pass(epoch)
        network.eval()
        with torch.no_grad():
            check = sum((network(x) - y).square().mean().item() for x, y in checks)
        plateau.step(check)
        best = min(best, check)
        history.append({"epoch": epoch, "mean": mean})
        print(check.hex(), best.hex(), total.sum().item().hex(), optimizer.param_groups[0]["lr"], flush=True)
    assert state_of_run == os.getpid()
    print(history, sorted(counts.items()), by_kind["loss"], mixed["steps"], options.steps, network.calls)
    print(sum(value.sum() for value in average.values()).item().hex(), temperature.item().hex())
main()
"""

BEGUN_ANEW = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader, step = DataLoader(data, batch_size=4, shuffle=True), 0
batches = iter(loader)
while step < 10:
    try:
        x, y = next(batches)
    except StopIteration:
        batches = iter(loader)
        x, y = next(batches)
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    step += 1
    print(step, loss.item().hex(), flush=True)
"""

IN_A_WHILE = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def endless(loader):
    while True:
        yield from loader
batches, step = endless(DataLoader(data, batch_size=4, shuffle=True)), 0
while step < 14:
    x, y = next(batches)
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    step += 1
    print(step, loss.item().hex(), flush=True)
"""

TWO_RUNS = """
def fit(rate):
    network = copy.deepcopy(model)
    optimizer = torch.optim.Adam(network.parameters(), lr=rate)
    for x, y in DataLoader(data, batch_size=4, shuffle=True):
        loss = (network(x) - y).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        print(rate, loss.item().hex(), flush=True)
    return loss.item()
results = []
for rate in (0.1, 0.01):
    results.append(fit(rate))
print(results)
"""


@pytest.mark.parametrize(
    ("text", "stops"),
    [(EVERYWHERE, [1, 6, 13]), (IN_A_WHILE, [4, 7]), (BEGUN_ANEW, [7]), (TWO_RUNS, [9])],
    ids=["everywhere", "in a while", "begun anew", "two runs"],
)
def test_variables_objects_and_generators_of_a_script_come_back(tmp_path: Path, text: str, stops: list[int]) -> None:
    run_in_parts_as_alone(tmp_path, write_script(tmp_path, HEAD + text), stops)


def test_an_average_of_the_weights_counts_when_room_for_the_state_is_reserved(tmp_path: Path) -> None:
    averaged = "average = {}\nfor x, y in DataLoader(data, batch_size=4):" + FIT
    averaged += "    for name, value in model.state_dict().items(): average[name] = 0.9 * value\n"
    text = HEAD + "model = nn.Sequential(nn.Linear(4, 4000), nn.Linear(4000, 4))\n" + SGD + averaged
    script = write_script(tmp_path, text)
    rank = Rank(tmp_path / "run", script, agent=True)
    assert rank.end() == 0, rank.output()
    weights = 4 * (4 * 4000 + 4000 + 4000 * 4 + 4)
    # the weights, their gradients, the average
    assert rank.page.get(Word.PEAK_DEVICE_BYTES) >= 3 * weights


FIT = """
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
REFUSED = {
    "a for loop around next()": "batches = iter(DataLoader(data, batch_size=4))\n"
    "for step in range(6):\n    x, y = next(batches)" + FIT,
    "a for loop around next() of a generator": "batches = (batch for batch in DataLoader(data, batch_size=4))\n"
    "for step in range(6):\n    x, y = next(batches)" + FIT,
    "fetching ahead": "batches = iter(DataLoader(data, batch_size=4))\nahead = next(batches)\n"
    "while ahead is not None:\n    x, y = ahead\n    ahead = next(batches, None)" + FIT,
    "enumerate of a cycle": "import itertools\n"
    "for n, (x, y) in enumerate(itertools.cycle(DataLoader(data, batch_size=4))):" + FIT + "    if n > 9: break\n",
    "a zip of an enumerate": "for m, (n, (x, y)) in zip(range(5), enumerate(DataLoader(data, batch_size=4))):" + FIT,
    "a cycle": "import itertools\nfor x, y in itertools.cycle(DataLoader(data, batch_size=4)):"
    + FIT
    + "    if (loss := 1 + globals().get('done', 0)) > 9: break\n    done = loss\n",
    "a class that hands on batches": "class Moved:\n"
    "    def __init__(self, batches): self.batches = batches\n"
    "    def __iter__(self): return self\n"
    "    def __next__(self): return next(self.batches)\n"
    "for x, y in Moved(iter(DataLoader(data, batch_size=4))):" + FIT,
    "a zip": "for n, (x, y) in zip(range(5), DataLoader(data, batch_size=4)):" + FIT,
    "workers that stay": "for x, y in DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True):" + FIT,
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_script_that_cannot_be_brought_back_by_running_it_again_is_offered_no_checkpoint(
    tmp_path: Path, name: str
) -> None:
    script = write_script(tmp_path, HEAD + SGD + REFUSED[name])
    output = offered_no_checkpoint(Rank(tmp_path / "run", script, agent=True))
    assert "this script can be paused, but neither moved nor saved: it" in output


LOST = {
    "a member of an enumeration": ("stage = Stage.FIRST", "stage = Stage.SECOND if stage else None", "stage (Stage)"),
    "a path": ("at = Path('a')", "len(str(at)); at = Path('b')", "at (PosixPath)"),
    "a number in decimal": ("money = Decimal(0)", "money += 1", "money (Decimal)"),
    "a span of time": ("spent = timedelta()", "spent += timedelta(1)", "spent (timedelta)"),
    "a named tuple": ("best = Point(0, 0.0)", "best = Point(best.step + 1, 0.0)", "best (Point)"),
    "a list of named tuples": ("points = []", "points.append(Point(len(points), 0.0))", "adds objects to points"),
    "a list of records": ("records = []", "records.append(Record(len(records)))", "adds objects to records"),
    "a dictionary by number": ("by = {}", "by[len(by)] = Record(0)", "adds objects to by"),
    "an object where there was none": ("best = None", "best = best or Record(1)", "sets best to an object"),
    "an object of a library": ("s = StandardScaler()", "s.partial_fit(x.numpy())", "s (StandardScaler)"),
    "an object of a library in one's own": (
        "holder = types.SimpleNamespace(s=StandardScaler())",
        "holder.s.partial_fit(x.numpy())",
        "s (StandardScaler)",
    ),
    "a counter of itertools": ("n = itertools.count()", "next(n)", "n (count)"),
    "a generator": ("n = (i for i in range(99))", "next(n)", "n (generator)"),
    "a digest": ("h = hashlib.sha256()", "h.update(b'x')", "h (HASH)"),
    "a text in memory": ("text = io.StringIO()", "text.write('x')", "text (StringIO)"),
    "an archive": ("z = zipfile.ZipFile(open(os.devnull, 'wb'), 'w')", "z.writestr('a', 'b')", "z (ZipFile)"),
    "a compressed stream": (
        "z = gzip.GzipFile(fileobj=open(os.devnull, 'wb'), mode='wb')",
        "z.write(b'x')",
        "z (GzipFile)",
    ),
    "a file that is read on": ("lines = open(__file__)", "lines.readline()", "lines (TextIOWrapper)"),
    "a cache of results": (
        "cached = functools.lru_cache(lambda k: k)\ncached.__module__ = '__main__'",
        "cached(x.sum().item())",
        "cached (_lru_cache_wrapper)",
    ),
    "its environment": ("import numbers", "os.environ['PHASE'] = str(model)", "the variable PHASE"),
    "how it makes files": ("os.umask(0o22)", "os.umask(0o77)", "its umask"),
    "a thread of its own": (
        "import threading\ndef wait(): threading.Event().wait()",
        "threading.Thread(target=wait, daemon=True).start()",
        "runs wait",
    ),
    "an output that is used again": (
        "out = torch.zeros(4, 4)",
        "out = model(x + out.detach()[:len(x)])",
        "out (Tensor)",
    ),
}
LOST_HEAD = """
import dataclasses, enum, functools, gzip, hashlib, io, itertools, zipfile
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from sklearn.preprocessing import StandardScaler
Point = collections.namedtuple("Point", "step loss")
@dataclasses.dataclass
class Record:
    step: int
class Stage(enum.Enum):
    FIRST = 1
    SECOND = 2
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


@pytest.mark.parametrize("kind", LOST)
def test_a_value_that_cannot_be_kept_refuses_the_checkpoint_and_the_reason_names_it(tmp_path: Path, kind: str) -> None:
    before, inside, named = LOST[kind]
    loop = f"\nfor x, y in DataLoader(data, batch_size=4):\n    {inside}" + FIT
    script = write_script(tmp_path, HEAD + LOST_HEAD + before + loop)
    rank = Rank(tmp_path / "run", script, agent=True, stop_at=3, checkpoint=tmp_path / "checkpoint")
    assert named in refused_checkpoint(rank)
    assert rank.page.get(Word.CAPABILITIES) == ONLY_IN_PLACE


KEPT = """
import types
from sklearn.preprocessing import StandardScaler
scaler = StandardScaler().fit(numpy.zeros((4, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def made():
    calls = 0
    def count():
        nonlocal calls
        calls += 1
        return calls
    return count
count = made()
class Meter:
    calls = 0
def add(seen=[]):
    Meter.calls += 1
    add.calls = getattr(add, "calls", 0) + 1
    seen.append(add.calls)
    return Meter.calls, len(seen)
def main():
    hidden = torch.zeros(4, 300_000)
    for x, y in DataLoader(data, batch_size=4):
        out = types.SimpleNamespace(result=model(x) + hidden.sum(), iterator=iter([1]))
        loss = (out.result - y).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        hidden = hidden + loss.item()
        print(count(), add(), loss.item().hex(), flush=True)
main()
"""


def test_a_large_tensor_and_what_closures_functions_and_classes_keep_come_back(tmp_path: Path) -> None:
    run_in_parts_as_alone(tmp_path, write_script(tmp_path, HEAD + KEPT), [2, 5])


UNSEEDED = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
order = list(range(24))
random.Random().shuffle(order)
for x, y in DataLoader(data, batch_size=4):
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
print(order)
"""


def test_a_second_run_that_has_shuffled_otherwise_is_given_up(tmp_path: Path) -> None:
    script, shards = write_script(tmp_path, HEAD + UNSEEDED), tmp_path / "checkpoint"
    rank = Rank(tmp_path / "first", script, agent=True, stop_at=2, checkpoint=shards)
    assert rank.end() == EXIT_YIELDED, rank.output()
    restore = {"kind": "checkpoint", "path": str(shards), "step": 2}
    again = Rank(tmp_path / "again", script, agent=True, restore=restore)
    assert again.end() == EXIT_NO_STATE, again.output()
    assert "another order" in json.loads((tmp_path / "again/rank-0.error.json").read_text())["message"]


def test_a_parked_state_of_such_a_script_that_is_carried_elsewhere_all_the_same_is_not_restored(tmp_path: Path) -> None:
    endless = "while True:\n    for n, (x, y) in zip(range(5), DataLoader(data, batch_size=4)):"
    script = write_script(tmp_path, HEAD + SGD + endless + FIT.replace("    ", "        "))
    rank = Rank(tmp_path / "run", script, agent=True, arena_bytes=1 << 24)
    rank.at_step(3)
    rank.stop(2, PageParkLevel.HAND_OVER)
    step = rank.reached(2)
    restore = {"kind": "arena", "step": step, "size": rank.page.get(Word.ARENA_SIZE)}
    again = Rank(tmp_path / "again", script, agent=True, restore=restore, arena_fd=rank.arena_fd)
    again.page.set(Word.ARENA_AVAILABLE, rank.page.get(Word.ARENA_FILLED))
    assert again.end() == EXIT_NO_STATE, again.output()
    assert "zip" in json.loads((tmp_path / "again/rank-0.error.json").read_text())["message"]
    rank.kill()


RESUMING = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
path, start = os.environ["SAVED"], 0
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    start = saved["epoch"] + 1
for epoch in range(start, 3):
    for x, y in DataLoader(data, batch_size=4, shuffle=True):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    torch.save({"model": model.state_dict(), "epoch": epoch}, path)
"""


def test_a_script_that_goes_on_by_itself_refuses_a_checkpoint_and_trains_on(tmp_path: Path) -> None:
    script, shards = write_script(tmp_path, HEAD + RESUMING), tmp_path / "checkpoint"
    environment = {"SAVED": str(tmp_path / "last.pt")}
    rank = Rank(tmp_path / "run", script, agent=True, stop_at=8, checkpoint=shards, environment=environment)
    assert "last.pt before it made it" in refused_checkpoint(rank)
    assert not shards.exists()


def test_a_script_that_looks_for_what_it_saves_is_offered_no_checkpoint_from_its_second_pass_on(tmp_path: Path) -> None:
    script = write_script(tmp_path, HEAD + RESUMING)
    offered_no_checkpoint(Rank(tmp_path / "run", script, agent=True, environment={"SAVED": str(tmp_path / "last.pt")}))
