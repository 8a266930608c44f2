"""Launch of the local ranks of a gang: everything before the fork. After a crash it is run again and does the rest, so
what is durable comes first: gang.json, then the pages with the order in them, then the group, then the forks."""

from __future__ import annotations

import json
import os
import pwd
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from ganger.agent.v1 import agent_pb2
from ganger.injob.launcher.namespaces import SHARED_MEMORY, TEMPORARY
from ganger.injob.launcher.process_record import TaskPlace, rank_environment, torchrun_environment
from ganger.injob.page import page_path
from ganger.injob.page_layout import VERSION
from ganger.launch_command import starts_python
from ganger.node_test import TEST_USER
from ganger.text import counted
from ganger.v1 import job_pb2
from ganger.wire.endpoints import host_of
from ganger.wire.resource_names import parse_job_name, parse_node_name

from ganger_daemon.checkpoints.node_checkpoints import Fetcher, FetchError
from ganger_daemon.checkpoints.storage import Unreadable, newest_found, parse_final, shard_name, token_found, verify
from ganger_daemon.core.part_facts import FoundCheckpoint, PartOutcomeKind
from ganger_daemon.gang.gang_context import GangContext, LocalPart, tasks_by_role
from ganger_daemon.images.packing import facts_of
from ganger_daemon.node.accounts import UMASK, Account
from ganger_daemon.node.daemon_files import GangPaths, write_json
from ganger_daemon.node.launchers import HASH_SEED
from ganger_daemon.node.process_identity import ProcessId, has_other_user

# A rank's share of the arena is rounded up to whole huge pages.
_ARENA_ALIGNMENT = 2 << 20
# A job that claims no memory may use all of its node's.
_IMAGE_MARGIN_BYTES = 64 << 30
# Characters; a program cannot be started with a variable of more than 128 KiB.
_HOSTS_MOST: Final = 64 * 1024


class LaunchRefusedError(Exception):
    """The gang cannot start here, by the message. `found`: complete checkpoints on storage, newest first."""

    kind = PartOutcomeKind.LAUNCH_FAILED

    def __init__(self, message: str, found: tuple[FoundCheckpoint, ...] = ()) -> None:
        super().__init__(message)
        self.found = found


class NodeFaultError(LaunchRefusedError):
    """The node is at fault, and no gang may start here before it is mended."""


class StateUnreadableError(LaunchRefusedError):
    """The checkpoint to start from is damaged or gone; the message names the files."""

    kind = PartOutcomeKind.STATE_UNREADABLE


class StateOutdatedError(LaunchRefusedError):
    """Storage has a newer checkpoint than the one it was to start from."""

    kind = PartOutcomeKind.STATE_OUTDATED


def check_owner(processes: Mapping[int, ProcessId], account: Account | None) -> None:
    """Refuse a process, by rank, that does not run as the account whose launcher has named it, before a signal or a
    write of root reaches it. Raises LaunchRefusedError."""
    for rank, process in processes.items():
        if account is not None and has_other_user(process.pid, account.uid):
            raise LaunchRefusedError(f"process {process.pid} of rank {rank} does not run as {account.name}")


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Address at which the ranks meet; `port` 0 for ranks that need not meet."""

    host: str = "127.0.0.1"
    port: int = 0
    store: bool = True


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What a rank restores from: `kind` "" (nothing), "checkpoint", "arena" or "image" (a process image)."""

    kind: str = ""
    path: str = ""
    step: int = 0
    # Number of ranks that saved it; zero where it does not matter.
    world: int = 0
    # The tasks of each role then, of a job in which these numbers may change; else empty.
    roles: Mapping[str, int] = field(default_factory=dict)


class RolePlace(NamedTuple):
    """A rank in its role: `number` of `size` tasks, from 0, `local_index` of `local_size` of them on this node."""

    name: str
    number: int
    size: int
    local_index: int
    local_size: int


def role_place(spec: job_pb2.JobSpec, part: LocalPart, rank: int) -> RolePlace:
    """Return the place of a rank. Ranks are numbered role by role; the only role of a job has all of them."""
    name, first, size = spec.roles[0].name if spec.roles else "", 0, part.world
    if len(spec.roles) > 1:
        for role in spec.roles:
            name, size = role.name, role.tasks
            if rank < first + size:
                break
            first += size
    local = [other for other in part.ranks if first <= other < first + size]
    return RolePlace(name, rank - first, size, local.index(rank), len(local))


