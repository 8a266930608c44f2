"""What a running gang is asked besides stopping: other cores, checkpoints now and then, its memory, its log."""

from __future__ import annotations

import asyncio
import os
import uuid
from pathlib import Path

import pytest
from daemon.kit import Cluster, Intents, Observed, in_phase, log_of, run, with_changes
from ganger.agent.v1 import peer_pb2, peer_pb2_grpc
from ganger.v1 import job_pb2
from ganger.v1.resources_pb2 import TaskShape
from ganger.wire.channels import open_aio_channel
from ganger.wire.endpoints import Endpoint
from ganger_daemon.cgroups.contract import is_done
from ganger_daemon.checkpoints import storage
from ganger_daemon.devices.virtual import VirtualSpec
from ganger_daemon.gang import gang_memory
from ganger_daemon.node.core_table import parse_ids
from ganger_daemon.node.process_identity import anonymous_bytes
from rpc.kit import until

pytestmark = pytest.mark.system

MEBIBYTE = 1 << 20
PAUSE = {"intent": Intents.INTENT_PARK, "level": job_pb2.SUSPEND_LEVEL_PAUSE}
OFFLOAD = {"intent": Intents.INTENT_PARK, "level": job_pb2.SUSPEND_LEVEL_OFFLOAD}


def test_cores_and_threads_change_while_the_job_runs() -> None:
    async def story(made: Cluster) -> None:
        daemon = await made.daemon("n1")
        uid = str(uuid.uuid4())
        gang = made.gang({"n1": [0]}, "n1", uid=uid, pause=0.005)
        await made.master.want("n1", gang)
        running = await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        before = len(running.cores[0].split(","))
        for sequence, threads, cores in ((2, 2, 2), (3, 1, 1)):
            wanted = with_changes(gang, sequence, threads=threads)
            wanted.claim.millicores[:] = [1000 * cores, 0]
            await made.master.want("n1", wanted)
            seen = await made.master.until(
                "n1", 1, lambda seen, t=threads, s=sequence: seen.threads == t and seen.order.master_sequence == s
            )
            held = await made.master.until(
                "n1", 1, lambda seen, c=cores: daemon.host.cores.millicores(f"{uid}-1") == 1000 * c
            )
            assert held.phase == seen.phase == Observed.PHASE_RUNNING
        assert before == 1
        assert len(log_of(made.directory, "n1", uid, 0, 1)) > 0

    run(story)


def threads_of(pid: int) -> str:
    """Return the number of threads that a process was started with."""
    variables = dict(one.split("=", 1) for one in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in one)
    return variables["OMP_NUM_THREADS"]


def test_each_role_runs_on_cores_and_with_threads_of_its_own() -> None:
    """Rank 0 serves parameters with three cores, ranks 1 and 2 work with half a core each; then all get twice that."""

    async def story(made: Cluster) -> None:
        daemon = await made.daemon("n1", virtual=VirtualSpec(4, "2x2", 12, 8 << 30, 1 << 28))
        gang = made.gang({"n1": [0, 1, 2]}, "n1", uid=str(uuid.uuid4()), pause=0.005)
        del gang.spec.roles[:], gang.claim.tasks[:]
        gang.spec.roles.add(name="ps", tasks=1, shape=TaskShape(millicores=3000))
        gang.spec.roles.add(name="worker", tasks=2, shape=TaskShape(gpus=1, millicores=500))
        gang.claim.tasks.extend([1, 2])
        gang.claim.device_mask = 0b11
        cores = daemon.host.cores
        for sequence, each in ((1, 1), (2, 2)):
            wanted = with_changes(gang, sequence)
            wanted.claim.millicores[:] = [2000 * each, 2000 * each]
            await made.master.want("n1", wanted)
            expected = [3 * each, each, each]
            seen = await made.master.until(
                "n1",
                1,
                lambda seen, sizes=expected: (
                    seen.phase == Observed.PHASE_RUNNING
                    and [len(parse_ids(text)) for text in seen.cores] == sizes
                    and [os.sched_getaffinity(rank.pid) for rank in seen.ranks]
                    == [set(cores.cpus_of(parse_ids(text))) for text in seen.cores]
                ),
            )
            assert seen.cores[1] == seen.cores[2]
            assert not set(parse_ids(seen.cores[0])) & set(parse_ids(seen.cores[1]))
        assert [threads_of(rank.pid) for rank in seen.ranks] == ["3", "1", "1"]

    run(story)


def test_the_working_set_of_a_gang_is_measured_by_its_control_group() -> None:
    async def story(made: Cluster) -> None:
        daemon = await made.daemon("n1", cgroups="auto")
        if not is_done(daemon.host.cgroups, "memory"):
            pytest.skip("no control group of this machine measures memory")
        size = 200 * MEBIBYTE
        await made.master.want("n1", made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), pause=0.05, size=size))
        seen = await made.master.until("n1", 1, lambda seen: seen.working_set_bytes >= size)
        assert seen.phase == Observed.PHASE_RUNNING
        assert seen.working_set_bytes < 4 * size
        await until(lambda: 1 in made.master.progress and made.master.progress[1].working_set_bytes >= size)

    run(story)


