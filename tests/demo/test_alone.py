"""Trainings of the demo run alone as they would if a user started them, several at a time, and end with the demo."""

from __future__ import annotations

import os
import select
from pathlib import Path

import pytest

from examples.demo.undisturbed_run import Alone, AloneError

pytestmark = pytest.mark.torch

SCRIPT = """
import os, sys
import beside
with open(sys.argv[1] + os.environ["RANK"], "w") as file:
    file.write(f"{__name__} {os.environ['WORLD_SIZE']} {[name for name in os.environ if name.startswith('GANGER_')]}")
print("said by rank", os.environ["RANK"])
sys.exit(int(os.environ["RANK"]))
"""


def test_ranks_run_the_script_in_their_own_environment_and_tell_their_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GANGER_PAGE", "/nowhere")
    (tmp_path / "beside.py").touch()
    script, log = tmp_path / "train.py", tmp_path / "train.log"
    script.write_text(SCRIPT)
    ranks = [{"RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
    with Alone(tmp_path / "alone.log") as alone:
        codes = alone.run([str(script), str(tmp_path / "out")], ranks, tmp_path, log, 120.0, lambda: None)
    assert codes == [0, 1]
    assert (tmp_path / "out1").read_text() == "__main__ 2 []"
    assert sorted(log.read_text().splitlines()) == ["said by rank 0", "said by rank 1"]


def test_what_still_runs_ends_with_it(tmp_path: Path) -> None:
    script, started = tmp_path / "train.py", tmp_path / "started"
    script.write_text(
        "import os, sys, time\n"
        "with open(sys.argv[1] + '.part', 'w') as file: file.write(str(os.getpid()))\n"
        "os.rename(sys.argv[1] + '.part', sys.argv[1])\n"
        "time.sleep(600)\n"
    )

    def until_started() -> None:
        if started.exists():
            raise InterruptedError

    with Alone(tmp_path / "alone.log") as alone, pytest.raises(InterruptedError):
        alone.run([str(script), str(started)], [{}], tmp_path, tmp_path / "train.log", 120.0, until_started)
    pid = int(started.read_text())
    descriptor = -1
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    readable, _, _ = select.select([descriptor], [], [], 30.0)
    os.close(descriptor)
    assert readable, "the training outlived the demo"


def test_a_training_that_takes_too_long_is_told(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time; time.sleep(600)")
    with Alone(tmp_path / "alone.log") as alone, pytest.raises(AloneError, match=r"not done within 0\.2 s"):
        alone.run([str(script)], [{}], tmp_path, tmp_path / "train.log", 0.2, lambda: None)
