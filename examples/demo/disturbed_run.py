"""One example, trained twice: once alone and undisturbed, once under Ganger while it is suspended, moved and re-pinned
at random steps."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ganger.client import Client
from ganger.job import FINISHED, Job, JobState
from ganger.v1 import job_pb2
from ganger.wire.errors import MoveRefused

from examples.demo.losses import Comparison, LossCurve, compare, largest_gap, read_training
from examples.demo.step_watch import StepWatch
from examples.demo.undisturbed_run import Alone

POLL_S = 0.01
ACTION_SECONDS = 120.0
AGAIN_SECONDS = 3.0
ROOM_SECONDS = 20.0
TRAINING_SECONDS = 600.0
ALONE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Example:
    """`form`: "attached" (five lines) or "plain" (unmodified)."""

    name: str
    form: str
    script: Path
    ranks: int
    steps: int
    actions: tuple[str, ...]
    options: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.name} ({self.form})"


@dataclass(frozen=True, slots=True)
class Action:
    """What was done to a job. `seconds`: of a suspend, order to rest; of a resume, order to next step; of a move, the
    longest time without a step; of a re-pin, order to the new cores."""

    kind: str
    step: int
    seconds: float
    before: str
    after: str
    resume_seconds: float = 0.0


@dataclass
class DisturbedRun:
    example: Example
    actions: list[Action] = field(default_factory=list)
    comparison: Comparison | None = None
    steps_per_second: float = 0.0
    rate_before_repin: float = 0.0
    rate_after_repin: float = 0.0
    moves_given_up: int = 0
    trouble: str = ""
    ended_early: bool = False


class EarlyEndError(Exception):
    """The training was over before everything had been done to it: too few steps for this machine, no fault."""


class InterruptedDemoError(Exception):
    """The demo is being ended."""


def train_alone(example: Example, directory: Path, seed: int, alone: Alone, look: Callable[[], None]) -> LossCurve:
    """The run nothing happens to, without Ganger. `look` is called while it runs and may raise. Raises RuntimeError
    with the end of its output, AloneError when it cannot be run."""
    losses, weights, log = (directory / f"alone.{what}" for what in ("losses", "weights", "log"))
    directory.mkdir(parents=True, exist_ok=True)
    world = {"WORLD_SIZE": str(example.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    ranks = [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(example.ranks)]
    arguments = command(example, losses, weights, seed)[1:]
    if any(alone.run(arguments, ranks, directory, log, ALONE_SECONDS, look)):
        output = log.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{example.title} does not run even alone:\n{output}")
    return read_training(losses, weights)


def train_disturbed(
    example: Example,
    directory: Path,
    seed: int,
    client: Client,
    expected: LossCurve,
    say: Callable[[str], None],
    look: Callable[[], None],
) -> DisturbedRun:
    """The run everything happens to. Trouble is told in the outcome, not raised; only what `look` raises, which is
    called while it waits, goes through."""
    outcome = DisturbedRun(example)
    losses, weights = directory / "ganger.losses", directory / "ganger.weights"
    job: Job | None = None
    try:
        with StepWatch(losses) as watch:
            job = client.submit(
                command(example, losses, weights, seed),
                gpus=example.ranks,
                cpus_per_gpu=1,
                name=f"demo-{example.name.replace('_', '-')}-{example.form}",
                directory=str(directory),
            )
            say(f"{example.title}: submitted as {job.name}")
            _Disturbed(job, example, watch, random.Random(f"{seed} {example.title}"), outcome, say, look).run()
            if _ends(job, look) is not JobState.SUCCEEDED:
                raise RuntimeError(f"{job.name} ended {job.state}: {job.message.failure.message}\n{_tail(job)}")
            seen = watch.seen()
            outcome.steps_per_second = watch.rate(seen[0][0], seen[-1][0])
        outcome.comparison = compare(expected, read_training(losses, weights))
        say(f"{example.title}: {_verdict(outcome.comparison)}")
    except InterruptedDemoError:
        raise
    except EarlyEndError as problem:
        outcome.ended_early = True
        outcome.trouble = str(problem)
    except Exception as problem:  # One example that fails must not hide how the others fare
        outcome.trouble = f"{type(problem).__name__}: {problem}"
        if job is not None:
            outcome.trouble += f"\n{_history(client, job)}"
            _cancel(job)
        say(f"{example.title}: {outcome.trouble}")
    return outcome


def command(example: Example, losses: Path, weights: Path, seed: int) -> list[str]:
    return [
        sys.executable,
        str(example.script),
        *("--epochs", "100000"),
        *("--steps", str(example.steps)),
        *("--seed", str(seed % 10_000)),
        *("--threads", "1"),
        *example.options,
        *("--losses", str(losses)),
        *("--weights", str(weights)),
    ]


class _Disturbed:
    """The actions of one job, one after the other, at random steps."""

    def __init__(
        self,
        job: Job,
        example: Example,
        watch: StepWatch,
        dice: random.Random,
        outcome: DisturbedRun,
        say: Callable[[str], None],
        look: Callable[[], None],
    ) -> None:
        self._job, self._example, self._watch, self._dice = job, example, watch, dice
        self._outcome, self._say, self._look = outcome, say, look

    def run(self) -> None:
        actions = list(self._example.actions)
        self._dice.shuffle(actions)
        self._watch.wait_for(1, ACTION_SECONDS, self._ended)
        for action in actions:
            self._watch.wait_for(self._watch.steps + self._dice.randint(5, 25), ACTION_SECONDS, self._ended)
            match action:
                case "move":
                    done = self._move()
                case "repin":
                    done = self._repin()
                case level:
                    done = self._suspend(level)
            self._outcome.actions.append(done)
            arrow = f" {done.before} -> {done.after}" if done.before != done.after else ""
            self._say(f"{self._example.title}: {done.kind} at step {done.step}, {1000 * done.seconds:.0f} ms{arrow}")

    def _suspend(self, level: str) -> Action:
        before = self._pids()
        ordered = time.monotonic()
        self._job.suspend(level)
        self._until(lambda message: _rests(message, level), f"suspended at {level}")
        seconds = time.monotonic() - ordered
        step = self._watch.steps
        self._settle()
        still = self._watch.steps
        ordered = time.monotonic()
        self._job.resume()
        self._watch.wait_for(still + 1, ACTION_SECONDS, self._ended)
        resumed = time.monotonic() - ordered
        self._until(_runs, "resumed")
        if self._watch_moved_while_suspended(step, still):
            raise RuntimeError(f"{self._job.name} made {still - step} steps while it was suspended")
        return Action(f"suspend {level}", step, seconds, f"pids {before}", f"pids {self._pids()}", resumed)

    def _move(self) -> Action:
        before = self._job.refresh()
        nodes, pids, epoch = _nodes(before), _pids(before), before.gang.epoch
        self._order_move()
        step, tried = self._watch.steps, time.monotonic()
        ordered = tried

        def has_moved(message: job_pb2.Job) -> bool:
            nonlocal tried
            if not _runs(message):
                return False
            if message.gang.epoch > epoch:
                return _nodes(message) != nodes
            # Running where it was: the move was given up before the commit, which harms nothing, and is tried again.
            if time.monotonic() - tried > AGAIN_SECONDS:
                tried = time.monotonic()
                self._outcome.moves_given_up += 1
                self._say(f"{self._example.title}: the move was given up before its commit; ordering it again")
                self._order_move()
            return False

        after = self._until(has_moved, "moved")
        self._watch.wait_for(self._watch.steps + 1, ACTION_SECONDS, self._ended)
        pause = largest_gap(self._watch.seen(), ordered, time.monotonic())
        if set(_pids(after)) & set(pids):
            raise RuntimeError(f"{self._job.name} was moved and still has a process of before: {pids}")
        return Action(
            "move", step, pause, f"{'+'.join(nodes)} {list(pids)}", f"{'+'.join(_nodes(after))} {list(_pids(after))}"
        )

    def _order_move(self) -> None:
        """What a job has just left, this one perhaps, may not be free yet: asked again for a while."""
        deadline = time.monotonic() + ROOM_SECONDS
        while True:
            try:
                self._job.move()
                return
            except MoveRefused:
                if time.monotonic() > deadline:
                    raise
                self._look()
                time.sleep(POLL_S)

    def _repin(self) -> Action:
        message = self._until(lambda message: _runs(message) and all(_pids(message)), "running")
        pids = _pids(message)
        before = _cores(pids)
        step, ordered = self._watch.steps, time.monotonic()
        self._outcome.rate_before_repin = self._watch.rate(ordered - 1.0, ordered)
        self._job.repin()
        deadline = ordered + ACTION_SECONDS
        while _cores(pids) == before:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._job.name} is still on cores {before}")
            time.sleep(POLL_S / 5)
        seconds = time.monotonic() - ordered
        self._watch.wait_for(self._watch.steps + 20, ACTION_SECONDS, self._ended)
        self._outcome.rate_after_repin = self._watch.rate(ordered + seconds, time.monotonic())
        return Action("re-pin", step, seconds, f"cores {before}", f"cores {_cores(pids)}")

    def _until(self, holds: Callable[[job_pb2.Job], bool], what: str) -> job_pb2.Job:
        deadline = time.monotonic() + ACTION_SECONDS
        while True:
            self._look()
            message = self._job.refresh()
            if holds(message):
                return message
            if message.state in FINISHED:
                raise RuntimeError(f"{self._job.name} was not {what}: {self._ended()}")
            if time.monotonic() > deadline:
                phase = job_pb2.Gang.Phase.Name(message.gang.phase)
                state = job_pb2.Job.State.Name(message.state)
                raise TimeoutError(f"{self._job.name} not {what} within {ACTION_SECONDS:g} s ({state}, {phase})")
            time.sleep(POLL_S)

    def _ended(self) -> str:
        self._look()
        message = self._job.refresh()
        if message.state not in FINISHED:
            return ""
        if message.state == job_pb2.Job.STATE_SUCCEEDED:
            raise EarlyEndError(f"{self._job.name} came to its last step before everything had been done to it")
        why = message.failure.message
        return f"{self._job.name} ended {job_pb2.Job.State.Name(message.state)}: {why}\n{_tail(self._job)}"

    def _settle(self) -> None:
        """Long enough for a line already on its way, and for a step that should not be."""
        time.sleep(0.15)

    @staticmethod
    def _watch_moved_while_suspended(step: int, still: int) -> bool:
        # The line of the last step may have been seen after the master's word.
        return still > step + 1

    def _pids(self) -> list[int]:
        return list(_pids(self._job.refresh()))


def _ends(job: Job, look: Callable[[], None]) -> JobState:
    deadline = time.monotonic() + TRAINING_SECONDS
    while job.refresh().state not in FINISHED and time.monotonic() < deadline:
        look()
        time.sleep(POLL_S)
    return job.state


def _rests(message: job_pb2.Job, level: str) -> bool:
    if message.state != job_pb2.Job.STATE_SUSPENDED:
        return False
    wanted = job_pb2.SuspendLevel.Value(f"SUSPEND_LEVEL_{level.upper()}")
    if level == "checkpoint":
        return not message.HasField("gang") and message.suspended_level in (wanted, 0)
    return message.gang.phase == job_pb2.Gang.PHASE_PARKED and message.gang.parked_level == wanted


def _runs(message: job_pb2.Job) -> bool:
    return message.state == job_pb2.Job.STATE_HOLDING and message.gang.phase == job_pb2.Gang.PHASE_RUNNING


def _nodes(message: job_pb2.Job) -> tuple[str, ...]:
    return tuple(sorted(claim.node.removeprefix("nodes/") for claim in message.gang.claims))


def _pids(message: job_pb2.Job) -> tuple[int, ...]:
    return tuple(message.gang.pids)


def _cores(pids: tuple[int, ...]) -> str:
    """The CPUs the ranks may run on, as the kernel says."""
    found = []
    for pid in pids:
        try:
            found.append("+".join(str(cpu) for cpu in sorted(os.sched_getaffinity(pid))))
        except ProcessLookupError:
            found.append("?")
    return ",".join(found)


def _verdict(comparison: Comparison) -> str:
    if comparison.identical:
        return f"all {comparison.steps} losses and the final weights are bit-identical"
    where = f"; first at step {comparison.first_difference}" if comparison.first_difference is not None else ""
    return (
        f"{comparison.differing} of {comparison.steps} losses differ{where}, weights equal: {comparison.same_weights}"
    )


def _tail(job: Job, size: int = 2000) -> str:
    try:
        return b"".join(job.logs(offset=-size)).decode(errors="replace")
    except Exception as problem:  # The log is a help in telling of another problem
        return f"(its log cannot be read: {problem})"


def _history(client: Client, job: Job, last: int = 25) -> str:
    """What the master noted about a job, for a person who wonders what went wrong."""
    try:
        events = list(client.list_events(job.name))[-last:]
    except Exception as problem:  # The history is a help in telling of another problem
        return f"(its history cannot be read: {problem})"
    return "\n".join(f"  {event.kind}: {event.message} {dict(event.figures)} ({event.cause})" for event in events)


def _cancel(job: Job) -> None:
    try:
        job.cancel("the demo gave it up")
    except Exception:  # It may have ended, and the master may be gone
        return


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
