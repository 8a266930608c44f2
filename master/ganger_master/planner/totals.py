"""The capacity that policies share out among gangs."""

from __future__ import annotations

import numpy as np
from ganger.cluster.view import View

from ganger_master.planner.in_place_resize import NOTHING_UNDER_WAY, Resizing
from ganger_master.planner.job_table import LiveTable
from ganger_master.policies.job_facts import Capacity


def capacity_of(view: View, table: LiveTable, resizing: Resizing = NOTHING_UNDER_WAY) -> Capacity:
    """Return the devices, cores and memory that gangs can have.

    Devices are the free ones of available nodes and those of gangs that run or leave, on any node; devices of parked
    gangs and broken ones do not count. Cores and memory are those of all available nodes. `resizing`: resizes under
    way, whose next worlds hold devices, too.
    """
    columns = view.columns()
    available = columns.available
    free = int(np.bitwise_count(columns.free[available]).sum())
    cores = memory = gpus_per_node = 0
    numbers = np.bincount(columns.sets[available], minlength=len(view.sets)).tolist()
    for name, configuration_set in view.sets.items():
        nodes = numbers[view.set_code(name)]
        if nodes:
            cores += nodes * sum(socket.millicores for socket in configuration_set.sockets)
            memory += nodes * configuration_set.memory_bytes
            gpus_per_node = max(gpus_per_node, configuration_set.devices)
    return Capacity(free + table.held_gpus + resizing.held_beside(table), cores / 1000, float(memory), gpus_per_node)
