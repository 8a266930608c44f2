"""Paused, offloaded, handed over, saved while going on: in the same process, without losing a bit or a byte."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from ganger.injob.page_layout import (
    CHECKPOINT_BIT,
    EXIT_NO_STATE,
    Capability,
    Error,
    PageOrderKind,
    PageParkLevel,
    PageState,
    Word,
)
from kit.images import verify_image
from training.harness import Rank, undisturbed, wait_until

pytestmark = pytest.mark.torch


# Waits after each step until the test lets it go on, so that orders meet known steps; state of about 38 MB.
PACED = """
import os, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(12, 1024))
{start}
addresses = " ".join(str(id(parameter)) for parameter in model.parameters())
for (x,) in loader:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("loss", loss.item().hex(), flush=True)
    {end}
assert addresses == " ".join(str(id(parameter)) for parameter in model.parameters())
"""
FORMS = {
    "attached": PACED.format(
        start="import ganger\njob = ganger.attach(model=model, optimizer=optimizer)\n"
        "loader = job.dataloader(data, global_batch=2, shuffle=True)",
        end="job.step(loss)",
    ),
    "plain": PACED.format(start="loader = DataLoader(data, batch_size=2, shuffle=True)", end="pass"),
}
STATE_BYTES = 3 * (1024 * 1024 + 1024) * 4 * 3
ARENA_BYTES = 128 << 20


def _anonymous_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")


@pytest.fixture(params=["attached", "plain"])
def script(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, bool]:
    path = tmp_path / "train.py"
    path.write_text(FORMS[request.param])
    return path, request.param == "plain"


def test_offload_frees_the_memory_it_reports_and_training_goes_on_alike(
    tmp_path: Path, script: tuple[Path, bool]
) -> None:
    path, agent = script
    rank = Rank(tmp_path / "parked", path, agent=agent, arena_bytes=ARENA_BYTES, stop_at=3)
    # the stop at step 3 has no directory to save to, so it is refused; the next order finds the rank there
    rank.wait_word(Word.ERROR, Error.STORAGE_FAILED)
    before = _anonymous_bytes(rank.process.pid or 0)
    rank.order(3, PageOrderKind.STOP, PageParkLevel.OFFLOAD, stop=2)
    assert rank.reached(3) == 3
    assert rank.page.get(Word.STATE) == PageState.OFFLOADED
    freed = rank.page.get(Word.OFFLOADED_BYTES)
    assert freed >= 0.99 * STATE_BYTES
    assert before - _anonymous_bytes(rank.process.pid or 0) >= 0.9 * STATE_BYTES
    # what lies in the arena is a whole image: it can move on without waking the rank
    assert rank.arena_fd is not None
    assert verify_image(rank.arena_fd).step == 3
    assert rank.page.get(Word.ARENA_FILLED) == rank.page.get(Word.ARENA_SIZE) >= STATE_BYTES
    rank.order(4, PageOrderKind.RUN)
    assert rank.end() == 0, rank.output()
    assert rank.output() == undisturbed(tmp_path, path)


# The rank starts the process that trains: it has the rank's environment and none of its descriptors.
PARENT = """
import subprocess, sys
sys.exit(subprocess.call([sys.executable, "-u", "child.py"], cwd=sys.argv[1]))
"""
CHILD = """
import ganger, torch
files = [open(f"shard{{number}}.bin", "r+b") for number in range({files})]
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = ganger.attach(model=model, optimizer=optimizer)
for step in range(3):
    model(torch.ones(64)).sum().backward()
    optimizer.step()
    job.step()
