"""Another account of this machine, for what is refused to its processes. Only root can act as another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

STRANGER = 12345
needs_a_stranger = pytest.mark.skipif(os.geteuid() != 0, reason="needs a second account")


@contextmanager
def as_stranger() -> Iterator[None]:
    """Act as the other account: the kernel records it with each call to listen or to connect."""
    os.seteuid(STRANGER)
    try:
        yield
    finally:
        os.seteuid(0)
