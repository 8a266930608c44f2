"""Packages that some tests need and not every installation has."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def skip_without(*packages: str) -> None:
    """Skip the test, or the module that is collected, where one of these packages is not installed.

    It imports none of them: trainers take seconds, in each process that collects tests."""
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed", allow_module_level=True)