def ranks_of_role(roles: Mapping[str, int], name: str) -> range:
    """Return the ranks of a role in a gang with these numbers of tasks."""
    first = sum(list(roles.values())[: list(roles).index(name)])
    return range(first, first + roles[name])


def program_of(spec: job_pb2.JobSpec, role: str) -> tuple[list[str], Mapping[str, str]]:
    """Return the command of a role's tasks, and the variables that they alone have."""
    found = next((program for program in spec.role_programs if program.role == role), job_pb2.RoleProgram())
    return list(found.command or spec.command), found.environment


def environment_of(spec: job_pb2.JobSpec, devices: Mapping[str, str], account: Account | None = None) -> dict[str, str]:
    """Return the user's environment with the variables of the devices; nothing of the daemon's own. `account`: that
    the job runs as, which has its home wherever the user submitted."""
    environment = dict(spec.environment)
    environment.setdefault("PATH", os.defpath)
    if account is not None:
        environment.update(HOME=account.home, USER=account.name, LOGNAME=account.name)
    environment.setdefault("HOME", os.path.expanduser("~"))
    environment.setdefault("PYTHONHASHSEED", HASH_SEED)
    environment.update(devices)
    return environment


def check_command(spec: job_pb2.JobSpec) -> None:
    """Check a command before it starts, with the rights of the calling thread on files. Raises LaunchRefusedError for a
    command or directory that cannot work, before anything is forked."""
    if not all(commands_of(spec)):
        raise LaunchRefusedError("the command is empty")
    directory = spec.working_directory or "/"
    if not os.path.isdir(directory):
        raise LaunchRefusedError(f"working directory {directory} does not exist on this node")


def commands_of(spec: job_pb2.JobSpec) -> list[list[str]]:
    """Return the commands of a job's roles."""
    return [program_of(spec, role.name)[0] for role in spec.roles] or [list(spec.command)]


def check_places(spec: job_pb2.JobSpec, storage: Path | None) -> None:
    """Check that a gang whose /tmp and /dev/shm are its own needs nothing that others have put there. Raises
    LaunchRefusedError."""
    for what, path in (("working directory", spec.working_directory), ("storage", str(storage or ""))):
        for place in (TEMPORARY, SHARED_MEMORY):
            if path.startswith(f"{place}/"):
                raise LaunchRefusedError(
                    f"{what} {path} is in {place}, and each job has a {place} of its own on this node"
                    " (ganger daemon --private-tmp): use another directory"
                )


def has_no_agent(spec: job_pb2.JobSpec) -> bool:
    """Return whether no hello is expected: the user wanted no agent, or the command of a role is no Python."""
    return spec.agent == job_pb2.JobSpec.AGENT_NONE or not all(map(starts_python, commands_of(spec)))


def reporting_ranks(spec: job_pb2.JobSpec, part: LocalPart) -> tuple[int, ...]:
    """Return the local ranks that report steps: those that run Python; all ranks where none does."""
    found = [rank for rank in part.ranks if starts_python(program_of(spec, role_place(spec, part, rank).name)[0])]
    return tuple(found) or part.ranks


def own_user() -> str:
    """Name of the user this daemon and its ranks run as; the number where it has no name."""
    uid = os.geteuid()
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def check_user(user: str) -> None:
    """Raises LaunchRefusedError for a user this daemon cannot become: ranks run as the daemon's own."""
    own = own_user()
    if user and user not in (own, str(os.geteuid()), TEST_USER):
        raise LaunchRefusedError(
            f"CANNOT_SWITCH_USER: this daemon runs as {own} and cannot become {user}; submit as {own}, or run a daemon"
            f" of {user} on this node"
        )


