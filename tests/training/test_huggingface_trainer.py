"""Scripts with a Hugging Face Trainer go on in a new process, on any node, as if never stopped.

They run where transformers and accelerate are installed (`make adapters`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from ganger.injob.page_layout import Capability, PageOrderKind, PageParkLevel, Word
from kit.packages import skip_without
from training.harness import (
    Rank,
    end_together,
    gang,
    preload,
    refused_checkpoint,
    run_gang_in_parts,
    run_in_parts,
    run_over_epoch_ends,
    run_to_end,
)

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
skip_without("transformers", "accelerate")
preload("transformers.trainer")

# 40 samples, 4 in a batch, 2 batches in a step: 5 steps in each of 3 epochs.
SCRIPT = """
import os, sys, torch
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
out = sys.argv[1]
torch.manual_seed(5)

class Samples(torch.utils.data.Dataset):
    def __init__(self, number):
        self.x = torch.randn(number, 8, generator=torch.Generator().manual_seed(number))
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return {"x": self.x[i] + torch.rand(8) / 10, "labels": self.x[i].sum().reshape(1)}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
    def forward(self, x, labels=None):
        y = self.layers(x)
        return {"loss": torch.nn.functional.mse_loss(y, labels), "logits": y}

class Lines(TrainerCallback):
    seen = 0
    def on_log(self, args, state, control, logs=None, **_):
        self.seen += 1
        row = {k: v for k, v in logs.items() if not k.endswith(("runtime", "_second"))}
        if state.is_world_process_zero:
            print(state.global_step, self.seen, sorted(row.items()), flush=True)
    def on_epoch_end(self, args, state, control, **_):
        if state.is_world_process_zero:
            print("end of epoch", state.epoch, flush=True)
    def on_train_begin(self, args, state, control, **_):
        if state.is_world_process_zero:
            print("begin", state.global_step, flush=True)

EXTRA
args = TrainingArguments(
    output_dir=os.path.join(out, "trained"), per_device_train_batch_size=4, gradient_accumulation_steps=2,
    num_train_epochs=3, logging_steps=2, eval_strategy="epoch", save_strategy="steps", save_steps=4, save_total_limit=1,
    report_to="none", disable_tqdm=True, use_cpu=True, learning_rate=0.01, metric_for_best_model="loss",
    load_best_model_at_end=False, OPTIONS
)
last = None
LOOKS
trainer = Trainer(
    model=Net(), args=args, train_dataset=Samples(40 * int(os.environ.get("WORLD_SIZE", "1"))),
    eval_dataset=Samples(8), callbacks=[Lines(), EarlyStoppingCallback(50)]
)
trainer.train(resume_from_checkpoint=last)
if trainer.is_world_process_zero():
    state = trainer.model.state_dict()
    with open(os.path.join(out, "weights"), "w") as file:
        file.write(repr({k: v.tolist() for k, v in state.items()}))
    print("done", len(trainer.state.log_history), sorted(os.listdir(os.path.join(out, "trained"))), flush=True)
"""


# As the example scripts of transformers do.
LOOKS = """
from transformers.trainer_utils import get_last_checkpoint
if os.path.isdir(args.output_dir):
    last = get_last_checkpoint(args.output_dir)
    if last is None and os.listdir(args.output_dir):
        raise ValueError("the output directory is not empty")
    print("begin from", last, flush=True)
