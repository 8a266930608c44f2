"""What a trainer and its script keep beside the models: counters, logs, callbacks, variables of the script.

Of a trainer's own objects every plain value is kept, for a second run comes to another place in them before its state
is put back. Of the script only what has changed since training began, as for any unmodified script.
"""

from __future__ import annotations

import time
from typing import Any, Callable

from ganger.training.foreign_values import is_harmless
from ganger.training.replay import is_own, package_of
from ganger.training.script_variables import Scope, Variables, scopes_of_script, script_frames, with_inner
from ganger.training.state_codec import StateNotSupportedError

# The scope of the model: of its plain values those are kept that change.
MODEL = "model"
CALLBACKS = "callbacks"
# What a script keeps of these is not part of the state: datasets, tokenizers, configurations.
_LIBRARIES = frozenset(
    [
        *("accelerate", "datasets", "huggingface_hub", "peft"),
        *("lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning"),
        *("safetensors", "sentencepiece", "tokenizers", "torchmetrics", "torchvision", "transformers", "trl"),
    ]
)
# Another node's clock shows another time.
_CLOCKS = frozenset(
    [
        *("start_time", "_start_time", "_end_time", "_last_time_checked", "_last_val_time", "_train_start_time"),
        *("start_t", "last_print_t", "_last_time"),
    ]
)
# It may take tenths of a second where there are many values.
_LOST_EVERY_S = 30.0


class TrainerVariables(Variables):
    """`scopes` returns the trainer's own objects by name; `packages` are looked into there, and objects with the ids
    of `skipped` are not."""

    def __init__(
        self, scopes: Callable[[], list[Scope]], packages: set[str], skipped: Callable[[], frozenset[int]]
    ) -> None:
        super().__init__()
        self._trainer_scopes = scopes
        self._packages = packages
        self._skipped = skipped
        self._looked_at = float("-inf")

    def note(self) -> None:
        super().note()
        assert self._before is not None
        names = {scope.path for scope in self._trainer_scopes()} - {MODEL}
        self._before = {path: values for path, values in self._before.items() if path.partition(".")[0] not in names}

    def put_back(self, saved: dict[str, dict[Any, Any]]) -> str:
        # A trainer makes some of its own objects only in its loop.
        made_later = {scope.path for scope in self._trainer_scopes()} - {MODEL, CALLBACKS}
        present = {scope.path for scope in self._look()}
        return super().put_back(
            {
                path: values
                for path, values in saved.items()
                if path in present or path.partition(".")[0] not in made_later
            }
        )

    def reason(self, *, is_due: bool = False) -> str:
        """Return why the values cannot be kept; '' if they can. Looks now and then, or if it `is_due`."""
        now = time.monotonic()
        if not self.noted or (not is_due and now < self._looked_at + _LOST_EVERY_S):
            return ""
        self._looked_at = now
        try:
            return self.lost()
        except StateNotSupportedError as error:
            return str(error)

    def _look(self) -> list[Scope]:
        frames = [frame for frame in script_frames() if is_own(frame.f_globals.get("__name__"))]
        own = {package_of(frame.f_globals.get("__name__")) for frame in frames} | {"__main__", "tqdm"}
        skipped = self._skipped()
        of_trainer = with_inner(self._trainer_scopes(), own | self._packages, skipped)
        # What is there already is not looked at again by way of the script's variables.
        seen = skipped | {id(value) for scope in of_trainer for _, value in scope.items if hasattr(value, "__dict__")}
        of_script = with_inner(scopes_of_script(frames), own, seen)
        for scope in of_script:
            scope.foreign = [(name, value) for name, value in scope.foreign if not _is_of_library(value)]
        for scope in of_trainer:
            scope.items = [(name, value) for name, value in scope.items if name not in _CLOCKS]
            scope.foreign = [
                (name, value) for name, value in scope.foreign if not (is_harmless(value) or _is_of_library(value))
            ]
        return [*of_trainer, *of_script]


def _is_of_library(value: Any) -> bool:
    return package_of(type(value).__module__) in _LIBRARIES


def scope_of(name: str, item: Any, skipped: frozenset[str] = frozenset()) -> Scope:
    """Return the attributes of an object as values by the name of the object."""
    items = [(key, value) for key, value in vars(item).items() if key not in skipped and not callable(value)]
    return Scope(name, items, lambda key, value: object.__setattr__(item, key, value))
