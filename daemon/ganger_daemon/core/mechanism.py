"""The mechanism by which a gang is stopped, saved and moved, and why stronger mechanisms do not apply.

Pure, and called twice. Before the start only the wish, the nodes, the image capability and the signal are known: that
decides whether the gang starts in namespaces. Once its agent has reported, the mechanism in use is reported with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ganger.injob.page_layout import Capability
from ganger.protocol.gang_orders import Mechanism

NO_IMAGE = "this node cannot dump and restore processes"
NO_SIGNAL = "the job names no signal at which it saves itself (--signal)"


@dataclass(frozen=True, slots=True)
class MechanismFacts:
    """What decides about the mechanism of a gang.

    `wish`: the only one that the user wants, UNSPECIFIED for the strongest; `nodes`: of the gang. The others say why a
    mechanism does not apply: empty where it applies, None while that is not known. `image`: why this node cannot dump
    and restore the processes."""

    wish: Mechanism = Mechanism.UNSPECIFIED
    nodes: int = 1
    attached: str | None = None
    adapter: str | None = None
    image: str | None = NO_IMAGE
    replay: str | None = None
    signal: str | None = NO_SIGNAL


@dataclass(frozen=True, slots=True)
class MechanismChoice:
    """The mechanism of a gang, and stronger ones that do not apply with the reasons, strongest first."""

    mechanism: Mechanism
    refused: tuple[tuple[Mechanism, str], ...] = ()


def choose_mechanism(facts: MechanismFacts) -> MechanismChoice:
    """Return the strongest mechanism that applies as far as known, or NONE. Those that are not known yet are passed
    over without a reason."""
    refused: list[tuple[Mechanism, str]] = []
    for mechanism in _candidates(facts):
        reason = _reason_against(facts, mechanism)
        if reason == "":
            return MechanismChoice(mechanism, tuple(refused))
        if reason is not None:
            refused.append((mechanism, reason))
    return MechanismChoice(Mechanism.NONE, tuple(refused))


def keeps_state(wish: Mechanism, able: int) -> bool:
    """Return whether the agent may save the state of a job: not where its user wants another mechanism. `able`: the
    capabilities (`Capability`) that the agents of all ranks report."""
    otherwise = able & (Capability.FIVE_LINE | Capability.ADAPTER | Capability.IMAGE)
    match wish:
        case Mechanism.SIGNAL | Mechanism.NONE:
            return False
        case Mechanism.ATTACHED:
            return bool(able & Capability.FIVE_LINE)
        case Mechanism.ADAPTER:
            return bool(able & Capability.ADAPTER)
        case Mechanism.REPLAY:
            return not otherwise
        case _:
            return True


def _candidates(facts: MechanismFacts) -> tuple[Mechanism, ...]:
    """Return the mechanisms to try, strongest first: an image is exact and needs nothing of the script, but is of one
    node."""
    if facts.wish is Mechanism.NONE:
        return ()
    if facts.wish is not Mechanism.UNSPECIFIED:
        return (facts.wish,)
    by_nodes = (Mechanism.IMAGE, Mechanism.ADAPTER) if facts.nodes == 1 else (Mechanism.ADAPTER, Mechanism.IMAGE)
    return (Mechanism.ATTACHED, *by_nodes, Mechanism.REPLAY, Mechanism.SIGNAL)


def _reason_against(facts: MechanismFacts, mechanism: Mechanism) -> str | None:
    if mechanism is Mechanism.IMAGE and facts.nodes > 1:
        return f"its ranks are on {facts.nodes} nodes, and an image is of one"
    reasons = {
        Mechanism.ATTACHED: facts.attached,
        Mechanism.ADAPTER: facts.adapter,
        Mechanism.IMAGE: facts.image,
        Mechanism.REPLAY: facts.replay,
        Mechanism.SIGNAL: facts.signal,
    }
    return reasons[mechanism]
