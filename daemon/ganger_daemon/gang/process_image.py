"""Process images of one gang's part: taken while its process stands still, and restored into a unit.

A gang with one process can be saved and moved as it is where its node can take process images. Its agent stops it at a
boundary, closes what leads outside, and waits; the daemon takes the image and writes it to storage as the shard of the
rank, so that it is described, published, verified and removed like any other checkpoint, or into an arena, from which
another node fetches it. A job without an agent is stopped wherever it is.

A job finds its page, its socket and its temporary files by names that stay the same wherever it is restored.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ganger.agent.v1 import agent_pb2
from ganger.failpoints import hit
from ganger.injob.launcher.client import Forked, Launcher, LauncherError
from ganger.injob.launcher.namespaces import LINKS, Unit, bind, make_links, unbind
from ganger.injob.page_layout import Capability, PageState, Word
from ganger.injob.process_identity import family
from ganger.protocol.gang_orders import DesiredOrder, OrderIntent
from ganger.v1 import job_pb2

from ganger_daemon.checkpoints.storage import directories, shard_name
from ganger_daemon.gang.exit_watcher import ExitWatcher
from ganger_daemon.gang.gang_context import GangContext
from ganger_daemon.gang.taken_devices import TakenDevices
from ganger_daemon.images.contract import (
    PID_FILE,
    SHARED_MEMORY,
    DeviceStateLostError,
    ImageFacts,
    ImageRefusedError,
    UnitProcesses,
)
from ganger_daemon.images.packing import cut_back, pack, packed_bytes, unpack
from ganger_daemon.node.daemon_files import make_directory, remove_tree
from ganger_daemon.node.process_identity import NO_PROCESS, ProcessId, send_signal

log = logging.getLogger(__name__)

_PAGE_ENDING = ".page"
_PARKED = (PageState.PAUSED, PageState.OFFLOADED)
# Longest wait until an agent has closed its socket, and between two looks.
_HANG_UP_S = 5.0
_RETRY_S = 0.05
# Longest dump, with the write to storage.
_DUMP_S = 3600.0
# Descriptors at which the program that restores an image finds the new page and the new log.
_PAGE_DESCRIPTOR, _LOG_DESCRIPTOR = 96, 97


class GangImages:
    """Images of one gang. `init`: of the unit of a restored process; NO_PROCESS without one. `has_ended`: the
    daemon has ended the processes with the image of the present stop; `awaits_agent`: false for a process restored from
    the image of one without an agent; `trouble`: why a move cannot continue."""

    def __init__(
        self, context: GangContext, exits: ExitWatcher, devices: TakenDevices, *, is_outside_closed: bool = False
    ) -> None:
        self._context = context
        self._devices = devices
        self._host = context.host
        self._paths = context.paths
        self._exits = exits
        self._is_outside_closed = is_outside_closed
        self._rank = context.part.ranks[0]
        self._taken: dict[int, int] = {}  # step of the newest image to storage, by agreement
        self._left: dict[int, int] = {}  # the same, of a former daemon that has ended the process with it
        self._handing: asyncio.Task[None] | None = None
        self._handed = (0, 0, 0)  # stop sequence, size and final bytes of the image that a destination fetches
        self._asked = 0  # the stop sequence under which a destination has asked for the image of a parked process
        self.hang_up: Callable[[], None] = lambda: None  # closes the job's socket, which must not be in an image
        self.pick_up: Callable[[], None] = lambda: None
        self._is_stopped = False
        self._imaged_step = 0  # both sides of a move report this one, although a child may count in the page
        self._names = ""  # the directory of names that the process knows
        self._obstacle = ""  # why it has none, although its node can take images
        self.init = NO_PROCESS
        self.has_ended = False
        self.awaits_agent = True
        self.trouble = ""

    @property
    def are_possible(self) -> bool:
        return bool(self._names)

    @property
    def holds_still(self) -> bool:
        """Whether the daemon has stopped the processes for a move, or restored them so."""
        return self._is_stopped

    def recall(self, left: Mapping[str, Any]) -> None:
        """Take over what a former daemon noted."""
        fields = left.get("images", {})
        self.init = ProcessId(*map(int, fields.get("init", (0, 0))))
        self._names = str(fields.get("names", ""))
        # without the daemon's consent a dump lets the process go on
        self.has_ended = bool(fields.get("has_ended", False))
        self._left = {int(agreement): int(step) for agreement, step in fields.get("taken", [])}
        self._is_stopped = bool(fields.get("is_stopped", False))
        self._imaged_step = int(fields.get("imaged_step", 0))
        self.awaits_agent = bool(fields.get("awaits_agent", True))
        sequence, size = fields.get("handed", (0, 0))
        self._handed = (int(sequence), int(size), int(size))

    def journal(self) -> dict[str, Any]:
        sequence, size, filled = self._handed
        fields = {
            "names": self._names,
            "init": [self.init.pid, self.init.start_ticks],
            "has_ended": self.has_ended,
            "taken": list(self._taken.items()) if self.has_ended else [],
            "is_stopped": self._is_stopped,
            "imaged_step": self._imaged_step,
            "awaits_agent": self.awaits_agent,
            "handed": [sequence, size] if filled == size else [0, 0],
        }
        return {"images": fields}

    def why_not(self, desired: agent_pb2.DesiredGang) -> str:
        """Return why no process image of the gang can be taken here; empty if it can."""
        part = self._context.part
        if desired.spec.mechanism not in (job_pb2.MECHANISM_UNSPECIFIED, job_pb2.MECHANISM_IMAGE):
            return "another mechanism is wanted"
        if len(part.ranks) != part.world:
            return "its processes are on several nodes"
        if part.world > 1:
            return "it has several tasks"
        if why := self._devices.unsavable(desired):
            return why
        if self._paths.run.is_relative_to(SHARED_MEMORY):
            return f"the daemon's run directory is in {SHARED_MEMORY}, which is another one for a restored process"
        return self._obstacle or self._host.images.unavailable

    # -- names ----------------------------------------------------------------------------------------------------

    def name(self, desired: agent_pb2.DesiredGang, mapping: dict[str, Any], *, has_agent: bool) -> dict[str, Any]:
        """Return a launcher's request for a rank that finds its files by names, where images are possible; elsewhere
        the request itself."""
        if self.why_not(desired):
            return mapping
        self._names = f"{LINKS}/{self._paths.group}"
        try:
            make_directory(self._files)
            make_links(self._names, self._links())
            unbind(self._temporary)
            bind(str(self._files), self._temporary)
        except OSError as error:
            # as in a container that may not mount: the job starts, and is saved in other ways
            self._names, self._obstacle = "", f"its directories cannot be named: {error}"
            log.warning("no process images of a gang", extra={"group": self._paths.group, "cause": str(error)})
            return mapping
        environment = dict(mapping["env"])
        environment["GANGER_PAGE"] = str(self.page_name(Path(mapping["page"])))
        environment["GANGER_JOB_DIR"] = f"{self._names}/job"
        environment["GANGER_SOCKET"] = f"{self._names}/run/{self._paths.socket.name}"
        environment.setdefault("TMPDIR", self._temporary)
        if has_agent:
            environment["GANGER_IMAGE"] = "1"
        return {**mapping, "env": environment, "no_io_uring": True}

    def page_name(self, page: Path) -> Path:
        """Return the name by which a process that is started here finds its page."""
        return Path(f"{LINKS}/{self._paths.group}/run/{page.name}")

    def _links(self) -> dict[str, str]:
        return {"run": str(self._paths.run), "job": str(self._paths.job)}

    @property
    def _temporary(self) -> str:
        """The path at which the process has its temporary files."""
        return f"{self._names}/tmp"

    @property
    def _files(self) -> Path:
        """The directory in which they are."""
        return self._host.paths.temporary / self._paths.group

    def clean(self) -> None:
        """End the unit of a gang, and remove its names and temporary files. Blocks."""
        send_signal(self.init, signal.SIGKILL)
        if self._names:
            own = f"{LINKS}/{self._paths.group}"
            unbind(f"{own}/tmp")
            remove_tree(Path(own))
            remove_tree(self._files)

    # -- images to storage ----------------------------------------------------------------------------------------

    def is_taken(self, agreement: int) -> bool:
        return agreement in self._taken

    def step_of(self, agreement: int) -> int | None:
        """Return the step of the image that was taken for an agreement; None without one."""
        return self._taken.get(agreement, self._left.get(agreement))

    async def take(self, storage: Path, agreement: int, step: int, *, goes_on: bool) -> str:
        """Take an image of the resting process for an agreement and write it to storage as its shard, once. Return why
        that cannot be done; empty when it is done. `goes_on`: otherwise the process ends with it."""
        if agreement in self._taken:
            return ""
        tmp, final = directories(storage, self._paths.job_uid, self._paths.epoch, step)
        shard = tmp / shard_name(self._rank)
        # A former daemon may have taken it; but that of a process that went on without a consent is of another moment.
        is_there = (shard.exists() or final.exists()) and (goes_on or not self._exits.live())
        if not is_there:
            try:
                await self._host.storage.work.run(self._take, shard, agreement, step, goes_on, within_s=_DUMP_S)
            except (ImageRefusedError, DeviceStateLostError) as error:
                return f"IMAGE_REFUSED: {error}"
            except OSError as error:
                is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                return f"STORAGE_{'FULL' if is_full else 'FAILED'}: its process image cannot be written: {error}"
        self._taken = {agreement: step}
        return ""

    def _take(self, shard: Path, agreement: int, step: int, goes_on: bool) -> None:
        shard.parent.mkdir(parents=True, exist_ok=True)
        part = shard.with_suffix(".part")

        def write(directory: Path) -> None:
            hit("image-dumped")
            with open(part, "wb") as file:
                pack(directory, self._header(step), file.fileno(), is_durable=True)
            os.replace(part, shard)
            hit("image-packed")
            if not goes_on:
                self.has_ended, self._taken = True, {agreement: step}
                self._context.write_notes()

        try:
            # one that goes on does not wait for storage; one that was parked without its devices gets none back
            keeps_devices = not self._devices.are_taken
            self._dump(write, goes_on=goes_on, keeps_devices=keeps_devices, stands_still=not goes_on)
        except BaseException:
            self.has_ended, self._taken = False, {}
            part.unlink(missing_ok=True)
            shard.unlink(missing_ok=True)
            raise

    def _dump(
        self, use: Callable[[Path], None], *, goes_on: bool, keeps_devices: bool, stands_still: bool = True
    ) -> None:
        """Dump the processes, and `use` the directory of their image, while they stand still or afterwards."""
        directory = self._empty_directory()
        try:
            process = self._exits.processes[self._rank]
            labels = {"names": self._names, "agent": "yes" if self._has_agent() else "", "step": str(self._imaged_step)}
            labels |= self._devices.labels(self._device_mask)
            members = () if self.init.pid else tuple(self._host.cgroups.pids(self._paths.group))
            is_frozen = self._host.cgroups.frozen(self._paths.group)
            freezer = self._host.cgroups.freezer_file(self._paths.group) if is_frozen else ""
            own = (SHARED_MEMORY, self._temporary)
            place = str(Path(freezer).parent) if freezer else ""
            unit = UnitProcesses(self.init.pid, process.pid, own, labels, members, place)
            meanwhile = (lambda: use(directory)) if stands_still else (lambda: None)
            with self._devices.in_use():
                facts = self._host.images.dump(
                    unit,
                    directory,
                    goes_on=goes_on,
                    keeps_devices=keeps_devices,
                    is_outside_closed=self._is_outside_closed,
                    meanwhile=meanwhile,
                )
            if not keeps_devices and facts.device_pids:
                self._devices.are_taken = True
            if not stands_still:
                use(directory)
        except DeviceStateLostError as error:
            self._devices.lost = str(error)
            raise
        finally:
            remove_tree(directory)

    @property
    def _device_mask(self) -> int:
        return self._context.part.device_masks[0]

    def _header(self, step: int) -> dict[str, Any]:
        return {"step": step, "rank": self._rank, "world": 1}

    def _has_agent(self) -> bool:
        pages = self._context.pages
        return pages.readable and bool(pages.progress(self._rank).capabilities & Capability.IMAGE)

    def _empty_directory(self) -> Path:
        directory = self._paths.job / "image"
        remove_tree(directory)
        make_directory(directory)
        return directory

    # -- images for another node ----------------------------------------------------------------------------------

    @property
    def are_carried(self) -> bool:
        """Whether a move carries an image of the process, and not what it puts into its arena."""
        pages = self._context.pages
        if not self.are_possible or not pages.readable:
            return False
        progress = pages.progress(self._rank)
        return self._has_agent() or not progress.hello_time_ns or bool(progress.opaque)

    def handed(self, stop_sequence: int) -> tuple[int, int]:
        """Return size and final bytes of the image that is in its arena for this stop; 0 before."""
        sequence, size, filled = self._handed
        return (size, filled) if sequence == stop_sequence else (0, 0)

    def follow(self, wanted: DesiredOrder, open_arena: Callable[[int], int]) -> None:
        """Take the image that an order to hand over needs, once the process may be taken; or let a process go on that
        was stopped for one. `open_arena` returns the descriptor of the arena for images, which is the caller's."""
        is_asked = wanted.intent is OrderIntent.PARK and self._asked == wanted.stop_sequence != 0
        if wanted.intent is OrderIntent.HAND_OVER or is_asked:
            is_begun = self._handing is not None or self._handed[0] == wanted.stop_sequence
            if not is_begun and not self.trouble and self._may_be_taken(wanted):
                self._handing = asyncio.create_task(self._hand_over(wanted, open_arena))
        elif wanted.intent is OrderIntent.RUN:
            self.let_run()
            # a daemon that died before its consent has noted an end that did not come
            self.has_ended = self.has_ended and not self._exits.live()
            # what stood in the way of a move that was given up may be over at the next one
            self.trouble = self.trouble if self._handing is not None or not self._exits.processes else ""
        if self._is_stopped and self._handing is None:
            # again, for a daemon that takes over
            state = PageState.HANDED_OVER if wanted.intent is OrderIntent.HAND_OVER else PageState.READY
            self._stand_in(state, wanted)

    def ask(self, stop_sequence: int) -> None:
        """Note that a destination waits for the image of a process that may be parked. Called from any thread."""
        self._asked = stop_sequence

    def _may_be_taken(self, wanted: DesiredOrder) -> bool:
        progress = self._context.pages.progress(self._rank)
        is_there = progress.reached_seq >= wanted.order.number
        if wanted.intent is OrderIntent.PARK:
            if self._has_agent():
                return is_there and progress.state in _PARKED
            return self.are_carried and self._host.cgroups.frozen(self._paths.group)
        if not self._has_agent():
            return self.are_carried
        return progress.state == PageState.HANDED_OVER and is_there

    async def _hand_over(self, wanted: DesiredOrder, open_arena: Callable[[int], int]) -> None:
        is_parked = wanted.intent is OrderIntent.PARK
        if is_parked:
            self.hang_up()
        # a parked agent closes its side of the socket a moment later; until then an image is refused
        deadline = time.monotonic() + (_HANG_UP_S if is_parked else 0.0)
        try:
            while self._handed[0] != wanted.stop_sequence:
                try:
                    await self._host.storage.work.run(
                        self._take_for_move, wanted.stop_sequence, open_arena, within_s=_DUMP_S
                    )
                except ImageRefusedError:
                    if time.monotonic() >= deadline:
                        raise
                    await asyncio.sleep(_RETRY_S)
        except (ImageRefusedError, DeviceStateLostError, OSError, LauncherError) as error:
            self.trouble = f"IMAGE_REFUSED: {error}"
            log.warning("no image for a move: %s", error, extra={"group": self._paths.group})
        finally:
            if is_parked:
                self.pick_up()
            self._handing = None
            self._context.wake()

    def _take_for_move(self, stop_sequence: int, open_arena: Callable[[int], int]) -> None:
        has_agent, step = self._has_agent(), self._context.pages.progress(self._rank).step
        self._imaged_step = step

        def write(directory: Path) -> None:
            hit("image-dumped")
            size = packed_bytes(directory, self._header(step))

            def filled(count: int) -> None:
                # Without an agent the process would go on if this daemon died now. The last byte waits until it is sure
                # to stand still, so that it is restored nowhere before.
                self._handed = (stop_sequence, size, count if has_agent else min(count, size - 1))

            arena = open_arena(self._rank)
            try:
                os.lseek(arena, 0, os.SEEK_SET)
                pack(directory, self._header(step), arena, filled=filled)
            finally:
                os.close(arena)
            if has_agent:
                self._context.write_notes()
            else:
                # It is taken at this instruction, and may pass no other here unless the move is given up.
                self._signal_all(signal.SIGSTOP)
            hit("image-packed")

        try:
            # without an agent it gets its devices back with the order to run, as its processes are stopped until then
            self._dump(write, goes_on=True, keeps_devices=has_agent)
        except BaseException:
            self._handed = (0, 0, 0)
            if not has_agent:
                self._signal_all(signal.SIGCONT)
            raise
        if not has_agent:
            self._is_stopped, self._handed = True, (stop_sequence, self._handed[1], self._handed[1])
            self._context.write_notes()

    def _stand_in(self, state: int, wanted: DesiredOrder) -> None:
        """Write into the page what an agent would: nothing in the process does."""
        page = self._context.pages[self._rank]
        page.set(Word.ACK_SEQ, wanted.stop_sequence)
        page.set(Word.REACHED_STEP, self._imaged_step)
        page.set(Word.STATE, state)
        page.set(Word.REACHED_SEQ, wanted.order.number)

    def let_run(self) -> None:
        """Let processes go on that were stopped for a move or restored for one."""
        if self._is_stopped:
            self._is_stopped = False
            self._context.pages[self._rank].set(Word.STATE, PageState.INIT)
            self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: signal.Signals) -> None:
        for pid in family(self._exits.processes[self._rank].pid):
            with suppress(OSError):
                os.kill(pid, number)

    # -- images from storage or from another node -------------------------------------------------------------------

    def restore(
        self, launcher: Launcher, mapping: dict[str, Any], source: int, *, procs: tuple[str, ...], is_moved: bool
    ) -> Forked:
        """Restore the gang's process into a new unit, from a descriptor of its packed image. Blocks. `is_moved`: a
        process without an agent stands still until `let_run`. Raises LauncherError, OSError, ImageRefusedError,
        ImageError."""
        directory = self._empty_directory()
        try:
            facts = unpack(source, directory)
            hit("image-unpacked")
            self._names = facts.labels["names"]
            has_agent = bool(facts.labels.get("agent"))
            # noted before there is a process: the next daemon finds it so
            self.awaits_agent, self._is_stopped = has_agent, is_moved and not has_agent
            self._imaged_step = int(facts.labels.get("step", 0))
            self._devices.expect(facts.labels, len(facts.device_pids), self._device_mask)
            while True:
                self._make_unit(launcher, procs)
                try:
                    root = self._restore_once(launcher, mapping, directory, facts)
                except ImageRefusedError as error:
                    if is_moved or not cut_back(facts, str(error)):
                        raise
                else:
                    hit("image-restored")
                    return root
        finally:
            remove_tree(directory)

    def _restore_once(self, launcher: Launcher, mapping: dict[str, Any], directory: Path, facts: ImageFacts) -> Forked:
        images = self._host.images
        images.fill(self.init.pid, directory)
        files = {log.path: _LOG_DESCRIPTOR for log in facts.logs}
        files |= {file.path: _PAGE_DESCRIPTOR for file in facts.files if file.path.endswith(_PAGE_ENDING)}
        command = images.restore_arguments(directory, files, is_stopped=self._is_stopped)
        opened = {_LOG_DESCRIPTOR: mapping["log"], _PAGE_DESCRIPTOR: mapping["page"]}
        try:
            ranks = [(mapping | {"init": self.init.pid}, 0)]
            return launcher.restore(ranks, command, opened, str(directory / PID_FILE)).root
        except LauncherError as error:
            why = images.restore_failure(directory) if error.reason == "RESTORE" else ""
            raise ImageRefusedError(why or str(error)) from error

    def _make_unit(self, launcher: Launcher, procs: tuple[str, ...]) -> None:
        make_directory(self._files)
        binds = [(str(self._files), self._temporary)]
        unit = Unit(self._paths.group, self._names, self._links(), binds)
        made = launcher.make_unit({**unit._asdict(), "cgroup_procs": list(procs)})
        self.init = ProcessId(made.pid, made.start_ticks)
        self._context.write_notes()
