"""What is imported before the first line of a script: by the agent, and by the server that ranks are forked from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from training.harness import run_to_end, write_script


def test_the_agent_imports_neither_torch_nor_numpy_before_a_script_does() -> None:
    program = "import sys, ganger.training.agent; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n", "both read variables that a script may set first"


@pytest.mark.torch
def test_ranks_are_forked_from_a_server_that_has_imported_all(tmp_path: Path) -> None:
    """It passes over what it does not find, and each rank of each test would import that."""
    text = "import gc, sys; print('training.warm' in sys.modules, gc.get_freeze_count() > 100_000)"
    run_to_end(tmp_path / "run", write_script(tmp_path, text), [], managed=False)
    assert (tmp_path / "run/rank-0.log").read_text() == "True True\n"
