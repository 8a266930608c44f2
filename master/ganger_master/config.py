"""The master's configuration: defaults, overridden by a TOML file, then by GANGER_MASTER_* variables, then by flags.

Parsed and validated once. All errors are reported together.
"""

from __future__ import annotations

import math
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from ganger.text import meant, parse_memory
from ganger.text import parse_duration as parse_finite_duration
from ganger.wire.endpoints import EndpointError, check_address, check_listen_address, is_loopback

from ganger_master.core.settings import DEFAULT_POLICY, SlowNodes, quotas_of
from ganger_master.core.tenancy import LEAST_IDLE_S, Partition, Team, partitions_of, teams_of, unknown_teams
from ganger_master.policies import live_policy_named

PREFIX: Final = "GANGER_MASTER_"

# Settings that are whole numbers, and what they count.
_COUNTS: Final = {
    "finished_jobs_limit": "jobs",
    "pending_jobs_per_user": "jobs",
    "requests_per_user": "requests",
    "changes_per_user": "changes",
    "streams_per_user": "streams",
}
_NEVER: Final = ("lost_after_s", "quantum_s", "logs_kept_s", "checkpoints_kept_s", "idle_warning_s", "idle_park_s")
_LEAST_S: Final = {
    # A job that is preempted at every plan makes no progress.
    "plan_every_s": 1.0,
    "quantum_s": 0.5,
    "usage_half_life_s": 60.0,
    # Below it a busy machine or database loses the lease of a healthy leader.
    "leader_lease_s": 0.5,
    **dict.fromkeys(("idle_warning_s", "idle_park_s"), LEAST_IDLE_S),
}
# One per second.
_MOST_MOVES_PER_HOUR: Final = 3600.0


class ConfigError(ValueError):
    """Errors of a configuration, one line each."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of a master. Those that the core has under the same name are explained in `core.settings`.

    `lost_after_s`: silence after which a node is lost; None: never, so that no job restarts on another node
    before an operator declares its node lost.
    """

    state_dir: Path
    listen: str = "127.0.0.1:0"
    # Directory of the master's certificate; with one it may listen anywhere.
    tls: Path | None = None
    # HOST:PORT at which people call with access tokens (`ganger tokens`), over TLS. Empty: nowhere.
    listen_tokens: str = ""
    # Directory of the authority (`ganger certs init`): daemons get new certificates from this master before theirs end.
    authority: Path | None = None
    # HOST:PORT that Prometheus scrapes; beyond loopback only with a certificate. Empty: no endpoint.
    metrics: str = ""
    database_url: str = ""
    # PostgreSQL: a stand-by leads once the leader has not renewed its lease for so long.
    leader_lease_s: float = 2.0
    storage: Path | None = None
    lost_after_s: float | None = 600.0
    policy: str = DEFAULT_POLICY
    plan_every_s: float = 300.0
    keep_place_after_s: float = 120.0
    quantum_s: float | None = 60.0
    moves_per_hour: float | None = None
    idle_warning_s: float | None = 1800.0
    idle_park_s: float | None = None
    slow_nodes: SlowNodes = SlowNodes.WARN
    test_nodes: bool = False
    test_command: str = "python3 -m ganger.node_test"
    # Default interval between checkpoints to storage; zero never.
    checkpoint_interval_s: float = 1800.0
    restart_delay_s: float = 10.0
    move_deadline_s: float = 600.0
    epoch_wait_s: float = 3600.0
    # The database was restored from a backup. The master mostly detects this by itself; with true it assumes it.
    restored: bool = False
    restored_wait_s: float = 20.0
    session_alive_s: float = 10.0
    events_kept_s: float = 30 * 86400.0
    # Time after the end of a job at which its logs and checkpoints are deleted; None: never.
    logs_kept_s: float | None = 30 * 86400.0
    checkpoints_kept_s: float | None = 30 * 86400.0
    # Number of finished jobs to keep; the jobs that ended first are dropped.
    finished_jobs_limit: int = 10_000
    # Limits of each user with a certificate of the role `user`: pending jobs, bytes of the specs of unfinished jobs,
    # requests and changes per second, and simultaneous streams (watch, follow logs). Operators have no limits.
    pending_jobs_per_user: int = 10_000
    spec_bytes_per_user: int = 256 * 1024 * 1024
    requests_per_user: int = 100
    changes_per_user: int = 10
    streams_per_user: int = 500
    # GPUs that a user may hold at once; "*": each user without an entry. No entry, no limit.
    quotas: Mapping[str, int] = field(default_factory=dict)
    # Teams by name, with their users, weights and limits.
    teams: Mapping[str, Team] = field(default_factory=dict)
    # Age at which a GPU-second of use counts half.
    usage_half_life_s: float = 7 * 86400.0
    # Partitions by name, with their nodes, users and limits; none: every job may be on every node.
    partitions: Mapping[str, Partition] = field(default_factory=dict)
    residue_bytes: int = 1 << 30
    scheduler_host: bool = True
    # Start the planner where the policy needs one.
    planner: bool = True
    log_level: str = "info"

    @property
    def database(self) -> str | Path:
        """Return a URL, or the path of a SQLite file."""
        return self.database_url or self.state_dir / "ganger.db"

    @property
    def database_path(self) -> Path | None:
        """Return the file of a SQLite database; None for any other database."""
        if not self.database_url:
            return self.state_dir / "ganger.db"
        found = re.fullmatch(r"sqlite(?:\+\w+)?:///(.+)", self.database_url)
        return Path(found[1]) if found is not None and found[1] != ":memory:" else None

    @property
    def storage_path(self) -> Path:
        return self.storage if self.storage is not None else self.state_dir / "storage"


