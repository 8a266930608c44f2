"""Runs training scripts as ranks with control pages of their own, with the test in the place of the daemon.

Scripts are forked from a server that has torch imported already, as the launcher does it: a test costs no imports.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from ganger.injob.launcher.preload import PRELOADED
from ganger.injob.metrics import series_path
from ganger.injob.page import Page
from ganger.injob.page_layout import Capability, PageOrderKind, PageParkLevel, PagePhase, Word
from ganger.injob.state_image import VARIABLE, arena_variable, make_arena
from ganger.protocol.metric_series import merged, parsed
from ganger.protocol.stop_rules import EPOCH_BIT

EXAMPLES = Path(__file__).parents[2] / "examples"
PATIENCE_S = 60.0
# What a script is offered that cannot be brought back by running it again.
ONLY_IN_PLACE = Capability.PAUSE | Capability.OFFLOAD

_context = multiprocessing.get_context("forkserver")
_PRELOADED = [*PRELOADED, "sklearn.datasets", __name__, "training.warm"]
_context.set_forkserver_preload(_PRELOADED)


def preload(*modules: str) -> None:
    """Import these ahead, too, once for all tests: trainers take seconds. To be called while tests are collected."""
    _PRELOADED[len(PRELOADED) : len(PRELOADED)] = modules
    _context.set_forkserver_preload(_PRELOADED)


def _start_server() -> None:
    """Start the server if it does not run. It looks for modules on the path of its environment only, and passes over
    those that it does not find: each rank would import them."""
    former = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        forkserver.ensure_running()
    finally:
        _set_path(former)


def _set_path(path: str | None) -> None:
    if path is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = path


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not seen within {PATIENCE_S:.0f} s: {what}")
        time.sleep(0.002)


def write_script(directory: Path, text: str) -> Path:
    script = directory / "train.py"
    script.write_text(text)
    return script


class Rendezvous:
    """A store outside the ranks, as the launcher's: a port found free and left to rank 0 can be taken meanwhile."""

    def __init__(self) -> None:
        import torch.distributed

        self._store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }


_started: list[Rank] = []


def end_all() -> None:
    """Kill what a test has left running."""
    for rank in _started:
        if rank.process.is_alive():
            rank.kill()
    _started.clear()


class Rank:
    """One rank: its page, its process, its log. The epoch's directory is shared by all ranks of a gang."""

    def __init__(
        self,
        directory: Path,
        script: Path,
        arguments: Sequence[object] = (),
        *,
        rank: int = 0,
        world: int = 1,
        rendezvous: Rendezvous | None = None,
        managed: bool = True,
        agent: bool = False,
        restore: dict[str, Any] | None = None,
        arena_bytes: int = 0,
        arena_fd: int | None = None,
        stop_at: int = 0,
        at_epoch_end: bool = False,
        save_at: int = 0,
        checkpoint: Path | None = None,
        order: int = PageOrderKind.RUN,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "orders").mkdir(exist_ok=True)
        if checkpoint is not None:
            # where the stop of `stop_at` saves to
            (directory / "orders/2.json").write_text(json.dumps({"checkpoint": str(checkpoint)}))
        self.directory = directory
        self.log = directory / f"rank-{rank}.log"
        self.rank = rank
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
        }
        self._rendezvous = rendezvous
        if rendezvous is not None:
            variables.update(rendezvous.environment)
        self.arena_fd = arena_fd
        if managed:
            path = directory / f"rank-{rank}.page"
            self.page = Page.create(str(path), epoch=1, rank=rank, world=world, local_rank=rank)
            self.page.write_order(1, order)
            # No daemon publishes here: a shard that is durable is all there is to a checkpoint.
            self.page.let_leave(1 << 40)
            variables.update(GANGER_PAGE=str(path), GANGER_JOB_DIR=str(directory))
            if restore is not None:
                (directory / f"restore-{rank}.json").write_text(json.dumps(restore))
                variables["GANGER_RESTORE"] = str(directory / f"restore-{rank}.json")
            if arena_bytes:
                self.arena_fd = make_arena(None, "of a test", arena_bytes)
        plan = {
            "path": os.environ.get("PYTHONPATH"),
            "environment": {**variables, **(environment or {})},
            "arguments": [str(script), *map(str, arguments)],
            "log": str(self.log),
            "agent": agent,
            "stop_at": stop_at,
            "stop_sequence": 2 | (EPOCH_BIT if at_epoch_end else 0),
            "save_at": save_at,
        }
        arena = None if self.arena_fd is None else f"/proc/{os.getpid()}/fd/{self.arena_fd}"
        _start_server()
        self.process = _context.Process(target=_run, args=(plan, arena))
        self.process.start()
        _started.append(self)

    def order(
        self, sequence: int, order: int, level: int = 0, stop: int = 0, details: dict[str, Any] | None = None
    ) -> None:
        if details is not None:
            (self.directory / "orders" / f"{sequence}.json").write_text(json.dumps(details))
        self.page.write_order(sequence, order, stop_seq=stop, level=level)

    def stop(self, sequence: int, level: int, **details: Any) -> None:
        self.order(sequence, PageOrderKind.STOP, level, stop=sequence, details=details)

    def reached(self, sequence: int) -> int:
        """Wait until the order is carried out; returns the step."""
        self._wait(lambda: self.page.get(Word.REACHED_SEQ) >= sequence, f"order {sequence} reached")
        return self.page.get(Word.REACHED_STEP)

    def at_step(self, step: int) -> None:
        self._wait(lambda: self.page.get(Word.STEP) >= step, f"step {step}")

    def wait_word(self, word: int, value: int) -> None:
        self._wait(lambda: self.page.get(word) == value, f"word {word} = {value}, is {self.page.get(word)}")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        wait_until(lambda: condition() or not self.process.is_alive(), what)
        assert condition(), f"the rank ended before: {what}\n{self.output()}"

    def end(self) -> int:
        """Wait for the end; returns the exit code."""
        self.process.join(PATIENCE_S)
        if self.process.is_alive():
            os.kill(self.process.pid or 0, signal.SIGUSR2)
            self.process.join(0.5)
            self.kill()
            raise AssertionError(f"the rank did not end\n{self.output()}")
        code = self.process.exitcode
        assert code is not None
        return code

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


