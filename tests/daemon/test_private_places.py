"""A gang of an account has a /tmp and a /dev/shm of its own on a node, and limits: what it sees there, how long they
last, and how they are turned off."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from daemon.account_kit import Accounted, run
from daemon.image_kit import begun, ended, from_image, goes_on, moved_in, needs_images, opaque, saved
from daemon.kit import Cluster, Intents, Observed, in_phase, log_of, with_changes
from ganger.agent.v1 import agent_pb2
from ganger.injob.launcher.client import Launcher
from ganger.v1 import job_pb2
from ganger_daemon.claimed_directories import DaemonError
from ganger_daemon.node.hooks import NodeHooks
from kit.accounts import makes_accounts
from rpc.kit import until

is_in_tmp = Path(sys.prefix).resolve().is_relative_to("/tmp")
pytestmark = [
    pytest.mark.system,
    makes_accounts,
    pytest.mark.skipif(is_in_tmp, reason="jobs with a /tmp of their own do not see these programs"),
]
# Each rank leaves a file in both places, waits for those of the first and the last, and prints what is there.
LEAVES = """
touch /tmp/of-${RANK:-0} /dev/shm/of-${RANK:-0}
until ls /tmp/of-0 /dev/shm/of-0 /tmp/of-$0 /dev/shm/of-$0 > /dev/null 2>&1; do sleep 0.05; done
echo $(ls /tmp) / $(ls /dev/shm) / $PPID
exec sleep 600
"""


@contextmanager
def left_by_the_machine() -> Iterator[str]:
    """A file in the machine's own places."""
    name = f"machine-{uuid.uuid4()}"
    paths = [Path("/tmp") / name, Path("/dev/shm") / name]
    for path in paths:
        path.touch()
    try:
        yield name
    finally:
        for path in paths:
            path.unlink()


async def begun_job(these: Accounted, account: Any, epoch: int, ranks: int = 1) -> Any:
    command = ["/bin/sh", "-c", LEAVES, str(ranks - 1)]
    gang = these.gang(account, epoch, command, device=epoch % 4, ranks=list(range(ranks)))
    await these.made.master.want("n1", gang)
    for rank in range(ranks):
        await until(lambda rank=rank: bool(lines_of(these, gang, rank)))
    return gang


def lines_of(these: Accounted, gang: Any, rank: int = 0) -> list[str]:
    return log_of(these.made.directory, "n1", gang.job_uid, rank, gang.epoch)


def seen(these: Accounted, gang: Any, rank: int = 0) -> list[list[str]]:
    return [part.split() for part in lines_of(these, gang, rank)[-1].split("/")]


async def stopped(these: Accounted, gang: Any) -> None:
    await these.made.master.want("n1", with_changes(gang, 9, intent=Intents.INTENT_STOP))
    await these.phase(gang.epoch, Observed.PHASE_ENDED)
    await these.made.master.forget("n1", gang.epoch)
    await these.made.master.until_absent("n1", gang.epoch)


def test_ranks_of_a_gang_share_places_that_no_other_job_and_not_the_machine_sees() -> None:
    async def story(these: Accounted) -> None:
        await these.daemon()
        with left_by_the_machine() as name:
            pair = await begun_job(these, these.ann, 1, ranks=2)
            assert [seen(these, pair, rank)[:2] for rank in (0, 1)] == [[["of-0", "of-1"], ["of-0", "of-1"]]] * 2
            for epoch, account in ((2, these.ann), (3, these.bob)):
                assert seen(these, await begun_job(these, account, epoch))[:2] == [["of-0"], ["of-0"]]
            for place in ("/tmp", "/dev/shm"):
                assert name in os.listdir(place)
                assert not {"of-0", "of-1"} & set(os.listdir(place))

    run(story)


def test_what_a_gang_has_left_is_removed_with_it_and_its_launcher_serves_the_next_one() -> None:
    async def story(these: Accounted) -> None:
        await these.daemon()
        first = await begun_job(these, these.ann, 1)
        _, _, (launcher,) = seen(these, first)
        other = await begun_job(these, these.ann, 2)
        places = these.made.directory / "n1" / "tmp"
        assert {path.name for path in places.iterdir()} == {f"{one.job_uid}-{one.epoch}" for one in (first, other)}
        await stopped(these, first)
        assert [path.name for path in places.iterdir()] == [f"{other.job_uid}-2"]
        assert os.listdir(f"/proc/{launcher}/root/dev/shm") == []
        again = await begun_job(these, these.ann, 3)
        assert seen(these, again) == [["of-0"], ["of-0"], [launcher]]
        assert seen(these, other)[2] != [launcher]

    run(story)


