"""The terms of a pass: shapes to place, holdings of gangs, groups of jobs that share devices, and the capacity to
share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from ganger.cluster.resources import Claim, GangShape
from ganger.cluster.view import View
from msgspec import Struct
from msgspec.structs import replace

from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord
from ganger_master.planner.device_groups import ALONE, Mates, Unit, shape_for_two
from ganger_master.planner.in_place_resize import NOTHING_UNDER_WAY, Resizing
from ganger_master.planner.job_table import LiveTable
from ganger_master.policies import Policy
from ganger_master.policies.job_facts import Capacity
from ganger_master.policies.stages import Colocate

Claims = tuple[Claim, ...]


def held_of(gang: Gang) -> Claims:
    """Return what a gang holds. Devices of a time-sliced gang count as shared: others of its group hold them too."""
    held = tuple([piece.held for piece in gang.pieces if piece.held is not None])
    return tuple([replace(claim, shared_mask=claim.device_mask) for claim in held]) if gang.node_set else held


def held_by_all(table: LiveTable, held: Callable[[Gang], Claims] = held_of) -> list[Claims]:
    """Return the claims of all running gangs, by `held`, and of all that are being returned."""
    return [*[held(gang) for _, gang in table.running], *[held_of(gang) for _, gang in table.going]]


class PassTerms(Struct, frozen=True):
    """What a pass plans with.

    shape: the shape that a pending job is placed with.
    held: what a running gang holds.
    mates_now: the present groups of jobs that share devices.
    """

    shape: Callable[[JobRecord], GangShape] = lambda job: job.shape
    held: Callable[[Gang], Claims] = held_of
    mates_now: Callable[[], Mates] = lambda: ALONE

    @property
    def mates(self) -> Mates:
        return self.mates_now()

    def held_by(self, unit: Unit) -> Claims:
        """Return what all gangs of a unit hold."""
        return tuple([claim for _, gang in unit for claim in self.held(gang)])


AS_ASKED = PassTerms()


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


def terms_of(policy: Policy, table: LiveTable) -> PassTerms:
    """Jobs on the same devices go together: another policy may have time-sliced or co-located them. Under a policy that
    co-locates, a job leaves memory for another one."""
    if not policy.has(Colocate):
        return PassTerms(mates_now=lambda: table.mates)
    return PassTerms(shape=shape_for_two, mates_now=lambda: table.mates)
