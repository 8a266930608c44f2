"""Oracles over a simulated cluster: what the processes really did, judged without looking at the master's state.

They know nothing of faults and share no code with the core: steps, devices and acknowledged jobs are counted anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field


class RuleBrokenError(AssertionError):
    """Something that must always hold did not."""


@dataclass(slots=True)
class CheckedTraining:
    """What really happened to one job."""

    total_steps: int
    # Memory it says that it needs of each device; zero for unknown.
    device_bytes: int = 0
    step: int = 0
    # Highest epoch that ever stepped.
    epoch: int = 0
    # Step at which the newest attempt began.
    began: int = 0
    # Steps of complete checkpoints, as written; and of the newest that the master has made known.
    checkpoints: list[int] = field(default_factory=list)
    known: int = 0
    # By epoch: the newest that was known when it got its place.
    known_to: dict[int, int] = field(default_factory=dict)
    # Deaths that allow going back to the last complete checkpoint: of a rank, of a node, by its own code; silence too.
    deaths: int = 0
    deaths_used: int = 0


class Oracle:
    """Told of every step and every process; raises RuleBrokenError at the first thing that must not be."""

    def __init__(self) -> None:
        self.trainings: dict[str, CheckedTraining] = {}
        self.accepted: dict[int, str] = {}
        # Jobs that were accepted after the restored copy of the database was made.
        self.lost: set[int] = set()
        self.is_restored = False
        # Uids of jobs that have ended, and of those about which a person has decided since.
        self.ended: set[str] = set()
        self.decided: set[str] = set()
        # Gangs that may step on a device: (node, device) -> (uid, epoch) -> whether it shares the device.
        self.users: dict[tuple[str, int], dict[tuple[str, int], bool]] = {}
        # Memory of each device of a node, and what processes that have offloaded keep: device -> attempt -> bytes.
        self.memory: dict[str, int] = {}
        self.kept: dict[tuple[str, int], dict[tuple[str, int], int]] = {}
        self.steps = 0

    def submitted(self, uid: str, total_steps: int, device_bytes: int = 0) -> None:
        self.trainings.setdefault(uid, CheckedTraining(total_steps, device_bytes))

    def acknowledged(self, number: int, uid: str) -> None:
        """The caller was told that the job is accepted."""
        known = self.accepted.setdefault(number, uid)
        if known != uid:
            raise RuleBrokenError(f"jobs/{number} was given twice: {known} and {uid}")

    def restored(self, uid: str, epoch: int, step: int, from_parked: bool) -> None:
        """A new attempt starts its first step from here."""
        training = self.trainings[uid]
        if uid in self.ended - self.decided:
            raise RuleBrokenError(f"{uid} epoch {epoch} runs, though the job has ended")
        began, training.began = training.began, step
        known = training.known_to.get(epoch)
        if not from_parked and step != known:
            raise RuleBrokenError(f"{uid} epoch {epoch} starts at step {step}, not at checkpoint {known}")
        if step == training.step:
            return
        if not from_parked and step > training.step:
            # Done by an attempt that was cut off, and known of only after another had begun from before it.
            training.step = step
            return
        if step > training.step:
            raise RuleBrokenError(f"{uid} epoch {epoch} starts at step {step}, but only {training.step} were done")
        # From a copy that was moved away from, once the one that took over from it is dead.
        if from_parked and step != began:
            raise RuleBrokenError(f"{uid} epoch {epoch}: a move lost steps {step}..{training.step}")
        if training.deaths <= training.deaths_used:
            raise RuleBrokenError(
                f"{uid} epoch {epoch} goes back from {training.step} to {step}, though nothing of it died"
            )
        training.deaths_used = training.deaths
        training.step = step

    def stepped(self, uid: str, epoch: int, step: int, devices: Sequence[tuple[str, int]]) -> None:
        training = self.trainings[uid]
        self.steps += 1
        if epoch < training.epoch:
            raise RuleBrokenError(f"{uid}: epoch {epoch} steps after epoch {training.epoch} did")
        training.epoch = epoch
        if step != training.step + 1:
            raise RuleBrokenError(f"{uid} epoch {epoch} does step {step} after step {training.step}")
        training.step = step
        for device in devices:
            self._check_users(device, uid, epoch)
            newer = [other for other in self.users.get(device, {}) if other[0] == uid and other[1] > epoch]
            if newer:
                raise RuleBrokenError(f"{device} is given to {newer} while {uid} epoch {epoch} steps on it")

    def occupied(
        self, uid: str, epoch: int, devices: Sequence[tuple[str, int]], shared: Collection[tuple[str, int]] = ()
    ) -> None:
        """Processes got these devices, and may use them from now on; of some they know that others may, too. Said
        again when that changes."""
        for device in devices:
            self.users.setdefault(device, {})[uid, epoch] = device in shared
            self.kept.get(device, {}).pop((uid, epoch), None)
            self._check_users(device, uid, epoch)
            self._check_memory(device)

    def shared(self, uid: str, epoch: int, devices: Sequence[tuple[str, int]]) -> None:
        """Note that the gangs on these devices now share them."""
        for device in devices:
            if (uid, epoch) in self.users.get(device, {}):
                self.users[device][uid, epoch] = True

    def left(self, uid: str, epoch: int, devices: Sequence[tuple[str, int]]) -> None:
        for device in devices:
            self.users.get(device, {}).pop((uid, epoch), None)
            self.kept.get(device, {}).pop((uid, epoch), None)

    def offloaded(self, uid: str, epoch: int, devices: Sequence[tuple[str, int]], residue: int) -> None:
        """Its processes use the devices no more, but keep that many bytes of each."""
        self.left(uid, epoch, devices)
        for device in devices:
            self.kept.setdefault(device, {})[uid, epoch] = residue
            self._check_memory(device)

    def _check_users(self, device: tuple[str, int], uid: str, epoch: int) -> None:
        """Check that all other gangs on the device share it too, or are attempts of the same job."""
        users = self.users.get(device, {})
        for other, shares in users.items():
            if other[0] != uid and not (shares and users.get((uid, epoch))):
                raise RuleBrokenError(f"{device} is given to {uid} epoch {epoch} while {other} is on it")

    def _check_memory(self, device: tuple[str, int]) -> None:
        users, kept = self.users.get(device, {}), sum(self.kept.get(device, {}).values())
        # Attempts of one job: the one gives up its memory as the other takes it.
        needs = {uid: self.trainings[uid].device_bytes for uid, _ in users}
        needed, whole = sum(needs.values()), self.memory.get(device[0], 0)
        if needed and needed + kept > whole > 0:
            raise RuleBrokenError(f"{sorted(needs)} need {needed} of the {whole} bytes of {device}, others keep {kept}")

    def moved(self, uid: str, epoch: int, stopped_at: set[int], has: set[int]) -> None:
        """A move was committed: the steps at which the source's ranks stand, and of which the destination's have the
        state."""
        if len(stopped_at) != 1 or has != stopped_at:
            raise RuleBrokenError(f"{uid} epoch {epoch} took over with steps {has}, the source stands at {stopped_at}")

    def spoiled(self, uid: str) -> None:
        """An image was broken: if that happens too often, the job may go back to its checkpoint."""
        self.trainings[uid].deaths += 1

    def died(self, uid: str) -> None:
        self.trainings[uid].deaths += 1

    def given_up(self, node: str, silent: float, allowed: float, attempts: Iterable[tuple[str, int]]) -> None:
        """The master goes on without a node it has not heard for `silent` seconds: more than it must wait. Its attempts
        count as dead."""
        if silent <= allowed:
            raise RuleBrokenError(f"{node} is given up after {silent:g} s of silence, {allowed:g} s are allowed")
        self.unreported(attempts)

    def unreported(self, attempts: Iterable[tuple[str, int]]) -> None:
        """The master goes on without a report of these attempts (uid, epoch). What they did since, even by ending well,
        cannot be told, and they count as dead; all but those a later one has followed."""
        for uid, epoch in attempts:
            if epoch >= self.trainings[uid].epoch:
                self.died(uid)

    def checkpointed(self, uid: str, step: int) -> None:
        self.trainings[uid].checkpoints.append(step)

    def made_known(self, uid: str, step: int) -> None:
        """Note the published checkpoint of a job: a start from storage starts from it."""
        training = self.trainings[uid]
        if step not in training.checkpoints:
            raise RuleBrokenError(f"{uid} is said to have a checkpoint of step {step}, which no rank wrote")
        training.known = step

    def placed(self, uid: str, epoch: int) -> None:
        """An attempt has its place; what it starts from, if not from a parked copy, stands."""
        training = self.trainings[uid]
        training.known_to[epoch] = training.known

    def finished(self, uid: str) -> None:
        """Record that the master has published the end of the job."""
        self.ended.add(uid)

    def decided_anew(self, uid: str) -> None:
        """Record that a person decides about the job: it may run again, from an earlier step."""
        self.decided.add(uid)
        self.died(uid)

    def rolled_back(self, jobs: Mapping[int, tuple[str, int]], remembered: Collection[str] | None = None) -> None:
        """Record that the master's database is an older copy. `jobs`: by number, the uid and the step of the newest
        known checkpoint. Jobs accepted since may be lost; their numbers may not be given again.
        `remembered`: only jobs with these uids are known outside the database; None where all numbers are."""
        self.is_restored = True
        self.lost |= self.accepted.keys() - jobs.keys()
        if remembered is not None:
            for number in [one for one in self.lost if self.accepted.get(one, "") not in remembered]:
                self.accepted.pop(number, None)
        for uid, step in jobs.values():
            self.trainings[uid].known = step

    def check_kept(self, jobs: Mapping[int, str]) -> None:
        """`jobs`: number to uid, as the master knows them now."""
        for number, uid in self.accepted.items():
            if number not in jobs and number in self.lost:
                continue
            if jobs.get(number) != uid:
                raise RuleBrokenError(f"jobs/{number} ({uid}) was accepted and is lost")

    def check_without_checkpoint(self, uid: str, on_storage: Sequence[str]) -> None:
        """Check a job that failed because no checkpoint is left."""
        if on_storage:
            raise RuleBrokenError(f"{uid} failed for want of a checkpoint beside {', '.join(on_storage)}")

    def check_succeeded(self, uid: str) -> None:
        training = self.trainings[uid]
        if training.step != training.total_steps:
            raise RuleBrokenError(f"{uid} is said to have succeeded at step {training.step} of {training.total_steps}")
