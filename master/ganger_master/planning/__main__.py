"""The planner as the master starts it: `python -m ganger_master.planning --state-dir DIR --until-stdin-closes`."""

from __future__ import annotations

from ganger_master.planning.cli import run

run()