def _run(plan: dict[str, Any], arena: str | None) -> None:
    """In the forked process: become the rank."""
    multiprocessing.set_start_method("fork", force=True)  # what a script started by itself would have
    log = os.open(plan["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    _set_path(plan["path"])
    os.environ.update(plan["environment"])
    if arena is not None:
        descriptor = os.open(arena, os.O_RDWR)
        os.set_inheritable(descriptor, True)
        os.environ[VARIABLE] = arena_variable(descriptor)
    sys.argv = plan["arguments"]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    if plan["stop_at"]:
        _while_making(
            plan["stop_at"],
            lambda page: page.write_order(
                2, PageOrderKind.STOP, stop_seq=plan["stop_sequence"], level=PageParkLevel.CHECKPOINT
            ),
        )
    if plan["save_at"]:
        _while_making(plan["save_at"], lambda page: page.request_checkpoint(5))
    if plan["agent"]:
        from ganger.training import agent

        agent.install()
    runpy.run_path(sys.argv[0], run_name="__main__")


def _while_making(step: int, act: Callable[[Page], None]) -> None:
    """Write into the own page, once, while step number `step` is being made, so that K is exactly that."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    page = Page.open(os.environ["GANGER_PAGE"])
    is_due = True

    def hook(optimizer: object, args: object, kwargs: object) -> None:
        nonlocal is_due
        if is_due and page.get(Word.STEP) == step - 1 and page.get(Word.PHASE) != PagePhase.REPLAY:
            is_due = False
            act(page)

    register_optimizer_step_post_hook(hook)


def end_together(ranks: Sequence[Rank]) -> list[int]:
    """The exit codes of a gang. When one fails the others are not waited for: they would wait for it."""
    wait_until(
        lambda: (
            all(not rank.process.is_alive() for rank in ranks)
            or any(rank.process.exitcode not in (None, 0, 75) for rank in ranks)
        ),
        "the end of the gang",
    )
    for rank in ranks:
        if rank.process.is_alive():
            rank.kill()
    return [rank.end() for rank in ranks]


def run_to_end(directory: Path, script: Path, arguments: Sequence[object], **options: Any) -> None:
    rank = Rank(directory, script, arguments, **options)
    assert rank.end() == 0, rank.output()


def run_in_parts(
    directory: Path, script: Path, arguments: Sequence[object], stops: Sequence[int], **options: Any
) -> None:
    """Run with a checkpoint to storage and a new process at every step of `stops`."""
    restore: dict[str, Any] | None = None
    for number, step in enumerate([*stops, 0]):
        part = directory / f"part-{number}"
        shards = directory / f"checkpoint-{number}"
        rank = Rank(part, script, arguments, restore=restore, stop_at=step, checkpoint=shards, **options)
        code = rank.end()
        assert code == (75 if step else 0), f"part {number} ended with {code}\n{rank.output()}"
        if step:
            assert rank.page.get(Word.CHECKPOINT_STEP) == step
        restore = {"kind": "checkpoint", "path": str(shards), "step": step}


def run_over_epoch_ends(
    directory: Path, script: Path, arguments: Sequence[object], steps_per_epoch: int, count: int, **options: Any
) -> list[tuple[int, int, int]]:
    """Stop to storage in the second step of every epoch but the last, and go on in a new process: each stop waits for
    the end of its epoch. Return number, first step and steps of each epoch in the series."""
    restore: dict[str, Any] | None = None
    kept = []
    for number in range(count):
        part, shards = directory / f"part-{number}", directory / f"checkpoint-{number}"
        is_last, end = number + 1 == count, (number + 1) * steps_per_epoch
        rank = Rank(
            part, script, arguments, restore=restore, checkpoint=shards,
            stop_at=0 if is_last else end - steps_per_epoch + 2, at_epoch_end=True, **options,
        )  # fmt: skip
        assert rank.end() == (0 if is_last else 75), rank.output()
        page = rank.page.progress()
        assert (page.training_epoch, page.training_epochs) == (number, count)
        if not is_last:
            assert rank.page.get(Word.CHECKPOINT_STEP) == end, rank.output()
        restore = {"kind": "checkpoint", "path": str(shards), "step": end}
        kept.append(parsed(Path(series_path(str(part))).read_text(), number))
    return [(epoch.number, epoch.first_step, epoch.steps) for epoch in merged(kept).epochs()]


def printed_in_parts(directory: Path, stops: Sequence[int]) -> str:
    """Return what the parts of `run_in_parts` have printed, one after the other."""
    return "".join((directory / f"part-{number}/rank-0.log").read_text() for number in range(len(stops) + 1))


def run_in_parts_as_alone(
    directory: Path,
    script: Path,
    stops: Sequence[int],
    environment: Mapping[str, str] | None = None,
    agent: bool = True,
) -> str:
    """Run once outside of Ganger, and once with a checkpoint and a new process at every step of `stops`.

    Both print the same; returns it."""
    run_to_end(directory / "alone", script, [], managed=False, environment=environment)
    run_in_parts(directory, script, [], stops, agent=agent, environment=environment)
    alone = (directory / "alone/rank-0.log").read_text()
    assert printed_in_parts(directory, stops) == alone
    return alone


def gang(directory: Path, script: Path, arguments: Sequence[object], world: int = 2, **options: Any) -> list[Rank]:
    """The ranks of one gang, as on a node each: they share nothing but the rendezvous store."""
    store, one = Rendezvous(), {"world": world, **options}
    return [Rank(directory, script, arguments, rank=rank, rendezvous=store, **one) for rank in range(world)]


def run_gang_in_parts(
    directory: Path, script: Path, arguments: Sequence[object], stops: Sequence[int], world: int = 2
) -> list[list[Rank]]:
    """As `run_in_parts`, with a gang and the agent. Return the ranks of each part."""
    restore: dict[str, Any] | None = None
    parts = []
    for number, step in enumerate([*stops, 0]):
        shards = directory / f"checkpoint-{number}"
        more: dict[str, Any] = {"agent": True, "restore": restore, "stop_at": step, "checkpoint": shards}
        ranks = gang(directory / f"part-{number}", script, arguments, world, **more)
        assert end_together(ranks) == [75 if step else 0] * world, "".join(rank.output() for rank in ranks)
        restore = {"kind": "checkpoint", "path": str(shards), "step": step}
        parts.append(ranks)
    return parts


def offered_no_checkpoint(rank: Rank) -> str:
    """Wait until a rank that is offered neither a move nor a checkpoint has trained to its end; returns its output."""
    assert rank.end() == 0, rank.output()
    assert rank.page.get(Word.CAPABILITIES) == ONLY_IN_PLACE, rank.output()
    return rank.output()


def refused_checkpoint(rank: Rank) -> str:
    """Wait until the rank refuses the checkpoint of its `stop_at`, let it train to its end; returns why it refused."""
    error = rank.directory / f"rank-{rank.rank}.error.json"
    wait_until(lambda: error.exists() or not rank.process.is_alive(), "a refusal")
    assert error.exists(), rank.output()
    rank.order(3, PageOrderKind.RUN)
    assert rank.end() == 0, rank.output()
    return str(json.loads(error.read_text())["message"])


def losses(path: Path) -> dict[int, str]:
    """Losses by step; the last line of a step counts."""
    return {int(step): loss for step, loss in (line.split() for line in path.read_text().splitlines())}


def undisturbed(tmp_path: Path, script: Path) -> str:
    """What the script prints outside of Ganger."""
    rank = Rank(tmp_path / "undisturbed", script, managed=False)
    assert rank.end() == 0, rank.output()
    return rank.output()