print("trained", flush=True)
"""


@pytest.mark.parametrize("files", [32, 0])
def test_a_stop_writes_nothing_into_the_files_of_a_process_that_did_not_inherit_the_arena(
    tmp_path: Path, files: int
) -> None:
    content = bytes(200_000)
    for number in range(files):
        (tmp_path / f"shard{number}.bin").write_bytes(content)
    (tmp_path / "parent.py").write_text(PARENT)
    (tmp_path / "child.py").write_text(CHILD.format(files=files))
    rank = Rank(tmp_path / "run", tmp_path / "parent.py", [tmp_path], arena_bytes=ARENA_BYTES)
    rank.stop(2, PageParkLevel.OFFLOAD)
    assert rank.end() == 0, rank.output()
    assert "trained" in rank.output()
    assert rank.page.get(Word.LOCK) == 0
    assert all((tmp_path / f"shard{number}.bin").read_bytes() == content for number in range(files))


def test_a_parked_state_is_written_to_storage_without_waking_up(tmp_path: Path, script: tuple[Path, bool]) -> None:
    path, agent = script
    rank = Rank(tmp_path / "parked", path, agent=agent, arena_bytes=ARENA_BYTES, stop_at=2)
    rank.wait_word(Word.ERROR, Error.STORAGE_FAILED)
    rank.order(3, PageOrderKind.STOP, PageParkLevel.OFFLOAD, stop=2)
    rank.reached(3)
    rank.order(4, PageOrderKind.STOP, PageParkLevel.CHECKPOINT, stop=2, details={"checkpoint": str(tmp_path / "saved")})
    assert rank.end() == 75
    assert verify_image(tmp_path / "saved/rank-0.shard").step == 2
    restore = {"kind": "checkpoint", "path": str(tmp_path / "saved"), "step": 2}
    again = Rank(tmp_path / "again", path, agent=agent, restore=restore)
    assert again.end() == 0, again.output()
    assert rank.output() + again.output() == undisturbed(tmp_path, path)


def test_a_state_handed_over_while_it_is_filled_goes_on_elsewhere(tmp_path: Path, script: tuple[Path, bool]) -> None:
    path, agent = script
    restore = {"kind": "arena", "step": 0, "size": 0}
    source = Rank(tmp_path / "source", path, agent=agent, arena_bytes=ARENA_BYTES, stop_at=4)
    destination = Rank(
        tmp_path / "destination", path, agent=agent, arena_bytes=ARENA_BYTES, restore=restore, order=PageOrderKind.WAIT
    )
    source.wait_word(Word.ERROR, Error.STORAGE_FAILED)
    source.order(3, PageOrderKind.STOP, PageParkLevel.HAND_OVER, stop=2)
    copied = 0
    assert source.arena_fd is not None
    assert destination.arena_fd is not None
    while copied < source.page.get(Word.ARENA_SIZE) or source.page.get(Word.REACHED_SEQ) < 3:
        filled = source.page.get(Word.ARENA_FILLED)
        if filled > copied:
            os.pwrite(destination.arena_fd, os.pread(source.arena_fd, filled - copied, copied), copied)
            copied = filled
            destination.page.set(Word.ARENA_AVAILABLE, copied)
    destination.wait_word(Word.STATE, PageState.READY)
    assert destination.page.get(Word.RESTORED_STEP) == 4
    assert source.page.get(Word.STATE) == PageState.HANDED_OVER
    destination.order(2, PageOrderKind.RUN)
    assert destination.end() == 0, destination.output()
    source.kill()
    assert source.output() + destination.output() == undisturbed(tmp_path, path)


def test_an_aborted_hand_over_goes_on_in_place(tmp_path: Path, script: tuple[Path, bool]) -> None:
    path, agent = script
    rank = Rank(tmp_path / "source", path, agent=agent, arena_bytes=ARENA_BYTES, stop_at=1)
    rank.wait_word(Word.ERROR, Error.STORAGE_FAILED)
    rank.order(3, PageOrderKind.STOP, PageParkLevel.HAND_OVER, stop=2)
    rank.reached(3)
    rank.order(4, PageOrderKind.RUN)
    assert rank.end() == 0, rank.output()
    assert rank.output() == undisturbed(tmp_path, path)


def test_an_arena_that_is_too_small_is_reported_and_the_rank_stays_paused(
    tmp_path: Path, script: tuple[Path, bool]
) -> None:
    path, agent = script
    rank = Rank(tmp_path / "parked", path, agent=agent, arena_bytes=1 << 20, stop_at=2)
    rank.wait_word(Word.ERROR, Error.STORAGE_FAILED)
    rank.order(3, PageOrderKind.STOP, PageParkLevel.OFFLOAD, stop=2)
    rank.wait_word(Word.ERROR, Error.ARENA_TOO_SMALL)
    # the error is told before the rank is back in its place
    rank.wait_word(Word.STATE, PageState.PAUSED)
    assert "--gpu-memory" in (tmp_path / "parked/rank-0.error.json").read_text()
    rank.order(4, PageOrderKind.RUN)
    assert rank.end() == 0, rank.output()
    assert rank.output() == undisturbed(tmp_path, path)


def test_a_move_after_an_offload_hands_over_the_newer_state(tmp_path: Path, script: tuple[Path, bool]) -> None:
    """What an earlier stop left in the arena must not be taken for the state of a later one."""
    path, agent = script
    # long enough that the second order meets it
    path.write_text(path.read_text().replace("torch.randn(12, 1024)", "torch.randn(120, 1024)"))
    rank = Rank(tmp_path / "source", path, agent=agent, arena_bytes=ARENA_BYTES, stop_at=1)
    rank.wait_word(Word.ERROR, Error.STORAGE_FAILED)
    rank.order(3, PageOrderKind.STOP, PageParkLevel.OFFLOAD, stop=2)
    assert rank.reached(3) == 1
    rank.order(4, PageOrderKind.RUN)
    rank.at_step(2)
    rank.order(5, PageOrderKind.STOP, PageParkLevel.HAND_OVER, stop=5)
    step = rank.reached(5)
    assert step > 1
    assert rank.arena_fd is not None
    assert verify_image(rank.arena_fd).step == step
    # handed over while it is parked: the image is there already
    rank.order(6, PageOrderKind.STOP, PageParkLevel.OFFLOAD, stop=5)
    rank.reached(6)
    rank.order(7, PageOrderKind.STOP, PageParkLevel.HAND_OVER, stop=5)
    assert rank.reached(7) == step
    assert rank.page.get(Word.ARENA_FILLED) == rank.page.get(Word.ARENA_SIZE) > 0
    assert verify_image(rank.arena_fd).step == step
    rank.order(8, PageOrderKind.RUN)
    assert rank.end() == 0, rank.output()
    assert rank.output() == undisturbed(tmp_path, path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_without_room_is_named_and_training_goes_on(tmp_path: Path, small_disk: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(FORMS["attached"])
    rank = Rank(tmp_path / "parked", path, stop_at=2)
    rank.wait_word(Word.ERROR, Error.STORAGE_FAILED)
    rank.order(
        3, PageOrderKind.STOP, PageParkLevel.CHECKPOINT, stop=2, details={"checkpoint": str(small_disk / "saved")}
    )
    rank.wait_word(Word.ERROR, Error.STORAGE_FULL)
    rank.wait_word(Word.STATE, PageState.PAUSED)
    assert list((small_disk / "saved").iterdir()) == []
    rank.order(4, PageOrderKind.RUN)
    assert rank.end() == 0, rank.output()
    assert rank.output() == undisturbed(tmp_path, path)


@pytest.mark.parametrize("arena_bytes", [0, ARENA_BYTES], ids=["no arena", "arena"])
def test_a_checkpoint_is_taken_while_training_goes_on(tmp_path: Path, arena_bytes: int) -> None:
    path = tmp_path / "train.py"
    path.write_text(FORMS["attached"])
    directory = tmp_path / "going-on"
    (directory / "orders").mkdir(parents=True)
    (directory / "orders/checkpoint-5.json").write_text(f'{{"checkpoint": "{tmp_path}/saved-{{step}}"}}')
    rank = Rank(directory, path, arena_bytes=arena_bytes, order=PageOrderKind.WAIT)
    wait_until(lambda: rank.page.get(Word.STATE) == PageState.READY, "ready")
    rank.page.request_checkpoint(5)
    rank.order(2, PageOrderKind.RUN)
    assert rank.end() == 0, rank.output()
    assert rank.output() == undisturbed(tmp_path, path)
    step = rank.page.get(Word.CHECKPOINT_STEP)
    assert rank.page.get(Word.CHECKPOINT_DONE) == 5 | CHECKPOINT_BIT
    assert verify_image(tmp_path / f"saved-{step}/rank-0.shard").step == step


WRITES_LATE = """
import threading
from ganger.training import state_keeper
write = state_keeper.StateKeeper._write_arena

