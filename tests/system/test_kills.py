"""Kill -9, anywhere: no accepted job is lost, none runs twice, no step is lost or repeated, all weights are right.

`kill_table` names the pairs of a place and a party that dies there. Each story takes one party through all its places
with one job, one kill after the other. `make test` kills at every place once and every party in every deed, `make
chaos` three times at all pairs and at fifty random instants besides. The jobs' own records of their steps lie outside
the system.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from ganger.failpoints import OF_DAEMON, OF_IMAGES
from ganger_master.store import tables
from kit.cluster import Cluster
from kit.waiting import eventually
from system.harness import Run
from system.kill_table import CHOSEN_PAIRS, PAIRS, PLACES, SENSELESS, VICTIMS, Pair, why_senseless
from system.killing import Story, clear_up, release, start_the_dead

References = dict[tuple[int, str], Run]

pytestmark = [pytest.mark.system, pytest.mark.torch]

STEPS = {"long": 400, "short": 64}
JOB = ("--state-megabytes", "2")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four nodes of one device: a gang of two fills two of them and moves to the other two."""
    with Cluster(tmp_path_factory.mktemp("kills"), nodes=4, virtual_gpus=1, topology="1x1", virtual_cores=1) as running:
        yield running


@pytest.fixture
def idle(cluster: Cluster) -> Iterator[Cluster]:
    yield cluster
    clear_up(cluster)


@pytest.fixture(scope="module")
def references(cluster: Cluster) -> References:
    """Undisturbed runs, by world size and steps."""
    kinds = ((2, "long"), (1, "short"), (2, "short"))
    runs = {kind: submit(cluster, "reference-{}-{}".format(*kind), *kind) for kind in kinds}
    for run in runs.values():
        run.hurry()
    for run in runs.values():
        run.wait_state("SUCCEEDED")
        run.check(run)
    return runs


def submit(cluster: Cluster, label: str, world: int, length: str, *options: str) -> Run:
    return Run.submit(cluster, label, *options, world=world, steps=STEPS[length], job=JOB)


def ends_well(run: Run, references: References, *, may_repeat: bool = False) -> None:
    run.hurry()
    run.wait_state("SUCCEEDED", within_seconds=90)
    (reference,) = (other for other in references.values() if (other.world, other.steps) == (run.world, run.steps))
    run.check(reference, may_repeat=may_repeat)


def went_back_to(run: Run, rank: int) -> set[int]:
    """The steps after which a rank began anew."""
    return {after - 1 for before, after in pairwise(line.step for line in run.lines(rank)) if after != before + 1}


# the table


def test_every_failpoint_of_every_service_is_in_the_table() -> None:
    # those of process images: tests/daemon/test_image_kills
    assert {place.failpoint for place in PLACES} == (OF_DAEMON - OF_IMAGES) | tables.FAILPOINTS


def test_every_place_and_party_is_tried_or_senseless_for_a_reason_that_is_needed() -> None:
    assert {pair.place for pair in PAIRS} == set(PLACES)
    for deed, failpoint, victims in SENSELESS:
        for victim in victims.split():
            places = [place for place in PLACES if place.deed == deed and failpoint in ("*", place.failpoint)]
            assert any(why_senseless(Pair(place, victim)) for place in places), (deed, failpoint, victim)


def test_every_place_and_every_party_in_every_deed_has_a_kill_among_the_chosen() -> None:
    assert {pair.place for pair in CHOSEN_PAIRS} == set(PLACES)
    assert {(pair.victim, pair.place.deed) for pair in CHOSEN_PAIRS} == {
        (pair.victim, pair.place.deed) for pair in PAIRS
    }


# the stories


def tell(
    cluster: Cluster, references: References, kills: Counter[Pair], pairs: Sequence[Pair], victim: str, label: str
) -> None:
    options = ("--max-failures", "50") if victim == "rank" else ()
    run = submit(cluster, label, 2, "long", *options)
    run.wait_step(2)
    saved = 0
    if victim == "rank":
        run.shell("suspend", run.id, "--level", "checkpoint")
        saved = run.last_step()
        run.shell("resume", run.id)
        run.wait_step(saved + 1)
    story = Story(cluster, run)
    for pair in pairs:
        if pair.victim == victim and pair.place.deed != "submit":
            story.kill(pair)
            kills[pair] += 1
    ends_well(run, references, may_repeat=victim == "rank")
    # only a rank's own death costs steps, and none before the last complete checkpoint
    for rank in range(run.world):
        assert went_back_to(run, rank) == ({saved} if victim == "rank" else set())


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_kill_at_each_named_place_loses_nothing(
    idle: Cluster, references: References, kills: Counter[Pair], victim: str
) -> None:
    tell(idle, references, kills, CHOSEN_PAIRS, victim, victim)


SUBMISSIONS = tuple(pair for pair in PAIRS if pair.place.deed == "submit")


