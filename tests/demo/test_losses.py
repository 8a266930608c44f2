"""The comparison of the demo sees a single wrong bit, and nothing else."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from examples.demo.losses import compare, largest_gap, read_training


def written(directory: Path, losses: list[float], weights: str = "abc", repeat: int = 0) -> tuple[Path, Path]:
    directory.mkdir(exist_ok=True)
    lines = [f"{step} {loss.hex()}" for step, loss in enumerate(losses, 1)]
    lines += lines[len(lines) - repeat :] if repeat else []
    (directory / "losses").write_text("".join(f"{line}\n" for line in lines))
    (directory / "weights").write_text(weights + "\n")
    return directory / "losses", directory / "weights"


LOSSES = [2.5, 1.25, 0.1, 0.3]


def test_equal_trainings_are_identical(tmp_path: Path) -> None:
    one = read_training(*written(tmp_path / "a", LOSSES))
    other = read_training(*written(tmp_path / "b", LOSSES))
    comparison = compare(one, other)
    assert comparison.identical
    assert comparison.steps == 4
    assert comparison.repeated == 0


def test_one_perturbed_step_is_seen_and_named(tmp_path: Path) -> None:
    one = read_training(*written(tmp_path / "a", LOSSES))
    perturbed = [2.5, 1.25, math.nextafter(0.1, 1.0), 0.3]
    assert perturbed[2] != LOSSES[2]
    comparison = compare(one, read_training(*written(tmp_path / "b", perturbed)))
    assert not comparison.identical
    assert (comparison.differing, comparison.first_difference) == (1, 3)


@pytest.mark.parametrize("losses", [LOSSES[:3], [*LOSSES, 0.2], []])
def test_a_missing_or_extra_step_is_a_difference(tmp_path: Path, losses: list[float]) -> None:
    one = read_training(*written(tmp_path / "a", LOSSES))
    assert not compare(one, read_training(*written(tmp_path / "b", losses))).identical


@pytest.mark.parametrize("weights", ["abd", ""])
def test_other_weights_are_a_difference(tmp_path: Path, weights: str) -> None:
    one = read_training(*written(tmp_path / "a", LOSSES))
    comparison = compare(one, read_training(*written(tmp_path / "b", LOSSES, weights)))
    assert comparison.differing == 0
    assert not comparison.identical


def test_two_empty_trainings_prove_nothing(tmp_path: Path) -> None:
    empty = read_training(*written(tmp_path, [], ""))
    assert not compare(empty, empty).identical


def test_a_repeated_step_counts_as_it_was_the_last_time(tmp_path: Path) -> None:
    one = read_training(*written(tmp_path / "a", LOSSES))
    comparison = compare(one, read_training(*written(tmp_path / "b", LOSSES, repeat=2)))
    assert comparison.identical
    assert comparison.repeated == 2


@pytest.mark.parametrize("line", ["1", "x 0x1p0", "1 fast"])
def test_a_file_that_is_no_list_of_losses_is_refused(tmp_path: Path, line: str) -> None:
    losses, weights = written(tmp_path, [])
    losses.write_text(line + "\n")
    with pytest.raises(ValueError, match=r"."):
        read_training(losses, weights)


def test_the_largest_gap_counts_only_within_the_span() -> None:
    seen = [(0.0, 1), (9.0, 2), (9.1, 3), (9.6, 4), (9.7, 5), (20.0, 6)]
    assert largest_gap(seen, 9.05, 9.65) == pytest.approx(0.5)
    assert largest_gap(seen, 30.0, 40.0) == 0.0
