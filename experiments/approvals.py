"""B17. How quickly gangs are approved or rejected that many job schedulers ask for at once (Xiao, SOSP 2017 student
research: a central component keeps a light view and quickly approves or rejects; no figures).

Set-up: 2,000 nodes of eight devices, and sixteen schedulers that each look for places in a view of their own: it is
brought up to date every sixteenth time they ask, and by what a rejection tells. Gangs have 1 to 64 devices, most of
them few; when nine devices in ten are held the oldest gang ends. Schedulers take turns at random. What places and what
approves is the production's. Timed is the verdict and taking the devices, in processor time on one thread; a claim of a
device that is held is counted by bitmaps of the experiment's own. What a whole master makes of it over the network is
measured live: `ganger bench verdicts`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np
from ganger.cluster.placement import candidates
from ganger.cluster.resources import (
    Claim,
    ConfigurationSet,
    DeviceGroup,
    GangShape,
    LocalityLevel,
    NodeRow,
    Role,
    Socket,
    TaskShape,
)
from ganger.cluster.view import View
from ganger_master.core.approval import CandidateApproval, approve
from ganger_master.simulator.report.figures import interval

from experiments.experiment import CoreUse, Experiment, MeasuredRows, Row, Setting

_NODES, _DEVICES, _SCHEDULERS, _REQUESTS = 2_000, 8, 16, 3_000
_SIZES = (1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 4, 4, 4, 8, 8, 8, 16, 32, 64)
# How full the cluster is kept, and after how many requests a scheduler's view is brought up to date.
_HELD, _UP_TO_DATE = 0.9, 16
_CANDIDATES = 2
_MEMORY = 1 << 40


def parts(setting: Setting) -> Sequence[Row]:
    return [{"seed": seed} for seed in setting.seeds(5)]


def measure(setting: Setting, part: Row) -> Sequence[Row]:
    return [asked_of(_NODES, _REQUESTS, part["seed"])]


def conclude(rows: Sequence[Row]) -> MeasuredRows:
    return MeasuredRows(
        {
            "double_allocations": sum(row["double_allocations"] for row in rows),
            "p99_milliseconds": interval([row["p99_ms"] for row in rows]),
            "p50_milliseconds": interval([row["p50_ms"] for row in rows]),
            "approvals_per_second": interval([row["approvals_per_second"] for row in rows]),
            "rejected_share": interval([row["rejected_share"] for row in rows]),
        },
        len(rows),
        load=_HELD,
        why="the approver alone; what a whole master makes of it over the network is measured live, by `ganger bench "
        "verdicts`",
    )


def asked_of(nodes: int, requests: int, seed: int) -> Row:
    """The verdicts on so many requests, once the cluster is full."""
    random = np.random.default_rng(seed)
    view = _idle(nodes)
    views = [view.copy() for _ in range(_SCHEDULERS)]
    asked = [0] * _SCHEDULERS
    held_by: deque[tuple[Claim, ...]] = deque()
    bitmaps: dict[str, int] = {}
    held = approved = rejected = doubles = 0
    seconds: list[float] = []
    while len(seconds) < requests:
        scheduler, size = int(random.integers(_SCHEDULERS)), int(random.choice(_SIZES))
        while held + size > _HELD * nodes * _DEVICES:
            for claim in held_by.popleft():
                view.give(claim)
                bitmaps[claim.node] &= ~claim.device_mask
                held -= claim.device_mask.bit_count()
        asked[scheduler] += 1
        if asked[scheduler] % _UP_TO_DATE == 0:
            views[scheduler] = view.copy()
        shape = GangShape((Role("worker", size, TaskShape(1, 1_000, 1 << 30)),))
        found = candidates(views[scheduler], shape, limit=_CANDIDATES).candidates
        if not found:
            views[scheduler] = view.copy()
            continue
        began = time.thread_time()
        verdict = approve(view, shape, found, job="jobs/1")
        if isinstance(verdict, CandidateApproval):
            for claim in verdict.claims:
                view.take(claim, size)
        spent = time.thread_time() - began
        if isinstance(verdict, CandidateApproval):
            for claim in verdict.claims:
                doubles += bool(bitmaps.get(claim.node, 0) & claim.device_mask)
                bitmaps[claim.node] = bitmaps.get(claim.node, 0) | claim.device_mask
                held += claim.device_mask.bit_count()
                views[scheduler].take(claim, size)
            held_by.append(verdict.claims)
        else:
            for row in verdict.rows:
                views[scheduler].put(row)
        if held > _HELD * nodes * _DEVICES - max(_SIZES):
            seconds.append(spent)
            approved += isinstance(verdict, CandidateApproval)
            rejected += not isinstance(verdict, CandidateApproval)
    return {
        "double_allocations": doubles,
        "p50_ms": 1e3 * float(np.percentile(seconds, 50)),
        "p99_ms": 1e3 * float(np.percentile(seconds, 99)),
        "approvals_per_second": approved / sum(seconds),
        "rejected_share": rejected / len(seconds),
    }


def _idle(nodes: int) -> View:
    of = ConfigurationSet(
        "h100x8",
        "h100",
        _DEVICES,
        device_memory_bytes=80 << 30,
        groups=(
            DeviceGroup(LocalityLevel.NVLINK, 0xFF),
            DeviceGroup(LocalityLevel.SOCKET, 0x0F),
            DeviceGroup(LocalityLevel.SOCKET, 0xF0),
        ),
        sockets=(Socket(32_000, 0x0F), Socket(32_000, 0xF0)),
        memory_bytes=_MEMORY,
    )
    view = View([of])
    for number in range(nodes):
        view.put(NodeRow(f"n{number:05}", of.name, (1 << _DEVICES) - 1, (32_000, 32_000), _MEMORY))
    return view


APPROVALS = Experiment("B17", parts, measure, conclude, core=CoreUse.APPROVAL)
