"""An installed Ganger without its repository says which commands need it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
# As an interpreter that has the three packages, and neither benchmarks, experiments nor examples.
_WITHOUT_CHECKOUT = """
import sys
for name in ("benchmarks", "examples", "experiments"):
    sys.modules[name] = None
from ganger.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", [["bench", "submit"], ["demo"], ["reproduce", "--list"]])
def test_command_that_needs_a_checkout_says_so_in_one_sentence(command: list[str], tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _WITHOUT_CHECKOUT, *command], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode != 0
    (line,) = ran.stderr.splitlines()
    assert f"`ganger {command[0]}` needs a checkout" in line
    assert ran.stdout == ""
