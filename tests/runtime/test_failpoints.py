"""Failpoints kill at the named passage, and only there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ganger import failpoints

NAMES = frozenset({"before-commit", "after-commit"})


def test_names_and_counts_are_read_and_names_of_other_programs_passed_over() -> None:
    assert failpoints.parse("", NAMES) == {}
    assert failpoints.parse("before-commit, after-commit:3=stop,mid-stream:2", NAMES) == {
        "before-commit": (1, signal.SIGKILL),
        "after-commit": (3, signal.SIGSTOP),
    }


@pytest.mark.parametrize("text", ["before-commit:0", "before-commit:-1", "before-commit:x"])
def test_count_that_is_no_positive_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="positive"):
        failpoints.parse(text, NAMES)


def test_action_that_is_unknown_is_refused() -> None:
    with pytest.raises(ValueError, match="stop"):
        failpoints.parse("before-commit=sleep", NAMES)


CODE = """
from ganger.failpoints import Failpoints
points = Failpoints({'before-commit', 'after-commit'})
for n in range(5):
    points.passing('before-commit'); points.passing('after-commit'); print(n, flush=True)
"""


def run(text: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        env={failpoints.VARIABLE: text},
        check=False,
        timeout=30,
    )
    return done.returncode, done.stdout


def test_process_dies_of_sigkill_at_the_counted_passage() -> None:
    assert run("before-commit:3") == (-9, "0\n1\n")


def test_process_reads_a_file_at_every_passage_and_removes_it_when_it_kills(tmp_path: Path) -> None:
    armed = tmp_path / "armed"
    assert run(f"@{armed}")[0] == 0
    armed.write_text("after-commit:2")
    assert run(f"@{armed}") == (-9, "0\n")
    assert not armed.exists()


def test_process_that_was_stopped_goes_on_from_there_and_stops_no_more(tmp_path: Path) -> None:
    armed = tmp_path / "armed"
    armed.write_text("before-commit:2=stop")
    environment = {failpoints.VARIABLE: f"@{armed}"}
    process = subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, text=True, env=environment)
    assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
    assert not armed.exists()
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=30) == ("0\n1\n2\n3\n4\n", None)
    assert process.returncode == 0
