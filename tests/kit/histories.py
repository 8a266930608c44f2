"""A cluster on which gangs come and go and nodes change, for tests of what is kept up to date meanwhile."""

from __future__ import annotations

from ganger.cluster.placement import candidates
from ganger.cluster.resources import Claim, GangShape
from ganger.cluster.view import LoadMode, View
from hypothesis import strategies as st
from kit.clusters import idle_row, parked, server
from msgspec.structs import replace

OTHER = replace(server("4", cores=4, gib=16, device_type="other"), dimensions={"net_mb_per_s": 800.0})


class History:
    def __init__(self, view: View) -> None:
        self.view = view
        view.put_configuration_set(OTHER)
        self.held: list[tuple[Claim, ...]] = []

    def holds(self, node: str) -> bool:
        return any(claim.node == node for claims in self.held for claim in claims)

    def change(self, what: str, at: int, shape: GangShape) -> None:
        view = self.view
        names = list(view.names())
        name = names[at % len(names)] if names else ""
        match what:
            case "start":
                for claims in candidates(view.copy(), shape).candidates[:1]:
                    for claim in claims:
                        view.take(claim, shape.gpus)
                    self.held.append(claims)
            case "end" if self.held:
                for claim in self.held.pop(at % len(self.held)):
                    view.give(claim)
            # A row replaces what its node had free: one that says that all is free comes where nothing is held.
            case "join" if not self.holds(f"n{at}"):
                rack = f"r{at % 3}" if at % 3 else ""
                view.put(idle_row(f"n{at}", OTHER if at % 2 else server(), rack, "f" if rack else ""))
            case "leave" if name and not self.holds(name):
                view.remove(name)
            case "cordon" if name:
                view.set_available(name, not view.row(name).available)
            case "park" if name and view.row(name).configuration_set == server().name:
                view.put(replace(view.row(name), parked_bytes=parked(name, 3, at % 4, 3, 3).parked_bytes, version=0))
            case "mode":
                view.mode = LoadMode.PACK if view.mode is LoadMode.SPREAD else LoadMode.SPREAD


CHANGES = st.tuples(
    st.sampled_from(["start"] * 5 + ["end"] * 4 + ["join", "leave", "cordon", "park", "mode"]), st.integers(0, 20)
)