def restore_plan(
    desired: agent_pb2.DesiredGang,
    storage: Path | None,
    part: LocalPart,
    nodes: tuple[str, ...] = (),
    fetched: Path | None = None,
) -> RestorePlan:
    """Return the state that the ranks start from. Raises LaunchRefusedError, StateUnreadableError, StateOutdatedError.

    All nodes of a gang start from the checkpoint that the master names, and none takes another one. Each node reads
    only its own shards. The leader checks whether storage has a newer checkpoint, written while a node was cut off from
    the master; then the master has to name that one. `nodes`: whose disk `storage` is; none: all nodes see it.
    `fetched`: directory on it with those shards of the checkpoint that this part starts from."""
    source = desired.restore.WhichOneof("source")
    if source == "parked":
        return RestorePlan("arena", step=desired.restore.step)
    if part.leads and storage is not None:
        _check_newest(desired, storage, nodes)
    if source is None:
        return RestorePlan()
    if storage is None:
        raise LaunchRefusedError("the checkpoint lies on storage this node does not see")
    path = fetched or Path(desired.restore.checkpoint_path)
    if not path.is_absolute():
        path = storage / desired.job_uid / path
    # Where the tasks of roles change, a rank may need parts that any other rank has saved.
    found = verify(path, None if part.roles else part.ranks, is_whole=fetched is None)
    if isinstance(found, Unreadable):
        # The token is checked last: a checkpoint that vanished with its storage is not damaged.
        if not found.is_lasting or not (desired.restore.checkpoint_streams or token_found(storage)):
            raise LaunchRefusedError(f"checkpoint {path} cannot be read now: {found.why}")
        left = _on_storage(desired, storage, nodes)
        raise StateUnreadableError(f"checkpoint {path} cannot be restored: {found.why}", left)
    # A manifest has its keys sorted; ranks are numbered in the order of the job's roles.
    roles = {name: found.roles[name] for name in part.roles} if found.roles.keys() == part.roles.keys() else {}
    may_differ = desired.spec.gpus_max > 0 or roles
    if found.step < desired.restore.step or not (found.world == part.world or may_differ):
        is_of = f"is of step {found.step} and {counted(found.world, 'rank')}"
        text = f"checkpoint {path} {is_of}, not of {desired.restore.step} and {part.world}"
        raise StateUnreadableError(text, _on_storage(desired, storage, nodes))
    own = path / shard_name(part.ranks[0] % found.world)
    kind = "checkpoint" if facts_of(own) is None else "image"
    return RestorePlan(kind, str(path), found.step, found.world, roles)


def restore_from_nodes(
    desired: agent_pb2.DesiredGang, fetcher: Fetcher, part: LocalPart, node: str, account: Account | None
) -> RestorePlan:
    """Return the same for a checkpoint that lies on the disks of nodes: it is fetched to that of `node`, this one,
    first, for `account` where the job runs as one. The leader fetches all of it, and has a further copy then; the
    others what their ranks start from, which may be all where ranks are divided otherwise. Blocks. Raises the same
    errors."""
    path, uid = desired.restore.checkpoint_path, desired.job_uid
    streams, fetched = desired.restore.checkpoint_streams, None
    try:
        if part.leads or part.roles:
            fetcher.checkpoint(streams, uid, path, account)
        else:
            by_node = [list(member.ranks) for member in desired.members]
            fetched = fetcher.part(streams, uid, path, part.ranks, by_node, account)
    except FetchError as error:
        why = f"checkpoint {path} cannot be fetched: {error}"
        if error.is_lasting:
            raise StateUnreadableError(why, _on_storage(desired, fetcher.directory, (node,))) from error
        raise LaunchRefusedError(why) from error
    return restore_plan(desired, fetcher.directory, part, (node,), fetched)


def _check_newest(desired: agent_pb2.DesiredGang, storage: Path, nodes: tuple[str, ...]) -> None:
    named = parse_final(Path(desired.restore.checkpoint_path).name)
    unreadable = set(desired.restore.unreadable_paths)
    found = _on_storage(desired, storage, nodes)
    newest = next((one for one in found if one.path not in unreadable), None)
    if newest is not None and (named is None or (newest.epoch, newest.step) > (named.epoch, named.step)):
        than = f"than {desired.restore.checkpoint_path}" if named is not None else "and was to start from none"
        raise StateOutdatedError(f"storage has a newer checkpoint, {newest.path}, {than}", found)


def _on_storage(desired: agent_pb2.DesiredGang, storage: Path, nodes: tuple[str, ...]) -> tuple[FoundCheckpoint, ...]:
    found = newest_found(storage, desired.job_uid, desired.epoch)
    return tuple([replace(one, nodes=nodes) for one in found]) if nodes else found


