"""Stories as text: commands, `----`, and exactly what they print. Blocks are separated by empty lines.

node NAME TOPOLOGY [type=T] [user=U] [disk=MB/s] [net=MB/s]       policy NAME | quota USER=DEVICES ...   (before nodes)
partition NAME [nodes= users= time= gpus= priority= preemptible=]      leave PARTITION     restart (with other settings)
submit GPUS [steps= cores= memory= type= within= user= priority= failures= disk= net= partition= time= after=]
told JOB KIND   cancel|resume|why|show|fails JOB           suspend JOB LEVEL              move JOB [NODE]
backup | restore | quarantine adopt|end JOB      reserve NAME NODE in=SECONDS for=SECONDS [users= lead=]
check NODE [FAILURE]              fault NODE DEVICE REASON       idle WARNING PARK (before nodes)      hang|wake JOB
cordon|uncordon|drain|reboot|silent|heard|storage|nostorage NODE     residue MEBIBYTES     run SECONDS      nodes
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace as structs_replace
from pathlib import Path

import pytest
from faultsim.fault_cluster import FaultCluster
from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.refusals import Reason, RefusalKind
from ganger.cluster.resources import Locality, LocalityLevel, Role, TaskShape
from ganger.cluster.topology import parse_topology
from ganger.protocol.gang_orders import Mechanism
from ganger_daemon.core.hook_outcomes import after_check
from ganger_master.core import commands
from ganger_master.core.answers import Answer, ArrayAnswer, Refused
from ganger_master.core.explain import explain
from ganger_master.core.gang_model import OutcomeKind
from ganger_master.core.job_model import SuspendLevel
from ganger_master.core.job_spec import Condition, Dependency, JobSpec
from ganger_master.core.node_faults import faults_of
from ganger_master.core.node_model import Reservation
from ganger_master.core.settings import CoreSettings
from ganger_master.core.tenancy import Partition, partitions_of
from ganger_master.planner.context import PlannerSettings, context_of
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.plan import plan
from ganger_master.policies.orders import Capacity, ranked
from msgspec.structs import replace

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))
_GIB = 1 << 30


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_scenario_prints_what_its_file_says(path: Path, request: pytest.FixtureRequest) -> None:
    told = path.read_text()
    printed = _told_again(told)
    if request.config.getoption("--rewrite", default=False):
        path.write_text(printed)
    else:
        assert printed == told


def test_for_every_blocker_a_scenario_names_it_and_the_job_starts_once_it_is_gone() -> None:
    told = {path.stem: path.read_text() for path in SCENARIOS}
    for reason in Reason:
        # No master refuses for UNKNOWN: it stands for what a newer one does.
        if reason.kind is RefusalKind.BLOCKER and reason is not Reason.UNKNOWN:
            story = told[f"why_{reason.name.lower()}"]
            named = re.search(rf"^why (\d+)\n----\n{reason.name}:", story, re.MULTILINE)
            assert named, reason
            assert re.search(rf"^jobs/{named[1]} HOLDING", story[named.end() :], re.MULTILINE), reason


def _told_again(text: str) -> str:
    story = _Story()
    blocks = []
    for block in text.strip().split("\n\n"):
        lines = block.split("\n----")[0].splitlines()
        said = [line for command in lines if not command.startswith("#") for line in story.tell(command)]
        blocks.append("\n".join([*lines, "----", *said]) if said else "\n".join(lines))
    return "\n\n".join(blocks) + "\n"


class _Story:
    def __init__(self) -> None:
        self._cluster: FaultCluster | None = None
        self._settings = CoreSettings()
        self._copy: dict[tuple[str, str], bytes] = {}

    @property
    def cluster(self) -> FaultCluster:
        if self._cluster is None:
            self._cluster = FaultCluster(1, [], self._settings)
        return self._cluster

    def tell(self, line: str) -> Iterator[str]:
        verb, *words = line.split()
        named = dict(word.split("=", 1) for word in words if "=" in word)
        yield from getattr(self, f"_{verb}")(*[word for word in words if "=" not in word], **named)

    def _policy(self, name: str) -> Iterator[str]:
        self._settings = CoreSettings(policy=name)
        yield from ()

    def _quota(self, **devices: str) -> Iterator[str]:
        self._settings = CoreSettings(quota_devices={user: int(count) for user, count in devices.items()})
        yield from ()

    def _partition(self, name: str, nodes: str = "", users: str = "", **limits: str) -> Iterator[str]:
        """Before the nodes, or before a restart."""
        table: dict[str, object] = {key: value if key == "time" else int(value) for key, value in limits.items()}
        table |= {"preemptible": table.get("preemptible") != 0, "nodes": nodes} if nodes else {}
        table |= {"users": users.split(",")} if users else {}
        self._set_partitions({**self._settings.partitions, **partitions_of({name: table})})
        yield from ()

    def _leave(self, name: str) -> Iterator[str]:
        """Take a partition out of the settings, before a restart."""
        self._set_partitions({other: one for other, one in self._settings.partitions.items() if other != name})
        yield from ()

    def _set_partitions(self, partitions: Mapping[str, Partition]) -> None:
        self._settings = structs_replace(self._settings, partitions=partitions)

    def _restart(self) -> Iterator[str]:
        master = self.cluster.master
        master.crash(2.0)
        master.settings = self._settings
        self.cluster.run_for(20.0)
        yield from ()

    def _node(
        self,
        name: str,
        topology: str,
        type: str = "virtual",
        user: str = "",
        image: str = "",
        keeps: str = "",
        **bandwidth: str,
    ) -> Iterator[str]:
        """`image`: what takes process images there, and then its jobs are saved by them. `keeps`: it sees no storage,
        and keeps checkpoints on its own disk."""
        made = parse_topology(
            topology,
            name=f"{type}-{topology}",
            device_type=type,
            millicores=16_000,
            memory_bytes=64 * _GIB,
            device_memory_bytes=_GIB,
        )
        declared = {f"{what}_mb_per_s": float(amount) for what, amount in bandwidth.items()}
        made = replace(made, name="-".join([made.name, *bandwidth.values()]), dimensions=declared)
        capabilities = {"switch_user": "no", "user": user} if user else {}
        capabilities |= {"image": image.replace("_", " ")} if image else {}
        capabilities |= {"disk_checkpoints": "yes"} if keeps else {}
        daemon = self.cluster.add_node(name, made, capabilities)
        daemon.storage_proved = not keeps
        if image and not image.startswith("none"):
            daemon.offers = replace(daemon.offers, mechanism=Mechanism.IMAGE)
        self.cluster.run_for(5.0)
        yield from ()

    def _submit(
        self,
        gpus: str,
        steps: str = "60",
        cores: str = "2",
        memory: str = "4",
        type: str = "",
        within: str = "CLUSTER",
        user: str = "",
        priority: str = "0",
        failures: str = "0",
        disk: str = "0",
        net: str = "0",
        partition: str = "",
        time: str = "",
        after: str = "",
    ) -> Iterator[str]:
        bandwidth = (int(disk), int(net))
        shape = TaskShape(1, int(cores) * 1000, int(memory) * _GIB, bandwidth if any(bandwidth) else ())
        spec = JobSpec(
            ("train", steps),
            (Role("worker", int(gpus), shape),),
            device_type=type,
            locality=Locality(widest=LocalityLevel[within]),
            priority=int(priority),
            max_failures=int(failures),
            gpu_memory_bytes=_GIB,
            partition=partition,
            time_limit_s=float(time) if time else None,
            dependencies=(Dependency(Condition.SUCCEEDED, int(after)),) if after else (),
        )
        submission = self.cluster.submit(spec, user)
        self.cluster.run_until(lambda: submission.number > 0 or submission.refused, 10.0)
        self.cluster.run_for(10.0)
        yield from self._show(str(submission.number)) if submission.number else ["refused"]

    def _array(self, members: str, at_once: str = "0", steps: str = "60") -> Iterator[str]:
        """An array of one-GPU jobs; `at_once` of them run or wait."""
        spec = JobSpec(("train", steps), (Role("worker", 1, TaskShape(1, 2000, 4 * _GIB)),), gpu_memory_bytes=_GIB)
        numbers = range(int(members))
        uids = tuple([f"member-{number}" for number in numbers])
        told = tuple([(number, {"lr": f"0.{number + 1}"}) for number in numbers])
        for uid in uids:
            self.cluster.oracle.submitted(uid, int(steps), spec.gpu_memory_bytes)
        answer = self.cluster.ask(commands.SubmitArray(spec, told, uids, int(at_once), request_id="array"))
        assert isinstance(answer, ArrayAnswer), answer
        for job in sorted(self.cluster.state.jobs.values(), key=lambda job: job.number):
            if job.uid in uids:
                self.cluster.oracle.acknowledged(job.number, job.uid)
        self.cluster.run_for(10.0)
        for job in sorted(self.cluster.state.jobs.values(), key=lambda job: job.number):
            if job.uid in uids:
                yield from self._show(str(job.number))

    def _show(self, number: str) -> Iterator[str]:
        state = self.cluster.state
        job = state.jobs[int(number)]
        gang = state.gangs.get(job.epoch)
        words = [job.name, job.state.value]
        if job.suspended_level:
            words.append(f"at {job.suspended_level.name}")
        if gang is not None:
            places = " ".join(f"{claim.node}:{claim.device_mask:#x}" for claim in gang.claims)
            words.append(f"epoch {gang.epoch} {gang.phase.value} on {places}")
            if gang.idle is not None:
                words.append("without using its GPUs")
        yield " ".join(words)

    def _told(self, number: str, kind: str) -> Iterator[str]:
        """Yield the messages of a kind in the job's history."""
        for row in self.cluster.master.history:
            if row.subject == f"jobs/{number}" and row.kind == kind:
                yield row.message

    def _why(self, number: str) -> Iterator[str]:
        found = explain(self.cluster.state, int(number), self.cluster.master.now())
        for blocker in found.blockers[:2]:
            yield f"{blocker.reason.name}: {blocker.message}"
        if not found.blockers:
            yield found.assumption

    def _plan(self) -> Iterator[str]:
        """What the planner would propose now, with the order it tells the master."""
        state, now = self.cluster.state, self.cluster.master.now()
        table = LiveTable(limits=state.limits)
        for job in state.jobs.values():
            table.put(job, state.gangs.get(job.epoch))
        capacity = Capacity(state.nodes.devices, 16.0, 64.0 * _GIB, 4)
        order, settings = state.policy.order, PlannerSettings(capacity=capacity)
        found = plan(
            context_of(state.policy, table, CapacityIndex(state.view.copy()), now, settings=settings, order=order)
        )
        _, facts = table.facts(now)
        line = [int(facts.number[at]) for at in ranked(order, facts, now, capacity) if not facts.is_running[at]]
        told = commands.Line(tuple(line), state.settings.policy)
        self.cluster.ask(commands.ProposePlan(found.changes, line=told))
        self.cluster.run_for(10.0)
        yield from ()

    def _nodes(self) -> Iterator[str]:
        for name, row in sorted(self.cluster.state.rows.items()):
            memory = row.free_memory_bytes / _GIB
            node = self.cluster.state.nodes[name]
            faults = "".join(f", {fault.text}" for fault in faults_of(node))
            yield f"{name} {node.state.value} free {row.free_mask:#x} {memory:.1f} GiB{faults}"

    def _run(self, seconds: str) -> Iterator[str]:
        self.cluster.run_for(float(seconds))
        self.cluster.check()
        yield from ()

    def _backup(self) -> Iterator[str]:
        self._copy = self.cluster.backup()
        yield from ()

    def _restore(self) -> Iterator[str]:
        """Put the copy in the place of the database, and go on without nodes that do not report."""
        self.cluster.restore(self._copy, commands.OpenStore("", is_restored=True))
        self.cluster.run_for(25.0)
        self.cluster.ask(commands.GoOn())
        self.cluster.run_for(5.0)
        yield from ()

    def _quarantine(self, what: str, number: str) -> Iterator[str]:
        """Adopt or end the quarantined gang of a job."""
        strays = [one for node in self.cluster.state.nodes.values() for one in node.strays if one.job == int(number)]
        kind = {"adopt": commands.AdoptQuarantined, "end": commands.EndQuarantined}[what]
        yield from self._ask(kind(strays[0].uid, strays[0].epoch) if strays else commands.GoOn())
        self.cluster.run_for(15.0)
        yield from ()

    def _cancel(self, number: str) -> Iterator[str]:
        yield from self._ask(commands.CancelJob(int(number)))

    def _suspend(self, number: str, level: str) -> Iterator[str]:
        yield from self._ask(commands.SuspendJob(int(number), SuspendLevel[level]))

    def _resume(self, number: str) -> Iterator[str]:
        yield from self._ask(commands.ResumeJob(int(number)))

    def _move(self, number: str, *nodes: str) -> Iterator[str]:
        yield from self._ask(commands.MoveJob(int(number), nodes))

    def _cordon(self, node: str) -> Iterator[str]:
        yield from self._ask(commands.CordonNode(node, "repair"))

    def _uncordon(self, node: str) -> Iterator[str]:
        yield from self._ask(commands.UncordonNode(node))

    def _drain(self, node: str) -> Iterator[str]:
        yield from self._ask(commands.DrainNode(node, "repair"))

    def _reserve(self, name: str, node: str, users: str = "", lead: str = "0", **times: str) -> Iterator[str]:
        start = self.cluster.master.now() + float(times["in"])
        named = tuple(users.split(",")) if users else ()
        reservation = Reservation(name, (node,), start, start + float(times["for"]), named, lead_s=float(lead))
        yield from self._ask(commands.ReserveNodes(reservation, "olga"))

    def _reboot(self, node: str) -> Iterator[str]:
        daemon = self.cluster.daemons[node]
        daemon.reboot()
        self.cluster.engine.after(5.0, daemon.start)
        yield from ()

    def _fails(self, number: str) -> Iterator[str]:
        """Rank 0 ends by itself, and not well."""
        gang = self.cluster.state.gangs[self.cluster.state.jobs[int(number)].epoch]
        self.cluster.physics.kill(gang.nodes[0], gang.epoch, OutcomeKind.FAILED, "rank 0 ended with exit code 1", 1)
        yield from ()

    def _idle(self, warning: str, park: str) -> Iterator[str]:
        """After how many seconds without use of GPUs jobs are reported and parked."""
        times = {"idle_warning_s": float(warning), "idle_park_s": None if park == "never" else float(park)}
        self._settings = structs_replace(self._settings, **times)
        yield from ()

    def _hang(self, number: str) -> Iterator[str]:
        """Its ranks neither step nor use a device."""
        self.cluster.physics.hung.add(self.cluster.state.jobs[int(number)].uid)
        yield from ()

    def _wake(self, number: str) -> Iterator[str]:
        self.cluster.physics.hung.discard(self.cluster.state.jobs[int(number)].uid)
        yield from ()

    def _silent(self, node: str) -> Iterator[str]:
        """Its daemon is dead; what runs there goes on."""
        self.cluster.daemons[node].crash()
        yield from ()

    def _heard(self, node: str) -> Iterator[str]:
        self.cluster.daemons[node].start()
        yield from ()

    def _storage(self, node: str) -> Iterator[str]:
        self.cluster.daemons[node].storage_proved = True
        yield from ()

    def _nostorage(self, node: str) -> Iterator[str]:
        self.cluster.daemons[node].storage_proved = False
        yield from ()

    def _check(self, node: str, *failure: str) -> Iterator[str]:
        """A health check fails with this line, or passes."""
        daemon = self.cluster.daemons[node]
        daemon.health = after_check(daemon.health, " ".join(failure))
        self.cluster.run_for(2.0)
        yield from ()

    def _fault(self, node: str, device: str, *reason: str) -> Iterator[str]:
        """A device reports a fault."""
        self.cluster.daemons[node].device_faults[int(device)] = " ".join(reason)
        self.cluster.run_for(2.0)
        yield from ()

    def _full(self, node: str) -> Iterator[str]:
        self.cluster.physics.full.add(node)
        yield from ()

    def _emptied(self, node: str) -> Iterator[str]:
        self.cluster.physics.full.discard(node)
        yield from ()

    def _residue(self, mebibytes: str) -> Iterator[str]:
        self.cluster.physics.residue_bytes = int(mebibytes) << 20
        yield from ()

    def _ask(self, command: commands.Command) -> Iterator[str]:
        answer: Answer = self.cluster.ask(command)
        if isinstance(answer, Refused):
            yield f"{answer.reason}: {answer.message}"