"""
# As jobs of one task are started: accelerate would look for other ranks.
ALONE = {"LOCAL_RANK": "-1", "GANGER_JOB_ID": "7"}


def script(directory: Path, *, options: str = "", extra: str = "", looks: str = "") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "train.py"
    path.write_text(SCRIPT.replace("OPTIONS", options).replace("EXTRA", extra).replace("LOOKS", looks))
    return path


def lines(*logs: Path) -> list[str]:
    """What scripts print, without the warnings of libraries and the notes of Ganger."""
    text = "".join(log.read_text() for log in logs)
    return [line for line in text.splitlines() if line[:1].isdigit() or line.startswith(("end", "begin", "done"))]


def logs_of_parts(directory: Path, count: int) -> list[Path]:
    return [directory / f"part-{number}/rank-0.log" for number in range(count)]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param("", marks=pytest.mark.chaos),
        "dataloader_num_workers=2",
        "accelerator_config={'use_seedable_sampler': False}",
        "lr_scheduler_type='cosine'",
    ],
)
def test_a_trainer_stopped_at_any_step_ends_as_if_never_stopped(tmp_path: Path, options: str) -> None:
    alone, parts = tmp_path / "alone", tmp_path / "parts"
    run_to_end(alone, script(alone, options=options), [alone], managed=False, environment=ALONE)

    stops = [1, 4, 5, 6, 10, 12, 14]
    run_in_parts(parts, script(parts, options=options), [parts], stops, agent=True, environment=ALONE)

    assert lines(*logs_of_parts(parts, len(stops) + 1)) == lines(alone / "rank-0.log")
    assert (parts / "weights").read_text() == (alone / "weights").read_text()


def test_a_script_that_looks_for_its_output_directory_goes_on_as_if_it_had_not_made_it(tmp_path: Path) -> None:
    alone, parts = tmp_path / "alone", tmp_path / "parts"
    run_to_end(alone, script(alone, looks=LOOKS), [alone], managed=False, environment=ALONE)

    # before the trainer's first checkpoint, and after it
    run_in_parts(parts, script(parts, looks=LOOKS), [parts], [2, 6], agent=True, environment=ALONE)

    assert lines(*logs_of_parts(parts, 3)) == lines(alone / "rank-0.log")
    assert (parts / "weights").read_text() == (alone / "weights").read_text()
    replayed = [parts / f"part-{part}/rank-0.replay.log" for part in (1, 2)]
    assert not [line for line in lines(*replayed) if line.startswith("begin from")]


def test_a_stop_that_waits_for_an_epoch_comes_behind_its_evaluation_and_the_series_has_each_epoch(
    tmp_path: Path,
) -> None:
    alone, parts = tmp_path / "alone", tmp_path / "parts"
    run_to_end(alone, script(alone), [alone], managed=False, environment=ALONE)

    epochs = run_over_epoch_ends(parts, script(parts), [parts], 5, 3, agent=True, environment=ALONE)

    assert epochs == [(0, 0, 5), (1, 5, 5), (2, 10, 5)]
    assert lines(*logs_of_parts(parts, 3)) == lines(alone / "rank-0.log")
    assert (parts / "weights").read_text() == (alone / "weights").read_text()


# As version 0.2 saved it.
WITHOUT_CLOCK = """
from ganger.training.trainer_run import TrainerRun
position = TrainerRun.loop_position
TrainerRun.loop_position = lambda run: {name: value for name, value in position(run).items() if name != "clock"}
"""


def test_a_state_of_a_version_that_knew_no_epochs_goes_on(tmp_path: Path) -> None:
    path = script(tmp_path, extra=WITHOUT_CLOCK)
    run_in_parts(tmp_path, path, [tmp_path], [6], agent=True, environment=ALONE)
    (done,) = [line for line in lines(*logs_of_parts(tmp_path, 2)) if line.startswith("done")]
    assert done


def test_two_ranks_stop_at_the_same_step_and_end_as_if_never_stopped(tmp_path: Path) -> None:
    alone, parts = tmp_path / "alone", tmp_path / "parts"
    two = gang(alone, script(alone, options="ddp_backend='gloo'"), [alone], managed=False)
    assert end_together(two) == [0, 0], two[0].output()

    run = run_gang_in_parts(parts, script(parts, options="ddp_backend='gloo'"), [parts], [3, 10])

    assert lines(*(ranks[0].log for ranks in run)) == lines(alone / "rank-0.log")
    assert (parts / "weights").read_text() == (alone / "weights").read_text()


def test_memory_is_freed_between_two_steps_and_training_goes_on_unchanged(tmp_path: Path) -> None:
    alone, run = tmp_path / "alone", tmp_path / "run"
    run_to_end(alone, script(alone), [alone], managed=False, environment=ALONE)
    rank = Rank(run, script(run), [run], agent=True, arena_bytes=1 << 22, environment=ALONE)
    rank.at_step(2)
    rank.stop(2, PageParkLevel.OFFLOAD)
    rank.reached(2)

    offered = rank.page.get(Word.CAPABILITIES)
    rank.order(3, PageOrderKind.RUN)
    assert rank.end() == 0, rank.output()

    wanted = Capability.PAUSE | Capability.OFFLOAD | Capability.CHECKPOINT | Capability.ADAPTER
    assert offered == wanted, rank.output()
    assert lines(rank.log) == lines(alone / "rank-0.log")
    assert (run / "weights").read_text() == (alone / "weights").read_text()


@pytest.mark.parametrize(
    ("extra", "options", "reason"),
    [
        ("import shutil; os.mkdir(out + '/old'); shutil.rmtree(out + '/old')", "", "made "),
        ("", "dataloader_num_workers=1, dataloader_persistent_workers=True", "persistent_workers"),
        ("kept = []\nLines.on_step_end = lambda *_, **__: kept.append(object())", "", "it adds objects to kept"),
    ],
)
def test_what_a_second_run_would_not_repeat_alike_is_refused_with_its_reason(
    tmp_path: Path, extra: str, options: str, reason: str
) -> None:
    rank = Rank(
        tmp_path / "rank", script(tmp_path, extra=extra, options=options), [tmp_path], agent=True, stop_at=3,
        checkpoint=tmp_path / "checkpoint", environment=ALONE,
    )  # fmt: skip

    assert reason in refused_checkpoint(rank)


def test_a_second_call_of_train_cannot_be_gone_on_with(tmp_path: Path) -> None:
    text = script(tmp_path)
    text.write_text(text.read_text().replace("trainer.train(resume", "trainer.train()\ntrainer.train(resume"))
    rank = Rank(tmp_path, text, [tmp_path], agent=True, environment=ALONE)

    assert rank.end() == 0, rank.output()

    assert not rank.page.get(Word.CAPABILITIES) & Capability.ADAPTER
    assert "it trains in more than one call of a trainer" in rank.output()
