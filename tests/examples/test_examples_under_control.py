"""The examples, both forms of each, stopped and gone on in new processes: losses and weights alike to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ganger.injob.page_layout import Word
from training.harness import EXAMPLES, Rank, Rendezvous, end_together, losses, run_in_parts, run_to_end

pytestmark = pytest.mark.torch

FORMS = {"attached": False, "plain": True}


def _outputs(directory: Path) -> list[object]:
    directory.mkdir(exist_ok=True)
    return ["--losses", directory / "losses", "--weights", directory / "weights"]


def _compare(directory: Path, reference: Path, steps: int) -> None:
    assert sorted(losses(reference / "losses")) == list(range(1, steps + 1))
    assert len((directory / "losses").read_text().splitlines()) == steps, "every step shows exactly once"
    assert losses(directory / "losses") == losses(reference / "losses")
    assert (directory / "weights").read_text() == (reference / "weights").read_text()


@pytest.mark.parametrize("form", FORMS)
def test_char_transformer_with_tied_weights_and_one_cycle_schedule_goes_on_alike(tmp_path: Path, form: str) -> None:
    script = EXAMPLES / f"char_transformer/{form}.py"
    # 938 windows of text, 10 steps an epoch: 10 is an epoch's end
    small = ["--epochs", 2, "--batch", 100, "--width", 16, "--steps", 14]
    run_to_end(tmp_path / "alone", script, [*small, *_outputs(tmp_path / "alone")], managed=False)
    run_in_parts(tmp_path, script, [*small, *_outputs(tmp_path)], [3, 10, 11], agent=FORMS[form])
    _compare(tmp_path, tmp_path / "alone", 14)


def _ranks(directory: Path, form: str, arguments: list[object], **options: Any) -> list[Rank]:
    store = Rendezvous()
    return [
        Rank(directory, EXAMPLES / f"ddp/{form}.py", arguments, rank=rank, world=2, rendezvous=store, **options)
        for rank in range(2)
    ]


@pytest.mark.parametrize("form", FORMS)
def test_two_ranks_stop_at_one_step_and_go_on_alike(tmp_path: Path, form: str) -> None:
    alone = ["--epochs", 2, "--batch", 256, *_outputs(tmp_path / "alone")]
    ranks = _ranks(tmp_path / "alone", form, alone, managed=False)
    assert end_together(ranks) == [0, 0], "".join(rank.output() for rank in ranks)
    arguments = ["--epochs", 2, "--batch", 256, *_outputs(tmp_path / "parts")]
    restore = None
    for number, stop_after in enumerate([2, 7]):
        part, shards = tmp_path / f"part-{number}", tmp_path / f"checkpoint-{number}"
        (part / "orders").mkdir(parents=True)
        (part / "orders/2.json").write_text(json.dumps({"checkpoint": str(shards)}))
        # each rank finds the order while it makes this step and acknowledges it: the gang stops at the next one
        ranks = _ranks(part, form, arguments, agent=FORMS[form], restore=restore, stop_at=stop_after)
        assert end_together(ranks) == [75, 75], "".join(rank.output() for rank in ranks)
        steps = {rank.page.get(Word.CHECKPOINT_STEP) for rank in ranks}
        assert steps == {stop_after + 1}, "no rank is a step ahead"
        restore = {"kind": "checkpoint", "path": str(shards), "step": steps.pop()}
    ranks = _ranks(tmp_path / "last", form, arguments, agent=FORMS[form], restore=restore)
    assert end_together(ranks) == [0, 0], "".join(rank.output() for rank in ranks)
    _compare(tmp_path / "parts", tmp_path / "alone", 12)
