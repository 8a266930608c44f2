"""What holds for every test."""

from __future__ import annotations

import logging
import sys

from hypothesis import HealthCheck, settings

# On a busy machine an example's time says nothing about what it shows. A change is judged by the same examples each
# time; new ones are looked for with `make explore`.
_TIMELESS = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ganger", _TIMELESS, derandomize=True)
settings.register_profile("explore", _TIMELESS)
settings.load_profile("ganger")


def pytest_runtest_teardown() -> None:
    """No rank outlives its test: pytest would wait for it at its end. Nor does the log of a service that a command
    started in this process: its stream is closed, and whatever logs later would print that."""
    for handler in logging.root.handlers[:]:
        if type(handler) is logging.StreamHandler:
            logging.root.removeHandler(handler)
    harness = sys.modules.get("training.harness")
    if harness is not None:
        harness.end_all()
