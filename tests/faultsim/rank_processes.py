"""What really runs: the processes of all gangs on all nodes, their steps, boundaries, arenas and checkpoints.

The physics of the simulated cluster. It obeys orders as ranks do (a stop is agreed on by all, running cancels it) and
tells the oracle what happened; it does not know why anything was ordered.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from faultsim.checkers import Oracle, RuleBrokenError
from faultsim.engine import Engine
from faultsim.faults import NONE
from ganger.cluster.topology import bits
from ganger_master.core.desired_projection import DesiredGang
from ganger_master.core.gang_model import GangIntent, OutcomeKind
from ganger_master.core.job_model import Checkpoint, SuspendLevel
from ganger_master.core.job_spec import JobSpec

if TYPE_CHECKING:
    from faultsim.node_rotation import NodeRotation

# What ranks use of a device if their job does not say.
_PEAK_BYTES = 1 << 30
# The first word of the command of a job without boundaries: it steps on, whatever it is ordered, until it is killed.
OPAQUE = "opaque"
# For how long an order to stop may be ignored.
_PATIENCE_S = 20.0


class Doing(Enum):
    # For devices that others are on.
    WAITING = "waiting"
    FORKING = "forking"
    PREPARED = "prepared"
    READY = "ready"
    RUNNING = "running"
    PARKED = "parked"
    ENDED = "ended"


@dataclass(slots=True)
class Ranks:
    """The ranks of one gang on one node."""

    node: str
    order: DesiredGang
    doing: Doing = Doing.WAITING
    level: SuspendLevel = SuspendLevel.NONE
    stop_sequence: int = 0
    stop_step: int = 0
    # Whose state it has, whatever is reported.
    restored_step: int = 0
    outcome: OutcomeKind = OutcomeKind.NONE
    message: str = ""
    # What the master wants, where it does not follow at once; and the switch (set epoch, sequence) obeyed under it.
    newest_order: DesiredGang | None = None
    switch: tuple[int, int] = (0, 0)
    # It has its devices, and may use them.
    occupies: bool = False
    # Why it rests short of what it was ordered.
    trouble: str = ""
    exit_code: int = 0
    checkpoint: tuple[int, str] | None = None
    # Complete checkpoints on storage, where it could not start from the one in its order.
    found: tuple[Checkpoint, ...] = ()

    @property
    def devices(self) -> list[tuple[str, int]]:
        return self.named(self.order.claim.device_mask)

    @property
    def shared(self) -> list[tuple[str, int]]:
        """Those of its devices of which it was told that others may be there, too."""
        return self.named(self.wanted.claim.shared_mask)

    def named(self, mask: int) -> list[tuple[str, int]]:
        return [(self.node, device) for device in bits(mask)]

    @property
    def wanted(self) -> DesiredGang:
        """By the master."""
        return self.newest_order or self.order

    @property
    def may_be_read(self) -> bool:
        """Whether its state may be taken from it: not while it only rests for another's turn."""
        return self.doing is Doing.PARKED and self.wanted.intent is not GangIntent.RUN

    @property
    def is_on_devices(self) -> bool:
        """Its processes may have something there."""
        if self.doing is Doing.PARKED:
            return self.level < SuspendLevel.OFFLOAD
        return self.doing not in (Doing.WAITING, Doing.ENDED)

    @property
    def is_alive(self) -> bool:
        return self.doing is not Doing.ENDED


@dataclass(slots=True)
class PhysicalGang:
    uid: str
    epoch: int
    nodes: tuple[str, ...]
    # Step its ranks are at.
    step: int = 0
    restored: bool = False
    stepped: bool = False
    stepping: bool = False
    # When it last stepped, or began to run.
    stepped_at: float = 0.0
    opaque: bool = False


