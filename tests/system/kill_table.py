"""Kills by place and victim: every failpoint times every party, and the reasons why some pairs make no sense.

A place belongs to the program that passes it (`holder`) while it does what a user asked for (`deed`). The victim is any
party, the holder or another one, at the very time the holder is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# leader: the daemon of rank 0; member: the daemon of another rank. In a move these are the source's, as are launcher
# and rank, and the destination is a daemon of the gang to come.
VICTIMS: Final = ("master", "leader", "member", "destination", "launcher", "rank")
DEEDS: Final = ("submit", "offload", "checkpoint", "move", "restart")


@dataclass(frozen=True)
class Place:
    failpoint: str
    holder: str
    deed: str

    def __str__(self) -> str:
        return f"{self.deed}/{self.failpoint}@{self.holder}"


@dataclass(frozen=True)
class Pair:
    place: Place
    victim: str

    def __str__(self) -> str:
        return f"{self.place} x {self.victim}"


PLACES: Final = (
    Place("before-commit", "master", "submit"),
    Place("after-commit", "master", "submit"),
    Place("commit-before-reply", "master", "submit"),
    Place("between-fork-and-page", "leader", "submit"),
    Place("before-commit", "master", "offload"),
    Place("after-commit", "master", "offload"),
    Place("commit-before-reply", "master", "offload"),
    Place("order-half-written", "leader", "offload"),
    Place("partial-acks", "leader", "offload"),
    Place("partial-acks", "member", "offload"),
    Place("parked-before-report", "leader", "offload"),
    Place("mid-fsync", "leader", "checkpoint"),
    Place("before-rename", "leader", "checkpoint"),
    Place("after-rename", "leader", "checkpoint"),
    Place("after-prepare", "destination", "move"),
    Place("mid-stream", "leader", "move"),
    Place("parked-before-report", "leader", "move"),
    Place("before-move-commit", "destination", "move"),
    Place("before-move-commit", "master", "move"),
    Place("after-move-commit", "master", "move"),
    Place("before-reap", "leader", "move"),
    Place("mid-load", "master", "restart"),
)

# (deed, failpoint or * for each, victim): why no kill is needed there
SENSELESS: Final = {
    ("submit", "*", "destination"): "only a move has a destination",
    ("offload", "*", "destination"): "only a move has a destination",
    ("checkpoint", "*", "destination"): "only a move has a destination",
    ("restart", "*", "destination"): "only a move has a destination",
    ("submit", "before-commit", "leader member launcher rank"): "no gang exists when a submission is committed",
    ("submit", "after-commit", "leader member launcher rank"): "no gang exists when a submission is committed",
    ("submit", "commit-before-reply", "leader member launcher rank"): "no gang exists when a submission is committed",
    ("offload", "before-commit", "leader member launcher rank"): "nothing leaves the master before the commit: for"
    " all others this is any instant",
    ("offload", "after-commit", "leader member launcher rank"): "as before the commit: nothing has left the master",
    ("offload", "commit-before-reply", "leader member launcher rank"): "as before the commit: nothing has left it",
    ("offload", "order-half-written", "launcher"): "orders go from daemon to ranks by their pages, past the launcher",
    ("offload", "partial-acks", "launcher"): "ranks agree by their pages, past the launcher",
    ("checkpoint", "*", "rank"): "ranks have ended by themselves: what is published are their durable shards",
    ("move", "before-move-commit", "launcher"): "the launchers of both sides have done their part",
    ("move", "after-move-commit", "launcher"): "the launchers of both sides have done their part",
    ("move", "parked-before-report", "launcher"): "the source's launcher gave its arenas away when the stream began",
    ("move", "before-reap", "rank"): "no process of the source is left",
    ("restart", "mid-load", "launcher rank"): "they know nothing of the master, and their daemons are busy with it",
}


def why_senseless(pair: Pair) -> str:
    """The reason, or nothing for a pair that is to be tried."""
    for (deed, failpoint, victims), reason in SENSELESS.items():
        if deed == pair.place.deed and failpoint in ("*", pair.place.failpoint) and pair.victim in victims.split():
            return reason
    return ""


PAIRS: Final = tuple(pair for victim in VICTIMS for place in PLACES if not why_senseless(pair := Pair(place, victim)))


def _chosen() -> tuple[Pair, ...]:
    """Each victim once in each deed, at a place that has no kill yet if there is one; then the places left."""
    chosen: dict[Pair, None] = {}

    def choose(pairs: list[Pair]) -> None:
        tried = {pair.place for pair in chosen}
        fresh = [pair for pair in pairs if pair.place not in tried]
        chosen.update(dict.fromkeys((fresh or pairs)[:1]))

    for victim in VICTIMS:
        for deed in DEEDS:
            choose([pair for pair in PAIRS if (pair.victim, pair.place.deed) == (victim, deed)])
    for place in PLACES:
        if place not in {pair.place for pair in chosen}:
            choose([pair for pair in PAIRS if pair.place == place])
    return tuple(pair for pair in PAIRS if pair in chosen)


# Those of `make test`: every place, and every victim in every deed. `make chaos` kills at all pairs.
CHOSEN_PAIRS: Final = _chosen()