def arena_bytes_per_rank(desired: agent_pb2.DesiredGang, ranks: int, device_memory_bytes: int) -> int:
    """Size of each local rank's arena. A claim without one gets room for its devices' memory: nothing is charged before
    it is touched, and what is claimed may be known only once the job has reported its peak."""
    devices = desired.claim.device_mask.bit_count()
    total = desired.claim.arena_bytes or devices * device_memory_bytes * 11 // 10 or desired.claim.memory_bytes
    return _aligned(-(-total // max(1, ranks)))


def bytes_ahead_per_rank(desired: agent_pb2.DesiredGang, ranks: int, arena_bytes: int) -> int:
    """Return the arena bytes that each local rank touches before its state arrives; zero where none comes from another
    arena. Touched pages are charged, so only what is claimed may be, and touching unused pages would take seconds."""
    if desired.restore.WhichOneof("source") != "parked" or not desired.claim.arena_bytes:
        return 0
    peak = desired.restore.parked.peak_device_bytes * desired.claim.device_mask.bit_count()
    return min(arena_bytes, _aligned(-(-peak * 11 // 10) // max(1, ranks))) if peak else arena_bytes


def _aligned(size: int) -> int:
    return -(-size // _ARENA_ALIGNMENT) * _ARENA_ALIGNMENT


def image_arena_bytes(desired: agent_pb2.DesiredGang, arena_bytes: int, device_memory_bytes: int) -> int:
    """Return the size of an arena for a process image, which is memory of the host, what is offloaded there, and of the
    devices. Memory is allocated as bytes arrive."""
    devices = desired.claim.device_mask.bit_count() * device_memory_bytes
    return _aligned(_IMAGE_MARGIN_BYTES + 2 * (desired.claim.memory_bytes + arena_bytes + devices))


def image_arena_name(paths: GangPaths, rank: int) -> str:
    return f"{paths.name(rank)}/image"


def is_distributed(desired: agent_pb2.DesiredGang, part: LocalPart) -> bool:
    """Return whether its tasks get the variables of torchrun: several tasks, one that may become several, or one whose
    spec requests them. Scripts that find them start a process group."""
    return part.world > 1 or desired.spec.gpus_max > 0 or bool(part.roles) or desired.spec.distributed


def role_hosts(desired: agent_pb2.DesiredGang) -> str:
    """Return the hosts of the tasks of each role, in the order of their ranks, as JSON; '' for a job without several
    roles, and where it were too long for a variable."""
    if len(desired.spec.roles) < 2:
        return ""
    hosts = {rank: host_of(member.peer_address) for member in desired.members for rank in member.ranks}
    found, first = {}, 0
    for role in desired.spec.roles:
        found[role.name] = [hosts.get(rank, "") for rank in range(first, first + role.tasks)]
        first += role.tasks
    text = json.dumps(found)
    return text if len(text) <= _HOSTS_MOST else ""


def job_environment(
    desired: agent_pb2.DesiredGang, paths: GangPaths, part: LocalPart, rank: int, rendezvous: Rendezvous, hosts: str
) -> dict[str, str]:
    """Return the variables that describe its job and its gang to a rank. `hosts`: as of `role_hosts`."""
    nodes = [parse_node_name(member.node) for member in desired.members]
    role = role_place(desired.spec, part, rank)
    environment = {
        "GANGER_JOB_ID": str(parse_job_name(desired.job)),
        "GANGER_JOB_NAME": desired.spec.display_name,
        "GANGER_ATTEMPT": str(desired.attempt or 1),
        "GANGER_NODES": ",".join(nodes),
        "GANGER_ROLE": role.name,
        "GANGER_ROLE_RANK": str(role.number),
        "GANGER_ROLE_SIZE": str(role.size),
    }
    has_roles = len(desired.spec.roles) > 1
    if has_roles:
        environment["GANGER_ROLE_SIZES"] = json.dumps(tasks_by_role(desired.spec))
    if hosts:
        environment["GANGER_ROLE_HOSTS"] = hosts
    if is_distributed(desired, part):
        own = next((number for number, member in enumerate(desired.members) if rank in member.ranks), 0)
        place = TaskPlace(rank, part.world, role.local_index, role.local_size, own, len(nodes))
        environment |= torchrun_environment(
            place, rendezvous.host, rendezvous.port, run=paths.group, has_store=rendezvous.store
        )
        if has_roles:
            environment |= {"ROLE_NAME": role.name, "ROLE_RANK": str(role.number), "ROLE_WORLD_SIZE": str(role.size)}
    return environment


def source_of(restore: RestorePlan, rank: int, role: RolePlace) -> dict[str, int]:
    """Return which rank saved what a rank starts from and, where roles have ranges, all ranks of its role there."""
    if not restore.roles:
        return {"rank": rank % restore.world if restore.world else rank}
    saved = ranks_of_role(restore.roles, role.name)
    return {"rank": saved[role.number % len(saved)], "first": saved.start, "ranks": len(saved)}


def _write_restore(paths: GangPaths, rank: int, role: RolePlace, restore: RestorePlan, ahead: int) -> str:
    """Write what a rank reads of the state that it starts from. Return the file's path; empty where there is none."""
    if not restore.kind or restore.kind == "image":
        return ""
    fields = {"kind": restore.kind, "path": restore.path, "step": restore.step, "size": ahead}
    fields |= source_of(restore, rank, role)
    write_json(paths.restore(rank), fields, mode=paths.read_mode)
    return str(paths.restore(rank))


def launch_mapping(
    context: GangContext,
    desired: agent_pb2.DesiredGang,
    rank: int,
    *,
    environment: Mapping[str, str],
    devices: Mapping[str, str],
    rendezvous: Rendezvous,
    restore: RestorePlan,
    cgroup_files: tuple[str, ...],
    threads: int,
    arena_bytes: int,
    hosts: str,
) -> dict[str, Any]:
    """Return the launcher's request for one rank, which is also rank-K.launch.json. `environment`: of the gang.
    `devices`: variables of the devices that the rank sees. `hosts`: as of `role_hosts`."""
    host, paths, part = context.host, context.paths, context.part
    ahead = bytes_ahead_per_rank(desired, len(part.ranks), arena_bytes)
    place = role_place(desired.spec, part, rank)
    command, own_environment = program_of(desired.spec, place.name)
    env = rank_environment(
        base={**environment, **own_environment, **devices},
        page=page_path(str(paths.run), rank),
        job_dir=str(paths.work),
        socket=str(paths.socket),
        threads=threads,
        inject=host.launchers.inject,
        restore=_write_restore(paths, rank, place, restore, ahead),
        job=job_environment(desired, paths, part, rank, rendezvous, hosts),
    )
    if desired.spec.agent == job_pb2.JobSpec.AGENT_NONE:
        env["GANGER_AGENT"] = "none"
    account = paths.account
    cpus = host.cores.cpus_of(context.cores_by_rank()[rank])
    mapping: dict[str, Any] = {
        "name": paths.name(rank),
        "argv": command,
        "env": env,
        "cwd": desired.spec.working_directory or "/",
        "log": str(host.logs.begin(desired.job_uid, rank, desired.epoch, account)),
        "page": page_path(str(paths.run), rank),
        "page_version": VERSION,
        "exit_path": str(paths.exit(rank)),
        "cgroup_procs": list(cgroup_files),
        "freezer": host.cgroups.freezer_file(paths.group),
        # A group of the kernel holds the cores of all roles.
        "cores": list(cpus) or None if part.pools or not cgroup_files else None,
        "threads": threads,
        "arena": {"name": paths.name(rank), "bytes": arena_bytes} if arena_bytes else None,
        "touched_bytes": ahead,
        "limits": {name: list(pair) for name, pair in host.launchers.limits.items()},
    }
    if account is not None:
        mapping |= for_account(paths)
        env["GANGER_ORDERS"] = str(paths.orders)
    write_json(paths.launch(rank), mapping)
    return mapping


def for_account(paths: GangPaths) -> dict[str, Any]:
    """Return the fields of a launch whose launcher is another account's: it may write no file of a control group."""
    return {"gate": str(paths.gate), "cgroup_procs": [], "freezer": "", "umask": UMASK}


def free_port(host: str) -> int:
    """Return a port that no process listens on now. Another process may take it before it is used."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
