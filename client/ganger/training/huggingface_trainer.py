"""The adapter for `transformers.Trainer` and its subclasses.

Its loop is entered in the epoch and behind the batches where training stopped, as when it resumes from a checkpoint of
its own, but without reading one: the complete state is put back before the first batch is fetched. So are the sums
behind its logs, which its own checkpoints lack.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, Callable

import torch
from torch.utils.data import DataLoader

from ganger.training.script_variables import Scope, refuse, set_state_of_loader, state_of_loader
from ganger.training.state import TrainingObjects, unwrapped
from ganger.training.trainer_run import CALLBACKS, MODEL, Begin, TrainerAdapter, hook_calls, replaced, scope_of

_NEEDED = ("_init_training_state", "_run_epoch", "get_batch_samples", "get_train_dataloader", "train")
# Of a trainer, these are made anew in a second run, or are part of the state in another way.
_NOT_VALUES = frozenset(
    [
        *("args", "model", "model_wrapped", "deepspeed", "optimizer", "lr_scheduler"),
        *("accelerator", "state", "control"),
        *("callback_handler", "data_collator", "train_dataset", "eval_dataset", "processing_class", "tokenizer"),
        *("compute_metrics", "compute_loss_func", "label_smoother", "jit_checkpoint_callback", "_eval_dataloaders"),
    ]
)
# They show how far training is.
_SHOWN = ("ProgressCallback", "NotebookProgressCallback", "PrinterCallback")


def hook(module: Any, begin: Begin) -> None:
    """Let every call of `train` in this process be controlled. `module`: transformers.trainer."""
    hook_calls(module.Trainer, "train", lambda trainer: HuggingFaceTraining(trainer, module), begin)


class HuggingFaceTraining(TrainerAdapter):
    """One call of `Trainer.train`."""

    form = "transformers.Trainer"
    packages = frozenset({"transformers", "trl"})

    def __init__(self, trainer: Any, module: Any) -> None:
        super().__init__()
        self._trainer = trainer
        self._module = module
        self._loaders: tuple[Any, ...] = ()
        self._epoch = 0
        # Batches of this pass that training has used or is about to.
        self._used = 0
        self._callback: Any = None
        self._end_skipping: Callable[[], None] = lambda: None

    def unsupported(self) -> str:
        trainer, args = self._trainer, self._trainer.args
        missing = [name for name in _NEEDED if not hasattr(self._module.Trainer, name)]
        if missing:
            version = getattr(sys.modules.get("transformers"), "__version__", "of this version")
            way = "by which training goes on at a step; version 5 has"
            return f"transformers {version} has no Trainer.{missing[0]}, {way}"
        if getattr(trainer, "is_deepspeed_enabled", False):
            return "DeepSpeed keeps its state in an engine of its own"
        if getattr(args, "auto_find_batch_size", False):
            return "auto_find_batch_size may find another batch size in a second run"
        if getattr(trainer, "is_fsdp_xla_enabled", False):
            return "there is no XLA here"
        return ""

    def without_checkpoint(self, arguments: Any, options: Any) -> tuple[Any, Any]:
        others = {name: value for name, value in options.items() if name != "resume_from_checkpoint"}
        return (None, *arguments[1:]), others

    # -- for TrainerRun

    def objects(self) -> TrainingObjects:
        trainer = self._trainer
        models = {"model": unwrapped(trainer.model)}
        known = {id(part) for part in trainer.model.modules()} | {id(trainer.model_wrapped)}
        for name, value in vars(trainer).items():
            if isinstance(value, torch.nn.Module) and id(value) not in known and name not in _NOT_VALUES:
                models[name] = unwrapped(value)
        scaler = getattr(trainer.accelerator, "scaler", None)
        scheduler = trainer.lr_scheduler
        return TrainingObjects(
            models=models,
            optimizers={"optimizer": getattr(trainer.optimizer, "optimizer", trainer.optimizer)},
            schedulers={} if scheduler is None else {"scheduler": getattr(scheduler, "scheduler", scheduler)},
            scalers={} if scaler is None else {"scaler": scaler},
        )

    def loop_position(self) -> dict[str, Any]:
        if self._pass is None:
            loader = state_of_loader(self._loaders[-1]) if self._loaders else {}
            return {"epoch": self._epoch + 1, "used": 0, "loader": loader}
        return {"epoch": self._epoch, **self._pass.position(self._used)}

    def refusal(self) -> str:
        if not self._loaders:
            return "its batches come from no DataLoader of PyTorch"
        if type(self._loaders[0]).__name__ == "DataLoaderDispatcher":
            return "its batches come from one rank for all (dispatch_batches)"
        return "" if self._pass is None else self._pass.refusal(self._used)

    def loaders(self) -> list[Any]:
        return list(self._loaders[-1:])

    def scopes(self) -> list[Scope]:
        trainer = self._trainer
        callbacks = [
            item
            for item in trainer.callback_handler.callbacks
            if item is not self._callback and type(item).__name__ not in _SHOWN
        ]
        return [
            scope_of("trainer", trainer, _NOT_VALUES),
            scope_of("state", trainer.state),
            scope_of("control", trainer.control),
            Scope(CALLBACKS, list(enumerate(callbacks)), refuse),
            Scope(MODEL, [(0, trainer.model)], refuse),
        ]

    def skipped(self) -> frozenset[int]:
        trainer = self._trainer
        names = _NOT_VALUES - {"callback_handler", "model"}
        return frozenset(id(getattr(trainer, name, None)) for name in names) | {id(trainer)}

    # -- the trainer's loop

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        trainer, module = self._trainer, self._module
        methods: list[tuple[Any, str, Callable[..., Any]]] = [
            (trainer, "get_train_dataloader", self._get_train_dataloader),
            (trainer, "_init_training_state", self._init_training_state),
            (trainer, "_run_epoch", self._run_epoch),
            (trainer, "get_batch_samples", self._get_batch_samples),
        ]
        skip, ignores = module.skip_first_batches, trainer.args.ignore_data_skip

        def end_skipping() -> None:
            module.skip_first_batches, trainer.args.ignore_data_skip = skip, ignores

        self._end_skipping = end_skipping
        if self.run.is_replaying:
            methods.append((trainer, "_load_rng_state", lambda original, *_: None))
            # What is to be skipped is skipped below, in the pass.
            module.skip_first_batches = lambda loader, *_, **__: loader
            trainer.args.ignore_data_skip = False
        self._callback = self._make_callback()
        trainer.callback_handler.callbacks.insert(0, self._callback)
        try:
            with replaced(methods):
                yield
        finally:
            trainer.callback_handler.callbacks.remove(self._callback)
            end_skipping()

    def _make_callback(self) -> Any:
        training = self

        base: Any = self._module.TrainerCallback

        class GangerCallback(base):  # type: ignore[misc]
            def on_epoch_begin(self, *_: Any, **__: Any) -> None:
                training.run.guarded(training.between_epochs)

            def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
                batches = args.gradient_accumulation_steps * args.per_device_train_batch_size
                training.run.guarded(training.run.stepped, batches)

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
                if logs and isinstance(logs.get("loss"), float):
                    training.run.guarded(training.run.report_loss, logs["loss"])

            def on_prediction_step(self, *_: Any, **__: Any) -> None:
                training.run.guarded(training.run.safe_point)

        return GangerCallback()

    def between_epochs(self) -> None:
        """The trainer is about to begin an epoch, and has done all that belongs to the last one."""
        self.run.loop_begins()
        target = self.run.target
        if target is None:
            self._pass = None
            self.run.epoch_ends()
        elif not target["used"]:
            set_state_of_loader(self._loaders[-1], target["loader"])
            self.run.arrive()
            self._end_skipping()

    def _get_train_dataloader(self, original: Any) -> Any:
        loader = original()
        base = getattr(loader, "base_dataloader", None)
        found = (loader,) if base is None else (loader, base)
        self._loaders = found if isinstance(found[-1], DataLoader) else ()
        return loader

    def _init_training_state(self, original: Any, *arguments: Any, **options: Any) -> Any:
        begins = original(*arguments, **options)
        target = self.run.target
        return begins if target is None else (target["epoch"], target["used"])

    def _run_epoch(self, original: Any, *arguments: Any, **options: Any) -> Any:
        self._epoch = int(options["epoch"])
        self._used, self._pass = 0, None
        if self.run.target is not None:
            self._used = self.run.target["used"]
            options["resume_from_checkpoint"] = ""
        self.run.guarded(self.run.epoch_begins, self._epoch, self._epochs())
        return original(*arguments, **options)

    def _epochs(self) -> int:
        """Return how many epochs it trains; 0 where its loader has no length."""
        count = int(self._trainer.state.num_train_epochs)
        return 0 if count == sys.maxsize else count

    def _get_batch_samples(self, original: Any, *arguments: Any, **options: Any) -> Any:
        self.run.guarded(self._before_fetch)
        fetched = original(*arguments, **options)
        self._used += len(fetched[0])
        return fetched

    def _before_fetch(self) -> None:
        if self.run.target is not None:
            self._target = self.run.target
            self.run.arrive()
            self._end_skipping()
        else:
            self.run.boundary()
