"""Hardware of the machine, as the kernel reports it: sockets, physical cores with thread siblings, memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ganger_daemon.node.core_table import Core, CoreMap, default_housekeeping, housekeeping_of, parse_ids

SYSTEM = Path("/sys/devices/system")
MEMORY_FOR_JOBS = 0.9
"""Share of host memory that jobs may claim: the rest is the kernel's, the daemon's and the page cache's."""


def read_cores(housekeeping: int | None = None, system: Path = SYSTEM) -> CoreMap:
    """The physical cores this process may use, by socket. A core's id is its lowest CPU. CPUs that are offline or
    outside the affinity of this process are left out; where the kernel says nothing of topology, each CPU is a core."""
    allowed = os.sched_getaffinity(0) if system == SYSTEM else None
    cores: dict[tuple[int, int], set[int]] = {}
    for cpu, directory in _cpus(system):
        if allowed is not None and cpu not in allowed:
            continue
        siblings = _ids(directory / "topology" / "thread_siblings_list") or (cpu,)
        package = _number(directory / "topology" / "physical_package_id")
        cores.setdefault((max(0, package), min(siblings)), set()).add(cpu)
    if not cores:
        cores = {(0, cpu): {cpu} for cpu in (allowed or range(os.cpu_count() or 1))}
    packages = sorted({package for package, _ in cores})
    sockets = tuple(
        tuple(Core(min(cpus), index, tuple(sorted(cpus))) for (of, _), cpus in sorted(cores.items()) if of == package)
        for index, package in enumerate(packages)
    )
    count = sum(len(socket) for socket in sockets)
    return CoreMap(
        sockets, housekeeping_of(sockets, default_housekeeping(count) if housekeeping is None else housekeeping)
    )


def usable_cpus() -> tuple[int, ...]:
    """The CPUs this process may run on, ascending."""
    return tuple(sorted(os.sched_getaffinity(0)))


def read_memory_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Host memory that jobs may claim."""
    for line in meminfo.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemTotal":
            mebibytes = int(int(rest.split()[0]) / 1024 * MEMORY_FOR_JOBS)
            # whole gigabytes, so that servers of one model agree however much the firmware keeps
            return max(1, mebibytes // 1024) * 2**30
    raise OSError(f"{meminfo} has no MemTotal")


def cpus_near(bus_id: str, devices: Path = Path("/sys/bus/pci/devices")) -> frozenset[int]:
    """The CPUs on the NUMA node of a PCI device; empty where unknown."""
    return frozenset(_ids(devices / _sysfs_bus_id(bus_id) / "local_cpulist"))


def _sysfs_bus_id(bus_id: str) -> str:
    """NVML says 00000000:0A:00.0, sysfs 0000:0a:00.0."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _cpus(system: Path) -> Iterator[tuple[int, Path]]:
    try:
        entries = sorted((system / "cpu").iterdir())
    except OSError:
        return
    for entry in entries:
        suffix = entry.name.removeprefix("cpu")
        if entry.name.startswith("cpu") and suffix.isdigit() and (entry / "topology").is_dir():
            yield int(suffix), entry


def _ids(path: Path) -> tuple[int, ...]:
    try:
        return parse_ids(path.read_text())
    except (OSError, ValueError):
        return ()


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return -1
