"""What a run says beside its result, on stderr. Where that cannot be written (a full disk) it is said to nobody, and
the run ends as it would have.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def say(text: str) -> None:
    """A line."""
    with or_to_nobody():
        print(text, file=sys.stderr, flush=True)


@contextmanager
def or_to_nobody() -> Iterator[None]:
    """For what writes to stderr itself."""
    try:
        yield
    except OSError:
        # What is held back of it would fail again at the end.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)
