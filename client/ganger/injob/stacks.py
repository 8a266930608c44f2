"""Stacks of a rank that does not obey, printed into its log when its daemon asks for them in the page.

Not by a signal: every signal that has a handler belongs to the user's program.
"""

from __future__ import annotations

import faulthandler
import threading

from ganger.injob.page import Word
from ganger.injob.page_access import Words

_LOOK_EVERY_S = 1.0


class StackPrinter:
    """A thread that looks at the page once a second; it prints nothing in processes forked from this one."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(words[Word.STACKS_SEQ],), daemon=True)
        self._thread.name = "ganger-stacks"
        self._thread.start()

    def close(self) -> None:
        """Let go of the page."""
        self._is_over.set()
        self._thread.join()

    def _watch(self, seen: int) -> None:
        while not self._is_over.wait(_LOOK_EVERY_S):
            requested = self._words[Word.STACKS_SEQ]
            if requested != seen:
                seen = requested
                try:
                    faulthandler.dump_traceback(2, all_threads=True)
                except OSError:
                    pass  # the program has closed its standard error
