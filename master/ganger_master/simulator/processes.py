"""Many pieces of work at once, each in a process of its own: what one holds in memory ends with it, and one that dies
is told from one that fails.

A process does one piece and sends its result. Nothing outlives the caller: processes are ended when the iteration is
closed or interrupted, and end by themselves when their parent is gone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from ganger_master.simulator.threads import one_thread_each

Task = TypeVar("Task")
# Called as often as it likes, with something that can be pickled.
Report = Callable[[Any], None]
_SECONDS_TO_END = 5.0


@dataclass(frozen=True)
class WorkerFailure:
    """No result; `details` are what the process had to say."""

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
    """`work(*arguments(task), report)` for each task, as they end: (task, what it returned, or `Failed`). At most
    `workers` at a time; arguments are made when their turn has come. `reported` gets what a piece of work reports."""
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
                said, value = _received(worker)
                if said == "report":
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
    # Spawned, not forked: a fork of a process with threads may stand still in a lock nobody holds any more.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_do, args=(theirs, work, arguments), name=f"ganger {task}", daemon=True)
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
    """In the child."""
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
        # Nobody listens any more.
        pass
    pipe.close()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
