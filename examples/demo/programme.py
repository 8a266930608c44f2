"""Which examples the demo plays, and in which order."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import ganger
from ganger.client import Client
from ganger.job import FINISHED, Job

from examples.demo.disturbed_run import (
    DisturbedRun,
    Example,
    InterruptedDemoError,
    train_alone,
    train_disturbed,
)
from examples.demo.undisturbed_run import Alone, AloneError

ALWAYS = 3
"""So many examples are always played, the others if time allows."""
ENOUGH_SECONDS = 105.0
SAFETY = 1.2
"""A further example begins only if, taking so many times as long as its other form did, it ends before ENOUGH_SECONDS:
the demo stays under two minutes."""
THREE_SUSPENDS_TWO_MOVES = ("pause", "offload", "checkpoint", "move", "move")


def find_examples(given: Path | None = None) -> Path:
    """The directory of the examples: as given, beside the package, or here. Raises FileNotFoundError with the places
    looked in."""
    package = Path(str(ganger.__file__)).resolve().parent
    places = [given] if given else [package.parents[1] / "examples", Path.cwd() / "examples"]
    for place in places:
        if (place / "digits_cnn" / "attached.py").is_file():
            return place.resolve()
    looked = ", ".join(str(place) for place in places)
    raise FileNotFoundError(f"no examples in {looked}; run the demo in a clone of the repository or give --examples")


def programme(examples: Path) -> tuple[Example, ...]:
    """The five-line forms first; the unmodified ones are played if time allows."""

    def example(
        name: str, form: str, ranks: int, steps: int, actions: tuple[str, ...], options: tuple[str, ...]
    ) -> Example:
        return Example(name, form, examples / name / f"{form}.py", ranks, steps, actions, options)

    every = (*THREE_SUSPENDS_TWO_MOVES, "repin")
    # Sizes for two small cores: some milliseconds a step, and so many steps that a source still trains when its
    # destination has imported what the script needs.
    small, wide = ("--batch", "4", "--width", "32"), ("--width", "32")
    return (
        example("ddp", "attached", 2, 1000, THREE_SUSPENDS_TWO_MOVES, wide),
        example("digits_cnn", "attached", 1, 800, every, wide),
        example("char_transformer", "attached", 1, 400, every, small),
        example("char_transformer", "plain", 1, 400, THREE_SUSPENDS_TWO_MOVES, small),
        example("digits_cnn", "plain", 1, 800, THREE_SUSPENDS_TWO_MOVES, wide),
        example("ddp", "plain", 2, 1000, THREE_SUSPENDS_TWO_MOVES, wide),
    )


def warm_up(directory: Path, client: Client) -> list[Job]:
    """A short job on every node: their launchers import PyTorch while the trainings run alone, as on a cluster that has
    been up for a while."""
    directory.mkdir(parents=True, exist_ok=True)
    script = directory / "warm.py"
    script.write_text("print('warm')\n")
    nodes = client.list_nodes()
    devices = max((found.devices for found in nodes.configuration_sets), default=1)
    return [
        client.submit(
            [sys.executable, str(script)], gpus=devices, cpus_per_gpu=1, name="demo-warm-up", directory=str(directory)
        )
        for _ in nodes.nodes
    ]


def play(
    examples: tuple[Example, ...],
    directory: Path,
    seed: int,
    client: Client,
    say: Callable[[str], None],
    alone: Alone,
    *,
    everything: bool = False,
) -> list[DisturbedRun]:
    """Plays them two at a time: one core each. An example that fails is told in its outcome."""
    began = time.monotonic()
    took: dict[str, float] = {}
    interrupted = threading.Event()
    warm = warm_up(directory, client)

    def look() -> None:
        if interrupted.is_set():
            raise InterruptedDemoError

    def one(example: Example, place: Path) -> DisturbedRun:
        started = time.monotonic()
        say(f"{example.title}: trains alone first, {example.steps} steps")
        try:
            expected = train_alone(example, place, seed, alone, look)
        except (RuntimeError, AloneError, OSError, ValueError) as problem:
            say(f"{example.title}: {problem}")
            return DisturbedRun(example, trouble=str(problem))
        say(f"{example.title}: trained alone in {time.monotonic() - started:.1f} s")
        for job in warm:
            while job.refresh().state not in FINISHED:
                look()
                time.sleep(0.05)
        outcome = train_disturbed(example, place, seed, client, expected, say, look)
        took[example.name] = time.monotonic() - started
        return outcome

    def fits(example: Example) -> bool:
        # Its other form may still be in the other lane: then the slowest so far is the guess.
        guess = took.get(example.name, max(took.values(), default=ENOUGH_SECONDS))
        return time.monotonic() - began + SAFETY * guess < ENOUGH_SECONDS

    def one_or_longer(number: int, example: Example) -> DisturbedRun | None:
        if number >= ALWAYS and not everything and not fits(example):
            return None
        place = directory / f"{example.name}-{example.form}"
        outcome = one(example, place)
        if outcome.ended_early:
            longer = replace(example, steps=2 * example.steps)
            say(f"{example.title}: {outcome.trouble}; again, with {longer.steps} steps")
            outcome = one(longer, place.with_name(f"{place.name}-longer"))
        return outcome

    lanes = ThreadPoolExecutor(max_workers=2, thread_name_prefix="example")
    try:
        futures = [lanes.submit(one_or_longer, number, example) for number, example in enumerate(examples)]
        return [outcome for outcome in (future.result() for future in futures) if outcome is not None]
    finally:
        # Nothing is left to tell them unless this is an interrupt or an error.
        interrupted.set()
        lanes.shutdown(cancel_futures=True)
