"""What runs in the user's interpreter runs in the oldest one it promises: Python 3.9, with nothing but its library."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

import pytest

CLIENT = Path(__file__).parents[2] / "client"

WORK = """
import os, pkgutil, sys, tempfile
import ganger, ganger.injob
assert sys.version_info[:2] == (3, 9)
for module in pkgutil.walk_packages(ganger.injob.__path__, "ganger.injob."):
    if not module.name.endswith("__main__"):
        __import__(module.name)
from ganger.injob.control import Control
from ganger.injob.page import Page
from ganger.injob.page_layout import PageParkLevel, PageOrderKind, Word
with tempfile.TemporaryDirectory() as directory:
    page = Page.create(os.path.join(directory, "rank-0.page"), epoch=1, rank=0, world=1)
    page.write_order(1, PageOrderKind.RUN)
    control = Control(Page.open(page.path), job_dir=directory)
    control.start()
    control.boundary()
    page.write_order(2, PageOrderKind.STOP, stop_seq=2, level=PageParkLevel.PAUSE)
    import threading, time
    trains = threading.Thread(target=control.boundary)
    trains.start()
    while page.get(Word.REACHED_SEQ) != 2:
        assert trains.is_alive()
        time.sleep(0.001)
    page.write_order(3, PageOrderKind.RUN)
    trains.join()
    assert page.progress().step == page.get(Word.REACHED_STEP) == 2
    control.close()
from ganger.node_test import main
assert main(["1"]) == 0
print("works")
"""


@functools.lru_cache(maxsize=1)
def _oldest_python() -> str:
    candidates = [shutil.which("python3.9") or "", *map(str, Path.home().glob(".pyenv/versions/3.9.*/bin/python3.9"))]
    for python in filter(None, candidates):
        # a shim of a version manager may be there and refuse
        if subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0:
            return python
    return ""


@pytest.mark.skipif(not _oldest_python(), reason="there is no Python 3.9 here")
def test_a_rank_pauses_and_goes_on_in_python_3_9() -> None:
    done = subprocess.run(
        [_oldest_python(), "-W", "error", "-c", WORK],
        env={"PYTHONPATH": str(CLIENT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()[-2:]) == (0, ["sums over 1 are right", "works"]), done.stderr