def parse_duration(text: str) -> float | None:
    """Return the seconds of `90s`, `10m` or `1h30m`; None for `never`. Raises ValueError for any other text."""
    return None if text == "never" else parse_finite_duration(text)


def load(
    flags: Mapping[str, str | bool | None],
    environment: Mapping[str, str],
    file_text: str = "",
    file_name: str = "config",
) -> Config:
    """Return the configuration. Flags that are None were not given. Raises ConfigError with every error."""
    problems: list[str] = []
    raw: dict[str, object] = {}
    try:
        raw.update(tomllib.loads(file_text))
    except (ValueError, RecursionError) as error:
        problems.append(f"{file_name}: {error}")
    for name in sorted(_SHOWN):
        if (text := environment.get(PREFIX + name.upper())) is not None:
            raw[name] = text
    problems += _mistyped(environment)
    raw.update({name: value for name, value in flags.items() if value is not None})

    values: dict[str, object] = {}
    has_certificates = bool(raw.get("tls"))
    for given, value in raw.items():
        name = given if given in _NAMES or f"{given}_s" not in _NAMES else f"{given}_s"
        try:
            values[name] = _parse_one(name, value, has_certificates)
        except ValueError as error:
            problems.append(str(error))
    if "state_dir" not in values and not any(problem.startswith("state_dir") for problem in problems):
        problems.append("state_dir: name where the master keeps its state (--state-dir DIR)")
    if strangers := unknown_teams(values.get("partitions", {}), values.get("teams", {})):  # type: ignore[arg-type]
        problems.append(f"partitions: {strangers}")
    if problems:
        raise ConfigError(tuple(problems))
    return Config(**values)  # type: ignore[arg-type]


def _mistyped(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield what is wrong with variables whose names are almost those of settings. Others belong to other programs, as
    those that Kubernetes sets for a service."""
    for variable in sorted(environment):
        name = variable.removeprefix(PREFIX).lower()
        if variable.startswith(PREFIX) and name not in _SHOWN and (near := get_close_matches(name, _SHOWN, 1, 0.8)):
            yield f"{variable}: there is no such variable; is it {PREFIX}{near[0].upper()}?"


def _parse_one(name: str, value: object, has_certificates: bool) -> object:
    """Return the value of one setting. Raises ValueError, whose text begins with the setting's name."""
    if name == "listen":
        return _listen_address_of(value, has_certificates)
    if name == "listen_tokens":
        return _token_address_of(value, has_certificates)
    if name == "metrics":
        return _metrics_of(value, has_certificates)
    parse = _PARSERS.get(name)
    if parse is not None:
        return parse(name, value)
    if name in _NAMES and name.endswith("_s"):
        return _duration_of(name, value)
    raise ValueError(f"{name}: there is no such setting; {meant(name, _SHOWN)}")


def _path_of(name: str, value: object) -> Path:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}: must be a path")
    return Path(value).expanduser().absolute()


def _text_of(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}: must be text")
    return value


def _listen_address_of(value: object, has_certificates: bool) -> str:
    listen = str(value)
    try:
        check_listen_address(listen, has_certificates=has_certificates)
    except EndpointError as error:
        raise ValueError(f"listen: {error}") from None
    if has_certificates and listen.startswith("unix:"):
        raise ValueError(f"listen {listen!r}: certificates are for HOST:PORT; leave --tls out, or listen there")
    if listen.startswith("unix:") and not listen.startswith("unix:/"):
        raise ValueError(f"listen {listen!r}: the path of a Unix socket must be absolute")
    return listen


