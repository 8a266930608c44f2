"""What an unmodified script writes into files of its own is there once, however it opens them, restarted or not."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from training import writing
from training.harness import run_in_parts, run_to_end

SCRIPT = Path(writing.__file__)
CLIENT = Path(__file__).parents[2] / "client"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The directories of one run without and of one with three new processes."""
    directory = tmp_path_factory.mktemp("files")
    alone, parts = directory / "of alone", directory / "of parts"
    alone.mkdir()
    parts.mkdir()
    run_to_end(directory / "alone", SCRIPT, [alone], managed=False)
    run_in_parts(directory, SCRIPT, [parts], [3, 6, 13], agent=True)
    return alone, parts


@pytest.mark.torch
@pytest.mark.parametrize("way", writing.WAYS)
def test_every_line_is_in_the_file_once_after_restarts(written: tuple[Path, Path], way: str) -> None:
    alone, parts = (directory / way for directory in written)
    assert len(alone.read_text().splitlines()) == 20
    assert parts.read_text() == alone.read_text()


# A script's first process, and its second, which is brought back to after its second line.
AGAIN = """
import os, sys
import writing
from ganger.training.replay import OutputReplay
directory, is_second = sys.argv[1], sys.argv[2:]
if is_second:
    diversion = OutputReplay(os.path.join(directory, "replay.log"))
files = writing.writers(directory)
writing.write("head\\n", files)
writing.write("step 1\\n", files)
if is_second:
    diversion.end()
    writing.write("step 2\\n", files)
"""


@pytest.mark.parametrize("python", ["python3.9", "python3.10", "python3.11", "python3.12", "python3.13", "python3.14"])
def test_in_every_python_a_repeated_line_is_kept_out_of_files(tmp_path: Path, python: str) -> None:
    found = next(iter(Path.home().glob(f".pyenv/versions/{python[6:]}.*/bin/{python}")), shutil.which(python))
    if found is None or subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode:
        pytest.skip(f"there is no {python} here")
    environment = {"PYTHONPATH": f"{CLIENT}:{SCRIPT.parent}"}
    for process in ([], ["second"]):
        command = [found, "-c", AGAIN, str(tmp_path), *process]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
    expected = dict.fromkeys(writing.WAYS, "head\nstep 1\nstep 2\n")
    assert {way: (tmp_path / way).read_text() for way in writing.WAYS} == expected
