"""Jobs of system tests and what must hold of their own record of steps, whatever was killed meanwhile."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.cluster import Cluster
from kit.shell import Shell
from kit.waiting import eventually

SCRIPT = Path(__file__).parent / "jobs" / "steps.py"


def checkpoints_of(cluster: Cluster, uid: str) -> list[tuple[int, int]]:
    """(epoch, step) of a job's complete checkpoints on storage, oldest first."""
    directory = cluster.storage / uid / "checkpoints"
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    found = [re.fullmatch(r"(\d+)-(\d+)", name) for name in names]
    return sorted((int(match[2]), int(match[1])) for match in found if match)


@dataclass(frozen=True)
class Line:
    step: int
    loss: str
    pid: int


@dataclass(frozen=True)
class Run:
    """One submitted job and the files into which its ranks write what they did."""

    cluster: Cluster
    name: str
    record: Path
    world: int
    steps: int

    @classmethod
    def submit(
        cls,
        cluster: Cluster,
        label: str,
        *options: str,
        world: int = 1,
        steps: int = 64,
        job: tuple[str, ...] = (),
        alike: bool = False,
    ) -> Run:
        words = cls.words(cluster, label, *options, world=world, steps=steps, job=job, alike=alike)
        answer = Shell(cluster.master_directory).json("submit", *words)
        return cls(cluster, str(answer["name"]), cls.record_of(cluster, label), world, steps)

    @classmethod
    def words(
        cls,
        cluster: Cluster,
        label: str,
        *options: str,
        world: int = 1,
        steps: int = 64,
        job: tuple[str, ...] = (),
        alike: bool = False,
    ) -> list[str]:
        """What stands behind `ganger submit`. `alike`: its command is that of all with these steps and this `job`."""
        record = cls.record_of(cluster, label)
        hidden = ("--env", f"STEPS_RECORD={record}") if alike else ()
        shown = () if alike else ("--record", str(record), "--slow-until", f"{record}.go")
        return [
            *("--name", label, "--gpus", str(world), "--checkpoint-every", "never", "--directory", str(SCRIPT.parent)),
            *(*hidden, *options, "--"),
            *(sys.executable, str(SCRIPT), "--steps", str(steps), *shown, *job),
        ]

    @staticmethod
    def record_of(cluster: Cluster, label: str) -> Path:
        return cluster.directory / f"{label}.record"

    def hurry(self) -> None:
        """From now on as fast as it can: what had to happen while it runs has happened."""
        Path(f"{self.record}.go").touch()

    @property
    def id(self) -> str:
        return self.name.removeprefix("jobs/")

    @property
    def shell(self) -> Shell:
        return Shell(self.cluster.master_directory)

    def show(self) -> dict[str, Any]:
        shown: dict[str, Any] = self.shell.json("show", self.id)
        return shown

    @property
    def state(self) -> str:
        return str(self.show()["state"])

    def lines(self, rank: int) -> list[Line]:
        """Whole lines only: the last one may be half written when its writer was killed."""
        path = Path(f"{self.record}.{rank}")
        if not path.exists():
            return []
        found = []
        for text in path.read_text().split("\n")[:-1]:
            step, loss, pid = text.split()
            if step != "done":
                found.append(Line(int(step), loss, int(pid)))
        return found

    def weights(self, rank: int) -> str:
        done = [line for line in Path(f"{self.record}.{rank}").read_text().splitlines() if line.startswith("done ")]
        assert len(done) == 1, f"rank {rank} ended {len(done)} times"
        return done[0].split()[1]

    def last_step(self) -> int:
        return min((self.lines(rank)[-1].step if self.lines(rank) else 0) for rank in range(self.world))

    def wait_step(self, step: int, within_seconds: float = 60.0) -> None:
        eventually(
            lambda: self.last_step() >= step,
            within_seconds=within_seconds,
            what=f"{self.name} has done {step} steps",
            story=self.story,
        )

    def wait_state(self, *states: str, within_seconds: float = 60.0) -> None:
        # The master may be down just now: an answer that does not come is not a state.
        def reached() -> bool:
            answer = self.shell.try_("show", self.id, "--json")
            return answer.code == 0 and json.loads(answer.out)["state"] in states

        eventually(
            reached,
            within_seconds=within_seconds,
            what=f"{self.name} is {' or '.join(states)}",
            story=self.story,
            every_seconds=0.05,
        )

    def story(self) -> str:
        history = self.shell.try_("history", self.id).out
        shown = self.shell.try_("show", self.id).out
        return f"{shown}\n{history}\n{self.cluster.story()}"

    def check(self, reference: Run, *, may_repeat: bool = False) -> None:
        """Every step once and in order, bit for bit as in `reference`, and the same weights at the end.

        `may_repeat`: a rank was killed, so steps since the last complete checkpoint are done again, with the same
        result.
        """
        for rank in range(self.world):
            lines, expected = self.lines(rank), {line.step: line.loss for line in reference.lines(rank)}
            steps = [line.step for line in lines]
            if not may_repeat:
                assert steps == list(range(1, self.steps + 1)), f"rank {rank}: steps {steps}"
            assert set(steps) == set(expected)
            wrong = [line for line in lines if line.loss != expected[line.step]]
            assert not wrong, f"rank {rank}: other losses at {[line.step for line in wrong]}"
            assert self.weights(rank) == reference.weights(rank)
