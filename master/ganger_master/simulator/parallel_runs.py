"""Parallel runs, one process per run; a process that dies is reported with the name of its run.

Each process runs one task, in one thread, since several would compete with the threads of linear algebra. Its memory is
released with it. Processes end when the iteration is closed or interrupted, and by themselves when their parent ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from ganger.program_setup import one_thread_each, settle

from ganger_master.simulator.inputs import Load, Material, ReplayOptions, jobs_at
from ganger_master.simulator.report.outcomes import Run

Task = TypeVar("Task")
# A task calls it with values that can be pickled, any number of times.
Report = Callable[[Any], None]
_SECONDS_TO_END = 5.0


@dataclass(frozen=True)
class WorkerFailure:
    """A task without a result. `details`: the traceback of the process, if any."""

    what: str
    details: str = ""


@dataclass
class _Worker(Generic[Task]):
    task: Task
    process: BaseProcess
    pipe: Connection


def each(
    tasks: Sequence[Task],
    work: Callable[..., Any],
    arguments: Callable[[Task], tuple[Any, ...]],
    workers: int,
    reported: Callable[[Task, Any], None] | None = None,
) -> Generator[tuple[Task, Any]]:
    """Run `work(*arguments(task), report)` for each task, `workers` at a time.

    Yields (task, result or `WorkerFailure`) as tasks end. `arguments` is called when its task starts. `reported` is
    called with the values that a task reports.
    """
    waiting = list(reversed(tasks))
    working: dict[Connection, _Worker[Task]] = {}
    try:
        while waiting or working:
            while waiting and len(working) < workers:
                task = waiting.pop()
                worker = _started(task, work, arguments(task))
                working[worker.pipe] = worker
            for pipe in wait(list(working)):
                assert isinstance(pipe, Connection)
                worker = working[pipe]
                kind, value = _received(worker)
                if kind == "report":
                    if reported is not None:
                        reported(worker.task, value)
                    continue
                del working[pipe]
                _end(worker)
                yield worker.task, value
    finally:
        for worker in working.values():
            worker.process.terminate()
        for worker in working.values():
            _end(worker)


def _started(task: Task, work: Callable[..., Any], arguments: tuple[Any, ...]) -> _Worker[Task]:
    # Spawned, not forked: a fork of a process with threads may block on a lock whose holder was not copied.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_do, args=(theirs, work, arguments), name=f"ganger {task}", daemon=True)
    # Ctrl-C reaches all processes of a terminal; children ignore it from their first instruction on. The tracker starts
    # before, because its start unblocks SIGINT.
    resource_tracker.ensure_running()
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with one_thread_each():
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
    # Only the child may hold its end of the pipe: otherwise its death would not close the pipe.
    theirs.close()
    return _Worker(task, process, ours)


def _received(worker: _Worker[Task]) -> tuple[str, Any]:
    try:
        message: tuple[str, Any] = worker.pipe.recv()
        return message
    except (EOFError, OSError):
        worker.process.join(_SECONDS_TO_END)
        code = worker.process.exitcode
        if code is not None and code < 0:
            hint = ": was it out of memory?" if -code == signal.SIGKILL else ""
            return "done", WorkerFailure(f"its process was ended by {signal.Signals(-code).name}{hint}")
        return "done", WorkerFailure(f"its process ended with code {code} without a result")


def _end(worker: _Worker[Task]) -> None:
    worker.process.join(_SECONDS_TO_END)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()
    worker.pipe.close()
    worker.process.close()


def _do(pipe: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Run in the child: execute the task and send its result."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        result = work(*arguments, lambda value: pipe.send(("report", value)))
    except MemoryError:
        result = WorkerFailure("it ran out of memory")
    except Exception as error:
        result = WorkerFailure(f"{type(error).__name__}: {error}", traceback.format_exc())
    try:
        pipe.send(("done", result))
    except OSError:
        # The parent has ended.
        pass
    pipe.close()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


# The type of `ganger_master.simulator.run.simulate`.
Simulate = Callable[..., Run]
_SECONDS_BETWEEN_REPORTS = 0.2


@dataclass(frozen=True)
class RunCell:
    """One run of a comparison."""

    policy: str
    load: Load
    seed: int

    def __str__(self) -> str:
        return f"policy {self.policy}, load {self.load}, seed {self.seed}"


class RunError(RuntimeError):
    """A run failed; the message names it. `details`: the traceback of its process, if any."""

    def __init__(self, cell: RunCell, what: str, details: str = "") -> None:
        super().__init__(f"{cell}: {what}")
        self.details = details


def run_all(
    cells: Sequence[RunCell],
    source: Material,
    options: Callable[[RunCell], ReplayOptions],
    simulate: Simulate,
    workers: int,
    progress: Callable[[RunCell, int], None] | None = None,
) -> Generator[tuple[RunCell, Run]]:
    """Yield runs in the order in which they end.

    `progress` is called with a cell and the number of its jobs that have ended. Raises RunError for the first failure,
    ValueError if the jobs cannot offer the load of a cell.
    """

    def arguments(cell: RunCell) -> tuple[Any, ...]:
        return simulate, jobs_at(source, cell.load, cell.seed), source.servers, cell.policy, options(cell)

    with closing(each(cells, _simulated, arguments, workers, progress)) as every:
        for cell, found in every:
            if isinstance(found, WorkerFailure):
                raise RunError(cell, found.what, found.details)
            yield cell, found


def _simulated(simulate: Simulate, jobs: Any, servers: Any, policy: str, options: ReplayOptions, report: Report) -> Run:
    """Run in the child: one simulation with progress reports."""
    settle()
    due = time.monotonic()

    def progress(ended: int, _: int) -> None:
        nonlocal due
        now = time.monotonic()
        if now >= due:
            due = now + _SECONDS_BETWEEN_REPORTS
            report(ended)

    return simulate(jobs, servers, policy, options, progress)
