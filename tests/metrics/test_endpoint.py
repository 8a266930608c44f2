"""The endpoint that Prometheus asks, of a real master, read as Prometheus reads it."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import TypeAlias

import pytest
from ganger.console import ExitCode
from ganger.v1 import node_pb2, resources_pb2, scheduling_pb2
from ganger.wire.tls import client_context
from ganger_master.app import Master
from ganger_master.config import Config
from ganger_master.runtime.state_directory import MasterObstacle, StartError
from ganger_master.store.tables import Problem, StoreError
from kit.certified import Authority
from kit.memory_store import MemoryStore
from prometheus_client.parser import text_string_to_metric_families
from rpc.kit import Served, Speaker, serving, spec_of, until

Samples: TypeAlias = dict[str, float]


def read(url: str, context: ssl.SSLContext | None = None) -> str:
    with urllib.request.urlopen(url, timeout=20, context=context) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        return str(answer.read().decode())


def samples_of(text: str) -> Samples:
    """By name with its labels, as in `ganger_jobs{state=pending}`."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


async def asked(served: Served) -> Samples:
    return samples_of(await asyncio.to_thread(read, served.master.metrics_url))


def gpus(samples: Samples) -> dict[str, float]:
    prefix = "ganger_gpus{device_type=virtual,state="
    return {name.removeprefix(prefix)[:-1]: value for name, value in samples.items() if name.startswith(prefix)}


async def ask_for(served: Served, job: str, node: str, mask: int) -> scheduling_pb2.Verdict:
    count = mask.bit_count()
    claim = resources_pb2.Claim(
        node=f"nodes/{node}", device_mask=mask, millicores=[2000 * count], memory_bytes=count << 30, tasks=[count]
    )
    request = scheduling_pb2.GangRequest(job=job, revision=1, candidates=[scheduling_pb2.Candidate(claims=[claim])])
    return await served.scheduling.RequestGang(request)


PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()


def test_every_metric_is_on_the_page(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path, metrics="127.0.0.1:0") as served:
            text = await asyncio.to_thread(read, served.master.metrics_url)
        names = {family.name for family in text_string_to_metric_families(text)}
        assert len(names) > 20
        assert {name for name in names if not name.startswith("process_") and name not in PAGE} == set()

    asyncio.run(story())


def test_what_is_served_follows_jobs_gpus_nodes_and_verdicts(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path, metrics="127.0.0.1:0") as served:
            empty = await asked(served)
            assert empty["ganger_jobs{state=pending}"] == empty["ganger_nodes{state=ready}"] == 0
            assert gpus(empty) == {}
            first, second = Speaker(served, "n1"), Speaker(served, "n2")
            await first.join()
            await second.join()
            for name in ("fits", "waits", "rests"):
                await served.submit(spec_of(3, name=name))
            before = time.time()
            assert (await ask_for(served, "jobs/1", "n1", 0b0111)).HasField("approved")
            assert (await ask_for(served, "jobs/2", "n1", 0b1110)).HasField("rejected")
            await served.nodes.DrainNode(node_pb2.DrainNodeRequest(name="nodes/n2", reason="memory"))
            held = asyncio.ensure_future(second.reconcile(max_wait_seconds=30.0))
            await until(lambda: served.is_held("n2"))
            found = await asked(served)
            took = time.time() - before
            nowhere = dict.fromkeys(("silent", "faulty", "unknown", "lost"), 0)
            assert gpus(found) == {"busy": 3, "idle": 1, "drained": 4} | nowhere
            for name, value in {
                "ganger_jobs{state=pending}": 2,
                "ganger_jobs{state=holding}": 1,
                "ganger_jobs{state=suspended}": 0,
                "ganger_pending_gpus": 6,
                "ganger_nodes{state=ready}": 1,
                "ganger_nodes{state=draining}": 1,
                "ganger_gangs{phase=starting}": 1,
                "ganger_gang_gpus{phase=starting}": 3,
                "ganger_verdicts_total{outcome=approved}": 1,
                "ganger_verdicts_total{outcome=rejected}": 1,
                "ganger_rejections_total{reason=GPUS}": 1,
                "ganger_pending_jobs_refused{reason=GPUS}": 1,
                "ganger_events_total{kind=job_submitted}": 3,
                "ganger_queue_wait_seconds_count": 1,
                "ganger_queue_wait_seconds_bucket{le=+Inf}": 1,
                "ganger_daemons_connected": 1,
                "ganger_master_ready": 1,
                "ganger_store_errors_total": 0,
                "ganger_core_errors_total": 0,
            }.items():
                assert found[name] == value, name
            assert 0 < found["ganger_longest_pending_seconds"] < took + 10
            assert 0 <= found["ganger_longest_silence_seconds"] < took + 10
            assert found["ganger_commit_seconds_count"] == found["ganger_commit_calls_count"] > 0
            assert found["process_resident_memory_bytes"] > 1 << 20
            held.cancel()
            cluster = await served.nodes.GetCluster(node_pb2.GetClusterRequest())
            assert (cluster.verdicts_approved, cluster.verdicts_rejected) == (1, 1)

    asyncio.run(story())


