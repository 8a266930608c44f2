"""What holds for every test."""

from __future__ import annotations

import logging
import signal
import sys

import pytest
from hypothesis import HealthCheck, settings

# On a busy machine an example's time says nothing about what it shows. A change is judged by the same examples each
# time; new ones are looked for with `make explore`.
_TIMELESS = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ganger", _TIMELESS, derandomize=True)
settings.register_profile("explore", _TIMELESS)
settings.load_profile("ganger")

# Ignored where the tests run in the background of a script (nohup), and then in every program that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


SCRIPTS = ("train.py", "t.py", "x.py", "a b.py", "my train.py", "run.sh")


@pytest.fixture
def scripts(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go to a directory that has the scripts that submissions of tests name."""
    directory = tmp_path_factory.mktemp("scripts")
    for name in SCRIPTS:
        (directory / name).touch()
    monkeypatch.chdir(directory)


def pytest_runtest_teardown() -> None:
    """No rank outlives its test: pytest would wait for it at its end. Nor does the log of a service that a command
    started in this process: its stream is closed, and whatever logs later would print that."""
    for handler in logging.root.handlers[:]:
        if type(handler) is logging.StreamHandler:
            logging.root.removeHandler(handler)
    harness = sys.modules.get("training.harness")
    if harness is not None:
        harness.end_all()
