"""Process images of one gang's part. Its agents stop it at a boundary, close what leads outside, and wait; a job
without an agent is stopped wherever it is. The image is the shard of the first rank on storage, or goes into an arena,
from which another node fetches it; several ranks have a common parent, and one image."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ganger.agent.v1 import agent_pb2
from ganger.failpoints import hit
from ganger.injob.launcher.client import Launcher
from ganger.injob.page import PageProgress
from ganger.injob.page_layout import Capability, PageState, Word
from ganger.injob.process_identity import ProcessId
from ganger.protocol.gang_orders import DesiredOrder, OrderIntent, ParkLevel
from ganger.text import os_failure
from ganger.v1 import job_pb2

from ganger_daemon.checkpoints.storage import CHECKPOINTS, IMAGES, directories, shard_name
from ganger_daemon.gang.exit_watcher import ExitWatcher
from ganger_daemon.gang.gang_context import GangContext, OfGang
from ganger_daemon.gang.gang_unit import GangUnit, Mappings
from ganger_daemon.gang.taken_devices import TakenDevices
from ganger_daemon.images.contract import (
    SHARED_MEMORY,
    DeviceStateLostError,
    DumpRequest,
    ImageFacts,
    ImageRefusedError,
    UnitProcesses,
    read_facts,
)
from ganger_daemon.images.packing import opened, pack, packed_bytes, unpack
from ganger_daemon.node.daemon_files import make_directory, remove_tree
from ganger_daemon.node.process_identity import is_alive, parent_of

log = logging.getLogger(__name__)

_PARKED = (PageState.PAUSED, PageState.OFFLOADED)
# What the daemon reports in the place of an agent while it holds the processes still.
_STAND_INS = {OrderIntent.HAND_OVER: PageState.HANDED_OVER, OrderIntent.PREPARE: PageState.READY}
# Longest wait until an agent has closed its socket, and between two looks.
_HANG_UP_S = 5.0
_RETRY_S = 0.05
# Longest dump, with the write to storage.
_DUMP_S = 3600.0
# Directories of images, below that of the gang.
_TO_STORAGE, _FOR_MOVE = "image", "image-moved"


class GangImages(OfGang):
    """Images of one gang. `unit`: of restored processes, and the names of all; `has_ended`: the daemon has ended the
    processes with the image of the present stop; `awaits_agent`: false for a process restored from the image of one
    without an agent; `trouble`: why a move cannot continue."""

    def __init__(
        self, context: GangContext, exits: ExitWatcher, devices: TakenDevices, *, is_outside_closed: bool = False
    ) -> None:
        super().__init__(context)
        self._devices = devices
        self._exits = exits
        self._is_outside_closed = is_outside_closed
        self._first = context.part.ranks[0]  # Rank whose shard and arena have the image
        self._taken: dict[int, int] = {}  # Step of the newest image to storage, by agreement
        self._left: dict[int, int] = {}  # Step by agreement of images that a former daemon took to end the processes
        self._handing: asyncio.Task[None] | None = None
        self._handed = (0, 0, 0)  # Stop sequence, size and final bytes of the image that a destination fetches
        self._stubs: dict[int, int] = {}  # Bytes that a destination fetches, for each other rank
        self._requested = 0  # Stop sequence at which a destination requested a parked process's image
        self.hang_up: Callable[[], None] = lambda: None  # Closes the job's socket, which must not be in an image
        self.pick_up: Callable[[], None] = lambda: None
        self._stop_sequence = 0  # Stop sequence of the present order
        self.holds_still = False  # Whether the daemon has stopped the processes for a move, or restored them stopped
        self._imaged_step = 0  # Both sides of a move report this step, although a child may count in the page
        self._obstacle = ""  # Why no image is possible, although its node can take images
        self.unit = GangUnit(context)
        self.has_ended = False
        self.awaits_agent = True
        self.trouble = ""

    @property
    def are_possible(self) -> bool:
        return bool(self.unit.names.directory)

    @property
    def is_moving(self) -> bool:
        """Whether the processes stand still for a move, or will at any moment: no other image may be taken of them."""
        return self.holds_still or self._handing is not None

    def recall(self, left: Mapping[str, Any]) -> None:
        """Take over what a former daemon noted."""
        fields = left.get("images", {})
        self.unit.recall(fields)
        # Without the daemon's consent a dump lets the process continue.
        self.has_ended = bool(fields.get("has_ended", False))
        self._left = {int(agreement): int(step) for agreement, step in fields.get("taken", [])}
        self.holds_still = bool(fields.get("is_stopped", False))
        self._imaged_step = int(fields.get("imaged_step", 0))
        self.awaits_agent = bool(fields.get("awaits_agent", True))
        sequence, size = fields.get("handed", (0, 0))
        self._handed = (int(sequence), int(size), int(size))
        self._stubs = {int(rank): int(bytes_) for rank, bytes_ in fields.get("stubs", {}).items()}

    def journal(self) -> dict[str, Any]:
        sequence, size, filled = self._handed
        fields = {
            **self.unit.journal(),
            "has_ended": self.has_ended,
            "taken": list(self._taken.items()) if self.has_ended else [],
            "is_stopped": self.holds_still,
            "imaged_step": self._imaged_step,
            "awaits_agent": self.awaits_agent,
            "handed": [sequence, size] if filled == size else [0, 0],
            "stubs": self._stubs,
        }
        return {"images": fields}

    def why_not(self, desired: agent_pb2.DesiredGang) -> str:
        """Return why no process image of the gang can be taken here; empty if it can."""
        part = self._context.part
        if desired.spec.mechanism not in (job_pb2.MECHANISM_UNSPECIFIED, job_pb2.MECHANISM_IMAGE):
            return "another mechanism is wanted"
        if len(part.ranks) != part.world:
            return "its processes are on several nodes"
        if why := self._devices.unsavable(desired):
            return why
        if part.world > 1 and desired.claim.device_mask and self._devices.is_real:
            return "it has several tasks with GPUs, and the GPU driver saves one process"
        if self._paths.run.is_relative_to(SHARED_MEMORY):
            return f"the daemon's run directory is in {SHARED_MEMORY}, which is another one for a restored process"
        return self._obstacle or self._host.images.unavailable

    @property
    def place(self) -> str:
        """Where the images are on storage: an account's have to be out of its reach."""
        return CHECKPOINTS if self._paths.account is None else IMAGES

    def make_names(self, desired: agent_pb2.DesiredGang, launcher_pid: int) -> None:
        """Make the names by which ranks of a launcher find their files, where images are possible. Blocks."""
        if not self.why_not(desired):
            self._obstacle = self.unit.names.make(launcher_pid)

    # -- images to storage ----------------------------------------------------------------------------------------

    def is_taken(self, agreement: int) -> bool:
        return agreement in self._taken

    def is_withdrawn(self, agreement: int) -> bool:
        """Return whether a newer order has replaced a stop. Its image may not end the processes any more."""
        return self._stop_sequence != agreement

    def step_of(self, agreement: int) -> int | None:
        """Return the step of the image that was taken for an agreement; None without one."""
        return self._taken.get(agreement, self._left.get(agreement))

    async def take(self, storage: Path, agreement: int, step: int, *, goes_on: bool) -> str:
        """Take an image of the resting process for an agreement and write it to storage as its shard, once. Return why
        that cannot be done; empty when it is done. `goes_on`: otherwise the process ends with it."""
        if agreement in self._taken:
            return ""
        lives = bool(self._exits.live())
        try:
            await self._host.storage.work.run(self._take, storage, agreement, step, goes_on, lives, within_s=_DUMP_S)
        except (ImageRefusedError, DeviceStateLostError) as error:
            return f"IMAGE_REFUSED: {error}"
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            return (
                f"STORAGE_{'FULL' if is_full else 'FAILED'}: its process image cannot be written: {os_failure(error)}"
            )
        self._taken = {agreement: step}
        return ""

    def _take(self, storage: Path, agreement: int, step: int, goes_on: bool, lives: bool) -> None:
        if self._is_taken_by_former(agreement):
            return
        tmp, final = directories(storage, self._paths.job_uid, self._paths.epoch, step, self.place)
        shard = tmp / shard_name(self._first)
        # A former daemon may have taken it; but that of a process that went on without a consent is of another moment.
        if (shard.exists() or final.exists()) and (goes_on or not lives):
            return
        tmp.mkdir(parents=True, exist_ok=True)
        part = shard.with_suffix(".part")

        def write(directory: Path) -> None:
            hit("image-dumped")
            for rank in self._ranks[1:]:
                with open(shard.with_name(shard_name(rank)), "wb") as file:
                    pack(directory, self._header(step, rank), file.fileno(), is_durable=True, has_files=False)
            with open(part, "wb") as file:
                pack(directory, self._header(step), file.fileno(), is_durable=True)
            os.replace(part, shard)
            hit("image-packed")
            if not goes_on:
                if self.is_withdrawn(agreement):
                    raise ImageRefusedError("its stop was withdrawn")
                self.has_ended, self._taken = True, {agreement: step}
                self._note_shared(read_facts(directory))
                self._context.write_notes()

        try:
            # One that continues does not wait for storage; one that was parked without its devices gets none back.
            keeps_devices = not self._devices.are_taken
            directory = self._empty_directory(_TO_STORAGE)
            self._dump(directory, write, goes_on=goes_on, keeps_devices=keeps_devices, stands_still=not goes_on)
        except BaseException:
            if self.has_ended:
                self.has_ended, self._taken = False, {}
                self._context.write_notes()
            part.unlink(missing_ok=True)
            shard.unlink(missing_ok=True)
            raise

    def _is_taken_by_former(self, agreement: int) -> bool:
        """Return whether a former daemon has taken the image and given its consent to the end of the processes; wait
        until they have ended. CRIU may have died, too, before it had ended them."""
        if agreement not in self._left or not self._host.images.has_consent(self._paths.job / _TO_STORAGE):
            return False
        while any(map(is_alive, self._exits.processes.values())):
            self._signal_all(signal.SIGKILL)
            time.sleep(_RETRY_S)
        return True

    def _dump(
        self,
        directory: Path,
        use: Callable[[Path], None],
        *,
        goes_on: bool,
        keeps_devices: bool,
        stands_still: bool = True,
    ) -> None:
        """Dump the processes into an empty directory, `use` it while they stand still or afterwards, and remove it. An
        image to storage may still be written when another one is taken for a move, so each has its own directory."""
        try:
            with self._devices.in_use(), self._thawed():
                unit = self._unit()
                request = DumpRequest(
                    unit,
                    directory,
                    goes_on=goes_on,
                    is_outside_closed=self._is_outside_closed,
                    keeps_devices=keeps_devices,
                    meanwhile=(lambda: use(directory)) if stands_still else (lambda: None),
                )
                facts = self._host.images.dump(request)
                self._note_shared(facts)
            if not keeps_devices and facts.device_pids:
                self._devices.are_taken = True
            if not stands_still:
                use(directory)
        except DeviceStateLostError as error:
            self._devices.lost = str(error)
            raise
        finally:
            remove_tree(directory)

    @contextmanager
    def _thawed(self) -> Iterator[None]:
        """Let the frozen processes of an account be stopped instead: CRIU, which runs as the account, may not thaw
        them, and the image is restored stopped anyway."""
        group, cgroups = self._paths.group, self._host.cgroups
        if self._paths.account is None or not cgroups.freezer_file(group) or not cgroups.frozen(group):
            yield
            return
        self._signal_all(signal.SIGSTOP)
        cgroups.thaw(group)
        try:
            yield
        finally:
            cgroups.freeze(group)
            self._signal_all(signal.SIGCONT)

    def _note_shared(self, facts: ImageFacts) -> None:
        if facts.shared_files.items() - self.unit.names.shared.items():
            self.unit.names.shared |= facts.shared_files
            self._context.write_notes()

    def _unit(self) -> UnitProcesses:
        """Return the processes as they are now. Raises ImageRefusedError."""
        labels = {
            "names": self.unit.names.directory,
            "agent": "yes" if self._has_agent() else "",
            "step": str(self._imaged_step),
            "places": "yes" if self._paths.has_places else "",
            **self._devices.labels(self._device_mask),
        }
        members = () if self.unit.init.pid else tuple(self._host.cgroups.pids(self._paths.group))
        ranks = {rank: self._exits.processes[rank].pid for rank in self._ranks} if len(self._ranks) > 1 else {}
        account = self._paths.account
        is_frozen = account is None and self._host.cgroups.frozen(self._paths.group)
        freezer = self._host.cgroups.freezer_file(self._paths.group) if is_frozen else ""
        own = (SHARED_MEMORY, self.unit.names.temporary)
        place = str(Path(freezer).parent) if freezer else ""
        return UnitProcesses(self.unit.init.pid, self._root(), own, labels, members, place, ranks, account)

    @property
    def _device_mask(self) -> int:
        return self._context.part.device_masks[0]

    def _root(self) -> int:
        """Return the process that has all others of the gang below it. Raises ImageRefusedError."""
        processes = [self._exits.processes[rank] for rank in self._ranks]
        if len(processes) == 1:
            return processes[0].pid
        ended = next((rank for rank, one in zip(self._ranks, processes, strict=True) if not is_alive(one)), None)
        if ended is not None:
            raise ImageRefusedError(f"rank {ended} has ended")
        parents = {parent_of(one.pid) for one in processes}
        root = parents.pop()
        if parents or root not in self._host.cgroups.pids(self._paths.group):
            raise ImageRefusedError("its ranks have lost their common parent")
        return root

    def _header(self, step: int, rank: int | None = None) -> dict[str, Any]:
        return {"step": step, "rank": self._first if rank is None else rank, "world": len(self._ranks)}

    def _found(self) -> list[PageProgress]:
        return [self._context.pages.progress(rank) for rank in self._ranks]

    def _has_agent(self) -> bool:
        return self._context.pages.readable and all(one.capabilities & Capability.IMAGE for one in self._found())

    def _empty_directory(self, name: str) -> Path:
        directory = self._paths.job / name
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
        return self._has_agent() or all(not one.hello_time_ns or one.opaque for one in self._found())

    def handed(self, rank: int, stop_sequence: int) -> tuple[int, int]:
        """Return size and final bytes of what is in the arena of a rank for this stop; 0 before."""
        sequence, size, filled = self._handed
        if sequence != stop_sequence:
            return 0, 0
        return (size, filled) if rank == self._first else (self._stubs.get(rank, 0), self._stubs.get(rank, 0))

    def follow(self, wanted: DesiredOrder, open_arena: Callable[[int], int]) -> None:
        """Take the image that an order to hand over needs, once the process may be taken; or let a process continue
        that was stopped for one. `open_arena` returns the descriptor of the arena for images, which is the caller's."""
        self._stop_sequence = wanted.stop_sequence
        is_requested = wanted.intent is OrderIntent.PARK and self._requested == wanted.stop_sequence != 0
        if wanted.intent is OrderIntent.HAND_OVER or is_requested:
            is_begun = self._handing is not None or self._handed[0] == wanted.stop_sequence
            if not is_begun and not self.trouble and self._may_be_taken(wanted):
                self._handing = asyncio.create_task(self._hand_over(wanted, open_arena))
        elif wanted.intent is OrderIntent.RUN:
            self.let_run()
            # A daemon that died before its consent has noted an end that did not come.
            if self.has_ended and not self._taken and self._exits.live():
                self.has_ended = self._host.images.has_consent(self._paths.job / _TO_STORAGE)
            # What stood in the way of a move that was given up may be over at the next one.
            self.trouble = self.trouble if self._handing is not None or not self._exits.processes else ""
        if self.holds_still and self._handing is None:
            # Again, for a daemon that takes over.
            if wanted.intent in _STAND_INS:
                self._stand_in(_STAND_INS[wanted.intent], wanted)
            elif wanted.intent is OrderIntent.PARK and wanted.level is ParkLevel.CHECKPOINT:
                # Stopped as it is, it would be in its image, and stand still for ever after a restore.
                self.let_run()

    def note_request(self, stop_sequence: int) -> None:
        """Note that a destination waits for the image of a process that may be parked. Called from any thread."""
        self._requested = stop_sequence

    def _may_be_taken(self, wanted: DesiredOrder) -> bool:
        found = self._found()
        are_there = all(one.reached_seq >= wanted.order.number for one in found)
        if wanted.intent is OrderIntent.PARK:
            if self._has_agent():
                return are_there and all(one.state in _PARKED for one in found)
            return self.are_carried and self._host.cgroups.frozen(self._paths.group)
        if not self._has_agent():
            return self.are_carried
        return are_there and all(one.state == PageState.HANDED_OVER for one in found)

    async def _hand_over(self, wanted: DesiredOrder, open_arena: Callable[[int], int]) -> None:
        is_parked = wanted.intent is OrderIntent.PARK
        if is_parked:
            self.hang_up()
        # A parked agent closes its side of the socket a moment later; until then an image is refused.
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
        except Exception as error:
            # Record any error as a reason, or the move would be retried for ever.
            is_expected = isinstance(error, ImageRefusedError | DeviceStateLostError | OSError)
            self.trouble = f"IMAGE_REFUSED: {os_failure(error)}"
            extra = {"group": self._paths.group}
            log.warning("no image for a move: %s", error, extra=extra, exc_info=None if is_expected else error)
        finally:
            if is_parked:
                self.pick_up()
            self._handing = None
            self._context.wake()

    def _take_for_move(self, stop_sequence: int, open_arena: Callable[[int], int]) -> None:
        has_agent, step = self._has_agent(), max(one.step for one in self._found())
        self._imaged_step = step

        def write(directory: Path) -> None:
            hit("image-dumped")
            for rank in self._ranks[1:]:
                with opened(open_arena(rank)) as arena:
                    self._stubs[rank] = pack(directory, self._header(step, rank), arena, has_files=False)
            size = packed_bytes(directory, self._header(step))

            def filled(count: int) -> None:
                # Without an agent the process would continue if this daemon died now. The last byte waits until it is
                # sure to stand still, so that it is restored nowhere before.
                self._handed = (stop_sequence, size, count if has_agent else min(count, size - 1))

            with opened(open_arena(self._first)) as arena:
                pack(directory, self._header(step), arena, filled=filled)
            # Noted first: the next daemon lets the process continue if the move is given up.
            self.holds_still = not has_agent
            self._context.write_notes()
            if not has_agent:
                # It is taken at this instruction, and may pass no other here unless the move is given up.
                self._signal_all(signal.SIGSTOP)
            hit("image-packed")

        try:
            # Without an agent it gets its devices back with the order to run, as its processes are stopped until then.
            self._dump(self._empty_directory(_FOR_MOVE), write, goes_on=True, keeps_devices=has_agent)
        except BaseException:
            self._handed, self.holds_still = (0, 0, 0), False
            if not has_agent:
                self._signal_all(signal.SIGCONT)
            self._context.write_notes()
            raise
        if not has_agent:
            self.holds_still, self._handed = True, (stop_sequence, self._handed[1], self._handed[1])
            self._context.write_notes()

    def _stand_in(self, state: int, wanted: DesiredOrder) -> None:
        """Write into the page what an agent would: nothing in the process does."""
        for rank in self._ranks:
            page = self._context.pages[rank]
            page.set(Word.ACK_SEQ, wanted.stop_sequence)
            page.set(Word.REACHED_STEP, self._imaged_step)
            page.set(Word.STATE, state)
            page.set(Word.REACHED_SEQ, wanted.order.number)

    def let_run(self) -> None:
        """Let processes continue that were stopped for a move or restored for one."""
        if self.holds_still:
            self.holds_still = False
            for rank in self._ranks:
                self._context.pages[rank].set(Word.STATE, PageState.INIT)
            self._signal_all(signal.SIGCONT)
            # The next daemon would end them without their grace.
            self._context.write_notes()

    def _signal_all(self, number: signal.Signals) -> None:
        """Signal the ranks, what they have started, and what runs beside them, as their rendezvous store."""
        for pid in self._devices.pids():
            if pid != self.unit.init.pid:
                with suppress(OSError):
                    os.kill(pid, number)

    # -- images from storage or from another node -------------------------------------------------------------------

    def restore(
        self, launcher: Launcher, mappings: Mappings, source: int, *, procs: tuple[str, ...], is_moved: bool
    ) -> dict[int, ProcessId]:
        """Restore the gang's ranks into a new unit, from a descriptor of their packed image. Blocks. `is_moved`: a
        process without an agent stands still until `let_run`; `mappings`, `procs`: as `GangUnit.restore` takes them.
        Raises LauncherError, OSError, ImageRefusedError, ImageError."""
        directory = self._empty_directory(_FOR_MOVE)
        try:
            facts = unpack(source, directory)
            if why := facts.foreign(self._paths.account):
                raise ImageRefusedError(why)
            hit("image-unpacked")
            self.unit.names.directory = facts.labels["names"]
            # as at the image, whatever this node's setting is: they have mounts of their own here anyway
            self._paths.has_places = bool(facts.labels.get("places"))
            has_agent = bool(facts.labels.get("agent"))
            # Noted before there is a process: the next daemon finds it so.
            self.awaits_agent, self.holds_still = has_agent, is_moved and not has_agent
            self._imaged_step = int(facts.labels.get("step", 0))
            self._devices.expect(facts.labels, len(facts.device_pids), self._device_mask)
            return self.unit.restore(
                launcher, mappings, directory, facts, procs, is_moved=is_moved, is_stopped=self.holds_still
            )
        finally:
            remove_tree(directory)
