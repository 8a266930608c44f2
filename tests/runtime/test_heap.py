"""The collector of cycles leaves alone what is there, for as long as it is told to."""

from __future__ import annotations

import subprocess
import sys

# In an interpreter of its own: other threads of a process of tests may freeze and collect, too.
_SCRIPT = """
import gc
from ganger.program_setup import settled

gc.set_threshold(700, 10, 10)
with settled():
    print(gc.get_freeze_count() > 0, gc.get_threshold() > (700, 10, 10))
print(gc.get_freeze_count(), gc.get_threshold())
"""


def test_what_lives_long_is_looked_at_again_afterwards() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["True True", "0 (700, 10, 10)"]
