"""A job for system tests that trains by Lightning's Trainer, on two ranks.

Usage: lightning_trainer.py DIRECTORY GO. Rank 0 prints its losses, and writes the weights to DIRECTORY/weights at its
end. A batch takes a tenth of a second until the file GO is there.
"""

from __future__ import annotations

import sys
from typing import Any

import lightning
import torch
from lightning.pytorch.loggers import CSVLogger
from trainer_parts import Samples, layers, pause_until, write_weights

directory, go = sys.argv[1:]


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def training_step(self, batch: Any, number: int) -> Any:
        pause_until(go, 0.1)
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layers(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        if self.trainer.is_global_zero:
            print("step", self.current_epoch, number, float(loss), flush=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def main() -> None:
    torch.set_num_threads(1)
    lightning.seed_everything(5, verbose=False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=30,
        accumulate_grad_batches=2,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        logger=CSVLogger(directory),
    )
    net = Net()
    trainer.fit(net, torch.utils.data.DataLoader(Samples(80), 4, shuffle=True))
    if trainer.is_global_zero:
        write_weights(directory, net)


if __name__ == "__main__":
    main()