def _token_address_of(value: object, has_certificates: bool) -> str:
    address = str(value)
    try:
        check_address(address)
    except EndpointError as error:
        raise ValueError(f"listen_tokens: {error}") from None
    if address.startswith("unix:") or not has_certificates:
        raise ValueError(f"listen_tokens {address!r}: tokens are taken over TLS only: give HOST:PORT, and --tls")
    return address


def _command_of(name: str, value: object) -> str:
    text = _text_of(name, value)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{name}: {text!r}: {error}") from None
    if not words:
        raise ValueError(f"{name}: name a program")
    return text


def _count_of(name: str, value: object) -> int:
    if isinstance(value, bool) or not re.fullmatch(r"[0-9]{1,15}", str(value)) or not int(str(value)):
        raise ValueError(f"{name}: {value!r} is not a number of {_COUNTS[name]} of at least 1")
    return int(str(value))


def _bytes_of(name: str, value: object) -> int:
    """Return a size. The unit of a bare number is in the name of the setting."""
    try:
        return parse_memory(f"{value}B" if re.fullmatch(r"[0-9]+", str(value)) else value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _log_level_of(name: str, value: object) -> object:
    if value not in ("debug", "info", "warning", "error"):
        raise ValueError(f"{name} {value!r}: one of debug, info, warning, error")
    return value


def _policy_of(name: str, value: object) -> str:
    policy = _text_of(name, value)
    try:
        live_policy_named(policy)
    except KeyError as error:
        raise ValueError(str(error.args[0])) from None
    return policy


def _metrics_of(value: object, has_certificates: bool) -> str:
    address = str(value)
    try:
        check_address(address)
    except EndpointError as error:
        raise ValueError(f"metrics: {error}") from None
    if address.startswith("unix:"):
        raise ValueError(f"metrics {address!r}: Prometheus asks over TCP; write HOST:PORT")
    if not has_certificates and not is_loopback(address):
        raise ValueError(f"metrics {address!r}: beyond this machine only with certificates (--tls); or 127.0.0.1:PORT")
    return address


def _slow_nodes_of(name: str, value: object) -> SlowNodes:
    if value not in list(SlowNodes):
        raise ValueError(f"{name} {value!r}: one of {', '.join(SlowNodes)}")
    return SlowNodes(str(value))


def _moves_of(name: str, value: object) -> float | None:
    """Return a number of migrations per hour, which may be below one; None for `auto`."""
    if value == "auto":
        return None
    try:
        moves = float(str(value)) if not isinstance(value, bool) else math.nan
    except ValueError:
        moves = math.nan
    if not 0.0 <= moves <= _MOST_MOVES_PER_HOUR:
        most = f"{_MOST_MOVES_PER_HOUR:g}"
        raise ValueError(f"{name}: {value!r} is no number of moves from 0 to {most}, nor auto")
    return moves


def _duration_of(name: str, value: object) -> float | None:
    setting = name.removesuffix("_s")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{setting}: {value!r} is no duration")
    try:
        seconds = parse_duration(str(value))
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from None
    if seconds is None and name not in _NEVER:
        hint = "0 for none" if name == "checkpoint_interval_s" else "a duration, for example 10m or 1d"
        raise ValueError(f"{setting}: never is not possible here: write {hint}")
    if seconds is not None and seconds < (least := _LEAST_S.get(name, 0.0)):
        raise ValueError(f"{setting}: {value!r} is too short, at least {least:g} s{', or never' * (name in _NEVER)}")
    return seconds


def _boolean_of(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    if value in ("true", "yes", "1", "false", "no", "0"):
        return value in ("true", "yes", "1")
    raise ValueError(f"{name}: {value!r} is neither true nor false")


_NAMES: Final = frozenset(one.name for one in fields(Config))
# As people write them: durations have their units in their values.
_SHOWN: Final = frozenset(name.removesuffix("_s") for name in _NAMES)

_PARSERS: Final[Mapping[str, Callable[[str, object], object]]] = {
    **dict.fromkeys(("state_dir", "storage", "tls", "authority"), _path_of),
    **dict.fromkeys(_COUNTS, _count_of),
    **dict.fromkeys(("residue_bytes", "spec_bytes_per_user"), _bytes_of),
    **dict.fromkeys(("scheduler_host", "planner", "restored", "test_nodes"), _boolean_of),
    "moves_per_hour": _moves_of,
    "quotas": lambda name, value: quotas_of(value),
    "teams": lambda name, value: teams_of(value),
    "partitions": lambda name, value: partitions_of(value),
    "log_level": _log_level_of,
    "database_url": _text_of,
    "test_command": _command_of,
    "slow_nodes": _slow_nodes_of,
    "policy": _policy_of,
}
