"""An error of the agent ends no job: the agent reports it and steps aside, and training goes on as without it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ganger.injob.page import Page, page_path
from ganger.injob.page_layout import (
    EXIT_NO_STATE,
    Capability,
    Error,
    Opaque,
    PageOrderKind,
    PageParkLevel,
    PageState,
    Word,
)
from ganger.training.outside_changes import OutsideChanges
from ganger.training.state_keeper import StateKeeper
from ganger.training.trainer_run import TrainerRun, Trainers
from training.harness import Rank, Rendezvous, end_together, undisturbed

pytestmark = pytest.mark.torch

LOOP = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
{before}
torch.set_num_threads(1)
torch.manual_seed(1)
model = nn.Linear(4, 4)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for epoch in range(2):
    for (x,) in DataLoader(TensorDataset(torch.randn(12, 4)), batch_size=2, shuffle=True):
        loss = model(x).square().mean()
        loss.backward(); optimizer.step(); optimizer.zero_grad()
        print(loss.item().hex(), flush=True)
"""
# Where the agent works: as it takes the page, looks at the script, counts bytes, passes a boundary, publishes.
FAILING = {
    "taking the page": "ganger.injob.control.Control.claim",
    "the state's keeper": "ganger.training.state_keeper.StateKeeper.handlers",
    "the first look at a script": "ganger.training.unmodified_script.UnmodifiedScript._examine",
    "finding what is trained": "ganger.training.script_objects.Discovery.training",
    "counting bytes": "ganger.training.state_keeper._live_tensors",
    "publishing": "ganger.training.progress_reporter.ProgressReporter.publish",
    "a boundary": "ganger.injob.order_handler.OrderHandler.attend",
    "the place of a fetch": "ganger.training.loops.fetch_place",
    "the place of a loop": "ganger.training.loops.places",
}
BREAK = """
import importlib
def fail(*arguments, **options):
    raise RuntimeError("Attempted to access the data pointer on an invalid python storage.")
def break_it(name):
    path, _, leaf = name.rpartition(".")
    try:
        holder = importlib.import_module(path)
    except ImportError:
        module, _, kind = path.rpartition(".")
        holder = getattr(importlib.import_module(module), kind)
    setattr(holder, leaf, fail)
break_it("{name}")
"""


