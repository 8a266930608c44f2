"""How much of what its devices can do a gang uses: between two reports, at no cost to the job."""

from __future__ import annotations

import time

from ganger_daemon.node.node_context import NodeContext


class Using:
    """Of a gang's part on this node. A virtual device that is bound to cores is as busy as these cores; of another one
    the driver says what each process used of it, and where it does not, a job that waits for no data counts as busy."""

    def __init__(self, host: NodeContext, group: str, device_mask: int) -> None:
        self._host = host
        self._group = group
        self._mask = device_mask
        self._seen: tuple[float, float] | None = None

    def forget(self) -> None:
        """It rests between its turns: that is no part of how busy it keeps its devices."""
        self._seen = None

    def measure(self, data_wait_share: float) -> float | None:
        """0 to 1, since the last call; None where nobody can tell yet."""
        if not self._mask:
            return None
        cores = self._host.device_cores * self._mask.bit_count()
        if cores:
            return self._of_cores(cores, time.monotonic())
        found = self._host.devices.use_by(self._host.cgroups.pids(self._group), self._mask)
        return 1.0 - data_wait_share if found is None else found

    def _of_cores(self, cores: float, now: float) -> float | None:
        before, self._seen = self._seen, (now, self._host.cgroups.cpu_seconds(self._group))
        if before is None or now <= before[0]:
            return None
        return min(1.0, max(0.0, self._seen[1] - before[1]) / (cores * (now - before[0])))
