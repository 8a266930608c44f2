"""An unmodified script, stopped at chosen steps and gone on in a new process, ends bit for bit as if never stopped."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from ganger.injob.metrics import series_path
from ganger.protocol.metric_series import parsed
from training.harness import EXAMPLES, Rank, losses, run_in_parts, run_to_end, write_script

pytestmark = pytest.mark.torch

EPOCHS = 3
STEPS_PER_EPOCH = 6
BATCH = 256


def _arguments(directory: Path, workers: int = 0) -> list[object]:
    paths = ["--losses", directory / "losses", "--weights", directory / "weights"]
    return ["--epochs", EPOCHS, "--batch", BATCH, "--seed", 3, "--workers", workers, *paths]


@pytest.fixture(scope="module", params=[0, 2], ids=["0 workers", "2 workers"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    directory = tmp_path_factory.mktemp("uninterrupted")
    run_to_end(directory, EXAMPLES / "digits_cnn/plain.py", _arguments(directory, request.param), managed=False)
    return request.param, directory


def _compare(directory: Path, reference: Path) -> None:
    lines = (directory / "losses").read_text().splitlines()
    assert len(lines) == EPOCHS * STEPS_PER_EPOCH, "every step shows exactly once"
    assert losses(directory / "losses") == losses(reference / "losses")
    assert (directory / "weights").read_text() == (reference / "weights").read_text()


def test_restart_at_epoch_edges_and_one_step_around_them_changes_no_bit(
    tmp_path: Path, reference: tuple[int, Path]
) -> None:
    workers, directory = reference
    edges = range(0, EPOCHS * STEPS_PER_EPOCH + 1, STEPS_PER_EPOCH)
    stops = [step for edge in edges for step in (edge - 1, edge, edge + 1) if 0 < step <= EPOCHS * STEPS_PER_EPOCH]
    run_in_parts(tmp_path, EXAMPLES / "digits_cnn/plain.py", _arguments(tmp_path, workers), stops, agent=True)
    _compare(tmp_path, directory)


def test_restart_at_random_steps_changes_no_bit(tmp_path: Path, reference: tuple[int, Path]) -> None:
    workers, directory = reference
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    stops = sorted(random.Random(seed).sample(range(1, EPOCHS * STEPS_PER_EPOCH), 3))
    run_in_parts(tmp_path, EXAMPLES / "digits_cnn/plain.py", _arguments(tmp_path, workers), stops, agent=True)
    _compare(tmp_path, directory)


def test_a_perturbed_step_fails_the_comparison(tmp_path: Path, reference: tuple[int, Path]) -> None:
    workers, directory = reference
    script = tmp_path / "perturbed.py"
    source = (EXAMPLES / "digits_cnn/plain.py").read_text()
    marker = "            schedule.step()\n"
    assert marker in source
    nudge = "            if schedule.last_epoch == 8:\n                network[-1].bias.data[0] += 1e-5\n"
    script.write_text(source.replace(marker, nudge + marker))
    run_in_parts(tmp_path, script, _arguments(tmp_path, workers), [4], agent=True)
    parts, alone = losses(tmp_path / "losses"), losses(directory / "losses")
    # made after step 9's loss; a loss may hide so little by rounding, the weights do not
    assert min(step for step in alone if parts[step] != alone[step]) > 9
    assert (tmp_path / "weights").read_text() != (directory / "weights").read_text()
    with pytest.raises(AssertionError):
        _compare(tmp_path, directory)


LOGGING = """
import ganger, torch
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for number, batch in enumerate(torch.utils.data.DataLoader(torch.randn(40, 8), batch_size=4)):
    model(batch).sum().backward()
    optimizer.step()
    ganger.log(number=number)
"""


def test_what_a_script_logs_just_before_it_is_stopped_is_in_its_series(tmp_path: Path) -> None:
    script = write_script(tmp_path, LOGGING)
    rank = Rank(tmp_path, script, agent=True, stop_at=3, checkpoint=tmp_path / "checkpoint")
    assert rank.end() == 75, rank.output()
    logged = parsed(Path(series_path(str(tmp_path))).read_text()).of("number")
    assert [point.values for point in logged] == [(0.0,), (1.0,), (2.0,)]


def test_the_examples_for_the_agent_contain_nothing_of_ganger() -> None:
    for script in EXAMPLES.glob("*/plain.py"):
        assert "ganger" not in script.read_text().lower()