def test_places_last_through_levels_of_suspend_and_the_ends_of_daemon_and_launcher() -> None:
    counts = (
        "n=0; while :; do n=$((n+1)); echo $n > /tmp/count; cp /tmp/count /dev/shm; cat /dev/shm/*; sleep 0.1; done"
    )

    async def story(these: Accounted) -> None:
        await these.daemon()
        gang = these.gang(these.ann, 1, ["/bin/sh", "-c", f"echo kept > /tmp/first; {counts} & wait"])
        await these.made.master.want("n1", gang)
        place = these.made.directory / "n1" / "tmp" / f"{gang.job_uid}-1"

        async def counts_on() -> None:
            before = len(lines_of(these, gang))
            await until(lambda: len(lines_of(these, gang)) > before + 2)
            assert (place / "first").read_text() == "kept\n"

        await counts_on()
        await these.parked(gang, 2, job_pb2.SUSPEND_LEVEL_PAUSE)
        await these.made.master.want("n1", with_changes(gang, 3))
        await counts_on()
        await these.made.stop_daemon("n1")
        (path,) = these.made.directory.glob(f"r-n1/launchers/{these.ann.uid}/*.sock")
        with Launcher(str(path), uid=these.ann.uid) as launcher:
            os.kill(launcher.pid, signal.SIGKILL)
        these.made.master.book("n1").observed.clear()
        await these.daemon()
        await these.phase(1, Observed.PHASE_RUNNING)
        await counts_on()
        # the launcher that the next daemon has started is held by this gang still
        other = await begun_job(these, these.ann, 2)
        assert seen(these, other)[:2] == [["of-0"], ["of-0"]]
        await stopped(these, gang)
        assert not place.exists()

    run(story)


def test_a_gang_keeps_its_places_where_the_note_of_its_launcher_was_lost() -> None:
    async def story(these: Accounted) -> None:
        await these.daemon()
        first = await begun_job(these, these.ann, 1)
        await these.made.stop_daemon("n1")
        notes = these.made.directory / "n1" / "jobs" / first.job_uid / "1" / "local.json"
        notes.write_text("{}")
        these.made.master.book("n1").observed.clear()
        await these.daemon()
        adopted = await these.phase(1, Observed.PHASE_RUNNING)
        second = await begun_job(these, these.ann, 2)
        assert seen(these, second)[:2] == [["of-0"], ["of-0"]]
        assert seen(these, second)[2] != seen(these, first)[2]
        assert os.listdir(f"/proc/{adopted.ranks[0].pid}/root/dev/shm") == ["of-0"]

    run(story)


@needs_images
def test_places_are_part_of_an_image_and_of_a_move() -> None:
    writes = opaque(
        "held = open('/tmp/held', 'w+')\nshared = open('/dev/shm/held', 'w+')\nopen('/tmp/left', 'w').write('left')\n",
        "print(count, file=held, flush=True); shared.seek(0); print(count, file=shared, flush=True)",
    )

    def is_whole(made: Cluster, node: str, epoch: int) -> None:
        pid = made.master.book(node).observed[epoch].ranks[0].pid
        root = Path(f"/proc/{pid}/root")
        counted = [int(line) for line in (root / "tmp/held").read_text().split()]
        assert counted == list(range(counted[0], counted[0] + len(counted)))
        assert (root / "tmp/left").read_text() == "left"
        assert (root / "dev/shm/held").exists()

    async def story(these: Accounted) -> None:
        made, uid = these.made, str(uuid.uuid4())
        await these.daemon("n1")
        await these.daemon("n2")
        gang = await begun(made, "opaque", uid, writes)
        is_whole(made, "n1", 1)
        parked = await saved(made, "n1", gang)
        await made.master.forget("n1", 1)
        gang = from_image(made, gang, parked, "n2", 2)
        await made.master.want("n2", gang)
        await made.master.until("n2", 2, in_phase(Observed.PHASE_RUNNING))
        await goes_on(made, "n2", uid, 2)
        is_whole(made, "n2", 2)
        await made.master.until("n2", 2, lambda one: one.capabilities.can_checkpoint)
        new = await moved_in(made, gang, "n1")
        await made.master.until("n2", 2, in_phase(Observed.PHASE_PARKED))
        old, gang = gang, with_changes(new, 2, intent=Intents.INTENT_RUN)
        await made.master.want("n1", gang)
        await made.master.until("n1", 3, in_phase(Observed.PHASE_RUNNING))
        await goes_on(made, "n1", uid, 3)
        is_whole(made, "n1", 3)
        await ended(made, "n2", old)
        await ended(made, "n1", gang)
        assert [*made.directory.glob("n?/tmp/*")] == []

    run(story)


