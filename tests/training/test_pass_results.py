"""A script whose way between its passes depends on what they come to is known by its source, and told by its line."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ganger.training import script_source

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _only_its_own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of other tests in this process are none of the script's."""
    known, is_own = frozenset(sys.modules), script_source.is_own
    monkeypatch.setattr(script_source, "is_own", lambda name: name not in known and is_own(name))


# As a DataLoader looks to the agent: not a frame of the script. Notes what is said at each pass.
LOADER = """
from ganger.training.pass_results import decided_by_results
from ganger.training.script_frames import frames, path
class Loader:
    def __init__(self):
        self.paths, self.reasons = {}, []
    def __len__(self):
        return 3
    def __iter__(self):
        place = path()
        self.paths.setdefault(place)
        if len(self.reasons) or not self.paths:
            self.reasons.append(decided_by_results(self.paths, place, frames()))
        else:
            self.reasons.append("")
        return iter([1.0, 2.0, 3.0])
"""
HEAD = """
import collections, copy, json, math, statistics, sys
import torch
from torch import nn
net, best, bad, history, step, shown = nn.Linear(1, 1), 1e9, 0, [], 0, None
def fit(x):
    return x * 0.9 ** len(history)
def evaluate():
    total = 0.0
    for x in checks:
        total += fit(x)
    return total / len(checks)
"""

HARMLESS = {
    "sums, means and lines of a log": """
for epoch in range(3):
    total, n, losses = 0.0, 0, []
    for x in loader:
        loss = fit(x); total += loss; n += 1; losses.append(loss); step += 1
    print(epoch, step, f"{total / n:.3f}", sum(losses) / len(losses), losses[-1], flush=True)
    history.append(total / len(loader))
""",
    "an evaluation in a function, and the best of them": """
for epoch in range(3):
    for x in loader:
        step += 1
    check = evaluate()
    best = min(best, check)
    if check < best * 1.1:
        best = check
        torch.save(net.state_dict(), "/dev/null")
        print("better", best)
    history.append({"epoch": epoch, "check": check})
""",
    "an evaluation in an expression": """
for epoch in range(3):
    for x in loader:
        pass
    check = sum(fit(x) for x in checks)
    print(check)
""",
    "a choice by what is no result": """
for epoch in range(4):
    for x in loader:
        loss = fit(x)
    if epoch % 2 == 1:
        print(evaluate())
    if epoch == 9:
        break
""",
    "a number of steps": """
steps = 8
for epoch in range(10):
    for x in loader:
        loss = fit(x); step += 1
        if step >= steps:
            break
    print(epoch, loss)
    if step >= steps:
        break
""",
    "a while over steps": """
batches = iter(loader)
while step < 8:
    try:
        x = next(batches)
    except StopIteration:
        batches = iter(loader)
        x = next(batches)
    step += 1
    loss = fit(x)
""",
    "an endless generator": """
def endless():
    while True:
        yield from loader
batches = endless()
while step < 8:
    x = next(batches); loss = fit(x); step += 1
""",
    "a trainer": """
class Meter:
    def __init__(self): self.sum, self.count = 0.0, 0
    def add(self, value): self.sum += value; self.count += 1
class Trainer:
    def __init__(self): self.best, self.seen = 1e9, 0
    def one(self, epoch):
        net.train(); meter = Meter()
        for x in loader:
            meter.add(fit(x)); self.seen += 1
        return meter
    def fit(self):
        for epoch in range(3):
            meter = self.one(epoch)
            check = evaluate()
            self.best = min(self.best, check)
            self.report(epoch, meter, check)
    def report(self, epoch, meter, check):
        print(epoch, meter.sum, check, self.best)
def main():
    trainer = Trainer()
    trainer.fit()
if __name__ == "__main__":
    main()
""",
    "two runs": """
def run(rate):
    for x in loader:
        loss = rate * fit(x)
    return loss
results = []
for rate in (0.1, 0.01):
    results.append(run(rate))
print(results)
""",
    "a checkpoint of each epoch": """
for epoch in range(3):
    for x in loader:
        loss = fit(x)
    torch.save({"net": net.state_dict(), "loss": loss}, "/dev/null")
    with open("/dev/null", "w") as file:
        json.dump({"epoch": epoch, "loss": loss}, file)
assert best < 0, "later than anything that is looked at"
""",
}

