"""Failpoints kill at the named passage, and only there."""

from __future__ import annotations

import subprocess
import sys

import pytest
from ganger_master.runtime import failpoints


def test_names_and_counts_are_read_and_names_of_other_programs_passed_over() -> None:
    assert failpoints.parse("") == {}
    assert failpoints.parse("before-commit, after-commit:3,mid-stream:2") == {"before-commit": 1, "after-commit": 3}


@pytest.mark.parametrize("text", ["before-commit:0", "before-commit:-1", "before-commit:x"])
def test_count_that_is_no_positive_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="positive"):
        failpoints.parse(text)


def test_process_dies_of_sigkill_at_the_counted_passage() -> None:
    code = (
        "from ganger_master.runtime.failpoints import Failpoints\n"
        "points = Failpoints.of_environment()\n"
        "for n in range(5):\n"
        "    points.passing('before-commit'); points.passing('after-commit'); print(n, flush=True)\n"
    )
    environment = {failpoints.VARIABLE: "before-commit:3"}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False, timeout=30
    )
    assert (run.returncode, run.stdout) == (-9, "0\n1\n")
