"""Which of the nodes that could hold a gang it prefers: the classes of Algorithm 1, then closeness, then load.

Smaller is better, and ties go in the order in which nodes came. For many nodes at once, and for one.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ganger.cluster.scan import Scan
from ganger.cluster.view import LoadMode

SLOT_BITS: Final = 20
# Loads are compared up to these.
_MOST_JOBS: Final = 255
_MOST_CORES: Final = 4095


def single_keys(scan: Scan, slots: NDArray[np.intp], mode: LoadMode, affinity: bool) -> NDArray[np.int64]:
    """Of nodes that are to hold the whole gang."""
    columns, gpus = scan.columns, scan.shape.gpus
    jobs = np.minimum(columns.jobs[slots], _MOST_JOBS)
    if not gpus:
        # Cores beside devices are left to gangs that use the devices.
        devices = scan.device_counts[slots]
        cores = np.minimum(columns.millicores[slots] // 1000, _MOST_CORES)
        load = (jobs << 12) + _MOST_CORES - cores if mode is LoadMode.SPREAD else cores
        return (devices << 24) + load
    left = scan.free_devices[slots] - gpus
    load = (63 - left << 8) + jobs if mode is LoadMode.SPREAD else (left << 8) + jobs
    levels = scan.closest(gpus)[slots].astype(np.int64)
    return ((classes(scan, slots, affinity) * 16 + levels) << 16) + load


def single_key(
    gpus: int, devices: int, free_devices: int, millicores: int, jobs: int, has: int, level: int, mode: LoadMode
) -> int:
    """The same of one node: its devices, those that it could give, its free cores, its jobs, its affinity (that of the
    gang where all servers are alike), and the level of the best `gpus` of its free devices."""
    jobs = min(jobs, _MOST_JOBS)
    if not gpus:
        cores = min(millicores // 1000, _MOST_CORES)
        return (devices << 24) + ((jobs << 12) + _MOST_CORES - cores if mode is LoadMode.SPREAD else cores)
    left = free_devices - gpus
    load = (63 - left << 8) + jobs if mode is LoadMode.SPREAD else (left << 8) + jobs
    return (((0 if has == gpus else 1 if has == 0 else 2) * 16 + level) << 16) + load


def classes(scan: Scan, slots: NDArray[np.intp], affinity: bool) -> NDArray[np.int64]:
    """Lines of Algorithm 1: 0 the same affinity, 1 no jobs yet, 2 any."""
    if not affinity:
        return np.zeros(slots.size, np.int64)
    has = scan.columns.affinity[slots]
    return np.where(has == scan.shape.gpus, 0, np.where(has == 0, 1, 2)).astype(np.int64)


def best_first(slots: NDArray[np.intp], keys: NDArray[np.int64], limit: int) -> list[int]:
    """The slots with the smallest keys."""
    whole = (keys << SLOT_BITS) | slots
    if whole.size > limit:
        whole = np.partition(whole, limit - 1)[:limit]
    return [int(key) & ((1 << SLOT_BITS) - 1) for key in np.sort(whole)]
