"""The strongest mechanism that applies is chosen, and each stronger one is refused with its reason."""

from __future__ import annotations

import pytest
from ganger.injob.page_layout import Capability
from ganger.protocol.gang_orders import Mechanism
from ganger_daemon.core.part_facts import (
    NO_IMAGE,
    NO_SIGNAL,
    MechanismChoice,
    MechanismFacts,
    choose_mechanism,
    keeps_state,
)

UNSPECIFIED, ATTACHED, ADAPTER, IMAGE, REPLAY, SIGNAL, NONE = Mechanism
A, D, R = "no attach", "no trainer", "it opens a database"
PLAIN = {"attached": A, "adapter": D, "replay": R}


@pytest.mark.parametrize(
    ("facts", "chosen", "refused"),
    [
        # Before the start only the image capability, the nodes and the signal are known.
        (MechanismFacts(image=""), IMAGE, ()),
        (MechanismFacts(), NONE, ((IMAGE, NO_IMAGE), (SIGNAL, NO_SIGNAL))),
        (MechanismFacts(signal=""), SIGNAL, ((IMAGE, NO_IMAGE),)),
        (
            MechanismFacts(nodes=2, image="", signal=""),
            SIGNAL,
            ((IMAGE, "its ranks are on 2 nodes, and an image is of one"),),
        ),
        # Once the agent has reported.
        (MechanismFacts(attached="", adapter="", image="", replay="", signal=""), ATTACHED, ()),
        (MechanismFacts(attached=A, adapter="", image="", replay="", signal=""), IMAGE, ((ATTACHED, A),)),
        (MechanismFacts(attached=A, adapter="", replay=""), ADAPTER, ((ATTACHED, A), (IMAGE, NO_IMAGE))),
        (MechanismFacts(nodes=2, attached=A, adapter="", image="", replay=""), ADAPTER, ((ATTACHED, A),)),
        (
            MechanismFacts(attached=A, adapter=D, replay="", signal=""),
            REPLAY,
            ((ATTACHED, A), (IMAGE, NO_IMAGE), (ADAPTER, D)),
        ),
        (
            MechanismFacts(**PLAIN, signal=""),
            SIGNAL,
            ((ATTACHED, A), (IMAGE, NO_IMAGE), (ADAPTER, D), (REPLAY, R)),
        ),
        (
            MechanismFacts(**PLAIN),
            NONE,
            ((ATTACHED, A), (IMAGE, NO_IMAGE), (ADAPTER, D), (REPLAY, R), (SIGNAL, NO_SIGNAL)),
        ),
        # What a user asks for is used, or nothing.
        (MechanismFacts(wish=REPLAY, attached="", image="", replay=""), REPLAY, ()),
        (MechanismFacts(wish=REPLAY, **{**PLAIN, "attached": ""}), NONE, ((REPLAY, R),)),
        (MechanismFacts(wish=REPLAY, image=""), NONE, ()),
        (MechanismFacts(wish=SIGNAL, attached="", signal=""), SIGNAL, ()),
        (MechanismFacts(wish=IMAGE, image="", attached=""), IMAGE, ()),
        (
            MechanismFacts(wish=IMAGE, nodes=3, image=""),
            NONE,
            ((IMAGE, "its ranks are on 3 nodes, and an image is of one"),),
        ),
        (MechanismFacts(wish=NONE, attached="", image="", signal=""), NONE, ()),
    ],
)
def test_the_strongest_mechanism_that_applies_is_chosen(
    facts: MechanismFacts, chosen: Mechanism, refused: tuple[tuple[Mechanism, str], ...]
) -> None:
    assert choose_mechanism(facts) == MechanismChoice(chosen, refused)


@pytest.mark.parametrize(
    ("wish", "of_attached", "of_adapter", "of_replay"),
    [
        (UNSPECIFIED, True, True, True),
        (ATTACHED, True, False, False),
        (ADAPTER, False, True, False),
        (REPLAY, False, False, True),
        (SIGNAL, False, False, False),
        (NONE, False, False, False),
    ],
)
def test_an_agent_saves_a_state_only_by_the_mechanism_that_the_user_wants(
    wish: Mechanism, of_attached: bool, of_adapter: bool, of_replay: bool
) -> None:
    bits = (Capability.FIVE_LINE, Capability.ADAPTER, 0)
    saved = [keeps_state(wish, bit | Capability.CHECKPOINT) for bit in bits]
    assert saved == [of_attached, of_adapter, of_replay]
