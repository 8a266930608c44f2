"""Launchers with and without PyTorch imported; a control page, and a rank's control of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ganger.injob.control import Control
from ganger.injob.page import Page, page_path
from ganger.injob.page_layout import PageOrderKind
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


@pytest.fixture
def page(tmp_path: Path) -> Page:
    page = Page.create(page_path(str(tmp_path), 0), epoch=1, rank=0, world=1)
    page.write_order(1, PageOrderKind.RUN)
    return page


@pytest.fixture
def control(page: Page, tmp_path: Path) -> Iterator[Control]:
    control = Control(Page.open(page.path), job_dir=str(tmp_path), socket_path=str(tmp_path / "job.sock"))
    yield control
    control.close()
