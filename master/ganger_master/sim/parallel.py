"""Many runs at once, each in a process of its own: what one holds in memory ends with it, and one that dies is named.

A process does one run and sends its `Run`. Nothing outlives the caller: processes are ended when the iteration is
closed or interrupted, and end by themselves when their parent is gone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from ganger_master.sim.asked import Load, Material, jobs_at
from ganger_master.sim.replay.options import Options
from ganger_master.sim.report.outcomes import Run
from ganger_master.sim.threads import one_thread_each

# What `ganger_master.sim.replay.run.simulate` is.
Simulate = Callable[..., Run]
# How often a run says how far it is.
_SECONDS_BETWEEN_REPORTS = 0.2
_SECONDS_TO_END = 5.0


@dataclass(frozen=True)
class Cell:
    """One run of a comparison."""

    policy: str
    load: Load
    seed: int

    def __str__(self) -> str:
        return f"policy {self.policy}, load {self.load}, seed {self.seed}"


class RunError(RuntimeError):
    """A run did not come to its end; the message names it, `details` are what its process had to say."""

    def __init__(self, cell: Cell, what: str, details: str = "") -> None:
        super().__init__(f"{cell}: {what}")
        self.details = details


@dataclass
class _Worker:
    cell: Cell
    process: BaseProcess
    pipe: Connection


def run_all(
    cells: Sequence[Cell],
    source: Material,
    options: Callable[[Cell], Options],
    simulate: Simulate,
    workers: int,
    progress: Callable[[Cell, int], None] | None = None,
) -> Generator[tuple[Cell, Run]]:
    """Runs in the order in which they end. `progress` gets a cell and how many of its jobs have ended. RunError for
    the first that fails; ValueError where the jobs cannot offer a cell's load."""
    waiting = list(reversed(cells))
    working: dict[Connection, _Worker] = {}
    try:
        while waiting or working:
            while waiting and len(working) < workers:
                cell = waiting.pop()
                worker = _started(cell, source, options(cell), simulate)
                working[worker.pipe] = worker
            for pipe in wait(list(working)):
                assert isinstance(pipe, Connection)
                worker = working[pipe]
                said, *values = _received(worker)
                if said == "progress":
                    if progress is not None:
                        progress(worker.cell, values[0])
                    continue
                del working[pipe]
                _end(worker)
                if said == "failed":
                    raise RunError(worker.cell, *values)
                yield worker.cell, values[0]
    finally:
        for worker in working.values():
            worker.process.terminate()
        for worker in working.values():
            _end(worker)


def _started(cell: Cell, source: Material, options: Options, simulate: Simulate) -> _Worker:
    # Spawned, not forked: a fork of a process with threads may stand still in a lock nobody holds any more.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    jobs = jobs_at(source, cell.load, cell.seed)
    arguments = (theirs, simulate, jobs, source.servers, cell.policy, options)
    process = context.Process(target=_work, args=arguments, name=f"ganger {cell}", daemon=True)
    # Ctrl-C goes to all processes of a terminal; children leave it to us, from their first instruction on. What
    # starting the tracker does to the mask must be over by then: it ends by letting SIGINT through.
    resource_tracker.ensure_running()
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with one_thread_each():
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
    # Only the child may hold its end, or nobody would see that it died.
    theirs.close()
    return _Worker(cell, process, ours)


def _received(worker: _Worker) -> tuple[Any, ...]:
    try:
        message: tuple[Any, ...] = worker.pipe.recv()
        return message
    except (EOFError, OSError):
        worker.process.join(_SECONDS_TO_END)
        code = worker.process.exitcode
        if code is not None and code < 0:
            hint = ": was it out of memory?" if -code == signal.SIGKILL else ""
            return "failed", f"its process was ended by {signal.Signals(-code).name}{hint}"
        return "failed", f"its process ended with code {code} without a result"


def _end(worker: _Worker) -> None:
    worker.process.join(_SECONDS_TO_END)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()
    worker.pipe.close()
    worker.process.close()


def _work(pipe: Connection, simulate: Simulate, jobs: Any, servers: Any, policy: str, options: Options) -> None:
    """In the child."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        run = simulate(jobs, servers, policy, options, _Reports(pipe))
        message: tuple[Any, ...] = ("done", run)
    except MemoryError:
        message = ("failed", "it ran out of memory")
    except Exception as error:
        message = ("failed", f"{type(error).__name__}: {error}", traceback.format_exc())
    try:
        pipe.send(message)
    except OSError:
        # Nobody listens any more.
        pass
    pipe.close()


class _Reports:
    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._next = time.monotonic()

    def __call__(self, ended: int, _: int) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _SECONDS_BETWEEN_REPORTS
            self._pipe.send(("progress", ended))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
