"""The five-line form, stopped at chosen steps and gone on in a new process, ends bit for bit as if never stopped."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from training.harness import EXAMPLES, losses, run_in_parts, run_to_end

pytestmark = pytest.mark.torch

EPOCHS = 3
STEPS_PER_EPOCH = 6
BATCH = 256


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("uninterrupted")
    run_to_end(directory, EXAMPLES / "digits_cnn/attached.py", _arguments(directory), managed=False)
    return directory


def _arguments(directory: Path, workers: int = 0) -> list[object]:
    paths = ["--losses", directory / "losses", "--weights", directory / "weights"]
    return ["--epochs", EPOCHS, "--batch", BATCH, "--seed", 3, "--workers", workers, *paths]


def _compare(directory: Path, reference: Path) -> None:
    lines = (directory / "losses").read_text().splitlines()
    assert len(lines) == EPOCHS * STEPS_PER_EPOCH, "every step shows exactly once"
    assert losses(directory / "losses") == losses(reference / "losses")
    assert (directory / "weights").read_text() == (reference / "weights").read_text()


@pytest.mark.parametrize("workers", [0, 2])
def test_restart_at_epoch_edges_and_one_step_around_them_changes_no_bit(
    tmp_path: Path, reference: Path, workers: int
) -> None:
    edges = range(0, EPOCHS * STEPS_PER_EPOCH + 1, STEPS_PER_EPOCH)
    # with the last one training is over
    stops = [step for edge in edges for step in (edge - 1, edge, edge + 1) if 0 < step < EPOCHS * STEPS_PER_EPOCH]
    run_in_parts(tmp_path, EXAMPLES / "digits_cnn/attached.py", _arguments(tmp_path, workers), stops)
    _compare(tmp_path, reference)


def test_restart_at_random_steps_changes_no_bit(tmp_path: Path, reference: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    stops = sorted(random.Random(seed).sample(range(1, EPOCHS * STEPS_PER_EPOCH), 3))
    run_in_parts(tmp_path, EXAMPLES / "digits_cnn/attached.py", _arguments(tmp_path), stops)
    _compare(tmp_path, reference)


def test_a_perturbed_step_fails_the_comparison(tmp_path: Path, reference: Path) -> None:
    script = tmp_path / "perturbed.py"
    source = (EXAMPLES / "digits_cnn/attached.py").read_text()
    marker = "            job.step(loss)"
    assert marker in source
    nudge = "            if job.step_count == 8:\n                network[-1].bias.data[0] += 1e-5\n"
    script.write_text(source.replace(marker, nudge + marker))
    run_in_parts(tmp_path, script, _arguments(tmp_path), [4])
    with pytest.raises(AssertionError):
        _compare(tmp_path, reference)
