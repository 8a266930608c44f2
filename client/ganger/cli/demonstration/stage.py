"""Which examples the demo plays, and in which order."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ganger
from ganger.cli.demonstration.trial import Example, Outcome, train_alone, train_disturbed
from ganger.client import Client
from ganger.job import Job

ENOUGH_SECONDS = 60.0
"""Examples beyond the first three begin only before this, so that the demo stays under two minutes."""
WARM_UP_SECONDS = 60.0
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

    def example(name: str, form: str, ranks: int, steps: int, actions: tuple[str, ...]) -> Example:
        return Example(name, form, examples / name / f"{form}.py", ranks, steps, actions)

    every = (*THREE_SUSPENDS_TWO_MOVES, "repin")
    return (
        example("char_transformer", "attached", 1, 400, every),
        example("digits_cnn", "attached", 1, 1200, every),
        example("ddp", "attached", 2, 500, THREE_SUSPENDS_TWO_MOVES),
        example("digits_cnn", "plain", 1, 1200, THREE_SUSPENDS_TWO_MOVES),
        example("char_transformer", "plain", 1, 400, THREE_SUSPENDS_TWO_MOVES),
        example("ddp", "plain", 2, 500, THREE_SUSPENDS_TWO_MOVES),
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
    *,
    everything: bool = False,
) -> list[Outcome]:
    """Plays them two at a time: one core each. An example that fails is told in its outcome."""
    began = time.monotonic()

    def one(number: int, example: Example) -> Outcome | None:
        if number >= 3 and not everything and time.monotonic() - began > ENOUGH_SECONDS:
            return None
        place = directory / f"{example.name}-{example.form}"
        say(f"{example.title}: trains alone first")
        try:
            expected = train_alone(example, place, seed)
        except Exception as problem:  # one example that fails must not hide how the others fare
            say(f"{example.title}: {problem}")
            return Outcome(example, trouble=str(problem))
        for job in warm:
            job.wait(WARM_UP_SECONDS, check=False)
        return train_disturbed(example, place, seed, client, expected, say)

    warm = warm_up(directory, client)
    with ThreadPoolExecutor(max_workers=2, thread_name_prefix="example") as lanes:
        futures = [lanes.submit(one, number, example) for number, example in enumerate(examples)]
        try:
            return [outcome for outcome in (future.result() for future in futures) if outcome is not None]
        except BaseException:
            for future in futures:
                future.cancel()
            print("ending the examples", file=sys.stderr)
            raise