@pytest.mark.parametrize("reads", [True, False])
def test_a_trial_of_less_memory_slows_a_job_that_reads_a_file_again_and_no_other(reads: bool) -> None:
    async def story(made: Cluster) -> None:
        daemon = await made.daemon("n1", cgroups="auto")
        if daemon.host.cgroups.capabilities["memory"] != "v2":
            pytest.skip("no control group of this machine holds file caches back")
        data = made.directory / "data"
        with data.open("wb") as file:
            for _ in range(384):
                file.write(os.urandom(MEBIBYTE))
            os.fsync(file.fileno())
            # Not in the page cache of this process's own group.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        mode = f"reads {data}" if reads else ""
        gang = made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), pause=0.02, mode=mode)
        await made.master.want("n1", gang)

        async def rates(count: int, is_tried: bool) -> list[float]:
            """Return the rates in so many reports, with a trial in effect or without one."""
            found: dict[float, float] = {}

            def is_enough() -> bool:
                seen = made.master.progress.get(1)
                if seen is not None and (seen.trial_memory_bytes > 0) == is_tried and seen.steps_per_s:
                    found[seen.time.ToNanoseconds()] = seen.steps_per_s
                # The interval in which it came into effect, or ended, was half of each.
                return len(found) > count

            await until(is_enough, 60)
            return sorted(list(found.values())[1:])

        await until(lambda: 1 in made.master.progress and made.master.progress[1].used_memory_bytes > 0, 30)
        used = 384 * MEBIBYTE if reads else 0
        await until(lambda: made.master.progress[1].used_memory_bytes >= used, 60)
        before = made.master.progress[1]
        assert 64 * MEBIBYTE <= before.least_memory_bytes <= 256 * MEBIBYTE
        full = await rates(3, is_tried=False)
        await made.master.want("n1", with_changes(gang, 1, trial_memory_bytes=MEBIBYTE))
        less = await rates(3, is_tried=True)
        # No less than it needs without caches of files.
        assert 64 * MEBIBYTE <= made.master.progress[1].trial_memory_bytes <= 256 * MEBIBYTE
        await made.master.want("n1", with_changes(gang, 1, trial_memory_bytes=0))
        again = await rates(3, is_tried=False)
        if reads:
            assert less[1] < 0.8 * full[1]
            assert again[-1] > less[1]
        else:
            assert less[-1] > 0.8 * full[1]

    run(story)


def test_a_filled_arena_is_no_part_of_the_working_set() -> None:
    async def story(made: Cluster) -> None:
        daemon = await made.daemon("n1", cgroups="auto")
        if not is_done(daemon.host.cgroups, "memory"):
            pytest.skip("no control group of this machine measures memory")
        gang = made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), pause=0.05, mode="fills its arena")
        gang.claim.arena_bytes = 512 * MEBIBYTE
        await made.master.want("n1", gang)
        seen = await made.master.until("n1", 1, lambda seen: seen.working_set_bytes > 0)
        group = daemon.gangs.all()[0].parts.context.paths.group
        use = daemon.host.cgroups.memory_use(group)
        assert use is not None
        assert use.working_set >= 512 * MEBIBYTE, "the arena is memory of the group"
        assert seen.working_set_bytes < 256 * MEBIBYTE

    run(story)


def test_a_rank_in_a_long_step_is_asked_for_its_stacks_and_gets_no_signal() -> None:
    async def story(made: Cluster) -> None:
        await made.daemon("n1", order_patience_s=0.2, order_deadline_s=300)
        uid = str(uuid.uuid4())
        gang = made.gang({"n1": [0]}, "n1", uid=uid, mode="long step")
        await made.master.want("n1", gang)
        await made.master.until("n1", 1, lambda seen: bool(seen.capabilities.can_pause))
        await made.master.want("n1", with_changes(gang, 2, **PAUSE))
        await until(lambda: any("in main" in line for line in log_of(made.directory, "n1", uid, 0, 1)), 60.0)
        (made.directory / "go").touch()
        parked = await made.master.until("n1", 1, in_phase(Observed.PHASE_PARKED))
        assert parked.order.master_sequence == 2
        assert "signalled" not in log_of(made.directory, "n1", uid, 0, 1)

    run(story)


def test_a_job_that_rests_reports_the_step_at_which_it_rests() -> None:
    async def story(made: Cluster) -> None:
        await made.daemon("n1")
        gang = made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), pause=0.005)
        await made.master.want("n1", gang)
        running = await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        assert not running.HasField("progress"), "how far a running job got goes by ReportProgress"
        await made.master.want("n1", with_changes(gang, 2, stop_sequence=2, **OFFLOAD))
        parked = await made.master.until("n1", 1, in_phase(Observed.PHASE_PARKED))
        assert parked.stop_step > 0
        assert parked.progress.step == parked.stop_step

    run(story)


