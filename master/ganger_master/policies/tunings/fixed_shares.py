"""Cores and memory in proportion to GPUs, whatever the job: `bind` of the CPU poster (Xiao et al., SoCC 2018: 24 cores
and 4 GPUs give 6 each), the baseline of Synergy (OSDI 2022) and the floor of every tuning that guarantees one."""

from __future__ import annotations

from ganger_master.policies.tunings import Gangs, Pieces, Tuning, TuningNodes, proportionally


def tune(gangs: Gangs, nodes: TuningNodes, placed: Pieces) -> Pieces:
    return proportionally(nodes, placed)


PROPORTIONAL = Tuning("proportional", tune, by_profiles=False)
BIND = Tuning("bind", tune, by_profiles=False)
