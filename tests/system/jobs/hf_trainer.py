"""A job for system tests that trains by Hugging Face's Trainer.

Usage: hf_trainer.py DIRECTORY GO. Rank 0 prints its logs, and writes the weights to DIRECTORY/weights at its end.
A step takes a fifth of a second until the file GO is there.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from trainer_parts import Samples, layers, pause_until, write_weights
from transformers import Trainer, TrainerCallback, TrainingArguments

directory, go = sys.argv[1:]


class NamedSamples(Samples):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return {"x": x, "labels": y}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: Any, labels: Any = None) -> Any:
        y = self.layers(x)
        return {"loss": torch.nn.functional.mse_loss(y, labels), "logits": y}


class Lines(TrainerCallback):
    def on_step_end(self, *_: Any, **__: Any) -> None:
        pause_until(go, 0.2)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            print("step", state.global_step, logs["loss"], logs["learning_rate"], flush=True)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(5)
    args = TrainingArguments(
        output_dir=os.path.join(directory, "trained"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=30,
        logging_steps=1,
        save_steps=40,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        learning_rate=0.01,
    )
    trainer = Trainer(model=Net(), args=args, train_dataset=NamedSamples(80), callbacks=[Lines()])
    trainer.train()
    if trainer.is_world_process_zero():
        write_weights(directory, trainer.model)


if __name__ == "__main__":
    main()
