"""What the agent brings into an interpreter before the first line of a script."""

from __future__ import annotations

import subprocess
import sys


def test_the_agent_imports_neither_torch_nor_numpy_before_a_script_does() -> None:
    program = "import sys, ganger.training.agent; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n", "both read variables that a script may set first"
