"""In which order jobs go, by policy name.

A policy is a pure key over a job: smaller keys go first, ties are broken by the job's number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ganger_master.core.model import Job
from ganger_master.policies import fifo


@dataclass(frozen=True, slots=True)
class Policy:
    name: str
    # Smaller goes first.
    key: Callable[[Job], tuple[int, ...]]
    # Nobody may take what a job further ahead waits for, however small.
    protects_all: bool


POLICIES = {
    "fifo": Policy("fifo", fifo.key, protects_all=True),
    # The same order, but what is not kept for those ahead may be used meanwhile.
    "backfill": Policy("backfill", fifo.key, protects_all=False),
}


def policy_named(name: str) -> Policy:
    """KeyError, naming the known ones, for an unknown name."""
    try:
        return POLICIES[name]
    except KeyError:
        raise KeyError(f"there is no policy {name!r}; there are {', '.join(sorted(POLICIES))}") from None
