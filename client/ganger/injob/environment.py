"""The environment of a rank: what torch.distributed and the agent read. One place, so that daemons and tests agree."""

from __future__ import annotations

import os
from collections.abc import Mapping

# Two ranks of one job may share a core set with others: spinning threads would burn what the others need (measured: up
# to five times slower), passive ones give the core back.
_THREADING = {"OMP_WAIT_POLICY": "passive"}
_OF_JOBS = ("GANGER_ARRAY", "GANGER_DEVICES")


def rank_environment(
    *,
    base: Mapping[str, str],
    page: str,
    job_dir: str,
    socket: str,
    rank: int,
    world: int,
    local_rank: int,
    local_world: int,
    master_addr: str,
    master_port: int,
    threads: int,
    inject: str,
    restore: str = "",
) -> dict[str, str]:
    """Return the whole environment of one rank on top of what the user's shell had (``base``).

    ``inject`` is a directory of `ganger.injob.inject`; ``restore`` the path of a restore file or empty. ``threads`` 0
    leaves the number to the program. ``master_port`` 0 (a job without a rendezvous store) sets no rendezvous.
    """
    # What the master tells a member of an array, and a daemon who has virtual devices, is the job's; all else of that
    # name is set here.
    environment = {
        key: value for key, value in base.items() if not key.startswith("GANGER_") or key.startswith(_OF_JOBS)
    }
    environment.update(_THREADING)
    environment.update(
        GANGER_PAGE=page,
        GANGER_JOB_DIR=job_dir,
        GANGER_SOCKET=socket,
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(local_rank),
        LOCAL_WORLD_SIZE=str(local_world),
    )
    if restore:
        environment["GANGER_RESTORE"] = restore
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    if master_port:
        environment.update(
            MASTER_ADDR=master_addr,
            MASTER_PORT=str(master_port),
            # The store is a process of ours: no rank opens one. torch reads the restart count only in this mode, and
            # insists on it.
            TORCHELASTIC_USE_AGENT_STORE="True",
            TORCHELASTIC_RESTART_COUNT="0",
        )
    # Our directory first: it holds nothing but `ganger` and a sitecustomize that loads the user's own.
    parts = [inject, *(part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part and part != inject)]
    environment["PYTHONPATH"] = os.pathsep.join(parts)
    return environment
