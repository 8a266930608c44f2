"""Kill -9 while a job changes its size: it does each step once and takes each sample once, with the losses of one that
never changed. (chaos: 2 to 5 min)"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from ganger.client import Client
from ganger.injob.launcher.client import Launcher, LauncherError
from ganger.wire.errors import ApiError
from kit.cluster import Cluster, Service
from kit.shell import Shell
from kit.waiting import eventually
from system.killing import clear_up, release, start_the_dead

pytestmark = [pytest.mark.system, pytest.mark.torch, pytest.mark.chaos]

SCRIPT = Path(__file__).parent / "jobs" / "elastic.py"
EPOCHS, STEPS_OF_EPOCH, SAMPLES = 200, 8, 96
# Failpoints and the programs that pass them, in the order of a change; of several daemons the first one dies.
PLACES = (
    ("after-prepare", "daemon"),
    ("mid-stream", "daemon"),
    ("parked-before-report", "daemon"),
    ("before-move-commit", "daemon"),
    ("before-move-commit", "master"),
    ("after-move-commit", "master"),
    ("before-reap", "daemon"),
)


@dataclass(frozen=True)
class Training:
    cluster: Cluster
    id: str
    record: Path

    @classmethod
    def submit(cls, cluster: Cluster, label: str, gpus: str, *job: str) -> Training:
        record = cluster.directory / f"{label}.record"
        shell = Shell(cluster.master_directory)
        words = ("--epochs", str(EPOCHS), "--record", str(record), "--slow-until", f"{record}.go")
        options = ("--gpus", gpus, "--cpus-per-gpu", "1", "--memory", "512M", "--gpu-memory", "16M")
        wishes = ("--distributed", "--name", label, "--checkpoint-every", "never")
        id = shell.submit(*options, *wishes, "--", sys.executable, str(SCRIPT), *words, *job)
        return cls(cluster, id, record)

    @property
    def shell(self) -> Shell:
        return Shell(self.cluster.master_directory)

    def lines(self) -> list[dict[str, object]]:
        found = []
        for path in self.record.parent.glob(f"{self.record.name}.[0-9]"):
            found += [json.loads(line) for line in path.read_text().split("\n")[:-1]]
        return sorted(found, key=lambda line: (line["step"], line["rank"]))

    def last_step(self) -> int:
        return max((int(str(line["step"])) for line in self.lines()), default=0)

    def devices(self) -> int:
        """Return the devices of a gang that runs and is not being resized; zero else, or while the master is away."""
        shown = self.shell.try_("show", self.id, "--json")
        gang = (json.loads(shown.out).get("gang") or {}) if shown.code == 0 else {}
        if gang.get("phase") != "RUNNING" or gang.get("move_claims"):
            return 0
        return sum(int(claim["device_mask"]).bit_count() for claim in gang["claims"])

    def settles(self, what: str) -> None:
        """Wait until the job makes progress and no node has more than its devices in use."""
        done = self.last_step()

        def is_quiet() -> bool:
            # A program that had read its failpoint before it was withdrawn may have stopped only now.
            release([self.cluster.master, *self.cluster.daemons.values()])
            devices, nodes = self.devices(), self.shell.try_("nodes", "--json")
            if not devices or nodes.code or self.last_step() < done + 2:
                return False
            masks = [int(node["view_entry"].get("free_mask", 0)) for node in json.loads(nodes.out)["nodes"]]
            free = sum([mask.bit_count() for mask in masks])
            return free == 2 * len(self.cluster.daemons) - devices

        eventually(is_quiet, what=f"the job goes on after {what}", within_seconds=120, story=self.story)

    def asks_until(self, gpus: int) -> None:
        order = ("resize", self.id, str(gpus), "--timeout", "60s")
        eventually(
            lambda: self.devices() == gpus or self.shell.try_(*order).code == 0,
            what=f"it has {gpus} GPUs",
            within_seconds=120,
            story=self.story,
        )

    def story(self) -> str:
        return f"{self.shell.try_('history', self.id).out}\n{self.cluster.story()}"

    def ends(self) -> dict[int, float]:
        """Well: each step once by every rank of one world, each sample once. Losses of the whole batches, by step."""
        Path(f"{self.record}.go").touch()
        self.shell("wait", self.id, "--timeout", "3m")
        by_step: dict[int, list[dict[str, object]]] = {}
        for line in self.lines():
            by_step.setdefault(int(str(line["step"])), []).append(line)
        assert sorted(by_step) == list(range(1, EPOCHS * STEPS_OF_EPOCH + 1)), self.story()
        taken: dict[object, list[object]] = {}
        for step, ranks in by_step.items():
            assert [line["rank"] for line in ranks] == list(range(int(str(ranks[0]["world"])))), f"step {step}"
            for line in ranks:
                samples = line["samples"]
                assert isinstance(samples, list)
                taken.setdefault(line["epoch"], []).extend(samples)
        for samples in taken.values():
            assert sorted(samples) == list(range(SAMPLES))  # type: ignore[type-var]
        return {step: sum(float(str(one["loss"])) for one in ranks) / len(ranks) for step, ranks in by_step.items()}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("resizes")
    with Cluster(directory, nodes=2, virtual_gpus=2, topology="2", virtual_cores=2) as running:
        yield running


@pytest.fixture
def idle(cluster: Cluster) -> Iterator[Cluster]:
    yield cluster
    clear_up(cluster)


@pytest.fixture(scope="module")
def losses(cluster: Cluster) -> dict[int, float]:
    """Losses of an undisturbed run, by step."""
    return Training.submit(cluster, "alone", "1").ends()


def are_alike(found: dict[int, float], losses: dict[int, float]) -> None:
    assert found == pytest.approx(losses, rel=1e-9)


def resize(training: Training, gpus: int) -> None:
    """Request a resize in a thread: a held program does not answer, and a killed one never will."""

    def ask() -> None:
        # Not by the shell of the tests, which catches what the whole process prints.
        with contextlib.suppress(ApiError), Client(str(training.cluster.master_directory)) as client:
            client.resize_job(training.id, gpus)

    threading.Thread(target=ask, daemon=True).start()


def until_held(holders: list[Service], what: str, training: Training) -> Service:
    eventually(lambda: any(holder.is_stopped for holder in holders), what=what, within_seconds=60, story=training.story)
    return next(holder for holder in holders if holder.is_stopped)


# On one node, and over two.
@pytest.mark.parametrize(("fewer", "more"), [(1, 2), (2, 4)])
def test_a_kill_at_each_place_of_a_change_of_size_loses_nothing(
    idle: Cluster, losses: dict[int, float], fewer: int, more: int
) -> None:
    training = Training.submit(idle, f"places-{fewer}-{more}", "1:4")
    training.settles("its start")
    if fewer > 1:
        training.shell("resize", training.id, str(fewer))
    for failpoint, program in PLACES:
        for becomes in (more, fewer):
            holders = [idle.master] if program == "master" else list(idle.daemons.values())
            idle.wait_ready()
            for holder in holders:
                holder.arm(f"{failpoint}=stop")
            what = f"a kill of the {program} at {failpoint} on the way to {becomes}"
            resize(training, becomes)
            until_held(holders, what, training).kill()
            release(holders)
            start_the_dead(idle)
            training.settles(what)
            if training.devices() != becomes:
                # Cancelled, or never durable: the user repeats the request.
                training.shell("resize", training.id, str(becomes), "--timeout", "60s")
                training.settles(f"{what}, asked again")
    are_alike(training.ends(), losses)


@pytest.mark.parametrize("seed", range(10))
def test_kills_at_any_instant_of_changes_of_size_lose_nothing(
    idle: Cluster, losses: dict[int, float], seed: int
) -> None:
    dice = random.Random(seed)
    training = Training.submit(idle, f"instant-{seed}", "1:4")
    training.settles("its start")
    for _ in range(5):
        idle.wait_ready()
        gpus = dice.choice([one for one in (1, 2, 3, 4) if one != training.devices()])
        victims: list[Service | None] = [idle.master, *idle.daemons.values(), None]
        victim = dice.choice(victims)
        launchers = _launchers(idle)
        resize(training, gpus)
        threading.Event().wait(dice.uniform(0.1, 1.5))  # the instant is what is random here
        if victim is not None:
            victim.kill()
        elif launchers:
            os.kill(dice.choice(launchers), signal.SIGKILL)
        start_the_dead(idle)
        training.settles(f"a kill of {victim.name if victim else 'a launcher'} on the way to {gpus}")
    are_alike(training.ends(), losses)


def _launchers(cluster: Cluster) -> list[int]:
    found = []
    for path in sorted(cluster.run_directory.glob("*/launchers/*.sock")):
        try:
            with Launcher(str(path)) as launcher:
                found.append(int(launcher.info()["pid"]))
        except LauncherError:
            continue
    return found
