"""Launch of one gang's local ranks through a launcher, and the cleanup after their end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial, reduce
from operator import or_
from pathlib import Path
from typing import Any

from ganger.agent.v1 import agent_pb2
from ganger.failpoints import hit
from ganger.injob.launcher.client import Launcher, LauncherError
from ganger.injob.page import page_path
from ganger.injob.process_identity import start_ticks
from ganger.injob.state_image import ImageError
from ganger.text import counted, os_failure

from ganger_daemon.cgroups.contract import Variant
from ganger_daemon.cgroups.controllers import set_affinity
from ganger_daemon.checkpoints.storage import give_storage, shard_name
from ganger_daemon.core.part_facts import PartOutcome, PartOutcomeKind
from ganger_daemon.gang.control_pages import page_order, write_details
from ganger_daemon.gang.exit_watcher import ExitWatcher
from ganger_daemon.gang.gang_context import ACCOUNT, GangContext, OfGang, ReceivedOrders, threads_by_rank, to_json
from ganger_daemon.gang.gang_hooks import GangHooks
from ganger_daemon.gang.gang_launcher import GangLauncher, GangRendezvous
from ganger_daemon.gang.launch_gate import gate_of
from ganger_daemon.gang.launch_plan import (
    LaunchRefusedError,
    NodeFaultError,
    Rendezvous,
    RestorePlan,
    arena_bytes_per_rank,
    check_command,
    check_owner,
    check_places,
    check_user,
    environment_of,
    image_arena_bytes,
    launch_mapping,
    restore_from_nodes,
    restore_plan,
    role_hosts,
    role_place,
)
from ganger_daemon.gang.process_image import GangImages
from ganger_daemon.images.contract import ImageRefusedError
from ganger_daemon.node.accounts import Account, AccountRefusedError, seen_by
from ganger_daemon.node.daemon_files import make_directory, open_plain, read_json, remove_tree, sync_file, write_json
from ganger_daemon.node.launchers import children_of, interpreter_of
from ganger_daemon.node.node_context import StorageWait
from ganger_daemon.node.process_identity import (
    ENDING_S,
    NO_PROCESS,
    FoundProcesses,
    ProcessId,
    RankProcess,
    holds_files_of_rank,
    parent_of,
    recognise,
    send_signal,
    stranger_text,
    strays,
)

log = logging.getLogger(__name__)

# Exit code of a shell that could not execute a command.
_NOT_EXECUTED = 127
_STRAYS_LOOK_S = 0.01
# Longest read of all shards of a node; how long the gang's loop waits for it at once; when it is reported.
_READING_S = 3600.0
_READING_PATIENCE_S = 0.2
_READING_QUIET_S = 5.0


class RankLaunch(OfGang):
    """Steps of one gang's launch. Idempotent: the work of a former daemon is found and kept.

    `is_done`: the local ranks were launched, at `launched_at` (seconds of the monotonic clock); `failure`: how the
    launch failed; `is_under_way`: a launch may start processes at any moment; `awaits_image`: the image of its
    processes is still to come from another node."""

    def __init__(
        self,
        context: GangContext,
        exits: ExitWatcher,
        launcher: GangLauncher,
        images: GangImages,
        blocked_by: Callable[[], str],
        cores_kept_by: Callable[[], str],
        desired: agent_pb2.DesiredGang,
    ) -> None:
        """`blocked_by` returns the job that is on the gang's devices; `cores_kept_by`: a job that still has cores to
        give back. Both return an empty text for none."""
        super().__init__(context)
        self._exits = exits
        self._launcher = launcher
        self._images = images
        self._blocked_by = blocked_by
        self._cores_kept_by = cores_kept_by
        self._reading: asyncio.Future[RestorePlan] | None = None
        self._reading_wait = StorageWait()
        self._noted: dict[int, ProcessId] = {}  # by a former daemon
        self.awaits_image = False
        self._arriving: asyncio.Task[None] | None = None
        self.is_done = False
        self.launched_at = 0.0
        self.failure: PartOutcome | None = None
        self._is_launching = False
        self.hooks = GangHooks(context, desired, self.kill_left)
        self.rendezvous = GangRendezvous(context, images)

    def recall(self, left: Mapping[str, Any]) -> None:
        self.awaits_image = bool(left.get("awaits_image", False))
        self._noted = {int(rank): ProcessId(*map(int, process)) for rank, process in left.get("ranks", {}).items()}

    def journal(self) -> dict[str, Any]:
        ranks = {rank: list(process) for rank, process in self._exits.processes.items()}
        return {"ranks": ranks, "awaits_image": self.awaits_image}

    @property
    def is_under_way(self) -> bool:
        # Not once the prolog has ended: the gang may have to wait for its time slice then.
        return self._is_launching or self.hooks.is_running

    async def attempt(self, orders: ReceivedOrders) -> bool:
        """Launch the ranks, or record why that failed. Return False while devices, cores, storage or the prolog are not
        ready."""
        try:
            launched = await self._attempt(orders)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if not isinstance(error, LaunchRefusedError | LauncherError | OSError):
                log.exception("launch failed", extra={"job": orders.desired.job})
            self.failure = _outcome_of(error)
            return True
        if launched is None:
            return False
        hit("between-fork-and-page")
        self.confirm(launched)
        return True

    def confirm(self, processes: Mapping[int, ProcessId]) -> None:
        """Watch the launched ranks."""
        self._watch(processes)
        # one that a former daemon has restored needs no image
        self.awaits_image = self.awaits_image and not processes
        self.is_done, self.launched_at = True, time.monotonic()

    async def _attempt(self, orders: ReceivedOrders) -> dict[int, ProcessId] | None:
        desired = orders.desired
        if self.hooks.is_prolog_running:
            return None
        account = await asyncio.to_thread(self._account_of, desired)
        if self._blocked_by():
            return None
        restore = await self._read_storage(desired, account)
        if restore is None:
            return None
        if self._blocked_by():
            # Another gang was started on its devices meanwhile, and may save a newer state.
            self._reading = None
            return None
        if shortage := self._take_cores(desired):
            if self._cores_kept_by():
                return None
            raise LaunchRefusedError(f"no cores: {shortage}")
        # from here on no other gang may start on its devices
        self._is_launching = True
        try:
            await asyncio.to_thread(self._paths.make_for, account)
            if not read_json(self._paths.gang):
                noted = {} if account is None else {ACCOUNT: account.journal()}
                write_json(self._paths.gang, to_json(desired) | noted)
            if account is not None:
                await self._give_storage(account)
            # the disk may take its time while the ranks are prepared; the launch is reported only once it is done
            durable = asyncio.ensure_future(asyncio.to_thread(sync_file, self._paths.gang))
            try:
                if not self.hooks.open():
                    return None
                self._reading = None
                return await self._launch(desired, orders, restore)
            finally:
                await durable
        finally:
            self._is_launching = False

    def _account_of(self, desired: agent_pb2.DesiredGang) -> Account | None:
        """Return the account that the ranks run as; None for the daemon's own. Raises LaunchRefusedError where they
        cannot run, or not with this command."""
        host = self._host
        try:
            # a launch that a former daemon has begun goes on as it began
            is_begun = bool(read_json(self._paths.gang))
            account = self._paths.account if is_begun else host.accounts.of(desired.user)
        except AccountRefusedError as error:
            raise LaunchRefusedError(str(error)) from error
        if account is None and not host.serves_all_users:
            check_user(desired.user)
        seen_by(account, lambda: check_command(desired.spec))
        if account is not None and not host.places_shared:
            check_places(desired.spec, host.storage.path)
        return account

    async def _give_storage(self, account: Account) -> None:
        """Make the job's directories on storage, where there is one. Raises LaunchRefusedError."""
        storage, path = self._host.storage, self._context.proved_storage
        if path is None:
            return
        try:
            await storage.work.run(give_storage, path, self._paths.job_uid, account, within_s=_READING_S)
        except OSError as error:
            why = f"its directory on storage cannot be given to account {account.name}: {os_failure(error)}"
            raise LaunchRefusedError(why) from error

    async def _launch(
        self, desired: agent_pb2.DesiredGang, orders: ReceivedOrders, restore: RestorePlan
    ) -> dict[int, ProcessId]:
        paths, host, pages = self._paths, self._host, self._pages
        share = max(1, sum(desired.claim.millicores) // 1000 // len(self._part.ranks))
        threads = threads_by_rank(self._part, desired, share)
        # run directory, then the pages with the order in them, before any rank could read them
        account = paths.account
        make_directory(paths.run)
        is_image = _is_image(desired, restore)
        pages.create(threads, is_restored=is_image, account=account)
        pages.extend_lease(host.lease_until_ns or 0)
        order = page_order(orders.wanted)
        assert order is not None, "a gang that is to stop is not launched"
        write_details(self._context.proved_storage, paths, str(order.seq))
        pages.write_order(order)
        environment = environment_of(desired.spec, host.devices.environment(desired.claim.device_mask), account)
        async with host.launch_lock:
            files = await asyncio.to_thread(self._make_group, desired)
        # not before: while the kernel waits, no group can be made
        hastened = asyncio.ensure_future(asyncio.to_thread(host.cgroups.hasten))
        device_memory = host.inventory.configuration_set.device_memory_bytes
        self._launcher.arena_bytes = arena_bytes_per_rank(desired, len(self._part.ranks), device_memory)
        self._launcher.image_arena_bytes = image_arena_bytes(desired, self._launcher.arena_bytes, device_memory)
        if is_image and account is not None:
            launcher = await asyncio.to_thread(self._launcher.become_restorer)
        else:
            launcher = await asyncio.to_thread(self._get_launcher, desired, environment, account)
        if not is_image:
            await asyncio.to_thread(self._images.make_names, desired, launcher.pid)
        rendezvous = await self.rendezvous.meet(desired, launcher, orders, is_image=is_image)
        # without this note, a daemon that finds the ranks would know neither their cores nor their arenas
        self._context.write_notes()
        processes = await asyncio.to_thread(
            self._fork_all, desired, environment, launcher, rendezvous, restore, files, threads
        )
        await hastened
        return processes

    def _visible_mask(self, desired: agent_pb2.DesiredGang, rank: int) -> int:
        """Return the devices that a rank sees: the gang's, of several roles those of the rank's role."""
        if len(desired.spec.roles) < 2:
            return desired.claim.device_mask
        place = role_place(desired.spec, self._part, rank)
        its_ranks = range(rank - place.number, rank - place.number + place.size)
        masks = zip(self._part.ranks, self._part.device_masks, strict=True)
        return reduce(or_, [mask for other, mask in masks if other in its_ranks])

    def _get_launcher(
        self, desired: agent_pb2.DesiredGang, environment: Mapping[str, str], account: Account | None
    ) -> Launcher:
        """Return the launcher of the command's interpreter, with the gang's places. Raises LauncherError, OSError."""
        launchers, spec, paths = self._host.launchers, desired.spec, self._paths
        paths.has_places = account is not None and not self._host.places_shared

        def seek() -> tuple[str, str]:
            found = interpreter_of(tuple(spec.command), environment, spec.working_directory, launchers.interpreter)
            return found, launchers.key(found, environment, account, is_private=paths.has_places)

        interpreter, key = seen_by(account, seek)
        while True:
            self._launcher.key = launchers.take(key, paths.group) if paths.has_places else key
            launcher = launchers.get(self._launcher.key, interpreter, environment, account)
            other = self._images.unit.names.give_places(launcher.pid) if paths.has_places else ""
            if not other:
                return launcher
            # a former daemon's note of it was lost
            launchers.hold(self._launcher.key, other)

    async def _read_storage(self, desired: agent_pb2.DesiredGang, account: Account | None) -> RestorePlan | None:
        """Return what the ranks start from, as `account`; None while it is being read: the gang's loop goes on
        meanwhile.

        Kept until the launch, so that a gang that waits for cores does not read its checkpoint again and again."""
        if self._reading is None:
            host = self._host
            work = partial(host.storage.work.run, within_s=_READING_S)
            if desired.restore.checkpoint_streams:
                reading = work(restore_from_nodes, desired, host.fetcher, self._part, host.node, account)
            else:
                nodes = (host.node,) if self._part.on_nodes else ()
                reading = work(restore_plan, desired, self._context.proved_storage, self._part, nodes)
            self._reading = asyncio.ensure_future(reading)
            if desired.restore.checkpoint_streams:
                self._reading.add_done_callback(lambda _: host.note_fetched())
            self._reading_wait = StorageWait()
        await asyncio.wait((self._reading,), timeout=_READING_PATIENCE_S)
        if not self._reading.done():
            return None
        try:
            return self._reading.result()
        except BaseException:
            self._reading = None
            raise

    @property
    def trouble(self) -> str:
        """Return what the launch waits for, once that takes long; empty for nothing."""
        if self._reading is None or self._reading.done() or self._reading_wait.passed_s < _READING_QUIET_S:
            return ""
        return self._host.storage.trouble or f"it has been reading its checkpoint since {self._reading_wait.since}"

    def recognise(self, children: Mapping[str, RankProcess]) -> dict[int, FoundProcesses]:
        """Return the process of each local rank, from launchers, the notes of a former daemon and the pages."""
        paths = self._paths
        members = frozenset(self._host.cgroups.pids(paths.group))

        def belongs(rank: int, process: ProcessId) -> bool:
            log_path = self._host.logs.segment_path(paths.job_uid, rank, paths.epoch)
            page = Path(page_path(str(paths.run), rank))
            return process.pid in members or holds_files_of_rank(process.pid, log_path, page)

        def found(rank: int) -> FoundProcesses:
            noted = [self._noted.get(rank, NO_PROCESS), self._pages.process(rank)]
            return recognise(children.get(paths.name(rank)), noted, partial(belongs, rank))

        return {rank: found(rank) for rank in self._part.ranks}

    async def clean(self) -> None:
        """Remove the group, cores and arenas of ended ranks. The run directory goes with the gang's outcome."""
        group = self._paths.group
        await self.kill_left()
        await asyncio.to_thread(self._launcher.release)
        await asyncio.to_thread(self._images.unit.clean)
        if not await asyncio.to_thread(self._host.cgroups.destroy, group):
            log.warning("group not removed", extra={"group": group})
        self._host.cores.release(group)
        # the rendezvous store ends when its file is gone
        await asyncio.to_thread(remove_tree, self._paths.rendezvous)
        await asyncio.to_thread(self._launcher.drop_arenas)

    async def kill_left(self) -> None:
        """Kill processes that ended ranks have left behind."""
        await asyncio.to_thread(self._host.cgroups.kill, self._paths.group)
        if self._host.cgroups.variant is Variant.NONE:
            await asyncio.to_thread(self._kill_strays)

    def _kill_strays(self) -> None:
        """Block until they are gone, or will not go. Without groups a process may have left its rank's session."""
        pages = [Path(page_path(str(self._paths.run), rank)) for rank in self._part.ranks]
        names = [self._images.unit.names.page(page) for page in pages]
        deadline, logged = time.monotonic() + ENDING_S, set()
        inject = self._host.launchers.inject
        while found := [ProcessId(pid, start_ticks(pid) or 0) for pid in strays(pages, inject, names)]:
            for process in sorted(found):
                if send_signal(process, signal.SIGKILL) and process not in logged:
                    logged.add(process)
                    log.warning("stray process killed", extra={"group": self._paths.group, "pid": process.pid})
            if time.monotonic() > deadline:
                return
            time.sleep(_STRAYS_LOOK_S)

    def _take_cores(self, desired: agent_pb2.DesiredGang) -> str:
        host, source = self._host, desired.restore.parked
        if self._paths.group in host.cores.held:
            return ""
        is_resized = bool(source.epoch) and sum(len(member.ranks) for member in source.members) != self._part.world
        former = host.paths.of(desired.job_uid, source.epoch).group if is_resized else ""
        near = host.inventory.near(desired.claim.device_mask)
        return host.cores.take(self._paths.group, desired.claim.millicores, near, former=former)

    def _make_group(self, desired: agent_pb2.DesiredGang) -> tuple[str, ...]:
        cgroups, group = self._host.cgroups, self._paths.group
        cgroups.create(group, self._pool(desired.claim.device_mask))
        cpus = self._host.cores.cpus(group)
        if cpus:
            cgroups.set_cpus(group, cpus)
            cgroups.set_quota(group, self._host.cores.quota(group))
        if desired.claim.memory_bytes:
            cgroups.set_memory_limit(group, desired.claim.memory_bytes + desired.claim.arena_bytes)
        if self._paths.account is not None:
            self._host.fence(group, desired.claim.device_mask)
        return cgroups.join_files(group)

    def _pool(self, device_mask: int) -> str:
        cores = self._host.device_cores * device_mask.bit_count()
        if not cores:
            return ""
        # daemons of one machine may share a root
        pool = f"{self._host.node}-devices-{device_mask:x}"
        if not self._host.cgroups.make_pool(pool, cores):
            raise LaunchRefusedError(
                f"no CPU quota of {counted(cores, 'core', 'g')}: {self._host.cgroups.capabilities['cpu_quota']}"
            )
        return pool

    def _fork_all(
        self,
        desired: agent_pb2.DesiredGang,
        environment: Mapping[str, str],
        launcher: Launcher,
        rendezvous: Rendezvous,
        restore: RestorePlan,
        files: tuple[str, ...],
        threads: Mapping[int, int],
    ) -> dict[int, ProcessId]:
        is_image = _is_image(desired, restore)
        if is_image and (why := self._images.why_not(desired)):
            raise LaunchRefusedError(f"its state is a process image, which this node cannot restore: {why}")
        found = self.recognise(children_of(launcher))
        processes: dict[int, ProcessId] = {}
        mappings: dict[int, dict[str, Any]] = {}
        hosts = role_hosts(desired)
        for rank in self._part.ranks:
            if found[rank].is_lost:
                raise LaunchRefusedError(stranger_text(rank, found[rank]))
            if found[rank].process.pid:
                processes[rank] = found[rank].process  # a former daemon had it forked
            else:
                mappings[rank] = launch_mapping(
                    self._context,
                    desired,
                    rank,
                    environment=environment,
                    devices=self._host.devices.environment(self._visible_mask(desired, rank)),
                    rendezvous=rendezvous,
                    restore=restore,
                    cgroup_files=files,
                    threads=threads[rank],
                    arena_bytes=self._launcher.arena_bytes,
                    hosts=hosts,
                )
        if mappings and is_image and restore.kind != "image":
            self.awaits_image = True
        elif mappings and is_image:
            path = Path(restore.path)
            if self._images.place != path.parent.name and self._paths.account is not None:
                raise LaunchRefusedError(f"{path} is a process image that its job may have written")
            with open_plain(path / shard_name(self._part.ranks[0]), is_jobs_directory=True) as shard:
                processes |= self._restore(launcher, mappings, shard.fileno(), is_moved=False)
        else:
            processes |= self._fork(launcher, mappings, desired, rendezvous)
        return dict(sorted(processes.items()))

    def _watch(self, processes: Mapping[int, ProcessId]) -> None:
        """Watch ranks. They, and a parent that they have in common, belong to the gang's group."""
        for rank, process in processes.items():
            self._exits.watch(rank, process)
        pids = [process.pid for process in self._exits.live()]
        parents = {parent_of(pid) for pid in pids} if len(pids) > 1 and self._images.are_possible else set()
        for pid in [*pids, *(parents if len(parents) == 1 else ())]:
            self._host.cgroups.track(self._paths.group, pid)
        if self._part.pools:
            # A tracked process may run on all cores of its group.
            for rank, ids in self._context.cores_by_rank().items():
                if rank in processes and self._exits.is_live(rank):
                    set_affinity((processes[rank].pid,), self._host.cores.cpus_of(ids))

    def _fork(
        self,
        launcher: Launcher,
        mappings: Mapping[int, dict[str, Any]],
        desired: agent_pb2.DesiredGang,
        rendezvous: Rendezvous,
    ) -> dict[int, ProcessId]:
        named = [self._images.unit.names.give(one) for one in mappings.values()]
        has_siblings = len(self._part.ranks) > 1
        have_parent = has_siblings and self._images.are_possible and len(mappings) == len(self._part.ranks)
        groups = self._host.cgroups.join_files(self._paths.group)
        with gate_of(self._paths, groups, list(mappings.values()), has_parent=have_parent):
            if have_parent:
                forked = launcher.fork_together(named, rendezvous.host if rendezvous.store else "").ranks
            else:
                forked = launcher.fork_all(named)
        found = dict(zip(mappings, forked, strict=True))
        check_owner(found, self._paths.account)
        return found

    def _restore(
        self, launcher: Launcher, mappings: Mapping[int, dict[str, Any]], source: int, *, is_moved: bool
    ) -> dict[int, ProcessId]:
        procs = self._host.cgroups.join_files(self._paths.group)
        if self._launcher.is_restorer:
            freezer = self._host.cgroups.freezer_file(self._paths.group)
            ours = {"cgroup_procs": list(procs), "freezer": freezer}
            mappings = {
                rank: {**one, **ours, "exit_path": str(self._paths.exit(rank))} for rank, one in mappings.items()
            }
        try:
            return self._images.restore(launcher, mappings, source, procs=procs, is_moved=is_moved)
        except (ImageRefusedError, ImageError) as error:
            raise LaunchRefusedError(f"its process image cannot be restored: {error}") from error

    def follow_arrival(self, is_whole: bool) -> None:
        """Restore the process whose image comes from another node, once it has come whole."""
        if self.awaits_image and is_whole and self._arriving is None and not self._images.trouble:
            self._arriving = asyncio.create_task(self._arrive())

    async def _arrive(self) -> None:
        try:
            processes = await asyncio.to_thread(self._restore_arrived)
        except Exception as error:
            # whatever it is: without a reason here it would be tried again and again, and the move would never end
            if not isinstance(error, LaunchRefusedError | LauncherError | OSError):
                log.exception("image not restored", extra={"group": self._paths.group})
            self._images.trouble = os_failure(error)
        else:
            self.awaits_image = False
            self._watch(processes)
            self._context.write_notes()
        finally:
            self._arriving = None
            self._context.wake()

    def _restore_arrived(self) -> dict[int, ProcessId]:
        launcher = self._launcher.running() or self._launcher.adopt_anew()
        arena = self._launcher.open_image_arena(self._part.ranks[0], is_made=False)
        try:
            mappings = {rank: read_json(self._paths.launch(rank)) for rank in self._part.ranks}
            return self._restore(launcher, mappings, arena, is_moved=True)
        finally:
            os.close(arena)


def _is_image(desired: agent_pb2.DesiredGang, restore: RestorePlan) -> bool:
    """Return whether the ranks go on from a process image, from storage or from another node."""
    return restore.kind == "image" or (restore.kind == "arena" and desired.restore.parked.is_process_image)


def _outcome_of(error: Exception) -> PartOutcome:
    kind = error.kind if isinstance(error, LaunchRefusedError) else PartOutcomeKind.LAUNCH_FAILED
    found = error.found if isinstance(error, LaunchRefusedError) else ()
    # The exit code shows the master that the command is at fault, and not the node.
    is_command = isinstance(error, LauncherError) and error.reason == "COMMAND"
    exit_code = _NOT_EXECUTED if is_command else 0
    message = os_failure(error)
    node_fault = message if isinstance(error, NodeFaultError) else ""
    return PartOutcome(kind, exit_code, message=message, found=found, node_fault=node_fault)
