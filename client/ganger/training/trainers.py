"""The trainers that the agent knows, each hooked once its module has been imported."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, Callable

from ganger.injob.control import Control
from ganger.training.outside_changes import OutsideChanges
from ganger.training.replay import OutputReplay
from ganger.training.trainer_run import TrainerAdapter, TrainerRun

# By the module with the trainer's class: ours for it.
KNOWN = {
    "transformers.trainer": "huggingface_trainer",
    "lightning.pytorch.trainer.trainer": "lightning_trainer",
    "pytorch_lightning.trainer.trainer": "lightning_trainer",
}


class Trainers:
    """Of one process. `make_way` lets go of the page for an adapter, or returns False."""

    def __init__(self, make_way: Callable[[], bool], diversion: OutputReplay | None, outside: OutsideChanges) -> None:
        self._make_way = make_way
        self._diversion = diversion
        self._outside = outside
        self._run: TrainerRun | None = None
        self._pid = os.getpid()

    def hook(self, name: str) -> None:
        """`name` has been imported. No failure of this ends the import."""
        try:
            importlib.import_module(f"ganger.training.{KNOWN[name]}").hook(sys.modules[name], self.begin)
        except Exception as problem:
            print(f"ganger: {name} is not known in this version: {problem}", file=sys.stderr, flush=True)

    def begin(self, adapter: TrainerAdapter, refusal: str) -> TrainerRun | None:
        """A trainer is about to train. Returns what controls it; None where nothing does, as its process is saved as
        it is, or is not the rank, or trains otherwise too. `refusal`: why the adapter cannot be of use."""
        if os.getpid() != self._pid or os.environ.get("GANGER_IMAGE"):
            return None
        try:
            return self._begun(adapter, refusal)
        except Exception as problem:
            print(f"ganger: {adapter.form} trains without control: {problem}", file=sys.stderr, flush=True)
            return None

    def _begun(self, adapter: TrainerAdapter, refusal: str) -> TrainerRun | None:
        if self._run is None:
            control: Any = Control.from_environment()
            if control is None:
                return None
            if refusal:
                control.explain("ADAPTER", refusal)
            if refusal or (control.restore is None and not self._make_way()) or not control.claim():
                control.close()
                return None
            if control.restore is not None and not self._make_way():
                control.close()
                return None
            self._run = TrainerRun(control, self._diversion, self._outside)
        self._run.begin(adapter)
        return self._run
