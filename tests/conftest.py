"""What holds for every test."""

from __future__ import annotations

import sys

from hypothesis import settings

# on a busy machine an example's time says nothing about what it shows
settings.register_profile("ganger", deadline=None, print_blob=True)
settings.load_profile("ganger")


def pytest_runtest_teardown() -> None:
    """No rank outlives its test: pytest would wait for it at its end."""
    harness = sys.modules.get("training.harness")
    if harness is not None:
        harness.end_all()