def test_checkpoints_come_as_often_as_the_job_asked_and_old_ones_go() -> None:
    async def story(made: Cluster) -> None:
        await made.daemon("n1")
        uid = str(uuid.uuid4())
        gang = made.gang({"n1": [0]}, "n1", uid=uid)
        gang.checkpoint_interval.FromMilliseconds(200)
        await made.master.want("n1", gang)
        steps: list[int] = []
        while len(steps) < 4:
            last = steps[-1] if steps else 0
            seen = await made.master.until("n1", 1, lambda seen, last=last: seen.checkpoint.step > last)
            assert seen.phase == Observed.PHASE_RUNNING
            steps.append(seen.checkpoint.step)
        kept = sorted(path.name for path in (made.storage / uid / "checkpoints").glob("*-1"))
        assert 1 <= len(kept) <= 3

    run(story)


def test_a_checkpoint_that_met_full_storage_is_tried_again_when_the_next_one_is_due() -> None:
    async def story(made: Cluster) -> None:
        await made.daemon("n1")
        gang = made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()))
        gang.checkpoint_interval.FromMilliseconds(200)
        full = made.directory / "full-0"
        full.touch()
        await made.master.want("n1", gang)
        await made.master.until("n1", 1, lambda seen: seen.trouble.startswith("STORAGE_FULL: rank 0: "))
        full.unlink()
        seen = await made.master.until("n1", 1, lambda seen: seen.checkpoint.step > 0 and not seen.trouble)
        assert seen.phase == Observed.PHASE_RUNNING

    run(story)


def test_what_a_failed_checkpoint_left_does_not_keep_the_room_of_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(made: Cluster) -> None:
        await made.daemon("n1")
        uid = str(uuid.uuid4())
        left = made.storage / uid / "checkpoints"
        monkeypatch.setattr(storage, "room_missing", lambda *_: int(any(left.glob("*.tmp"))))
        gang = made.gang({"n1": [0]}, "n1", uid=uid)
        gang.checkpoint_interval.FromMilliseconds(200)
        full = made.directory / "full-0"
        full.touch()
        await made.master.want("n1", gang)
        await made.master.until("n1", 1, lambda seen: seen.trouble.startswith("STORAGE_FULL: rank 0: "))
        full.unlink()
        await made.master.until("n1", 1, lambda seen: seen.checkpoint.step > 0 and not seen.trouble)

    run(story)


def test_a_checkpoint_is_published_on_storage_that_is_named_from_where_the_daemon_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(made: Cluster) -> None:
        monkeypatch.chdir(made.directory)
        await made.daemon("n1", storage=made.storage.relative_to(made.directory))
        gang = made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()))
        gang.checkpoint_interval.FromMilliseconds(200)
        await made.master.want("n1", gang)
        seen = await made.master.until("n1", 1, lambda seen: bool(seen.checkpoint.step or seen.trouble))
        assert (seen.checkpoint.step > 0, seen.trouble) == (True, "")

    run(story)


@pytest.mark.parametrize("mode", ["", "keeps"])
def test_offloaded_is_said_only_of_memory_seen_free(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang_memory, "_TROUBLE_S", 0.3)

    async def story(made: Cluster) -> None:
        await made.daemon("n1")
        gang = made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), pause=0.02, size=48 * MEBIBYTE, mode=mode)
        await made.master.want("n1", gang)
        running = await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        pid = running.ranks[0].pid
        before = anonymous_bytes(pid) or 0
        await made.master.want("n1", with_changes(gang, 2, stop_sequence=2, **OFFLOAD))
        if mode == "keeps":
            seen = await made.master.until("n1", 1, lambda seen: "not free" in seen.trouble)
            assert seen.phase == Observed.PHASE_STOPPING
            return
        parked = await made.master.until("n1", 1, in_phase(Observed.PHASE_PARKED))
        assert parked.level == job_pb2.SUSPEND_LEVEL_OFFLOAD
        assert set(parked.residue_bytes) == {0}
        assert parked.arena_bytes >= 48 * MEBIBYTE
        assert before - (anonymous_bytes(pid) or 0) >= 0.9 * 48 * MEBIBYTE

    run(story)


def test_a_log_is_read_from_any_offset_and_followed_to_its_end() -> None:
    async def story(made: Cluster) -> None:
        daemon = await made.daemon("n1")
        uid = str(uuid.uuid4())
        await made.master.want("n1", made.gang({"n1": [0]}, "n1", uid=uid, steps=100, pause=0.01))
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))

        async def read(stub: peer_pb2_grpc.PeerServiceAsyncStub, offset: int, follow: bool) -> bytes:
            request = peer_pb2.ReadPeerLogRequest(job_uid=uid, rank=0, offset=offset, follow=follow)
            return b"".join([chunk.data async for chunk in stub.ReadLog(request)])

        async with open_aio_channel(Endpoint(daemon.peer_address, daemon.host.token)) as channel:
            stub = peer_pb2_grpc.PeerServiceStub(channel)
            whole, now = await asyncio.gather(read(stub, 0, True), read(stub, 0, False))
            assert whole.startswith(now)
            path = Path(made.directory, "n1", "logs", uid, "rank-0.1.log")
            assert whole == await asyncio.to_thread(path.read_bytes)
            assert whole.count(b"step ") == 100
            assert await read(stub, 700, False) == whole[700:]

    run(story)
