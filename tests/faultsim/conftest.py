"""`pytest tests/faultsim --rewrite` writes what the scenarios print instead of comparing it: then read the diff."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write the expected output of scenario files anew")
