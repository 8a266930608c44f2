"""The master's database is restored from a backup as docs/how-to/operating.md says, while jobs have gone on since."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from kit.cluster import Cluster
from kit.shell import Shell
from kit.waiting import eventually
from system.harness import Run

pytestmark = [pytest.mark.system, pytest.mark.torch]

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "operating.md"


def commands(block: str) -> list[str]:
    """Return the commands of the page under the mark."""
    found = re.search(rf"<!-- {block} -->\n```console\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None, block
    return [line.removeprefix("$ ") for line in found[1].splitlines()]


def type_all(cluster: Cluster, block: str) -> None:
    for line in commands(block):
        here = line.replace("/var/lib/ganger/master", str(cluster.master_directory))
        here = here.replace("/backup", str(cluster.directory / "backup"))
        Shell(cluster.master_directory)(*shlex.split(here)[1:])


def free_devices(shell: Shell) -> int:
    return sum([int(node["view_entry"]["free_mask"]).bit_count() for node in shell.json("nodes")["nodes"]])


def quarantined(shell: Shell) -> list[dict[str, object]]:
    return list(shell.json("nodes", "quarantine", "list"))


def typed(gang: str, block_line: int) -> list[str]:
    """A line of the block on quarantined gangs, for this one."""
    return [*commands("quarantine")[block_line].replace("GANG", gang).split()[1:]]


class Since:
    """A cluster of two nodes whose jobs go on after its database was copied."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.shell = cluster, Shell(cluster.master_directory)
        slow = {"steps": 4000}
        self.stays = Run.submit(cluster, "stays", world=2, **slow)
        self.moves = Run.submit(cluster, "moves", **slow)
        self.resumes = Run.submit(cluster, "resumes", **slow)
        self.rests = Run.submit(cluster, "rests", **slow)
        self.ends = Run.submit(cluster, "ends", steps=200)
        self.cancelled = Run.submit(cluster, "cancelled", **slow)
        for run in (self.stays, self.moves, self.resumes, self.rests, self.ends, self.cancelled):
            run.wait_step(2)
        self.shell("suspend", self.resumes.id, "--level", "offload")
        self.resting(self.resumes)
        (cluster.directory / "backup").mkdir()
        type_all(cluster, "backup")

    def goes_on(self) -> None:
        self.shell("resume", self.resumes.id)
        self.running(self.resumes)
        self.shell("suspend", self.rests.id, "--level", "offload")
        self.resting(self.rests)
        self.ends.hurry()
        self.ends.wait_state("SUCCEEDED")
        self.shell("cancel", self.cancelled.id)
        self.cancelled.wait_state("CANCELLED")
        epoch = int(self.moves.show()["gang"]["epoch"])
        self.shell("move", self.moves.id)
        eventually(
            lambda: int(self.moves.show()["gang"]["epoch"]) > epoch and self.phase(self.moves) == "RUNNING",
            what="it has moved",
            story=self.moves.story,
        )
        eventually(lambda: len(pids(self.moves)) == 2, what="its new process steps", story=self.moves.story)
        self.starts = Run.submit(self.cluster, "starts", steps=4000)
        self.starts.wait_step(2)
        self.other = Run.submit(self.cluster, "other", steps=4000)
        self.other.wait_step(2)

    def phase(self, run: Run) -> str:
        return str((run.show()["gang"] or {}).get("phase", ""))

    def running(self, run: Run) -> None:
        eventually(lambda: self.phase(run) == "RUNNING", what=f"{run.name} runs", story=run.story)

    def resting(self, run: Run) -> None:
        eventually(lambda: self.phase(run) == "PARKED", what=f"{run.name} rests", story=run.story)

    def settled(self) -> None:
        def is_settled() -> bool:
            answer = self.shell.try_("events", "--json")
            return '"restore_settled"' in answer.out

        eventually(is_settled, within_seconds=60.0, what="all is settled", story=self.cluster.story)


def epoch_of(run: Run) -> int:
    """Zero where it has no gang."""
    return int((run.show()["gang"] or {}).get("epoch", 0))


def pids(run: Run) -> set[int]:
    return {line.pid for rank in range(run.world) for line in run.lines(rank)}


# With lost marks every decision is shown by tests/faultsim/test_restored.
@pytest.mark.parametrize("marks", ["kept", pytest.param("lost", marks=pytest.mark.chaos)])
def test_a_restored_master_takes_what_runs_and_runs_nothing_twice(tmp_path: Path, marks: str) -> None:
    environment = {"GANGER_MASTER_RESTORED_WAIT": "3s"}
    with Cluster(tmp_path, nodes=2, virtual_gpus=6, topology="3x2", environment=environment) as cluster:
        since = Since(cluster)
        since.goes_on()
        shell = since.shell
        before = {run.name: pids(run) for run in (since.stays, since.moves, since.resumes, since.starts)}
        epochs = {run.name: epoch_of(run) for run in (since.stays, since.moves, since.resumes, since.rests)}
        uid = str(since.cancelled.show()["uid"])
        cluster.master.stop()
        type_all(cluster, "restore")
        if marks == "lost":
            (cluster.master_directory / "ganger.db.marks").unlink()
            (cluster.master_directory / "ganger.db.ended").unlink()
            # As on storage that is lost with the rest.
            (cluster.storage / uid / "ended").unlink(missing_ok=True)
        cluster.start_master()
        since.settled()

        # Jobs that the copy has are in their present state, not in that of the copy.
        known = (since.stays, since.moves, since.resumes, since.rests)
        assert {run.name: epoch_of(run) for run in known} == epochs, shell("events")
        since.ends.wait_state("SUCCEEDED")
        assert since.rests.state == "SUSPENDED"
        for run in (since.stays, since.moves, since.resumes):
            step = run.last_step()
            run.wait_step(step + 3)
            assert pids(run) == before[run.name], f"{run.name}\n{shell('events')}"
        since.cancelled.wait_state("CANCELLED" if marks == "kept" else "SUSPENDED")
        if marks == "lost":
            assert "ganger resume" in shell("why", since.cancelled.id)

        # Gangs that it does not have are quarantined, hold their devices, and are adopted or ended.
        gangs = quarantined(shell)
        assert {str(gang["job"]) for gang in gangs} == {since.starts.name, since.other.name}
        assert "quarantined" in shell("nodes")
        free = free_devices(shell)
        assert free == 12 - (2 + 1 + 1 + 1 + 1)
        names = {str(gang["job"]): str(gang["name"]).rpartition("/")[2] for gang in gangs}
        for command in ("show", "why", "cancel"):
            assert typed(names[since.other.name], 2)[-1] in shell.try_(command, since.other.id).err
        shell(*typed(names[since.starts.name], 1))
        since.running(since.starts)
        assert pids(since.starts) == before[since.starts.name]
        shell(*typed(names[since.other.name], 2), "--yes")
        eventually(lambda: not quarantined(shell), what="nothing is quarantined", story=cluster.story)
        eventually(
            lambda: free_devices(shell) == free + 1,
            what="its device is free",
            story=cluster.story,
        )

        # No number is given again, and what rests goes on where it rested.
        fresh = Run.submit(cluster, "fresh", steps=4)
        assert int(fresh.id) > int(since.other.id)
        fresh.hurry()
        fresh.wait_state("SUCCEEDED")
        step = since.rests.last_step()
        shell("resume", since.rests.id)
        since.rests.wait_step(step + 2)
        steps = [line.step for line in since.rests.lines(0)]
        assert steps == list(range(steps[0], steps[0] + len(steps)))
