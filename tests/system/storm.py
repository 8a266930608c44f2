"""A storm over a real cluster: jobs take turns, are packed, moved and resized as dice say, while parties are killed.

All is asked through the public API, as a planner would ask, so the master judges each change. What must hold is judged
by what the jobs themselves wrote down (`benchmarks.witnesses`) and by what the harness was told was accepted.
"""

from __future__ import annotations

import random
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from ganger.client import Client
from ganger.v1 import job_pb2, scheduling_pb2, scheduling_pb2_grpc
from ganger.wire.channels import open_channel
from ganger.wire.endpoints import Endpoint, EndpointError, read_endpoint
from ganger.wire.errors import ApiError
from kit.cluster import Cluster, Service
from kit.waiting import eventually
from system.killing import start_the_dead
from system.tally import Tally
from system.wishes import (
    NEEDS_MEBIBYTES,
    Seen,
    Wish,
    Wishes,
    has_ended,
    is_settled,
    rests,
    runs,
    takes_turns,
    waits,
)

from benchmarks import victims, witnesses
from benchmarks.witnesses import WITNESS_JOB, Death, Pack, Record, Step

KINDS: Final = ("turn", "pack", "move", "resize")
MOST_STEPS: Final = 640
STEP_S: Final = 0.08
# Jobs that live at a time, by GPUs; 0: elastic. They need more devices than there are, so some are time-sliced.
POPULATION: Final = {0: 1, 1: 8, 2: 1}
AT_ONCE: Final = 5
# Changes beside those that are counted, without which there would soon be nothing to do.
_BESIDES: Final = ("start", "rest")
# Losses of an elastic job differ by the order of sums.
TOLERANCE: Final = 1e-12
# By then every change is done and every running job does a step, on a busy machine, too.
PATIENCE_SECONDS: Final = 180.0
_LOOK_S: Final = 0.15
# The least that any cluster grants.
_QUANTUM_MS: Final = 500
_SAMPLES: Final = 96
# Of those that are tried again.
_SAVED_EVERY: Final = "3s"
_FAILURES: Final = 1000
# Of what happened, the last lines are told.
_TOLD: Final = 80


@dataclass
class Job:
    """An accepted submission."""

    name: str
    uid: str
    label: str
    request: str
    gpus: int
    steps: int
    record: Record
    # When it last did a step, or was not to.
    stepped: float = field(default_factory=time.monotonic)
    done: int = 0


@dataclass
class Action:
    """A change that was asked for."""

    wish: Wish
    began: float
    steps: dict[str, int]