def test_without_private_places_jobs_share_those_of_the_machine() -> None:
    async def story(these: Accounted) -> None:
        await these.daemon(has_private_places=False)
        with left_by_the_machine() as name:
            gang = these.gang(these.ann, 1, ["/bin/sh", "-c", f"ls /tmp/{name}"])
            await these.made.master.want("n1", gang)
            await these.phase(1, Observed.PHASE_ENDED)
            assert lines_of(these, gang) == [f"/tmp/{name}"]

    run(story)


@pytest.fixture
def in_tmp() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


def test_a_working_directory_in_tmp_is_refused_with_the_reason(in_tmp: Path) -> None:
    async def story(these: Accounted) -> None:
        await these.daemon()
        gang = these.gang(these.ann, 1, ["true"])
        gang.spec.working_directory = str(in_tmp)
        await these.made.master.want("n1", gang)
        refused = await these.phase(1, Observed.PHASE_ENDED)
        assert refused.outcome.kind == agent_pb2.Outcome.KIND_LAUNCH_FAILED
        assert f"working directory {in_tmp} is in /tmp, and each job has a /tmp of its own" in refused.outcome.message

    run(story)


def test_a_daemon_that_cannot_keep_its_promise_does_not_start(in_tmp: Path) -> None:
    async def story(these: Accounted) -> None:
        with pytest.raises(DaemonError, match=rf"--private-tmp: {in_tmp} is in /tmp, where jobs would not see it"):
            await these.made.daemon("n2", accounts="system", state_directory=in_tmp, has_private_places=True)
        with pytest.raises(DaemonError, match="all jobs run as this daemon's own user"):
            await these.made.daemon("n3", accounts="own", has_private_places=True)

    run(story)


PRINTS_LIMITS = "ulimit -Sc; ulimit -Hc; ulimit -Sn; ulimit -Hn; ulimit -l; ulimit -c unlimited || echo stays"


@pytest.mark.parametrize("accounts", ["system", "own"])
def test_a_job_has_the_limits_of_the_daemons_setting(accounts: str) -> None:
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    # root of a container may be unable to raise the limit that it has
    found = subprocess.run(
        ["/bin/sh", "-c", "ulimit -l unlimited; ulimit -l"], capture_output=True, text=True, check=False
    )
    most = found.stdout.strip()

    async def story(these: Accounted) -> None:
        limits = {"core": (0, 0), "nofile": (512, 4096), "memlock": unlimited}
        await these.daemon(accounts=accounts, limits=limits)
        gang = these.gang(these.ann, 1, ["/bin/sh", "-c", PRINTS_LIMITS])
        gang.user = these.ann.name if accounts == "system" else "root"
        await these.made.master.want("n1", gang)
        await these.phase(1, Observed.PHASE_ENDED)
        lines = lines_of(these, gang)
        assert lines[:5] == ["0", "0", "512", "4096", most]
        assert lines[-1] == "stays" or (accounts == "own" and most == "unlimited")

    run(story)


@pytest.mark.parametrize("as_user", [True, False])
def test_prolog_and_epilog_run_as_the_account_of_the_job_where_that_is_set(as_user: bool) -> None:
    async def story(these: Accounted) -> None:
        made, place = these.made, these.made.directory / "noted"
        place.mkdir()
        place.chmod(0o1777)
        words = "id -un; id -Gn; echo $HOME; grep -E 'CapEff|NoNewPrivs' /proc/self/status"
        hook = made.directory / "hook"
        hook.write_text(f"#!/bin/sh\nexec > {place}/$GANGER_HOOK\n{words}\n")
        hook.chmod(0o755)
        await these.daemon(hooks=NodeHooks(hook, hook, run_as_user=as_user))
        await made.master.want("n1", these.gang(these.ann, 1, ["true"]))
        ended = await these.phase(1, Observed.PHASE_ENDED)
        assert (ended.outcome.kind, ended.outcome.node_fault) == (agent_pb2.Outcome.KIND_DONE, "")
        for name in ("prolog", "epilog"):
            lines = (place / name).read_text().splitlines()
            assert lines[0] == (these.ann.name if as_user else "root")
            if as_user:
                assert lines[2:] == [these.ann.home, "CapEff:\t0000000000000000", "NoNewPrivs:\t1"]

    run(story)