def _script(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "train.py"
    path.write_text(text)
    return path


def _numbers(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("0x")]


@pytest.mark.parametrize("place", FAILING)
def test_a_failure_of_the_agent_is_reported_and_training_goes_on(tmp_path: Path, place: str) -> None:
    script = _script(tmp_path, LOOP.format(before=""))
    broken = tmp_path / "broken.py"
    broken.write_text(LOOP.format(before=BREAK.format(name=FAILING[place])))
    rank = Rank(tmp_path / "run", broken, agent=True)
    assert rank.end() == 0, rank.output()
    assert _numbers(rank.output()) == _numbers(undisturbed(tmp_path, script))
    assert "the agent met what it cannot handle: RuntimeError: Attempted to access" in rank.output()
    assert "Traceback" not in rank.output()
    if place != "taking the page":
        assert rank.page.get(Word.OPAQUE) == Opaque.AGENT_FAILED
        said = json.loads((rank.directory / "rank-0.no-BOUNDARIES.json").read_text())
        assert said["message"].startswith("the agent met what it cannot handle: RuntimeError")


@pytest.mark.parametrize(
    "place", ["ganger.training.replayed_run.capture", "ganger.training.script_variables.Variables.lost"]
)
def test_a_fault_where_the_agent_looks_for_reasons_is_no_reason_of_the_script_and_leaves_the_pause(
    tmp_path: Path, place: str
) -> None:
    broken = _script(tmp_path, LOOP.format(before=BREAK.format(name=place)))
    rank = Rank(tmp_path / "run", broken, agent=True)
    assert rank.end() == 0, rank.output()
    line = broken.read_text().splitlines().index("def fail(*arguments, **options):") + 2
    said = json.loads((rank.directory / "rank-0.no-CHECKPOINT.json").read_text())
    assert said["message"].startswith("the agent met what it cannot handle: RuntimeError: Attempted to access")
    assert said["message"].endswith(f"(at train.py:{line}, please report it)")
    assert rank.page.get(Word.CAPABILITIES) & (Capability.PAUSE | Capability.CHECKPOINT) == Capability.PAUSE


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Page:
    page = Page.create(page_path(str(tmp_path), 0), epoch=1, rank=0, world=1)
    monkeypatch.setenv("GANGER_PAGE", page.path)
    return page


ADAPTER: Any = SimpleNamespace(form="a trainer")


def test_an_adapter_that_does_not_get_the_page_has_nothing_make_way(page: Page) -> None:
    page.set(Word.LOCK, os.getpid() + 1)
    made_way: list[bool] = []
    reported: list[Exception] = []
    trainers = Trainers(lambda: not made_way.append(True), reported.append, None, OutsideChanges())
    assert trainers.begin(ADAPTER, "") is None
    assert made_way == reported == []


def test_a_failure_before_an_adapter_controls_its_trainer_is_reported_as_one_of_the_agent(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = KeyError("no such handler")

    def fail(*_: object) -> None:
        raise fault

    reported: list[Exception] = []
    trainers = Trainers(lambda: True, reported.append, None, OutsideChanges())
    monkeypatch.setattr(StateKeeper, "handlers", fail)
    assert trainers.begin(ADAPTER, "") is None
    assert reported == [fault]
    monkeypatch.undo()
    monkeypatch.setenv("GANGER_PAGE", page.path)
    monkeypatch.setattr(TrainerRun, "start", fail)
    assert trainers.begin(ADAPTER, "") is None
    assert (reported, page.get(Word.OPAQUE)) == ([fault], Opaque.AGENT_FAILED)


def test_a_job_whose_agent_has_failed_goes_on_counting_its_steps_and_obeys_no_stop(tmp_path: Path) -> None:
    text = LOOP.format(before=BREAK.format(name=FAILING["counting bytes"])).replace("range(2)", "range(200)")
    rank = Rank(tmp_path / "run", _script(tmp_path, text), agent=True)
    rank.wait_word(Word.OPAQUE, Opaque.AGENT_FAILED)
    rank.stop(2, PageParkLevel.PAUSE)
    rank.at_step(1100)
    assert rank.end() == 0, rank.output()
    assert rank.page.get(Word.ACK_SEQ) == 0


def test_a_rank_with_a_state_to_restore_ends_when_its_agent_fails_before_it_has_begun(tmp_path: Path) -> None:
    # Torch is imported before the script here, so the failure is that of a hook at its first line.
    fails = "from ganger.training import agent\nagent._stand_aside(RuntimeError('broken'))\n"
    text = fails + LOOP.format(before="")
    restore = {"kind": "checkpoint", "path": str(tmp_path), "step": 3}
    rank = Rank(tmp_path / "run", _script(tmp_path, text), agent=True, restore=restore)
    assert rank.end() == EXIT_NO_STATE, rank.output()
    assert _numbers(rank.output()) == []
    assert rank.page.get(Word.ERROR) == Error.STATE_UNREADABLE
    said = json.loads((rank.directory / "rank-0.error.json").read_text())
    assert said["message"].startswith("cannot restore: the agent met what it cannot handle: RuntimeError")


def test_the_script_s_own_failure_stays_its_own(tmp_path: Path) -> None:
    text = LOOP.format(before="").replace("optimizer.zero_grad()", "raise ValueError('mine')")
    rank = Rank(tmp_path / "run", _script(tmp_path, text), agent=True)
    assert rank.end() == 1
    assert "ValueError: mine" in rank.output()


ATTACHED = """
import ganger, torch
{before}
torch.set_num_threads(1)
torch.manual_seed(1)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
job = ganger.attach(model=model, optimizer=optimizer)
loader = job.dataloader(torch.randn(12, 4), global_batch=2, shuffle=True)
for epoch in job.epochs(2):
    for x in loader:
        loss = model(x).square().mean()
        loss.backward(); optimizer.step(); optimizer.zero_grad()
        print(loss.item().hex(), flush=True)
        job.step(loss)
"""


@pytest.mark.parametrize("place", ["the state's keeper", "counting bytes", "publishing", "a boundary"])
def test_a_failure_in_an_attached_job_is_reported_and_training_goes_on(tmp_path: Path, place: str) -> None:
    script = _script(tmp_path, ATTACHED.format(before=""))
    broken = tmp_path / "broken.py"
    broken.write_text(ATTACHED.format(before=BREAK.format(name=FAILING[place])))
    rank = Rank(tmp_path / "run", broken)
    assert rank.end() == 0, rank.output()
    assert _numbers(rank.output()) == _numbers(undisturbed(tmp_path, script))
    assert rank.page.get(Word.OPAQUE) == Opaque.AGENT_FAILED


# Slow until the file of argv[1] exists: the ranks are stopped in good time, and then have few steps left.
SHARDED = """
import os, sys, time, torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(1)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
{shard}
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
{attach}
loader = DataLoader(TensorDataset(torch.randn(400, 8)), batch_size=2)
for (x,) in loader:
    if not os.path.exists(sys.argv[1]):
        time.sleep(0.05)
    loss = model(x).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    {step}
print("trained", flush=True)
dist.destroy_process_group()
"""
SHARDING = {
    "FSDP2": "from torch.distributed.fsdp import fully_shard\nfully_shard(model, mesh=mesh)",
    "tensor parallel": (
        "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module\n"
        "parallelize_module(model, mesh, {'0': ColwiseParallel(), '2': RowwiseParallel()})"
    ),
}
ATTACH = "import ganger\njob = ganger.attach(model=model, optimizer=optimizer)"


@pytest.mark.parametrize("way", SHARDING)
@pytest.mark.parametrize("attached", [False, True])
def test_sharded_jobs_train_are_counted_and_offer_to_be_parked(tmp_path: Path, way: str, attached: bool) -> None:
    text = SHARDED.format(
        shard=SHARDING[way], attach=ATTACH if attached else "", step="job.step(loss)" if attached else ""
    )
    script, go = _script(tmp_path, text), tmp_path / "go"
    rendezvous = Rendezvous()
    ranks = [
        Rank(tmp_path / "run", script, [go], rank=rank, world=2, rendezvous=rendezvous, agent=not attached)
        for rank in range(2)
    ]
    for rank in ranks:
        rank.at_step(12)
        rank.stop(2, PageParkLevel.PAUSE)
    assert len({rank.reached(2) for rank in ranks}) == 1
    go.touch()
    for rank in ranks:
        assert rank.page.get(Word.OPAQUE) == Opaque.NO, rank.output()
        assert rank.page.get(Word.DEVICE_BYTES) > 0
        # the attached one takes its batches from a loader of its own
        offered = Capability.PAUSE | Capability.OFFLOAD
        offered |= 0 if attached else Capability.CHECKPOINT | Capability.REPLAY
        assert rank.page.get(Word.CAPABILITIES) & ~Capability.FIVE_LINE == offered
        rank.order(3, PageOrderKind.RUN)
    assert end_together(ranks) == [0, 0], ranks[0].output() + ranks[1].output()
    assert "trained" in ranks[0].output()


def test_an_attached_job_that_cannot_be_saved_refuses_the_stop_with_its_reason_and_is_not_stopped_again(
    tmp_path: Path,
) -> None:
    odd = "type('Odd', (), {'state_dict': lambda self: {'it': object()}, 'load_state_dict': None})()"
    holds = f"{ATTACH}\njob.register('odd', {odd})"
    text = SHARDED.format(shard=SHARDING["FSDP2"], attach=holds, step="job.step(loss)")
    script, go, rendezvous = _script(tmp_path, text), tmp_path / "go", Rendezvous()
    ranks = [
        Rank(tmp_path / "run", script, [go], rank=rank, world=2, rendezvous=rendezvous, arena_bytes=1 << 20)
        for rank in range(2)
    ]
    for rank in ranks:
        rank.at_step(2)
        rank.stop(2, PageParkLevel.OFFLOAD)
    for rank in ranks:
        rank.wait_word(Word.STATE, PageState.PAUSED)
        assert not rank.page.get(Word.CAPABILITIES) & Capability.OFFLOAD
        said = json.loads((rank.directory / f"rank-{rank.rank}.no-OFFLOAD.json").read_text())
        assert said["message"].startswith("it failed once: ")
        rank.order(3, PageOrderKind.RUN)
    go.touch()
    assert end_together(ranks) == [0, 0], ranks[0].output() + ranks[1].output()


# The signal comes while the agent works, as one that a scheduler sends may.
SIGNALLED = """
import os, signal
import ganger.training.progress_reporter as reporter
def ask(number, frame):
    raise LookupError("the script's handler")
handlers = {{"a function": ask, "an object": type("Ask", (), {{"__call__": lambda self, n, f: ask(n, f)}})()}}
signal.signal(signal.SIGUSR1, handlers["{handler}"])
publish = reporter.ProgressReporter.publish
def signalled(*arguments):
    os.kill(os.getpid(), signal.SIGUSR1)
    return publish(*arguments)
reporter.ProgressReporter.publish = signalled
"""


@pytest.mark.parametrize("handler", ["a function", "an object"])
@pytest.mark.parametrize("form", [LOOP, "ATTACHED"], ids=["unmodified", "attached"])
def test_what_the_signal_handler_of_a_script_raises_within_the_agent_reaches_the_script(
    tmp_path: Path, form: str, handler: str
) -> None:
    before = SIGNALLED.format(handler=handler)
    text = (ATTACHED if form == "ATTACHED" else form).format(before=before)
    rank = Rank(tmp_path / "run", _script(tmp_path, text), agent=form == LOOP)
    assert rank.end() == 1, rank.output()
    assert "LookupError: the script's handler" in rank.output()
    assert "training goes on" not in rank.output()