def tell_of_a_submission(
    cluster: Cluster, references: References, kills: Counter[Pair], pair: Pair, label: str
) -> None:
    """The victim dies while a job is accepted or started. The request id makes asking again safe."""
    request = ("--request-id", str(uuid.UUID(int=random.Random(label).getrandbits(128), version=4)))
    options = (*request, "--max-failures", "50")
    holders = [cluster.master] if pair.place.holder == "master" else list(cluster.daemons.values())
    words = Run.words(cluster, label, *options, world=2, steps=STEPS["short"], job=JOB)
    for holder in holders:
        holder.arm(f"{pair.place.failpoint}=stop")
    asking = cluster.begin("submit", *words)
    eventually(lambda: any(holder.is_stopped for holder in holders), what=f"{pair.place} comes", story=cluster.story)
    if pair.place.holder == "master":
        cluster.master.kill()
        asking.kill()
    else:
        assert asking.wait(60) == 0
        run = submit(cluster, label, 2, "short", *options)
        story = Story(cluster, run)
        nodes = story.nodes()
        (leader,) = story.services("leader", nodes)
        eventually(lambda: leader.is_stopped, what=f"the leader comes to {pair.place}", story=cluster.story)
        if pair.victim in ("launcher", "rank"):
            os.kill((story.launcher if pair.victim == "launcher" else story.rank)(nodes[0]), signal.SIGKILL)
        else:
            story.services(pair.victim, nodes)[0].kill()
    asking.wait()
    release(holders)
    start_the_dead(cluster)
    run = submit(cluster, label, 2, "short", *options)
    ends_well(run, references, may_repeat=pair.victim == "rank")
    listed = [job for job in run.shell.json("queue", "--all") if job["spec"]["display_name"] == label]
    assert len(listed) == 1, "accepted once, however often it was asked for"
    kills[pair] += 1


@pytest.mark.parametrize("pair", [pair for pair in SUBMISSIONS if pair in CHOSEN_PAIRS], ids=str)
def test_a_kill_while_a_job_begins_loses_nothing(
    idle: Cluster, references: References, kills: Counter[Pair], pair: Pair
) -> None:
    tell_of_a_submission(idle, references, kills, pair, f"{pair.victim}-{pair.place.failpoint}")


@pytest.mark.chaos
@pytest.mark.parametrize("again", range(3))
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_kill_of_each_party_at_each_named_place_loses_nothing(
    idle: Cluster, references: References, kills: Counter[Pair], victim: str, again: int
) -> None:
    tell(idle, references, kills, PAIRS, victim, f"{victim}-again-{again}")


@pytest.mark.chaos
@pytest.mark.parametrize("again", range(3))
@pytest.mark.parametrize("pair", SUBMISSIONS, ids=str)
def test_a_kill_while_a_job_begins_loses_nothing_the_next_time_either(
    idle: Cluster, references: References, kills: Counter[Pair], pair: Pair, again: int
) -> None:
    tell_of_a_submission(idle, references, kills, pair, f"{pair.victim}-{pair.place.failpoint}-again-{again}")


# at rest, and at any instant


def test_a_launcher_killed_while_its_ranks_run_or_rest_leaves_them_their_state(
    idle: Cluster, references: References
) -> None:
    run = submit(idle, "launcher-rests", 1, "short")
    run.wait_step(3)
    rank = run.lines(0)[-1].pid
    os.kill(_parent(rank), signal.SIGKILL)
    for level in ("pause", "offload"):
        run.shell("suspend", run.id, "--level", level)
        run.shell("resume", run.id)
    ends_well(run, references)
    assert {line.pid for line in run.lines(0)} == {rank}


def test_a_killed_rank_of_a_world_of_one_goes_back_to_the_last_complete_checkpoint_and_no_further(
    idle: Cluster, references: References
) -> None:
    run = submit(idle, "rank-of-one", 1, "short", "--max-failures", "1")
    run.wait_step(8)
    run.shell("suspend", run.id, "--level", "checkpoint")
    saved = run.last_step()
    run.shell("resume", run.id, "--no-wait")
    run.wait_step(saved + 5)
    os.kill(run.lines(0)[-1].pid, signal.SIGKILL)
    ends_well(run, references, may_repeat=True)
    assert went_back_to(run, 0) == {saved}


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(50))
def test_a_kill_at_any_instant_loses_nothing(idle: Cluster, references: References, seed: int) -> None:
    dice, cluster = random.Random(seed), idle
    world = dice.choice([1, 2])
    run = submit(cluster, f"instant-{seed}", world, "short", "--max-failures", "1")
    run.wait_step(dice.randint(1, 10))
    story = Story(cluster, run)
    nodes = story.nodes()
    victim = dice.choice([name for name in VICTIMS if world == 2 or name != "member"])
    rank, launcher = story.rank(nodes[0]), story.launcher(nodes[0])
    deed = dice.choice(["offload", "checkpoint", "move"])
    order = ("move", run.id) if deed == "move" else ("suspend", run.id, "--level", deed)
    asking = cluster.begin(*order, "--no-wait")
    threading.Event().wait(dice.uniform(0.3, 2.0))  # the instant is what is random here
    if victim in ("launcher", "rank"):
        # a rank that has been saved, or moved away, is gone already
        with contextlib.suppress(ProcessLookupError):
            os.kill(launcher if victim == "launcher" else rank, signal.SIGKILL)
    else:
        dice.choice(story.services(victim, nodes)).kill()
    if victim == "master":
        asking.kill()
    asking.wait(60)
    start_the_dead(cluster)
    eventually(
        lambda: deed == "move" or run.shell.try_("resume", run.id, "--no-wait").code == 0 or run.state == "HOLDING",
        what="it goes on",
        story=run.story,
    )
    ends_well(run, references, may_repeat=victim == "rank")


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
