"""Runs in processes of their own: a run that dies is named, and no process outlives its caller."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from ganger_master.simulator.inputs import Load, Material, ReplayOptions, TraceSelection
from ganger_master.simulator.parallel_runs import RunCell, RunError, run_all
from ganger_master.simulator.report.outcomes import Run
from ganger_master.simulator.traces.servers import servers_from_flags
from ganger_master.simulator.traces.workload import workload
from kit.waiting import eventually
from simulator.cli import fakes

SOURCE = Material(
    "three",
    workload("abc", [0.0, 10.0, 20.0], [1, 1, 2], [5.0, 6.0, 7.0]),
    servers_from_flags(nodes=1, gpus_per_node=2),
    rows=3,
    apart=0,
    findings=(),
    ignored_columns=(),
    part=TraceSelection(),
)


def runs(
    policies: list[str],
    simulate: Callable[..., Run],
    seeds: int = 1,
    workers: int = 2,
    progress: Callable[[RunCell, int], None] | None = None,
) -> Generator[tuple[RunCell, Run]]:
    cells = [RunCell(policy, Load(), seed) for policy in policies for seed in range(seeds)]
    return run_all(cells, SOURCE, lambda cell: ReplayOptions(seed=cell.seed), simulate, workers, progress)


def is_alive(pid: int) -> bool:
    """A zombie counts as gone: without its parent, no process may reap it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_every_run_comes_back_with_what_it_was_asked_for() -> None:
    told: dict[RunCell, int] = {}
    found = dict(runs(["fifo", "srtf"], fakes.one_by_one, seeds=2, workers=3, progress=told.__setitem__))
    assert {(cell.policy, cell.seed) for cell in found} == {("fifo", 0), ("fifo", 1), ("srtf", 0), ("srtf", 1)}
    for cell, run in found.items():
        assert (run.policy, run.seed) == (cell.policy, cell.seed)
        np.testing.assert_array_equal(run.outcomes.jct_s, [5.0, 6.0, 7.0])
    assert told == dict.fromkeys(found, 3)


def test_a_run_is_one_thread_and_the_caller_keeps_its_environment() -> None:
    before = os.environ.get("OPENBLAS_NUM_THREADS")
    assert len(list(runs(["fifo"], fakes.threads_of_linear_algebra))) == 1
    assert os.environ.get("OPENBLAS_NUM_THREADS") == before


@pytest.mark.parametrize(
    ("simulate", "what"),
    [
        (fakes.killed_if_srtf, "policy srtf, load as recorded, seed 0: its process was ended by SIGKILL: .*memory"),
        (fakes.leaves, "policy srtf, load as recorded, seed 0: its process ended with code 3 without a result"),
        (fakes.fails, "policy srtf, load as recorded, seed 0: RuntimeError: the planner has no plan"),
        (fakes.runs_out_of_memory, "policy srtf, load as recorded, seed 0: it ran out of memory"),
    ],
)
def test_a_run_that_fails_is_named(simulate: Callable[..., Run], what: str) -> None:
    with pytest.raises(RunError, match=what) as caught:
        list(runs(["srtf"], simulate))
    assert ("in fails" in caught.value.details) == (simulate is fakes.fails)


def test_one_that_dies_ends_the_others() -> None:
    with pytest.raises(RunError, match="policy srtf"):
        list(runs(["srtf", "fifo", "las"], fakes.killed_if_srtf, workers=3))
    assert not [child for child in psutil.Process().children() if _runs_policies(child)]


def _runs_policies(process: psutil.Process) -> bool:
    try:
        return "spawn_main" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # gone, or ended and not yet waited for
        return False


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit])
def test_a_caller_that_stops_iterating_ends_all_processes(error: type[BaseException]) -> None:
    pids: list[int] = []

    def note(cell: RunCell, pid: int) -> None:
        pids.append(pid)
        if len(pids) == 2:
            raise error

    with pytest.raises(error):
        list(runs(["fifo", "srtf"], fakes.reports_its_pid_and_stays, progress=note))
    assert len(pids) == 2
    assert not any(map(is_alive, pids))


def test_processes_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from simulator.cli import fakes, test_parallel as t\n"
        "if __name__ == '__main__':\n"
        "    said = lambda cell, pid: print(pid, flush=True)\n"
        "    list(t.runs(['fifo', 'srtf'], fakes.reports_its_pid_and_stays, progress=said))\n"
    )
    (tmp_path / "main.py").write_text(script)
    root = Path(__file__).resolve().parents[3]
    parent: subprocess.Popen[Any] = subprocess.Popen(
        [sys.executable, str(tmp_path / "main.py")], cwd=root, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    assert all(map(is_alive, pids))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    eventually(lambda: not any(map(is_alive, pids)), what="the processes end")
