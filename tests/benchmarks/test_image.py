"""The bench of process images at a small size."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ganger_daemon.images.criu import choose_images

from benchmarks import image


def test_the_parts_of_a_move_are_measured_beside_the_raw_stream(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if os.geteuid() != 0 or choose_images().unavailable:
        pytest.skip(f"no images of processes here: {choose_images().unavailable}")
    monkeypatch.setattr(image, "QUICK_SIZES", (8 * 2**20,))

    monkeypatch.chdir(tmp_path)
    figures = image.main(quick=True)["figures"]

    assert isinstance(figures, dict)
    parts = sum(figures[f"image_8MB_{part}_seconds"] for part in image.PARTS)
    assert figures["image_8MB_pause_seconds"] == pytest.approx(parts, rel=0.01)
    assert figures["image_8MB_bytes"] > 8 * 2**20
    assert figures["image_8MB_raw_stream_seconds"] > 0
