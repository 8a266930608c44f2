"""Launchers with and without PyTorch imported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from injob.launcher_kit import HAS_TORCH, Place, launcher_place


@pytest.fixture(scope="module")
def zygote() -> Iterator[Place]:
    if not HAS_TORCH:
        pytest.skip("torch is not installed")
    yield from launcher_place(preload=True)


@pytest.fixture(scope="module")
def plain() -> Iterator[Place]:
    yield from launcher_place(preload=False)


@pytest.fixture(params=["fork", "exec"])
def either(request: pytest.FixtureRequest) -> Place:
    place: Place = request.getfixturevalue("zygote" if request.param == "fork" else "plain")
    return place


@pytest.fixture
def mortal() -> Iterator[Place]:
    """A launcher to be killed."""
    yield from launcher_place(preload=False)