def test_no_series_is_added_by_more_jobs_users_or_nodes(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path, metrics="127.0.0.1:0") as served:
            numbers = []
            for number in range(3):
                await Speaker(served, f"n{number}").join()
                for _ in range(number):
                    await served.submit()
                numbers.append(Counter(name.partition("{")[0] for name in await asked(served)))
            assert numbers[1] == numbers[2]

    asyncio.run(story())


def test_calls_are_answered_while_one_client_reads_slowly_and_others_read_all_the_time(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path, metrics="127.0.0.1:0") as served:
            await Speaker(served, "n1").join()
            port = int(served.master.metrics_url.split(":")[2].partition("/")[0])
            reading = [asyncio.ensure_future(_keep_reading(served)) for _ in range(2)]
            jobs = [await served.submit() for _ in range(200)]
            with socket.create_connection(("127.0.0.1", port)) as mute:
                mute.sendall(b"GET /metrics HT")
                began = time.monotonic()
                jobs += [await served.submit() for _ in range(20)]
                assert time.monotonic() - began < 5.0
                # a silent client is disconnected, and the next one answered
                assert (await asked(served))["ganger_jobs{state=pending}"] == len(jobs)
            for task in reading:
                task.cancel()

    asyncio.run(story())


async def _keep_reading(served: Served) -> None:
    while True:
        assert (await asked(served))["ganger_master_ready"] == 1


class FailingStore(MemoryStore):
    fails = False

    def prepare(self, rows):  # type: ignore[no-untyped-def]
        commit = super().prepare(rows)

        def fail_or_commit() -> None:
            if self.fails:
                self.fails = False
                raise StoreError(Problem.FULL, "told to fail")
            commit()

        return fail_or_commit


def test_a_commit_that_failed_is_counted(tmp_path: Path) -> None:
    async def story() -> None:
        store = FailingStore()
        async with serving(tmp_path, store=store, metrics="127.0.0.1:0") as served:
            store.fails = True
            with pytest.raises(Exception, match="told to fail"):
                await served.submit()
            await until(lambda: served.master.writer.is_ready)
            assert (await asked(served))["ganger_store_errors_total"] == 1

    asyncio.run(story())


def test_beyond_loopback_only_clients_with_a_certificate_are_answered(tmp_path: Path) -> None:
    async def story() -> None:
        authority = Authority(tmp_path)
        config = Config(tmp_path / "state", "127.0.0.1:0", authority.issue("master", "m"), metrics="0.0.0.0:0",
                        scheduler_host=False, policy="fifo-backfill")  # fmt: skip
        master = Master(config)
        await master.start()
        try:
            url = master.metrics_url.replace("0.0.0.0", "127.0.0.1")
            assert url.startswith("https://")
            known, stranger = (
                client_context(a.issue("user", "prometheus")) for a in (authority, Authority(tmp_path, "b"))
            )
            stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
            anonymous = ssl.create_default_context(cadata=None)
            anonymous.check_hostname, anonymous.verify_mode = False, ssl.CERT_NONE
            for context in (stranger, anonymous):
                with pytest.raises((urllib.error.URLError, ConnectionError, ssl.SSLError)):
                    await asyncio.to_thread(read, url, context)
            assert samples_of(await asyncio.to_thread(read, url, known))["ganger_master_ready"] == 1
        finally:
            await master.stop()

    asyncio.run(story())


def test_a_port_in_use_keeps_the_master_from_starting_and_is_named(tmp_path: Path) -> None:
    async def story() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(StartError, match=f"metrics: cannot listen on {address}: in use") as failed:
                async with serving(tmp_path, metrics=address):
                    pass
            assert failed.value.obstacle is MasterObstacle.STATE
        async with serving(tmp_path, metrics=address) as served:
            assert served.master.metrics_url == f"http://{address}/metrics"

    asyncio.run(story())


def test_without_a_word_of_it_nothing_is_served(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            assert served.master.metrics_url == ""

    asyncio.run(story())


@pytest.mark.system
def test_the_program_says_where_it_serves_them_and_why_it_cannot(tmp_path: Path) -> None:
    def start(name: str, metrics: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "ganger.cli.main", "master", "--state-dir", str(tmp_path / name),
                   "--no-scheduler-host", "--metrics", metrics]  # fmt: skip
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    with start("first", "127.0.0.1:0") as first:
        try:
            assert first.stdout is not None
            assert first.stdout.readline().startswith("ganger master ready at ")
            url = first.stdout.readline().removeprefix("metrics at ").strip()
            assert samples_of(read(url))["ganger_master_ready"] == 1
            address = url.removeprefix("http://").removesuffix("/metrics")
            _, said = (second := start("second", address)).communicate(timeout=30)
            assert f"metrics: cannot listen on {address}: in use" in said
            assert (second.returncode, "Traceback" in said) == (ExitCode.REFUSED, False)
        finally:
            first.send_signal(signal.SIGTERM)
        assert first.wait(30) == 0
