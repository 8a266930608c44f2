"""The environment of a rank: what torch.distributed and the agent read. One place, so that daemons and tests agree."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

# Two ranks of one job may share a core set with others: spinning threads would burn what the others need (measured: up
# to five times slower), passive ones give the core back.
_THREADING = {"OMP_WAIT_POLICY": "passive"}
_OF_JOBS = ("GANGER_ARRAY", "GANGER_DEVICES")


class TaskPlace(NamedTuple):
    """Where a task is in its gang: ``rank`` of ``world``, ``local_rank`` of ``local_world`` on node ``node_rank`` of
    ``nodes``."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    node_rank: int = 0
    nodes: int = 1


def torchrun_environment(place: TaskPlace, host: str, port: int, *, run: str, has_store: bool) -> dict[str, str]:
    """Return what torchrun sets in a worker, but what names its own files.

    ``run`` names the gang. ``has_store``: a process of ours serves the rendezvous store at ``host``:``port``, so no
    rank opens one; otherwise rank 0 does.
    """
    environment = {
        "RANK": place.rank,
        "WORLD_SIZE": place.world,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_world,
        "NODE_RANK": place.node_rank,
        "GROUP_RANK": place.node_rank,
        "GROUP_WORLD_SIZE": place.nodes,
        "ROLE_RANK": place.rank,
        "ROLE_WORLD_SIZE": place.world,
        "ROLE_NAME": "default",
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": run,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        # Torch's store of an agent insists on it.
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    if has_store:
        environment["TORCHELASTIC_USE_AGENT_STORE"] = True
    return {name: str(value) for name, value in environment.items()}


def rank_environment(
    *,
    base: Mapping[str, str],
    page: str,
    job_dir: str,
    socket: str,
    threads: int,
    inject: str,
    restore: str = "",
    job: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the whole environment of one rank on top of what the user's shell had (``base``).

    ``inject``: a directory of `ganger.injob.bootstrap`. ``restore``: the path of a restore file, or empty.
    ``threads``: 0 leaves the number to the program. ``job``: variables about the job and its gang.
    """
    # The job keeps the variables that the master sets for members of an array and a daemon for virtual devices; all
    # others of that prefix are set here.
    environment = {
        key: value for key, value in base.items() if not key.startswith("GANGER_") or key.startswith(_OF_JOBS)
    }
    environment.update(_THREADING)
    environment.update(
        GANGER_PAGE=page,
        GANGER_JOB_DIR=job_dir,
        GANGER_SOCKET=socket,
        **(job or {}),
    )
    if restore:
        environment["GANGER_RESTORE"] = restore
    if threads:
        # one that the user gave stands
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    # Our directory first: it holds nothing but `ganger` and a sitecustomize that loads the user's own.
    parts = [inject, *(part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part and part != inject)]
    environment["PYTHONPATH"] = os.pathsep.join(parts)
    return environment
