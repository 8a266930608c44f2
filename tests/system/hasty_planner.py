"""The planner as its program runs it, but that believes what it measures after seconds: STATE_DIR NOTE RECORD."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from ganger.program_setup import set_up_log
from ganger.scheduling.program import until_stopped
from ganger.wire.endpoints import find_endpoint
from ganger_master.planner_process.run import Planner
from ganger_master.policies.trials import TrialPace

HASTY = TrialPace(warm_s=1.0, settle_s=0.5, window_s=0.5, window_steps=2)


def main() -> None:
    set_up_log("planner")
    state_directory, note, record_to = sys.argv[1:]
    work = Planner(lambda: find_endpoint(state_directory), trial_pace=HASTY, note=Path(note), record_to=Path(record_to))
    asyncio.run(until_stopped(work.run(), until_stdin_closes=False))


if __name__ == "__main__":
    main()
