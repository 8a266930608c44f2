"""A planner whose nodes come back with other hardware plans with what is there now."""

from __future__ import annotations

import pytest
from core.drive import SERVER, job_of
from core.test_changed_hardware import KINDS, Changing
from ganger.cluster.resources import ConfigurationSet
from ganger.job_state import JobState
from ganger_master.core.answers import SessionAnswer
from ganger_master.core.gang_model import ObservedPhase
from hypothesis import given
from hypothesis import strategies as st
from planner.test_moves import Moved
from planner.test_passes import Planned


class ChangingPlanned(Changing, Planned):
    def __init__(self, policy: str) -> None:
        self.boots: dict[str, int] = {}
        Planned.__init__(self, 3, policy)


class ChangingMoved(Changing, Moved):
    def __init__(self, policy: str) -> None:
        self.boots: dict[str, int] = {}
        Moved.__init__(self, 3, policy)


_DEEDS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.sampled_from([1, 2, 4, 6, 8])),
        st.tuples(st.just("boot"), st.sampled_from(["n1", "n2", "n3"]), st.sampled_from(KINDS)),
    ),
    min_size=3,
    max_size=25,
)


@pytest.mark.parametrize("policy", ["las", "drf", "las+defrag", "fifo-backfill+tetris+defrag", "ftf"])
@given(_DEEDS)
def test_what_is_planned_fits_whatever_nodes_became(policy: str, deeds: list[tuple[object, ...]]) -> None:
    drive = ChangingMoved(policy) if policy.endswith("defrag") else ChangingPlanned(policy)
    kinds = dict.fromkeys(drive.state.nodes, SERVER)
    for deed, *about in deeds:
        match deed, *about:
            case "submit", int(gpus):
                drive.submit(job_of(gpus))
            case "boot", str(node), ConfigurationSet() as kind:
                assert isinstance(drive.opens(node, kind, boots=1), SessionAnswer)
                drive.observe(node)
                kinds[node] = kind
        # All of which is approved.
        for _, number in drive.proposed():
            job = drive.job(number)
            if job.state is JobState.HOLDING and not job.next_epoch:
                drive.seen(number, job.epoch, ObservedPhase.RUNNING)
        for gang in drive.state.gangs.values():
            assert all(
                piece.held is None or piece.held.device_mask < 1 << kinds[piece.claim.node].devices
                for piece in gang.pieces
            )