def write_late(*arguments):
    threading.main_thread().join()
    write(*arguments)

state_keeper.StateKeeper._write_arena = write_late
"""


def test_a_checkpoint_that_is_written_when_training_has_ended_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(WRITES_LATE + FORMS["attached"])
    directory = tmp_path / "going-on"
    (directory / "orders").mkdir(parents=True)
    (directory / "orders/checkpoint-5.json").write_text(f'{{"checkpoint": "{tmp_path}/saved-{{step}}"}}')
    rank = Rank(directory, path, arena_bytes=ARENA_BYTES, order=PageOrderKind.WAIT)
    wait_until(lambda: rank.page.get(Word.STATE) == PageState.READY, "ready")
    rank.page.request_checkpoint(5)
    rank.order(2, PageOrderKind.RUN)
    assert rank.end() == 0, rank.output()
    assert rank.page.get(Word.CHECKPOINT_DONE) == 5 | CHECKPOINT_BIT


@pytest.mark.parametrize("arena_bytes", [0, ARENA_BYTES], ids=["no arena", "arena"])
def test_a_checkpoint_that_fails_while_training_goes_on_is_reported_by_its_number(
    tmp_path: Path, arena_bytes: int
) -> None:
    path = tmp_path / "train.py"
    path.write_text(FORMS["attached"])
    (tmp_path / "no directory").touch()
    directory = tmp_path / "going-on"
    (directory / "orders").mkdir(parents=True)
    (directory / "orders/checkpoint-5.json").write_text(f'{{"checkpoint": "{tmp_path}/no directory/{{step}}"}}')
    rank = Rank(directory, path, arena_bytes=arena_bytes, order=PageOrderKind.WAIT)
    wait_until(lambda: rank.page.get(Word.STATE) == PageState.READY, "ready")
    rank.page.request_checkpoint(5)
    rank.order(2, PageOrderKind.RUN)
    assert rank.end() == 0, rank.output()
    assert rank.page.get(Word.CHECKPOINT_FAILED) == 5 | CHECKPOINT_BIT
    assert rank.page.get(Word.ERROR) == Error.STORAGE_FAILED


def test_a_full_disk_is_reported_and_training_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n" + FORMS["attached"]
    )
    rank = Rank(tmp_path / "parked", path, stop_at=2)
    rank.wait_word(Word.ERROR, Error.STORAGE_FAILED)
    rank.order(3, PageOrderKind.STOP, PageParkLevel.CHECKPOINT, stop=2, details={"checkpoint": str(tmp_path / "saved")})
    wait_until(lambda: "File too large" in (tmp_path / "parked/rank-0.error.json").read_text(), "the error")
    assert list((tmp_path / "saved").iterdir()) == []
    rank.order(4, PageOrderKind.RUN)
    assert rank.end() == 0, rank.output()
    assert rank.output() == undisturbed(tmp_path, path)


def test_a_state_that_cannot_be_read_ends_the_rank_with_a_code_of_its_own(
    tmp_path: Path, script: tuple[Path, bool]
) -> None:
    path, agent = script
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/rank-0.shard").write_bytes(b"x" * 1000)
    restore = {"kind": "checkpoint", "path": str(tmp_path / "saved"), "step": 2}
    rank = Rank(tmp_path / "again", path, agent=agent, restore=restore)
    assert rank.end() == EXIT_NO_STATE
    assert rank.page.get(Word.ERROR) == Error.STATE_UNREADABLE
    assert "not a state image" in (tmp_path / "again/rank-0.error.json").read_text()


def test_the_forms_say_what_they_can_do(tmp_path: Path, script: tuple[Path, bool]) -> None:
    path, agent = script
    rank = Rank(tmp_path / "run", path, agent=agent)
    assert rank.end() == 0, rank.output()
    everything = Capability.PAUSE | Capability.OFFLOAD | Capability.CHECKPOINT
    attached = everything | Capability.FIVE_LINE | Capability.RESIZE
    assert rank.page.get(Word.CAPABILITIES) == (everything | Capability.REPLAY if agent else attached)
    assert rank.page.get(Word.STEP) == 6
    assert rank.page.get(Word.SAMPLES) == 12
    assert rank.page.get(Word.PEAK_DEVICE_BYTES) >= STATE_BYTES


def test_threads_follow_a_retune(tmp_path: Path, script: tuple[Path, bool]) -> None:
    path, agent = script
    path.write_text(path.read_text() + "\nprint('threads', torch.get_num_threads())\n")
    rank = Rank(tmp_path / "run", path, agent=agent, stop_at=2)
    rank.wait_word(Word.ERROR, Error.STORAGE_FAILED)
    rank.page.retune(9, 2)
    rank.wait_word(Word.RETUNE_DONE, 9)
    assert rank.page.get(Word.THREADS_APPLIED) == 2
    rank.order(4, PageOrderKind.RUN)
    assert rank.end() == 0, rank.output()
    assert rank.output().endswith("threads 2\n")
