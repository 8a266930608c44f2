"""The adapter for Lightning's `Trainer` (`lightning` and `pytorch_lightning`).

Its loops keep their progress in plain values, which are put back at the first batch, or at the beginning of an epoch.
What Lightning's own checkpoints lack is kept too: the position in the loader, sums of logged values, metrics, loggers.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import sys
from collections.abc import Iterator
from typing import Any, Callable

import torch
from torch.utils.data import DataLoader, IterableDataset

from ganger.training.script_variables import Scope, refuse, set_state_of_loader, state_of_loader
from ganger.training.state import TrainingObjects, unwrapped
from ganger.training.trainer_run import CALLBACKS, MODEL, Begin, TrainerAdapter, hook_calls, replaced, scope_of

_NEEDED = ("on_advance_start", "setup_data", "epoch_loop", "epoch_progress")
# They show how far training is.
_SHOWN = ("ProgressBar", "ModelSummary")
_OF_META = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx"),
    *("dataloader_idx", "metric_attribute"),
)
_OF_METRIC = ("has_reset", "value", "cumulated_batch_size", "_forward_cache", "_computed", "_update_count")


def hook(module: Any, begin: Begin) -> None:
    """Let every call of `fit` in this process be controlled. `module`: the one with the class Trainer."""
    hook_calls(module.Trainer, "fit", LightningTraining, begin)


class LightningTraining(TrainerAdapter):
    """One call of `Trainer.fit`."""

    form = "lightning.Trainer"
    packages = frozenset({"lightning", "pytorch_lightning", "lightning_fabric"})
    is_ahead = False

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self._trainer = trainer
        self._loop: Any = trainer.fit_loop
        self._is_between_epochs = True
        self._steps = 0

    def unsupported(self) -> str:
        if missing := [name for name in _NEEDED if not hasattr(self._loop, name)]:
            return f"this version of Lightning has no {missing[0]}"
        strategy = type(self._trainer.strategy).__name__
        if strategy in ("DeepSpeedStrategy", "XLAStrategy"):
            return f"{strategy} keeps its state in an engine of its own"
        if self._trainer.reload_dataloaders_every_n_epochs:
            return "reload_dataloaders_every_n_epochs makes its loaders anew"
        return ""

    def without_checkpoint(self, arguments: Any, options: Any) -> tuple[Any, Any]:
        return arguments[:4], {**options, "ckpt_path": None}

    # -- for TrainerRun

    def objects(self) -> TrainingObjects:
        trainer = self._trainer
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        optimizers = [getattr(item, "optimizer", item) for item in trainer.optimizers]
        return TrainingObjects(
            models={"model": unwrapped(trainer.lightning_module)},
            optimizers={f"optimizer{number}": item for number, item in enumerate(optimizers)},
            schedulers={f"scheduler{number}": item for number, item in enumerate(schedulers)},
            scalers={} if scaler is None else {"scaler": scaler},
        )

    def loop_position(self) -> dict[str, Any]:
        found: dict[str, Any] = {"results": self._results()}
        if self._pass is None or self._is_between_epochs:
            return {**found, "used": 0, "loader": state_of_loader(self.loaders()[0])}
        return {**found, **self._pass.position(self._pass.taken)}

    def refusal(self) -> str:
        loaders = self.loaders()
        if len(loaders) != 1:
            return f"it reads {len(loaders)} loaders at once"
        if not isinstance(loaders[0], DataLoader):
            return "its batches come from no DataLoader of PyTorch"
        if isinstance(loaders[0].dataset, IterableDataset):
            return "its data set has no length"
        if any(metric.meta.sync.group is not None for metric in self._loop.epoch_loop._results.values()):
            return "it logs a value over a group of ranks of its own"
        return "" if self._pass is None or self._is_between_epochs else self._pass.refusal(self._pass.taken)

    def loaders(self) -> list[Any]:
        combined = self._loop._combined_loader
        return [] if combined is None else list(combined.flattened)

    def scopes(self) -> list[Scope]:
        trainer = self._trainer
        callbacks = [
            item for item in trainer.callbacks if not any(kind.__name__ in _SHOWN for kind in type(item).__mro__)
        ]
        plain = frozenset(name for name, value in vars(trainer).items() if hasattr(value, "__dict__"))
        return [
            scope_of("trainer", trainer, plain | {"callbacks"}),
            Scope("loops", [("fit", self._loop)], refuse),
            Scope("logged", [("connector", trainer._logger_connector)], refuse),
            Scope(CALLBACKS, list(enumerate(callbacks)), refuse),
            Scope("loggers", list(enumerate(trainer.loggers)), refuse),
            Scope(MODEL, [(0, trainer.lightning_module)], refuse),
        ]

    def skipped(self) -> frozenset[int]:
        trainer, loop = self._trainer, self._loop
        skipped = [trainer, trainer.strategy, trainer.datamodule, loop._data_source, loop.epoch_loop._results]
        names = ("_results", "_data_source", "_combined_loader", "_data_fetcher")
        skipped += [getattr(loop.epoch_loop.val_loop, name, None) for name in names]
        for loader in self.loaders():
            skipped += [loader, getattr(loader, "dataset", None)]
        if loop._combined_loader is not None:
            skipped += [loop._combined_loader._flattened, loop._combined_loader._iterables]
        return frozenset(map(id, skipped)) - {id(None)}

    # -- Lightning's loops

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        epoch_loop = self._loop.epoch_loop
        methods: list[tuple[Any, str, Callable[..., Any]]] = [
            (self._loop, "on_advance_start", self._epoch_begins),
            (epoch_loop, "advance", self._advance),
            (epoch_loop, "on_advance_end", self._advanced),
            (epoch_loop.val_loop, "on_advance_end", self._evaluated),
        ]
        with replaced(methods), _kept_tables() if self.run.is_replaying else contextlib.nullcontext():
            yield

    def _epoch_begins(self, original: Any) -> Any:
        self._is_between_epochs = True
        self.run.loop_begins()
        target = self.run.target
        if target is None:
            self.run.guarded(self.run.epoch_ends)
        elif target["used"] == 0:
            self.run.guarded(self._arrive)
        if not self.run.is_replaying:
            self.run.guarded(self._report_epoch)
        self._steps = self._loop.epoch_loop.global_step
        return original()

    def _advance(self, original: Any, fetcher: Any) -> Any:
        self._is_between_epochs = False
        if self.run.target is not None:
            self.run.guarded(self._arrive, fetcher)
            self.run.guarded(self._report_epoch)
            self._steps = self._loop.epoch_loop.global_step
        else:
            self.run.guarded(self.run.boundary)
        return original(fetcher)

    def _report_epoch(self) -> None:
        trainer = self._trainer
        # Negative: without end.
        count = max(0, trainer.max_epochs or 0)
        steps_per_epoch = self._loop.max_batches / trainer.accumulate_grad_batches
        if not count and trainer.max_steps > 0 and math.isfinite(steps_per_epoch):
            count = math.ceil(trainer.max_steps / max(1, math.ceil(steps_per_epoch)))
        self.run.epoch_begins(trainer.current_epoch, count)

    def _advanced(self, original: Any, fetcher: Any) -> Any:
        result = original(fetcher)
        steps = self._loop.epoch_loop.global_step
        if steps != self._steps:
            self._steps = steps
            samples = int(getattr(self.loaders()[0], "batch_size", None) or 0)
            self.run.guarded(self.run.stepped, samples)
        return result

    def _evaluated(self, original: Any, *arguments: Any) -> Any:
        result = original(*arguments)
        self.run.guarded(self.run.safe_point)
        return result

    # -- going back

    def _arrive(self, fetcher: Any = None) -> None:
        """Go on between two epochs, or in the pass that is read through `fetcher`."""

        def prepare(place: dict[str, Any]) -> None:
            if fetcher is None:
                set_state_of_loader(self.loaders()[0], place["loader"])
            else:
                self._target = place
                iter(fetcher)
            self._restore_results(place["results"])

        made = [getattr(logger, "log_dir", None) for logger in self._trainer.loggers]
        self.run.arrive(prepare)
        for logger, directory in zip(self._trainer.loggers, made):
            _continue_log(logger, directory)

    # -- logged values

    def _results(self) -> list[dict[str, Any]]:
        found = []
        for key, metric in self._loop.epoch_loop._results.items():
            meta = metric.meta
            kept = _OF_METRIC if metric.is_tensor else ("has_reset",)
            one = {
                "key": key,
                "is_tensor": metric.is_tensor,
                "meta": {name: getattr(meta, name) for name in _OF_META},
                "reduce": meta.reduce_fx.__name__,
                "sync": {name: getattr(meta.sync, name) for name in ("_should", "rank_zero_only", "_op")},
                "values": {name: getattr(metric, name) for name in kept if name in vars(metric)},
            }
            found.append(one)
        return found

    def _restore_results(self, saved: list[dict[str, Any]]) -> None:
        results = self._loop.epoch_loop._results
        kinds = importlib.import_module(type(results).__module__)
        for one in saved:
            meta = kinds._Metadata(**one["meta"], reduce_fx=getattr(torch, one["reduce"]))
            meta.sync = kinds._Sync(fn=self._trainer.strategy.reduce, **one["sync"])
            metric = kinds._ResultMetric(meta, one["is_tensor"])
            for name, value in one["values"].items():
                object.__setattr__(metric, name, value)
            if not one["is_tensor"]:
                metric.value = self._trainer.lightning_module.get_submodule(one["meta"]["metric_attribute"])
                metric._forward_cache = metric.value._forward_cache
            results[one["key"]] = metric


@contextlib.contextmanager
def _kept_tables() -> Iterator[None]:
    """Let a CSVLogger of a given version keep the table of its directory, which it removes when it is made anew."""
    modules = [sys.modules.get(f"{package}.loggers.csv_logs") for package in ("lightning.fabric", "lightning_fabric")]
    with contextlib.ExitStack() as stack:
        writers: list[Any] = [getattr(module, "_ExperimentWriter", None) for module in modules]
        for writer in writers:
            if hasattr(writer, "_check_log_dir_exists"):
                stack.callback(setattr, writer, "_check_log_dir_exists", writer._check_log_dir_exists)
                writer._check_log_dir_exists = lambda self: None
        yield


def _continue_log(logger: Any, made: Any) -> None:
    """Let a logger write where it wrote before. `made`: the directory that it has chosen in this process."""
    directory = getattr(logger, "log_dir", None)
    if not isinstance(directory, str) or not isinstance(made, str) or made == directory:
        return
    if type(getattr(logger, "_experiment", None)).__name__ == "SummaryWriter":
        logger._experiment.close()
        logger._experiment = None
    with contextlib.suppress(OSError):
        os.rmdir(made)
