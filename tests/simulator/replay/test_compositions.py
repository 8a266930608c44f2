"""Every composition of a policy's parts plans a small workload to its end, or is refused with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from ganger_master.core.commands import Command, ProposePlan
from ganger_master.core.plan_changes import CoresChange, PlanChange
from ganger_master.policies import EXTRA_STAGES, NAMES, ShareByTimeSlices, Tune, policy_named
from ganger_master.policies.placements import PLACEMENTS
from ganger_master.policies.tunings.catalogue import TUNINGS
from ganger_master.simulator.inputs import ReplayOptions, SwitchCosts
from ganger_master.simulator.run import _Replay
from ganger_master.simulator.traces.servers import servers_from_flags
from ganger_master.simulator.traces.workload import Workload, workload
from simulator.replay.test_packing import HOURS
from simulator.replay.test_packing import SERVERS as ONE_SERVER
from simulator.replay.test_packing import jobs as light_jobs
from simulator.replay.test_packing import options as roomy
from simulator.replay.test_promises import Watched

SERVERS = servers_from_flags(nodes=2, gpus_per_node=4)
OPTIONS = ReplayOptions(costs=SwitchCosts(start_s=2.0, suspend_s=1.5, resume_s=1.0), plan_every_s=20.0)
MODIFIERS = (*PLACEMENTS, *TUNINGS, *EXTRA_STAGES)
# Modifiers of every kind, each with each other, after bases of every kind.
FEW = ("best-fit", "fgd", "role", "synergy-tune", "exact", *EXTRA_STAGES)
KINDS = ("fifo", "srtf", "ganger", "gandiva", "optimus", "tetris")
WITHOUT_PREEMPTION = {"fifo", "fifo-backfill", "backfill", "tetris", "tetris-cos", "tetris-oracle"}


def reason_against(base: str, *parts: str) -> str | None:
    """Return the reason by which a composition has no meaning, by rules of its own."""
    if sum(part in PLACEMENTS for part in parts) > 1:
        return "one placement"
    if sum(part in TUNINGS for part in parts) > 1:
        return "one tuning"
    if base.startswith("tetris") and any(part in PLACEMENTS for part in parts):
        return "chooses a job together with its place"
    if base == "optimus" and "elastic" in parts:
        return "decides the size of elastic jobs itself"
    if base in WITHOUT_PREEMPTION and not {"packs", "slices"}.isdisjoint(parts):
        return "preempts no job"
    return None


def compositions() -> Iterator[tuple[str, ...]]:
    for base in NAMES:
        for modifier in MODIFIERS if base in KINDS else FEW:
            yield base, modifier
    for base in KINDS:
        for pair in combinations(FEW, 2):
            yield base, *pair


EVERY = tuple(compositions())
# `make test` has every modifier after every base, and every pair of modifiers after two bases; these are the others.
PAIRS = tuple(combinations(FEW, 2))
LATER = {(base, *pair) for at, base in enumerate(KINDS) for number, pair in enumerate(PAIRS) if (at + number) % 3}


def of_bases() -> list[Any]:
    """Parameters (base, compositions): a test for each composition would take longer to collect than to run."""
    found = []
    for base in NAMES:
        mine = [one for one in EVERY if one[0] == base]
        found.append(pytest.param(base, [one for one in mine if one not in LATER], id=base))
        if base in KINDS:
            rest = [one for one in mine if one in LATER]
            found.append(pytest.param(base, rest, id=f"{base}, all pairs", marks=pytest.mark.chaos))
    return found


def jobs(count: int = 6, seed: int = 3, seconds: tuple[int, int] = (20, 400), models: tuple[str, ...] = ()) -> Workload:
    """Return elastic jobs of one to four GPUs that do not all fit at once."""
    dice = np.random.default_rng(seed)
    gpus = dice.choice([1, 1, 2, 2, 4], count)
    return workload(
        [str(number) for number in range(count)],
        np.sort(dice.integers(0, 120, count)).tolist(),
        gpus.tolist(),
        dice.integers(*seconds, count).tolist(),
        numbers={"min_gpus": np.ones(count, int), "max_gpus": 2 * gpus, "batch_size": np.full(count, 256.0)},
        labels={"user": ["ann", "bob", "eve"] * (count // 3), "model": list(models) or ["resnet50"] * count},
    )


class Changing(Watched):
    """Keeps the proposed changes."""

    def __init__(self, rows: Workload, policy: str, options: ReplayOptions = OPTIONS) -> None:
        self.proposed: list[PlanChange] = []
        super().__init__(rows, SERVERS, policy, options)

    def send(self, command: Command) -> object:
        if isinstance(command, ProposePlan):
            self.proposed += command.changes
        return super().send(command)


@pytest.mark.parametrize(("base", "composed"), of_bases())
def test_every_composition_plans_all_jobs_to_their_end_or_is_refused_with_a_reason(
    base: str, composed: list[tuple[str, ...]]
) -> None:
    rows = jobs()
    for parts in composed:
        name, reason = "+".join(parts), reason_against(*parts)
        if reason is not None:
            with pytest.raises(KeyError, match=reason) as refused:
                policy_named(name)
            assert "\n" not in refused.value.args[0], name
            assert len(refused.value.args[0]) < 200, name
            continue
        replay = Changing(rows, name)
        replay.run()
        assert replay.ledger.outcomes().finished.all(), name
        assert not replay.state.jobs.live, name
        assert replay.state.nodes.free_devices == SERVERS.gpus, name


def test_each_reason_occurs_and_most_compositions_have_a_meaning() -> None:
    reasons = [reason_against(*parts) for parts in EVERY]
    assert len({*reasons}) == 6
    assert reasons.count(None) > 0.8 * len(reasons)


def test_a_part_that_a_policy_has_already_changes_nothing() -> None:
    for name, plain in (
        ("gandiva+elastic", "gandiva"),
        ("gandiva+packs", "gandiva"),
        ("gandiva+defrag", "gandiva"),
        ("ganger+packs", "ganger"),
        ("synergy+synergy-tune", "synergy"),
    ):
        one, other = policy_named(name), policy_named(plain)
        assert (one.order, one.placement, one.stages) == (other.order, other.placement, other.stages), name


def test_stages_plan_in_one_sequence_however_a_name_lists_its_parts() -> None:
    one, other = policy_named("srtf+packs+defrag+role+elastic"), policy_named("srtf+elastic+role+defrag+packs")
    assert one.stages == other.stages
    assert len(one.stages) == 5
    assert policy_named("gandiva+role").has(ShareByTimeSlices, Tune)


def test_time_sliced_jobs_are_tuned_once_they_have_their_devices_alone() -> None:
    """Language models need few cores, and two speech models take what these leave."""
    models = ("lstm", "m5", "lstm", "m5", "gnmt", "m5")
    rows = jobs(6, seconds=(3_000, 6_000), models=models)
    replay = Changing(rows, "gandiva+synergy-tune", ReplayOptions(costs=OPTIONS.costs, rates="profiles"))
    replay.run()
    assert any(isinstance(change, CoresChange) for change in replay.proposed)
    assert replay.ledger.outcomes().finished.all()


@pytest.mark.parametrize("policy", ["optimus+packs", "srtf+packs", "ganger+defrag", "ganger+synergy-tune"])
def test_light_jobs_are_co_located_whatever_else_the_policy_does(policy: str) -> None:
    rows = light_jobs(*["vae"] * 6)
    replay = _Replay(rows, ONE_SERVER, policy, roomy(rows), None)
    replay.run()
    outcomes = replay.ledger.outcomes()
    assert outcomes.finished.all()
    # Six jobs on four GPUs: one after the other they would take twice as long.
    assert outcomes.end_s.max() < 1.3 * HOURS
