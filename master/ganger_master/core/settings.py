"""Settings of the core, in seconds, and quotas as users write them: `alice=32,*=16`, or a table of the same.

Imports nothing heavy, since it parses command-line flags.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from ganger_master.core.tenancy import MOST_GPUS, Partition, Team

# Of a cluster and of a replay for which no policy is named.
DEFAULT_POLICY: Final = "ganger"


class SlowNodes(StrEnum):
    """What is done with a node on which jobs step more slowly than elsewhere."""

    IGNORE = "ignore"
    WARN = "warn"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """`lost_after_s` None: a node is lost only when an operator declares it lost."""

    lost_after_s: float | None = 600.0
    # Beyond lost_after: what clocks may drift and processes may be late in stopping themselves.
    lost_margin_s: float = 30.0
    # Least time that a restored master waits for daemons to call, also for those that its database does not have:
    # longer than daemons wait between two attempts.
    restored_wait_s: float = 20.0
    # Longest time between two heartbeats of a daemon; at most a quarter of `lost_after_s`.
    poll_s: float = 60.0
    # A node whose daemon is this much later than that takes no gangs until it calls. None: never, as modelled nodes.
    silent_margin_s: float | None = 30.0
    policy: str = "fifo"
    # Minimum time between two plans that preempt running jobs.
    plan_every_s: float = 300.0
    # Without a planner: time that a gang waits until room is kept for it.
    keep_place_after_s: float = 120.0
    # The quantum of time slices; None: no time-slicing.
    quantum_s: float | None = 60.0
    # Opportunistic migrations per node and hour; None: the planner decides.
    moves_per_hour: float | None = None
    storage: str = ""
    storage_token: str = ""
    checkpoint_interval_s: float = 1800.0
    # Time after a job's end at which its logs are deleted; None: never.
    logs_kept_s: float | None = 30 * 86400.0
    # A session that answered this recently keeps its name; a node that did cannot be declared lost.
    session_alive_s: float = 10.0
    request_kept_s: float = 24 * 3600.0
    # After how long without a step and without use of its GPUs a running job's user is warned, and after how long it is
    # parked; None: never. A partition may have other times.
    idle_warning_s: float | None = 1800.0
    idle_park_s: float | None = None
    # Whether a node is tested once a fault of it has gone, before it takes gangs; and the program of each test, which
    # gets the number of GPUs as its last argument.
    test_nodes: bool = False
    test_command: str = "python3 -m ganger.node_test"
    slow_nodes: SlowNodes = SlowNodes.WARN
    # Between SIGTERM and kill.
    grace_s: float = 10.0
    # What each parked process is presumed to keep of its device at OFFLOAD while its daemon cannot measure it.
    residue_bytes: int = 1 << 30
    # A move whose destination is not ready by then is given up; the source continues.
    move_deadline_s: float = 600.0
    # Longest wait of a plan for the end of an epoch, of a job that is scheduled at those.
    epoch_wait_s: float = 3600.0
    turn_lease_s: float = 0.5
    turns_at_once: int = 256
    # A job that found no place gets another lease after this, or when the view changes.
    turn_again_s: float = 5.0
    # After so many lost turns a user's scheduler is passed over for the default one.
    lost_turns_allowed: int = 3
    # Failed starts in a row, without a step, after which a job fails.
    launch_failures_allowed: int = 5
    # Before a job is tried again whose last two attempts failed by themselves; doubled with each further one, up to the
    # most. An attempt that ran for so long begins the count anew.
    restart_delay_s: float = 10.0
    restart_delay_most_s: float = 300.0
    restart_reset_s: float = 600.0
    # Moves of one job given up in a row, after which a drain parks it to storage.
    moves_aborted_allowed: int = 2
    # Blocked jobs ahead whose places are protected.
    protected_jobs: int = 4
    jobs_waiting_limit: int = 100_000
    finished_jobs_limit: int = 10_000
    # Bytes of the specs of finished jobs that are kept; beyond them the oldest are forgotten early. None: no limit.
    finished_bytes_limit: int | None = None
    # Limits of each user who is not an operator: pending jobs, and bytes of the specs of jobs that have not ended.
    pending_jobs_per_user: int = 10_000
    spec_bytes_per_user: int = 256 * 1024 * 1024
    # Request ids of finished jobs that are kept no longer: about 60 MB. Beyond these the oldest are forgotten early.
    former_requests_limit: int = 250_000
    # Devices that a user may hold at once; "": users that are not named. Absent: no limit.
    quota_devices: Mapping[str, int] = field(default_factory=dict)
    # By name; without any, use gives no job precedence.
    teams: Mapping[str, Team] = field(default_factory=dict)
    # Age at which a GPU-second of use counts half.
    usage_half_life_s: float = 7 * 86400.0
    # By name; without any, each job may be on every node.
    partitions: Mapping[str, Partition] = field(default_factory=dict)

    def idle_times_s(self, partition: str) -> tuple[float, float]:
        """Return after how long jobs of a partition that use no device are reported and parked; infinite: never."""
        terms = self.partitions.get(partition)
        warning = self.idle_warning_s if terms is None or terms.idle_warning_s is None else terms.idle_warning_s
        park = self.idle_park_s if terms is None or terms.idle_park_s is None else terms.idle_park_s
        return warning or math.inf, park or math.inf

    def idle_after_s(self, partition: str) -> float:
        """Return after how long without use of its devices daemons report that of a job; zero: not at all."""
        first = min(self.idle_times_s(partition))
        return 0.0 if first == math.inf else first

    @property
    def needs_planner(self) -> bool:
        return needs_planner(self.teams, self.partitions)


def needs_planner(teams: Mapping[str, Team], partitions: Mapping[str, Partition]) -> bool:
    """Return whether a planner places all jobs under every policy: only it follows the shares of teams, and the order
    in each partition."""
    return bool(teams or partitions)


def quotas_of(value: object) -> dict[str, int]:
    """Return GPUs by user from a table, or from the `alice=8,*=4` of variables and flags. Raises ValueError."""
    problems: list[str] = []
    if isinstance(value, str):
        pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
        named = Counter(user.strip() for user, _, _ in pairs)
        if twice := [user for user, times in named.items() if times > 1]:
            problems.append(f"{_named(twice)} twice: give each user one number")
        given = [(user.strip(), gpus.strip()) for user, _, gpus in pairs]
    elif isinstance(value, Mapping):
        given = list(value.items())
    else:
        raise ValueError(f"quotas: {value!r} is no table of users and GPUs")
    wrong = [user for user, gpus in given if not user or isinstance(gpus, bool) or not str(gpus).isdecimal()]
    if wrong:
        problems.append(f"{_named(wrong)}: write USER=GPUS, a number from 0 on, and *=GPUS for every other user")
    digits = len(str(MOST_GPUS))
    known = [(user, str(gpus)) for user, gpus in given if user not in wrong]
    if beyond := [user for user, gpus in known if len(gpus) > digits or int(gpus) > MOST_GPUS]:
        problems.append(f"{_named(beyond)}: at most {MOST_GPUS} GPUs; for any number give none")
    if problems:
        raise ValueError(f"quotas: {'; '.join(problems)}")
    return {user: int(str(gpus)) for user, gpus in given}


def _named(users: list[str]) -> str:
    return ", ".join(map(repr, users))
