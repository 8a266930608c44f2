"""The planner as the master starts it: `python -m ganger_master.planner_process --state-dir DIR
--until-stdin-closes`."""

from __future__ import annotations

from ganger_master.planner_process.cli import run

run()
