"""Which files a script saves with torch.save, and whether it goes on from one of them by itself.

A script that looks for its own checkpoint when it starts would, run again, begin in the middle; then counting its loops
leads to another place than the one the state belongs to.
"""

from __future__ import annotations

import functools
import os
import pathlib
from typing import Any, Callable

import torch


class OwnFiles:
    """`is_repeating`: whether the script is on its way back, when what it saves would spoil its files."""

    def __init__(self, is_repeating: Callable[[], bool]) -> None:
        self._is_repeating = is_repeating
        self.saved: set[str] = set()
        self._looked_for: set[str] = set()
        self._undo: list[Callable[[], None]] = []

    def watch(self) -> None:
        """Once per process, before the script's first line."""
        files, save = self, torch.save

        @functools.wraps(save)
        def noted_save(item: Any, file: Any, *arguments: Any, **options: Any) -> None:
            if files._is_repeating():
                return
            save(item, file, *arguments, **options)
            if isinstance(file, (str, os.PathLike)):
                files.saved.add(_path(file))

        setattr(torch, "save", noted_save)  # noqa: B010 (mypy: an assignment would need its exact type)
        for holder, name in (
            (torch, "load"),
            (os.path, "exists"),
            (os.path, "isfile"),
            (pathlib.Path, "exists"),
            (pathlib.Path, "is_file"),
        ):
            self._note_use(holder, name)

    def first_loop_begins(self) -> None:
        """From here on nothing is looked for to start from."""
        while self._undo:
            self._undo.pop()()

    def resumed_from(self) -> str:
        """The file the script starts from if it is there, of those it saves; '' for none."""
        return min(self.saved & self._looked_for, default="")

    def _note_use(self, holder: Any, name: str) -> None:
        original = getattr(holder, name)

        @functools.wraps(original)
        def noted(file: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(file, (str, os.PathLike)):
                self._looked_for.add(_path(file))
            return original(file, *arguments, **options)

        setattr(holder, name, noted)
        self._undo.append(lambda: setattr(holder, name, original))


def _path(file: Any) -> str:
    return os.path.abspath(os.fsdecode(file))