DECIDES = {
    "early stopping": """
for epoch in range(9):
    for x in loader: loss = fit(x)
    if loss < best: best, bad = loss, 0
    else: bad += 1
    if bad > 2:
        break
""",
    "early stopping by an object": """
class Stopper:
    def __init__(self): self.best, self.bad, self.is_over = 1e9, 0, False
    def __call__(self, value):
        if value < self.best: self.best, self.bad = value, 0
        else: self.bad += 1
        if self.bad > 2: self.is_over = True
stopper = Stopper()
for epoch in range(9):
    for x in loader: loss = fit(x)
    stopper(loss)
    if stopper.is_over: break
""",
    "early stopping by a function's word": """
def is_over(value):
    return len(history) > 2 and value > history[-1]
for epoch in range(9):
    for x in loader: loss = fit(x)
    history.append(loss)
    if is_over(loss): break
""",
    "a target": """
loss = 1e9
while loss > 0.5:
    for x in loader: loss = fit(x)
    history.append(loss)
""",
    "a return when it is good enough": """
def train():
    for epoch in range(9):
        check = evaluate()
        for x in loader: pass
        if check < 0.01: return epoch
train()
""",
    "a check that raises": """
for epoch in range(3):
    losses = []
    for x in loader: losses.append(fit(x))
    if len(losses) != 3: raise RuntimeError("too few")
""",
    "an assertion": """
for epoch in range(3):
    n = 0
    for x in loader: n += 1
    assert n == len(loader)
""",
    "a check in a function": """
def check(value):
    if value > 1e6: sys.exit("it does not learn")
for epoch in range(3):
    for x in loader: loss = fit(x)
    check(loss)
""",
    "an end in the middle of a pass": """
for epoch in range(3):
    for x in loader:
        loss = fit(x)
        if loss > 1e6: raise RuntimeError("diverged")
""",
    "a return from the middle of a pass": """
def train():
    for x in loader:
        loss = fit(x)
        if loss < 0.1: return
for epoch in range(3):
    train()
""",
    "a layer that is trained once the loss is good": """
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(3):
    for x in loader: loss = fit(x)
    if loss < 1.0: opt.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
""",
    "a rate that is cut": """
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(3):
    for x in loader: loss = fit(x)
    if loss > best: opt = torch.optim.SGD(net.parameters(), lr=0.01)
""",
    "an evaluation only if it is better": """
for epoch in range(3):
    for x in loader: loss = fit(x)
    value = evaluate()
    if value < best:
        best = value; test = evaluate()
    print(test)
""",
    "a variable that is set now and then": """
for epoch in range(3):
    n = 0
    for x in loader:
        n += 1
        if n % 3 == 2: last = fit(x)
    print(last)
""",
    "a number of passes by a result": """
for epoch in range(2):
    for x in loader: loss = fit(x)
    for more in range(int(loss)):
        for x in loader: loss = fit(x)
""",
    "a deviation of too few": """
for epoch in range(3):
    losses = []
    for x in loader: losses.append(fit(x))
    print(statistics.stdev(losses))
""",
    "an item that is not there": """
for epoch in range(3):
    losses = []
    for x in loader: losses.append(fit(x))
    print(losses[2])
""",
    "a division by what may be zero": """
for epoch in range(3):
    hits = 0
    for x in loader: hits += x > 1
    print(1 / hits)
""",
    "a file that is named for a result": """
for epoch in range(3):
    for x in loader: loss = fit(x)
    if loss < best:
        best = loss
        with open("/dev/null", "w") as file: file.write("x")
""",
    "a loop that was left": """
for epoch in range(3):
    for x in loader: step += 1
    if step >= 2: break
for x in loader: pass
""",
    "an end in an expression": """
for epoch in range(3):
    for x in loader: loss = fit(x)
    loss < 1e-9 and sys.exit()
""",
    "a choice in an expression": """
for epoch in range(3):
    for x in loader: loss = fit(x)
    test = evaluate() if loss < 10 else None
""",
    "a flag": """
done = False
while not done:
    for x in loader: loss = fit(x)
    history.append(loss)
    done = loss < 2.2
""",
    "patience that is counted down": """
patience = 2
for epoch in range(9):
    for x in loader: loss = fit(x)
    if loss >= best: patience -= 1
    best = min(best, loss)
    if patience == 0: break
""",
    "a rate that became too small": """
opt = torch.optim.SGD(net.parameters(), lr=0.1)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt)
for epoch in range(3):
    for x in loader: loss = fit(x); opt.step()
    plateau.step(loss)
    if opt.param_groups[0]["lr"] < 1e-3: break
""",
    "an exception of its own": """
class Enough(Exception): pass
try:
    for epoch in range(9):
        for x in loader: loss = fit(x)
        history.append(loss)
        if loss < 2.0: raise Enough
except Enough:
    pass
""",
    "the rest of an epoch that is left out": """
for epoch in range(3):
    for x in loader: loss = fit(x)
    if loss > 100: continue
    evaluate()
""",
    "passes that go on from the best": """
for epoch in range(2):
    for x in loader: loss = fit(x)
    history.append(loss)
again = history.index(min(history)) + 1
for epoch in range(again):
    for x in loader: pass
""",
    "a pass for each of a growing list": """
for epoch in range(2):
    for x in loader: history.append(x)
for item in history:
    for x in loader: pass
""",
}


def _reasons(tmp_path: Path, text: str) -> list[str]:
    script = tmp_path / "train.py"
    script.write_text(HEAD + text)
    agent: dict[str, Any] = {"__name__": "ganger.of_this_test"}
    exec(LOADER, agent)
    loader = agent["Loader"]()
    checks = SimpleNamespace(**{})
    scope: dict[str, Any] = {"__name__": "__main__", "loader": loader, "checks": loader}
    del checks
    try:
        exec(compile(script.read_text(), str(script), "exec"), scope)
    except (AssertionError, SystemExit):
        pass
    return [reason for reason in loader.reasons if reason]


@pytest.mark.parametrize("kind", HARMLESS)
def test_results_that_are_only_computed_printed_and_kept_are_no_reason(tmp_path: Path, kind: str) -> None:
    assert _reasons(tmp_path, HARMLESS[kind]) == []


@pytest.mark.parametrize("kind", DECIDES)
def test_results_that_decide_are_a_reason_and_the_line_is_told(tmp_path: Path, kind: str) -> None:
    reasons = _reasons(tmp_path, DECIDES[kind])
    assert reasons, "it is found while the script runs"
    assert "at train.py:" in reasons[0]
