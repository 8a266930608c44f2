"""What an agent says before it knows the script is no last word."""

from __future__ import annotations

import pytest
from ganger.injob.page import PageProgress
from ganger.injob.page_layout import Capability
from ganger_daemon.gang.observation import is_still_looking

EVERYTHING = Capability.PAUSE | Capability.OFFLOAD | Capability.CHECKPOINT


@pytest.mark.parametrize(
    ("capabilities", "first_step_ns", "looks"),
    [
        (Capability.PAUSE, 0, True),
        (Capability.PAUSE, 7, False),
        (EVERYTHING, 0, False),
        (EVERYTHING | Capability.FIVE_LINE, 0, False),
        (Capability.OPAQUE, 0, False),
    ],
)
def test_the_agent_of_an_unmodified_script_looks_on_until_a_step_is_done(
    capabilities: int, first_step_ns: int, looks: bool
) -> None:
    silent = PageProgress(*[0] * len(PageProgress._fields))
    progress = silent._replace(capabilities=capabilities, first_step_time_ns=first_step_ns)
    assert is_still_looking(progress) is looks
