"""A script that saves itself at a signal is suspended, moved and drained by that signal, and goes on from its files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kit.up import Up
from kit.waiting import eventually

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).parent / "jobs" / "saves_itself.py"
TWO_NODES = ("--nodes", "2", "--virtual-gpus", "1", "--virtual-cores", "2", "--virtual-memory", "4G")


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    # Without images, which serve any script that runs on one node.
    with Up(tmp_path_factory.mktemp("up") / "c", *TWO_NODES, settings={"GANGER_DAEMON_CRIU": "none"}) as up:
        up.wait_ready(2)
        yield up


@dataclass
class Counting:
    """A job that counts on from what it saved."""

    up: Up
    directory: Path
    job: str = ""

    def submit(self, *options: str, signal: str = "TERM", save_s: float = 0.0, code: int = 0) -> None:
        """`save_s`: how long it takes to save; negative: it ignores the signal."""
        words = (str(SCRIPT), str(self.directory), signal, str(save_s), str(code))
        self.job = self.up.submit(*options, "--mechanism", "signal", "--signal", signal, "--", sys.executable, *words)
        self.wait_for_more()

    def counts(self) -> list[int]:
        file = self.directory / "counted"
        return [int(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []

    def wait_for_more(self) -> None:
        before = len(self.counts())
        eventually(lambda: len(self.counts()) > before + 2, within_seconds=60, what="it counts on", story=self.story)

    def wait_state(self, state: str, within_seconds: float = 60.0) -> None:
        eventually(lambda: self.shown()["state"] == state, within_seconds=within_seconds, what=state, story=self.story)

    def shown(self) -> dict[str, object]:
        shown: dict[str, object] = self.up.json("show", self.job)
        return shown

    def node(self) -> str:
        return str(self.shown()["gang"]["claims"][0]["node"]).removeprefix("nodes/")  # type: ignore[index]

    def can(self, name: str) -> bool:
        return bool((self.shown()["capabilities"] or {}).get(name))  # type: ignore[attr-defined]

    def asked(self) -> list[str]:
        file = self.directory / "asked"
        return file.read_text().split() if file.exists() else []

    def finish(self) -> None:
        (self.directory / "end").touch()
        self.wait_state("SUCCEEDED")
        assert self.counts() == list(range(1, len(self.counts()) + 1)), self.story()
        assert not (self.directory / "worker-signals").exists(), "a worker got a signal"

    def story(self) -> str:
        return f"{self.up.try_('show', self.job).stdout}\n{self.up.try_('history', self.job).stdout}\n{self.up.story()}"


@pytest.fixture
def counting(up: Up, tmp_path: Path) -> Iterator[Counting]:
    counting = Counting(up, tmp_path)
    yield counting
    (tmp_path / "end").touch()
    up.try_("cancel", counting.job)
    up.try_("wait", counting.job, "--timeout", "60s")


@pytest.mark.parametrize(("signal", "code"), [pytest.param("TERM", 0, marks=pytest.mark.chaos), ("USR1", 3)])
def test_a_script_saves_itself_when_it_is_suspended_moved_and_drained_and_goes_on_where_it_was(
    counting: Counting, signal: str, code: int
) -> None:
    counting.submit(signal=signal, code=code)
    counting.up("suspend", counting.job, "--level", "checkpoint")
    counting.wait_state("SUSPENDED")
    eventually(lambda: not counting.shown()["gang"], what="it holds nothing", story=counting.story)
    assert counting.asked() == [f"SIG{signal}"]
    counting.up("resume", counting.job)
    counting.wait_for_more()

    # A frozen one is thawed to save itself.
    eventually(lambda: counting.can("can_pause"), within_seconds=30, what="it can be frozen", story=counting.story)
    counting.up("suspend", counting.job, "--level", "pause")
    eventually(lambda: counting.shown().get("suspended_level") == "PAUSE", what="it is paused", story=counting.story)
    counting.up("suspend", counting.job, "--level", "checkpoint")
    eventually(lambda: not counting.shown()["gang"], within_seconds=30, what="it has left", story=counting.story)
    counting.up("resume", counting.job)
    counting.wait_for_more()

    here = counting.node()
    (there,) = {"n1", "n2"} - {here}
    counting.up("move", counting.job, "--to", there)
    eventually(lambda: counting.node() == there, within_seconds=30, what=f"it is on {there}", story=counting.story)
    counting.wait_for_more()

    counting.up("drain", there, "--reason", "a new fan")
    try:
        eventually(lambda: counting.node() != there, within_seconds=30, what=f"it left {there}", story=counting.story)
    finally:
        counting.up("uncordon", there)
    counting.wait_for_more()
    assert counting.asked() == [f"SIG{signal}"] * 4
    assert counting.shown()["failures"] == 0
    counting.finish()


def test_a_script_that_ignores_its_signal_is_killed_after_the_grace_and_starts_again(counting: Counting) -> None:
    counting.submit("--grace", "1s", save_s=-1)
    counting.up("suspend", counting.job, "--level", "checkpoint")
    counting.wait_state("SUSPENDED")
    eventually(lambda: not counting.shown()["gang"], what="it is gone", story=counting.story)
    assert "did not exit within the grace after its stop signal" in counting.up("history", counting.job)
    counting.up("resume", counting.job)
    counting.wait_for_more()
    assert counting.shown()["failures"] == 0
    assert counting.counts().count(1) == 2, "it began again"


def test_a_daemon_that_ends_during_the_grace_changes_nothing(counting: Counting) -> None:
    counting.submit(save_s=3)
    here = counting.node()
    counting.up("suspend", counting.job, "--level", "checkpoint", "--no-wait")
    eventually(lambda: bool(counting.asked()), what="it was asked", story=counting.story)
    counting.up.kill(here)
    counting.wait_state("SUSPENDED")
    eventually(lambda: not counting.shown()["gang"], within_seconds=60, what="it has left", story=counting.story)
    assert counting.asked() == ["SIGTERM"]
    counting.up.wait_ready(2)
    counting.up("resume", counting.job)
    counting.wait_for_more()
    assert counting.shown()["failures"] == 0
    counting.finish()


def test_a_cancelled_script_has_no_more_than_the_usual_grace(counting: Counting) -> None:
    counting.submit("--grace", "1h", save_s=-1)
    counting.up("suspend", counting.job, "--level", "checkpoint", "--no-wait")
    eventually(lambda: bool(counting.asked()), what="it was asked", story=counting.story)
    counting.up("cancel", counting.job)
    counting.wait_state("CANCELLED")


# Its agent reports that it cannot be run again to its position: batches are fetched through zip.
ZIPPED = """
import os, signal, sys, time, torch
from torch.utils.data import DataLoader, TensorDataset
asked = []
signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
count = int(open("saved").read()) if os.path.exists("saved") else 0
while not os.path.exists("end"):
    for (x,), _ in zip(DataLoader(TensorDataset(torch.randn(64, 4)), 4), range(1000)):
        model(x).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
        count += 1
        with open("counted", "a") as file:
            file.write(f"{count}\\n")
        if asked:
            with open("saved", "w") as file:
                file.write(str(count))
            sys.exit(1)
        time.sleep(0.05)
