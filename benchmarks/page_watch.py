"""A look at control pages from a thread of its own, for as long as something is measured."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import TypeVar

# Between two looks.
POLL_SECONDS = 0.0005

_Self = TypeVar("_Self", bound="Watch")


class Watch(ABC):
    """Looks from `with` to its end."""

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self.look, name="pages", daemon=True)

    def __enter__(self: _Self) -> _Self:
        self._thread.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self._is_over.set()
        self._thread.join()

    def goes_on(self) -> bool:
        """After a moment, whether to look once more."""
        return not self._is_over.wait(POLL_SECONDS)

    @abstractmethod
    def look(self) -> None:
        """In the thread, until it does not go on."""
