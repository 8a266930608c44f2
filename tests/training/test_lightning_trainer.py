"""Scripts with Lightning's Trainer go on in a new process, on any node, as if never stopped.

They run where lightning is installed (`make adapters`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.packages import skip_without
from training.harness import preload, run_in_parts, run_over_epoch_ends, run_to_end

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
skip_without("lightning")
preload("lightning.pytorch")

# 40 samples, 4 in a batch, 2 batches in a step: 5 steps in each of 3 epochs.
SCRIPT = """
import os, sys, torch
import PACKAGE as L
from PACKAGE.callbacks import Callback, EarlyStopping, ModelCheckpoint
from PACKAGE.loggers import CSVLogger
out = sys.argv[1]
L.seed_everything(5, verbose=False)

class Samples(torch.utils.data.Dataset):
    def __init__(self, number):
        self.x = torch.randn(number, 8, generator=torch.Generator().manual_seed(number))
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return self.x[i] + torch.rand(8) / 10, self.x[i].sum().reshape(1)

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
        self.seen = []
    def training_step(self, batch, number):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layers(x), y)
        self.seen.append(round(float(loss), 6))
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss
    def validation_step(self, batch, number):
        x, y = batch
        self.log("valid", torch.nn.functional.mse_loss(self.layers(x), y), sync_dist=True)
    def on_train_epoch_end(self):
        print("end of epoch", self.current_epoch, self.global_step, len(self.seen), float(sum(self.seen)), flush=True)
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]

class Lines(Callback):
    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking and trainer.is_global_zero:
            metrics = {k: round(float(v), 7) for k, v in trainer.callback_metrics.items()}
            print(trainer.global_step, sorted(metrics.items()), flush=True)
    def on_train_start(self, trainer, module):
        print("begin", trainer.global_step, flush=True)

EXTRA
world = int(os.environ.get("WORLD_SIZE", "1"))
model = Net()
best = ModelCheckpoint(dirpath=os.path.join(out, "trained"), monitor="valid", save_top_k=1, save_last=True)
trainer = L.Trainer(
    accelerator="cpu", devices=world, max_epochs=3, accumulate_grad_batches=2, log_every_n_steps=2,
    enable_progress_bar=False, enable_model_summary=False, default_root_dir=out, logger=CSVLogger(out, version=VERSION),
    callbacks=[Lines(), best, EarlyStopping("valid", patience=50)], OPTIONS
)
# before ModelCheckpoint has made it
last = os.path.exists(os.path.join(out, "trained", "last.ckpt"))
print("begin from", last, flush=True)
trainer.fit(
    model, torch.utils.data.DataLoader(Samples(40 * world), 4, shuffle=True, num_workers=WORKERS),
    torch.utils.data.DataLoader(Samples(8), 4)
)
if trainer.is_global_zero:
    with open(os.path.join(out, "weights"), "w") as file:
        file.write(repr({k: v.tolist() for k, v in model.state_dict().items()}))
    print("done", os.path.basename(best.best_model_path), float(best.best_model_score), flush=True)
"""
# As jobs of one task are started: Lightning would look for other ranks.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "GANGER_JOB_ID": "7"}


def script(directory: Path, *, package: str = "lightning.pytorch", options: str = "", workers: int = 0) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "train.py"
    text = SCRIPT.replace("OPTIONS", options).replace("EXTRA", "").replace("PACKAGE", package)
    # a table in a directory of its own choice, or in a given one
    path.write_text(text.replace("WORKERS", str(workers)).replace("VERSION", "0" if workers else "None"))
    return path


def lines(*logs: Path) -> list[str]:
    """What scripts print, without the warnings of libraries and the notes of Ganger."""
    text = "".join(log.read_text() for log in logs)
    return [line for line in text.splitlines() if line[:1].isdigit() or line.startswith(("end", "begin", "done"))]


@pytest.mark.parametrize(
    ("package", "options", "workers"),
    [("lightning.pytorch", "", 0), ("pytorch_lightning", "val_check_interval=5", 2)],
)
def test_a_trainer_stopped_at_any_step_ends_as_if_never_stopped(
    tmp_path: Path, package: str, options: str, workers: int
) -> None:
    skip_without(package.partition(".")[0])
    alone, parts = tmp_path / "alone", tmp_path / "parts"
    run_to_end(alone, script(alone, package=package, options=options, workers=workers), [alone], managed=False)

    stops = [1, 5, 6, 10, 14]
    text = script(parts, package=package, options=options, workers=workers)
    run_in_parts(parts, text, [parts], stops, agent=True, environment=ALONE)

    logs = [parts / f"part-{number}/rank-0.log" for number in range(len(stops) + 1)]
    assert lines(*logs) == lines(alone / "rank-0.log")
    assert (parts / "weights").read_text() == (alone / "weights").read_text()
    table = "lightning_logs/version_0/metrics.csv"
    assert (parts / table).read_text() == (alone / table).read_text()
    assert sorted(path.name for path in (parts / "lightning_logs").iterdir()) == ["version_0"]


@pytest.mark.parametrize("until", ["max_epochs=3", "max_steps=15"])
def test_a_stop_that_waits_for_an_epoch_comes_behind_its_evaluation_and_the_series_has_each_epoch(
    tmp_path: Path, until: str
) -> None:
    alone, parts = tmp_path / "alone", tmp_path / "parts"
    for path in (script(alone), script(parts)):
        path.write_text(path.read_text().replace("max_epochs=3", until))
    run_to_end(alone, alone / "train.py", [alone], managed=False)

    epochs = run_over_epoch_ends(parts, parts / "train.py", [parts], 5, 3, agent=True, environment=ALONE)

    assert epochs == [(0, 0, 5), (1, 5, 5), (2, 10, 5)]
    logs = [parts / f"part-{number}/rank-0.log" for number in range(3)]
    assert lines(*logs) == lines(alone / "rank-0.log")
    assert (parts / "weights").read_text() == (alone / "weights").read_text()
