"""What holds for every test."""

from __future__ import annotations

import sys

from hypothesis import settings

# On a busy machine an example's time says nothing about what it shows. A change is judged by the same examples each
# time; new ones are looked for with `make explore`.
settings.register_profile("ganger", deadline=None, print_blob=True, derandomize=True)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("ganger")


def pytest_runtest_teardown() -> None:
    """No rank outlives its test: pytest would wait for it at its end."""
    harness = sys.modules.get("training.harness")
    if harness is not None:
        harness.end_all()