"""


@pytest.mark.torch
def test_a_script_that_no_stronger_mechanism_fits_is_suspended_by_its_signal(counting: Counting) -> None:
    (counting.directory / "train.py").write_text(ZIPPED)
    words = ("--directory", str(counting.directory), "--signal", "TERM", "--", sys.executable, "train.py")
    counting.job = counting.up.submit(*words)
    # In place by its agent, which has reported then.
    eventually(lambda: counting.can("can_offload"), within_seconds=60, what="it can be freed", story=counting.story)
    assert counting.can("can_checkpoint")
    shown = " ".join(counting.up("show", counting.job).split())
    assert "mechanism signal: SIGTERM, then at most 1m to exit" in shown
    assert "not image: not wanted" in shown
    assert "not replay: " in shown
    counting.wait_for_more()
    counting.up("suspend", counting.job, "--level", "checkpoint")
    counting.up("resume", counting.job)
    counting.wait_for_more()
    assert counting.shown()["failures"] == 0
    assert "after its stop signal" in counting.up("history", counting.job)
    counting.finish()


def test_a_job_that_must_move_and_cannot_ends_with_the_reasons(counting: Counting) -> None:
    counting.job = counting.up.submit("--must-move", "--mechanism", "replay", "--", "sleep", "1000")
    counting.wait_state("FAILED")
    failure = counting.shown()["failure"]
    assert failure["reason"] == "CANNOT_MOVE"  # type: ignore[index]
    assert "replay: no agent" in failure["message"]  # type: ignore[index]
    assert "mechanism none (replay was asked for)" in " ".join(counting.up("show", counting.job).split())


@pytest.mark.torch
def test_a_mechanism_that_was_asked_for_and_does_not_apply_is_not_replaced_by_another(counting: Counting) -> None:
    (counting.directory / "train.py").write_text(ZIPPED)
    words = ("--mechanism", "adapter", "--directory", str(counting.directory), "--", sys.executable, "train.py")
    counting.job = counting.up.submit(*words)
    eventually(lambda: is_settled(counting), within_seconds=60, what="its agent has reported", story=counting.story)
    assert counting.can("can_pause")
    assert not any(map(counting.can, ("can_offload", "can_checkpoint", "can_move")))
    shown = " ".join(counting.up("show", counting.job).split())
    assert "mechanism none (adapter was asked for) not adapter: it imports no trainer that Ganger knows" in shown
    why = "it was submitted with --mechanism adapter, which does not apply: it imports no trainer that Ganger knows"
    assert f"not checkpoint: {why}" in shown


def is_settled(counting: Counting) -> bool:
    return bool(counting.shown()["capabilities"]) and not counting.can("is_presumed")