class Storm:
    """One run of `actions` changes of the kinds that count, under kills; all is drawn from `seed`. Victims are the
    master and daemons, so no step is ever undone. If `spares_ranks` is false, ranks and launchers are killed, too, and
    jobs save themselves every few seconds and are retried, each from its newest checkpoint."""

    def __init__(
        self, cluster: Cluster, seed: int, actions: int, kill_chance: float = 0.3, *, spares_ranks: bool = True
    ) -> None:
        self.cluster, self.seed, self.actions, self.kill_chance = cluster, seed, actions, kill_chance
        self.spares_ranks = spares_ranks
        self.tally = Tally(KINDS)
        self._dice = random.Random(seed)
        self._jobs: dict[str, Job] = {}
        self._packs: list[Pack] = []
        self._deaths: list[Death] = []
        self._under_way: list[Action] = []
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._restarted = 0.0
        self._is_ready = True
        self._quantum_ms = _QUANTUM_MS
        self._asked: tuple[str, str, int, int] | None = None
        self._references: dict[int, dict[tuple[int, int], Step]] = {}
        self._losses: dict[int, float] = {}
        self._checked_ns = 0
        self._began = time.monotonic()
        self._told: list[str] = []
        self._channel: tuple[Endpoint, Any] | None = None
        self._hurry = cluster.directory / "hurry"
        self._is_over = False
        self.worst_loss = 0.0

    # -- the whole of it

    def run(self) -> None:
        self._refer()
        idle = self._look()
        assert idle is not None
        while self.tally.actions < self.actions:
            self._go_on()
        self._calm()
        eventually(
            lambda: (seen := self._look()) is not None and seen.free == idle.free and seen.memory == idle.memory,
            what="all that was held is free again",
            within_seconds=PATIENCE_SECONDS,
            story=self.story,
        )

    def _refer(self) -> None:
        """Run undisturbed reference jobs, with which all others are compared."""
        for gpus in POPULATION:
            self._submit(f"reference-{gpus}", gpus, MOST_STEPS, STEP_S / 100)
        while not self._have_all_ended():
            self._go_on(is_disturbed=False)
        for job in list(self._jobs.values()):
            steps = job.record.read()
            self._references[job.gpus] = witnesses.by_step_and_rank(steps)
            if not job.gpus:
                self._losses = witnesses.losses_of_batches(steps)
        self._check(0)

    def _calm(self) -> None:
        """Stop changes and kills, and wait until all jobs end."""
        self._due.clear()
        start_the_dead(self.cluster)
        self._is_over = True
        self._hurry.touch()
        while not self._have_all_ended():
            self._go_on(is_disturbed=False)
        self._check(0)
        for job in self._jobs.values():
            last = [one for one in witnesses.what_counts(job.record.read()) if one.step == job.steps]
            assert last, f"{job.name} did not do its last step\n{self.story()}"
            assert len(last) == last[0].world, f"{job.name} was not ended by all of its ranks\n{self.story()}"

    def _have_all_ended(self) -> bool:
        seen = self._look()
        return seen is not None and all(has_ended(seen.jobs[name]) for name in self._jobs)

    def _go_on(self, *, is_disturbed: bool = True) -> None:
        now = time.monotonic()
        for due in sorted(self._due, key=lambda one: one[0]):
            if due[0] <= now:
                self._due.remove(due)
                due[1]()
        seen = self._look()
        if seen is not None:
            self._settle(seen)
            self._watch(seen)
            if is_disturbed:
                self._populate(seen)
                self._ask(seen, self._kind(seen))
            else:
                self._ask(seen, self._dice.choice(_BESIDES), is_end=True)
        _pace.wait(_LOOK_S)

    # -- what is asked

    def _populate(self, seen: Seen) -> None:
        if self._asked is None:
            living = Counter(job.gpus for name, job in self._jobs.items() if not has_ended(seen.jobs[name]))
            missing = [gpus for gpus, wanted in POPULATION.items() if living[gpus] < wanted]
            if not missing:
                return
            gpus, steps = self._dice.choice(missing), 8 * self._dice.randint(MOST_STEPS // 24, MOST_STEPS // 8)
            request = str(uuid.UUID(int=self._dice.getrandbits(128), version=4))
            self._asked = (f"{gpus or 'elastic'}-{len(self._jobs)}", request, gpus, steps)
        label, request, gpus, steps = self._asked
        if self._submit(label, gpus, steps, STEP_S, request):
            self._asked = None

    def _submit(self, label: str, gpus: int, steps: int, step_seconds: float, request: str = "") -> bool:
        """Return whether the job was accepted. While the master is away, the submission is retried."""
        request = request or str(uuid.uuid4())
        try:
            accepted = self._accepted(label, request, gpus, steps, step_seconds)
        except (ApiError, EndpointError):
            return False
        name = accepted.name
        record = Record(name, self.cluster.directory / f"{label}.record")
        self._jobs[name] = Job(name, accepted.uid, label, request, gpus, steps, record)
        self._tell(f"{name} ({label}, {steps} steps) is accepted")
        return True

    def _accepted(self, label: str, request: str, gpus: int, steps: int, step_seconds: float) -> job_pb2.Job:
        command = [sys.executable, str(WITNESS_JOB), "--record", str(self.cluster.directory / f"{label}.record")]
        command += ["--steps", str(steps), "--step-seconds", str(step_seconds), "--hurry-once", str(self._hurry)]
        with Client(str(self.cluster.master_directory)) as client:
            return client.submit(
                [*command, *([] if gpus else ["--elastic"])],
                request_id=request,
                gpus=gpus or "1:4",
                cpus_per_gpu=1,
                memory="512M",
                gpu_memory=f"{NEEDS_MEBIBYTES}M",
                checkpoint_every="never" if self.spares_ranks else _SAVED_EVERY,
                max_failures=0 if self.spares_ranks else _FAILURES,
                name=label,
                directory=str(WITNESS_JOB.parent),
            ).message

    def _kind(self, seen: Seen) -> str:
        """The kinds come about as often as each other."""
        under_way = Counter(action.wish.kind for action in self._under_way)
        weights = {kind: 1 / (1 + self.tally.done[kind] + 4 * under_way[kind]) for kind in KINDS}
        most = max(weights.values())
        crowd = sum(waits(job) for job in seen.jobs.values())
        resting = sum(rests(job) for job in seen.jobs.values())
        # pending jobs are to be time-sliced, too: some are started only if many wait
        weights.update(start=most * max(0, crowd - 1) / 4, rest=most * (0.1 + resting / 16))
        return self._dice.choices(list(weights), list(weights.values()))[0]

    def _ask(self, seen: Seen, kind: str, *, is_end: bool = False) -> None:
        if len(self._under_way) >= AT_ONCE:
            return
        busy = {name for action in self._under_way for name in action.wish.jobs}
        gpus = {name: job.gpus for name, job in self._jobs.items()}
        wishes = Wishes(self._dice, seen, gpus, busy, self._quantum_ms)
        self._quantum_ms = _QUANTUM_MS
        wish = wishes.useful() if is_end else wishes.any_of(kind)
        if wish is None:
            return
        packs = []
        for device in wish.joins:
            comes = {name for pack in self._packs if pack.device == device and pack.ended is None for name in pack.jobs}
            there = frozenset({*seen.holders(device), *wish.jobs, *comes})
            packs.append(Pack(device, there, time.monotonic_ns()))
        self._packs += packs
        asked = [change for change in wish.changes if change.revision]
        if asked and not self._is_approved(wish, asked):
            for pack in packs:
                self._packs.remove(pack)
            return
        steps = {name: self._jobs[name].record.done() for name in wish.jobs}
        self._under_way.append(Action(wish, time.monotonic(), steps))
        self._tell(f"{wish.kind}: {wish.what}")
        if wish.kind in KINDS and not is_end and self._dice.random() < self.kill_chance:
            for victim in self._victims():
                self._at(self._dice.uniform(0.0, 2.0), lambda victim=victim: self._kill(victim))  # type: ignore[misc]

    def _is_approved(self, wish: Wish, changes: list[scheduling_pb2.Change]) -> bool:
        """Return whether the master approved the changes; true if it did not answer, since it may have."""
        try:
            verdicts = self._stub().ProposePlan(scheduling_pb2.Plan(changes=changes, reason="a storm")).verdicts
        except (grpc.RpcError, EndpointError):
            return True
        for verdict in verdicts:
            for refusal in verdict.refusals:
                self.tally.refused[f"{wish.kind}: {refusal.reason}"] += 1
                self._tell(f"refused: {wish.what}: {refusal.message}")
                # of this group, whose switches take so long; those of the next one are unknown
                self._quantum_ms = max(self._quantum_ms, int(1.2 * refusal.figures.get("least_milliseconds", 0)))
        return all(verdict.approved for verdict in verdicts)

    # -- what comes of it

    def _settle(self, seen: Seen) -> None:
        for action in list(self._under_way):
            if not self._is_settled(seen, action):
                waited = time.monotonic() - action.began
                assert waited < PATIENCE_SECONDS, f"{action.wish.what} is not settled\n{self.story()}"
                continue
            self._under_way.remove(action)
            kind, outcome = action.wish.kind, action.wish.judge(seen)
            if outcome == "done":
                self.tally.done[kind] += 1
            else:
                self.tally.called_off[kind] += 1
            self._tell(f"{outcome}: {action.wish.what}")
        busy = {name for action in self._under_way for name in action.wish.jobs}
        for pack in self._packs:
            there = pack.jobs.intersection(seen.holders(pack.device))
            if pack.ended is None and len(there) < 2 and not busy & pack.jobs:
                pack.ended = time.monotonic_ns()

    def _is_settled(self, seen: Seen, action: Action) -> bool:
        for name in action.wish.jobs:
            live = seen.jobs[name]
            if not is_settled(live):
                return False
            if runs(live) and self._jobs[name].record.done() <= action.steps[name]:
                return False
        return True

    def _watch(self, seen: Seen) -> None:
        """Check that every job that should run makes progress, and that none has failed or is lost."""
        now = time.monotonic()
        is_going = True
        for job in self._jobs.values():
            assert job.name in seen.jobs, f"{job.name} was accepted, and is not known\n{self.story()}"
            live = seen.jobs[job.name]
            failed = live.state in (job_pb2.Job.STATE_FAILED, job_pb2.Job.STATE_CANCELLED)
            assert not failed, f"{job.name} has failed\n{self.story()}"
            done = job.record.done()
            if done > job.done or not runs(live):
                job.done, job.stepped = done, now
            assert now - job.stepped < PATIENCE_SECONDS, f"{job.name} does no step\n{self.story()}"
            is_going = is_going and (not runs(live) or takes_turns(live) or job.stepped > self._restarted)
        if self._restarted and not self._due:
            if not self._is_ready and seen.is_ready:
                self._is_ready = True
                self.tally.ready.append(now - self._restarted)
            if self._is_ready and is_going:
                self._restarted = 0.0
                self._check(self._checked_ns)

    # -- kills

    def _victims(self) -> list[str]:
        """Mostly one; now and then two of them at once."""
        all_ = ["master", *self.cluster.daemons, *([] if self.spares_ranks else ["rank", "rank", "rank", "launcher"])]
        return self._dice.sample(all_, 2 if self._dice.random() < 0.15 else 1)

    def _at(self, seconds: float, do: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + seconds, do))

    def _kill(self, victim: str) -> None:
        if victim in ("rank", "launcher"):
            self._kill_process(victim)
            return
        service = self.cluster.daemons.get(victim, self.cluster.master)
        if not service.alive:
            return
        service.kill()
        self._killed("master" if service is self.cluster.master else "daemon", service.name)
        self._at(self._dice.uniform(0.0, 1.5), lambda: self._restart(service))

    def _kill_process(self, kind: str) -> None:
        """Kill one of the live ranks or launchers; the cluster starts it again, or does not."""
        there = (
            victims.ranks(self.cluster.run_directory)
            if kind == "rank"
            else victims.launchers(self.cluster.run_directory)
        )
        if not there:
            return
        victim = self._dice.choice(there)
        saved = victims.newest_checkpoint(self.cluster.storage, victim.uid) if victim.uid else 0
        if victim.kill():
            names = [job.name for job in self._jobs.values() if job.uid == victim.uid]
            self._deaths += [Death(name, time.monotonic_ns(), saved) for name in names]
            self._killed(kind, f"{victim.what} {' '.join(names)}")

    def _killed(self, victim: str, text: str) -> None:
        self.tally.killed(victim, [action.wish.kind for action in self._under_way])
        self._tell(f"killed: {text}")

    def _restart(self, service: Service) -> None:
        if service is self.cluster.master:
            self.cluster.start_master()
        else:
            service.start()
        self._restarted, self._is_ready = time.monotonic(), False
        self._tell(f"started: {service.name}")

    # -- what must hold

    def _check(self, since_ns: int) -> None:
        """Of all steps since then, and a little before."""
        self._checked_ns = time.monotonic_ns() - 10**9
        found: list[str] = []
        recent: list[Step] = []
        for job in self._jobs.values():
            steps = job.record.read()
            recent += [one for one in steps if one.ended >= since_ns]
            counts = witnesses.what_counts(steps)
            found += witnesses.undone_without_cause(steps, self._deaths)
            found += witnesses.lost_or_repeated(counts)
            found += witnesses.two_attempts_at_once(steps)
            if job.gpus:
                found += witnesses.other_results(steps, self._references[job.gpus])
            else:
                found += witnesses.samples_not_once(counts, _SAMPLES)
                found += self._other_losses(counts)
        found += witnesses.two_on_a_device(recent, self._packs)
        assert not found, "\n".join([*found[:20], self.story()])
        self._check_accepted()

    def _other_losses(self, steps: list[Step]) -> list[str]:
        found = []
        for step, loss in witnesses.losses_of_batches(steps).items():
            off = abs(loss - self._losses[step]) / abs(self._losses[step])
            self.worst_loss = max(self.worst_loss, off)
            if off > TOLERANCE:
                found.append(f"step {step} of {steps[0].job}: loss {loss!r}, not {self._losses[step]!r}")
        return found

    def _check_accepted(self) -> None:
        """Check that the master lists all accepted jobs and no others, and that a repeated request gets the same
        answer."""
        job = self._dice.choice(list(self._jobs.values()))
        try:
            with Client(str(self.cluster.master_directory)) as client:
                listed = {one.name for one in client.list_jobs()}
            again = self._accepted(
                job.label,
                job.request,
                job.gpus,
                job.steps,
                STEP_S / 100 if job.label.startswith("reference") else STEP_S,
            ).name
        except (ApiError, EndpointError):
            # It is killed again already: the next check after a kill will do.
            return
        unknown = listed - self._jobs.keys()
        assert len(unknown) <= (self._asked is not None), f"never submitted: {unknown}"
        assert self._jobs.keys() <= listed, f"accepted and lost: {self._jobs.keys() - listed}"
        assert again == job.name, f"{job.name} was accepted twice: {again}"

    # -- how it is seen and told

    def _look(self) -> Seen | None:
        """None while no master answers."""
        try:
            stream = self._stub().WatchCluster(scheduling_pb2.WatchClusterRequest())
            try:
                jobs: dict[str, scheduling_pb2.LiveJob] = {}
                nodes: list[Any] = []
                for delta in stream:
                    nodes += delta.view.nodes
                    jobs.update({job.job: job for job in delta.jobs})
                    if not delta.has_more:
                        break
            finally:
                stream.cancel()
        except (grpc.RpcError, EndpointError):
            return None
        by_name = {row.node.removeprefix("nodes/"): row for row in nodes}
        if len(by_name) < len(self.cluster.daemons):
            return None
        free = {name: row.free_mask for name, row in by_name.items()}
        memory = {name: row.free_memory_bytes for name, row in by_name.items()}
        return Seen(jobs, free, memory, all(row.available for row in by_name.values()))

    def _stub(self) -> Any:
        endpoint = read_endpoint(self.cluster.master_directory)
        if self._channel is None or self._channel[0] != endpoint:
            if self._channel is not None:
                self._channel[1].close()
            self._channel = (endpoint, open_channel(endpoint))
        return scheduling_pb2_grpc.SchedulingServiceStub(self._channel[1])

    def close(self) -> None:
        if self._channel is not None:
            self._channel[1].close()

    def _tell(self, what: str) -> None:
        self._told.append(f"{time.monotonic() - self._began:7.2f}  {what}")
        with (self.cluster.directory / "storm.log").open("a") as out:
            print(self._told[-1], file=out)

    def story(self) -> str:
        return "\n".join([self.report(), *self._told[-_TOLD:], self.cluster.story()])

    def report(self) -> str:
        seconds = time.monotonic() - self._began
        steps = {job.name: job.record.steps for job in self._jobs.values()}
        switches = witnesses.switches([one for own in steps.values() for one in own])
        undone = sum(len(own) - len(witnesses.what_counts(own)) for own in steps.values())
        return "\n".join(
            [
                f"seed {self.seed}: {self.tally.actions} changes in {seconds:.0f} s, {len(self._jobs)} jobs,"
                f" {switches} times another job's turn on a device, {sum(self.tally.kills.values())} kills",
                *self.tally.lines(),
                f"{undone} steps of ranks were undone by deaths of ranks, and done again;"
                f" losses of elastic jobs are off by {self.worst_loss:.1e} at most",
            ]
        )


# Never set: waiting on it paces a loop.
_pace = threading.Event()