class Physics:
    """All ranks of the cluster, by (epoch, node)."""

    def __init__(self, engine: Engine, oracle: Oracle, step_seconds: float = 1.0, fork_seconds: float = 0.5) -> None:
        self.engine = engine
        self.oracle = oracle
        self.step_seconds = step_seconds
        self.fork_seconds = fork_seconds
        # What processes keep of each of their devices once they have offloaded; no more than their job may use.
        self.residue_bytes = 0
        # The share of their claimed host memory that processes use at rest; zero: it cannot be measured.
        self.memory_used = 0.0
        self.ranks: dict[tuple[int, str], Ranks] = {}
        self.gangs: dict[int, PhysicalGang] = {}
        # Checkpoints on storage by path, and by epoch the paths that the leader was ordered to keep.
        self.checkpoints: dict[str, Checkpoint] = {}
        self.kept: dict[int, tuple[str, ...]] = {}
        # Jobs, by uid, without boundaries.
        self.opaque: set[str] = set()
        # Jobs, by uid, whose ranks neither step nor use a device, and can be stopped wherever they are.
        self.hung: set[str] = set()
        # Jobs, by uid, that use all of the grace that a stop gives them, and step on meanwhile.
        self.trapping: set[str] = set()
        # By node.
        self.turns: dict[str, NodeRotation] = {}
        # Until when the ranks of each node may step: agents and launchers keep to it, also where the daemon is dead.
        self.leases: dict[str, float] = {}
        # Nodes on which nothing can be launched.
        self.full: set[str] = set()
        self.faults = NONE

    def obey(self, node: str, order: DesiredGang) -> None:
        """What the daemon of a node makes its ranks do."""
        ranks = self.ranks.get((order.epoch, node))
        if ranks is None:
            if order.intent not in (GangIntent.RUN, GangIntent.PREPARE):
                self.report_gone(node, order)
            elif order.needs_spec:
                self._fork(node, order)
            return
        self.follow(ranks, order, (0, 0))

    def share(self, node: str, orders: Iterable[DesiredGang]) -> None:
        """Read a whole set before any gang starts by it, so that all sharing gangs are known."""
        for order in orders:
            ranks = self.ranks.get((order.epoch, node))
            if ranks is not None and ranks.occupies and order.master_sequence > ranks.wanted.master_sequence:
                self.oracle.shared(order.uid, order.epoch, ranks.named(order.claim.shared_mask))

    def follow(self, ranks: Ranks, order: DesiredGang, switch: tuple[int, int]) -> None:
        """The order of the highest rank counts: a switch outranks the master's order under which it is made. One of the
        same rank says nothing new, whatever else is in it."""
        rank, present = (order.master_sequence, switch), (ranks.order.master_sequence, ranks.switch)
        if rank < present:
            return
        if rank == present:
            self._follow(ranks)
            return
        if order.master_sequence > ranks.order.master_sequence:
            ranks.trouble = ""
        ranks.order, ranks.switch = order, switch
        if switch == (0, 0):
            ranks.newest_order = None
        if ranks.occupies:
            self._occupy(ranks)
        if self.ignores_stops(ranks):
            self.engine.after(_PATIENCE_S, lambda: self._press(ranks, rank))
        self._follow(ranks)

    def settle(self, ranks: Ranks) -> None:
        """Apply a changed level to the parked gangs of a node set."""
        if ranks.doing is Doing.PARKED:
            self._settle_at_level(ranks)

    def ignores_stops(self, ranks: Ranks) -> bool:
        """Whether it is to stop at a boundary, and has none."""
        return self.gangs[ranks.order.epoch].opaque and ranks.order.intent in (GangIntent.PARK, GangIntent.HAND_OVER)

    def _press(self, ranks: Ranks, rank: tuple[int, tuple[int, int]]) -> None:
        if (ranks.order.master_sequence, ranks.switch) == rank and ranks.is_alive and self.ignores_stops(ranks):
            self._end(ranks, OutcomeKind.ESCALATED, "did not obey an order within its deadline and was killed")

    def residue_of(self, uid: str) -> int:
        return min(self.residue_bytes, self.oracle.trainings[uid].device_bytes or self.residue_bytes)

    def peak_of(self, uid: str) -> int:
        """Bytes of each device that its ranks were seen to use."""
        return self.oracle.trainings[uid].device_bytes or _PEAK_BYTES

    def forget(self, node: str, epoch: int) -> None:
        self.ranks.pop((epoch, node), None)

    def kill(self, node: str, epoch: int, outcome: OutcomeKind, message: str, exit_code: int = 0) -> None:
        ranks = self.ranks.get((epoch, node))
        if ranks is not None and ranks.is_alive:
            self._end(ranks, outcome, message, exit_code)

    def extend_lease(self, node: str, until: float) -> None:
        self.leases[node] = until
        for ranks in list(self.ranks.values()):
            if ranks.node == node:
                self._go(ranks.order.epoch)

    def _fork(self, node: str, order: DesiredGang) -> None:
        self._know(order)
        gang = self.gangs[order.epoch]
        if not any(name != node and (order.epoch, name) in self.ranks for name in gang.nodes):
            # All of it that there was was lost with its machines before any report that it ran: it starts over.
            gang.restored = gang.stepped = False
        ranks = self.ranks[order.epoch, node] = Ranks(node, order)
        self._launch(ranks)

    def _launch(self, ranks: Ranks) -> None:
        """Check that no rank starts on a device before its daemon has seen the former one end."""
        if ranks.doing is not Doing.WAITING or self.ranks.get((ranks.order.epoch, ranks.node)) is not ranks:
            return
        turns = self.turns.get(ranks.node)
        if (turns is not None and turns.waits(ranks)) or self.is_blocked(ranks):
            self.engine.after(0.5, lambda: self._launch(ranks))
            return
        ranks.doing = Doing.FORKING
        self.engine.after(self.engine.between(0.1, self.fork_seconds), lambda: self._forked(ranks))

    def is_blocked(self, ranks: Ranks) -> bool:
        """Return whether a gang is on its devices that does not share them. What it moves away from, or grows out
        of, gives them up at the boundary."""
        own, restore = ranks.wanted.claim, ranks.order.restore
        for (_, node), other in self.ranks.items():
            if node != ranks.node or other is ranks or not other.is_on_devices:
                continue
            turns = self.turns.get(node)
            if turns is not None and other.doing is Doing.PARKED and turns.share_paused(ranks, other):
                continue
            there = other.wanted.claim
            collide = own.device_mask & there.device_mask & ~(own.shared_mask & there.shared_mask)
            if collide and (other.order.uid != ranks.order.uid or restore.alone):
                return True
        return False

    def _occupy(self, ranks: Ranks) -> None:
        ranks.occupies = True
        self.oracle.occupied(ranks.order.uid, ranks.order.epoch, ranks.devices, ranks.shared)

    def report_gone(self, node: str, order: DesiredGang) -> None:
        """Report as an outcome that a wanted gang is not here and must not start."""
        self._know(order)
        kind = OutcomeKind.STOPPED if order.intent is GangIntent.STOP else OutcomeKind.UNKNOWN
        self.ranks[order.epoch, node] = Ranks(node, order, Doing.ENDED, outcome=kind, message="nothing of it is here")

    def _know(self, order: DesiredGang) -> None:
        if order.epoch not in self.gangs:
            nodes = tuple(member.node for member in order.members)
            self.gangs[order.epoch] = PhysicalGang(order.uid, order.epoch, nodes, opaque=order.uid in self.opaque)
        elif self.gangs[order.epoch].uid != order.uid:
            known = self.gangs[order.epoch].uid
            raise RuleBrokenError(f"epoch {order.epoch} was given twice: to {known} and to {order.uid}")

    def _forked(self, ranks: Ranks) -> None:
        if ranks.doing is not Doing.FORKING or self.ranks.get((ranks.order.epoch, ranks.node)) is not ranks:
            return
        failed = self.faults.failed_launch
        if ranks.node in self.full or (failed and self.engine.chance(failed)):
            self._end(ranks, OutcomeKind.LAUNCH_FAILED, "No space left on device")
            return
        ranks.doing = Doing.PREPARED
        self._follow(ranks)
        self._restore(ranks)

    def _restore(self, ranks: Ranks) -> None:
        """Waits for the arenas it starts from, copies them; from storage or from nothing it starts at once."""
        if ranks.doing is not Doing.PREPARED:
            return
        order = ranks.order
        gang = self.gangs[order.epoch]
        parked = order.restore.parked_epoch
        if not parked:
            if not gang.restored:
                if self._is_refused(ranks):
                    return
                named = self.checkpoints.get(order.restore.checkpoint_path)
                gang.step = 0 if named is None else named.step
                gang.restored = True
            ranks.doing = Doing.READY
            self._follow(ranks)
            return
        sources = [self.ranks.get((parked, member.node)) for member in order.restore.parked_members]
        if all(source is not None and source.may_be_read for source in sources):
            self.engine.after(self.engine.between(0.1, 1.0), lambda: self._copied(ranks, parked))
        else:
            self.engine.after(0.5, lambda: self._restore(ranks))

    def _is_refused(self, ranks: Ranks) -> bool:
        """Return whether it cannot start from the checkpoint in its order, or storage has a newer one. Then it ends,
        and reports the checkpoints on storage."""
        order, name = ranks.order, ranks.order.restore.checkpoint_path
        earlier = [one for one in self.on_storage(order.uid) if one.epoch < order.epoch]
        ranks.found = tuple(reversed(earlier))
        good = [one.path for one in ranks.found if one.path not in order.restore.unreadable]
        if name and name not in self.checkpoints:
            self._end(ranks, OutcomeKind.STATE_UNREADABLE, f"{name} is not on storage")
        elif good and good[0] != name:
            self._end(ranks, OutcomeKind.STATE_OUTDATED, f"storage has {good[0]}")
        return not ranks.is_alive

    def on_storage(self, uid: str) -> list[Checkpoint]:
        """Return the complete checkpoints of a job, oldest first."""
        own = [one for path, one in self.checkpoints.items() if path.startswith(f"{uid}/")]
        return sorted(own, key=lambda one: (one.epoch, one.step))

    def prune(self, uid: str, epoch: int) -> None:
        """Remove checkpoints as the leader does. It keeps the two newest, those from which the master would start the
        job, and the first one after these: its acknowledgement may have got lost."""
        kept, present = self.kept.get(epoch, ()), self.on_storage(uid)
        known = [at for at, one in enumerate(present) if one.path in kept]
        for at, one in enumerate(present[:-2]):
            if at not in known and at != max(known, default=-1) + 1:
                del self.checkpoints[one.path]

    def _copied(self, ranks: Ranks, parked: int) -> None:
        order = ranks.order
        sources = [self.ranks.get((parked, member.node)) for member in order.restore.parked_members]
        if ranks.doing is not Doing.PREPARED:
            return
        if not all(source is not None and source.may_be_read for source in sources):
            self.engine.after(0.5, lambda: self._restore(ranks))
            return
        gang = self.gangs[order.epoch]
        steps = {source.stop_step for source in sources if source is not None}
        assert len(steps) == 1, f"sources of epoch {order.epoch} are parked at {steps}"
        gang.step = steps.pop()
        if gang.step > 1 and self.engine.chance(self.faults.spoiled_image):
            gang.step -= 1
            self.oracle.spoiled(gang.uid)
        gang.restored = True
        ranks.restored_step = ranks.stop_step = gang.step
        if self.engine.chance(self.faults.late_step):
            ranks.stop_step = 0
            self.engine.after(self.engine.between(0.1, 5.0), lambda: self._say_step(ranks))
        ranks.doing = Doing.READY
        self._follow(ranks)

    @staticmethod
    def _say_step(ranks: Ranks) -> None:
        if ranks.doing is Doing.READY:
            ranks.stop_step = ranks.restored_step

    def _follow(self, ranks: Ranks) -> None:
        order = ranks.order
        if order.intent is GangIntent.STOP:
            grace = order.grace_s if order.uid in self.trapping else 0.0
            if grace > 0.0:
                self.engine.after(
                    grace, lambda: self.kill(ranks.node, order.epoch, OutcomeKind.STOPPED, "stopped by order")
                )
            else:
                self.kill(ranks.node, order.epoch, OutcomeKind.STOPPED, "stopped by order")
            return
        if order.intent is GangIntent.RUN and ranks.doing in (Doing.READY, Doing.PARKED):
            ranks.doing = Doing.RUNNING
            ranks.level = SuspendLevel.NONE
            ranks.stop_sequence = 0
            self._occupy(ranks)
            self._go(order.epoch)
        elif order.intent in (GangIntent.PARK, GangIntent.HAND_OVER):
            if ranks.doing is Doing.READY and not self.gangs[order.epoch].stepping:
                ranks.doing = Doing.RUNNING
                self._occupy(ranks)
            if ranks.doing is Doing.PARKED and ranks.stop_sequence and order.stop_sequence != ranks.stop_sequence:
                # A newer stop, further on: its peers may have left the boundary where it rests.
                ranks.doing = Doing.RUNNING
                ranks.level = SuspendLevel.NONE
                ranks.stop_sequence = 0
                self._occupy(ranks)
            if ranks.doing is Doing.PARKED:
                self._settle_at_level(ranks)
            else:
                self._go(order.epoch)

    def _members(self, epoch: int) -> list[Ranks] | None:
        """All ranks of a gang, if all are there and go."""
        members = [self.ranks.get((epoch, node)) for node in self.gangs[epoch].nodes]
        present = [ranks for ranks in members if ranks is not None and ranks.doing is Doing.RUNNING]
        return present if len(present) == len(members) else None

    def _go(self, epoch: int) -> None:
        gang = self.gangs[epoch]
        if gang.stepping or self._members(epoch) is None:
            return
        gang.stepping, gang.stepped_at = True, self.engine.now
        self.engine.after(self.step_seconds * self.engine.between(0.8, 1.2), lambda: self._boundary(gang))

    def _boundary(self, gang: PhysicalGang) -> None:
        """The end of a mini-batch: all ranks together, or none."""
        gang.stepping = False
        members = self._members(gang.epoch)
        if members is None or any(self.leases.get(ranks.node, self.engine.now) < self.engine.now for ranks in members):
            return
        if not gang.stepped:
            # Also one that stops before its first step: what starts from its arenas has lost nothing by that.
            parked = bool(members[0].order.restore.parked_epoch)
            self.oracle.restored(gang.uid, gang.epoch, gang.step, parked)
        stops = {ranks.order.stop_sequence for ranks in members}
        if 0 not in stops and len(stops) == 1 and not gang.opaque:
            self._park(gang, members)
            return
        if gang.uid in self.hung:
            gang.stepping = True
            self.engine.after(self.step_seconds, lambda: self._boundary(gang))
            return
        gang.stepped = True
        gang.step += 1
        devices = [device for ranks in members for device in ranks.devices]
        self.oracle.stepped(gang.uid, gang.epoch, gang.step, devices)
        for ranks in members:
            ranks.stop_step = 0
        if gang.step >= self.oracle.trainings[gang.uid].total_steps:
            for ranks in members:
                self._end(ranks, OutcomeKind.DONE, "")
            return
        if gang.step % 20 == 0 and not gang.opaque:
            self._write_checkpoint(gang, members)
        self._go(gang.epoch)

    def _park(self, gang: PhysicalGang, members: list[Ranks]) -> None:
        for ranks in members:
            ranks.doing = Doing.PARKED
            ranks.level = SuspendLevel.PAUSE
            ranks.stop_sequence = ranks.order.stop_sequence
            ranks.stop_step = gang.step
        for ranks in members:
            # The first one may take all with it.
            self.settle(ranks)

    def _settle_at_level(self, ranks: Ranks) -> None:
        order = ranks.order
        gang = self.gangs[order.epoch]
        turns = self.turns.get(ranks.node)
        if ranks.level is SuspendLevel.PAUSE and turns is not None and turns.share_paused(ranks, ranks):
            # While others have their turn: it keeps all it has there, and does nothing with it.
            ranks.occupies = False
            self.oracle.offloaded(order.uid, order.epoch, ranks.devices, self.oracle.trainings[order.uid].device_bytes)
        if order.intent is not GangIntent.PARK or order.level <= ranks.level or not ranks.stop_sequence:
            return
        if order.level is SuspendLevel.OFFLOAD:
            ranks.level = SuspendLevel.OFFLOAD
            ranks.occupies = False
            self.oracle.offloaded(order.uid, order.epoch, ranks.devices, self.residue_of(order.uid))
            return
        members = [self.ranks.get((order.epoch, node)) for node in gang.nodes]
        if all(
            one is not None and one.doing is Doing.PARKED and one.order.level is SuspendLevel.CHECKPOINT
            for one in members
        ):
            present = [one for one in members if one is not None]
            if any(one.trouble for one in present) or self.engine.chance(self.faults.full_storage):
                for one in present:
                    one.trouble = "STORAGE_FULL: no space left on device"
                return
            self._write_checkpoint(gang, present)
            for one in present:
                self._end(one, OutcomeKind.YIELDED, "")

    def _write_checkpoint(self, gang: PhysicalGang, members: list[Ranks]) -> None:
        path = f"{gang.uid}/{gang.step}-{gang.epoch}"
        self.checkpoints[path] = Checkpoint(gang.step, gang.epoch, path)
        members[0].checkpoint = (gang.step, path)
        self.oracle.checkpointed(gang.uid, gang.step)
        self.prune(gang.uid, gang.epoch)

    def _end(self, ranks: Ranks, outcome: OutcomeKind, message: str, exit_code: int = 0) -> None:
        order = ranks.order
        ranks.doing = Doing.ENDED
        ranks.occupies = False
        ranks.outcome = outcome
        ranks.message = message
        ranks.exit_code = exit_code
        self.oracle.left(order.uid, order.epoch, ranks.devices)
        if outcome in (OutcomeKind.FAILED, OutcomeKind.UNKNOWN, OutcomeKind.ESCALATED):
            self.oracle.died(order.uid)
            # Collectives break: the peers follow soon.
            for node in self.gangs[order.epoch].nodes:
                peer = self.ranks.get((order.epoch, node))
                if peer is not None and peer.doing is Doing.RUNNING:
                    self._end_soon(peer)

    def _end_soon(self, ranks: Ranks) -> None:
        def die() -> None:
            if ranks.doing is Doing.RUNNING:
                self._end(ranks, OutcomeKind.UNKNOWN, "lost its peers")

        self.engine.after(self.engine.between(0.1, 5.0), die)


def spec_steps(spec: JobSpec) -> int:
    """Steps a simulated job does: the last word of its command."""
    return int(spec.command[-1])
