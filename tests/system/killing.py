"""Kills a party of a running gang while another one, or itself, is held at a named place."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ganger.client import Client
from ganger.injob.launcher.client import Launcher, LauncherError
from ganger.injob.page import Page
from ganger.wire.errors import ApiError
from kit.cluster import Cluster, Service
from kit.shell import Shell
from kit.waiting import eventually
from system.harness import Run
from system.kill_table import Pair


@dataclass
class Story:
    """What happens to one job of two ranks on two nodes, one kill after the other."""

    cluster: Cluster
    run: Run

    # -- parties

    def nodes(self) -> list[str]:
        """Of the gang, rank 0's first."""
        gang = self.run.show().get("gang") or {}
        return [str(claim["node"]).removeprefix("nodes/") for claim in gang.get("claims", [])]

    def services(self, role: str, nodes: list[str]) -> list[Service]:
        """All that may play the role; which of the destinations passes a place first is open."""
        if role == "master":
            return [self.cluster.master]
        if role == "destination":
            return [daemon for name, daemon in self.cluster.daemons.items() if name not in nodes]
        return [self.cluster.daemons[nodes[0 if role == "leader" else 1]]]

    def rank(self, node: str) -> int:
        """Process of rank 0 in its newest epoch, by its page: it may not have run a line yet."""
        pages = (self.cluster.run_directory / node / str(self.run.show()["uid"])).glob("*/rank-0.page")
        page = Page.open(str(max(pages, key=lambda path: int(path.parent.name))), writable=False)
        try:
            return page.identity().pid
        finally:
            page.close()

    def launcher(self, node: str) -> int:
        """The launcher that looks after rank 0; 0 when it died and its successor has not been needed yet."""
        rank = self.rank(node)
        for path in (self.cluster.run_directory / node / "launchers").glob("*.sock"):
            try:
                with Launcher(str(path)) as launcher:
                    if any(child["pid"] == rank for child in launcher.list()):
                        return int(launcher.info()["pid"])
            except LauncherError:
                continue
        return 0

    # -- a kill

    def kill(self, pair: Pair) -> None:
        """The user's deed, the kill in the middle of it, and what the user does after it: ask again, and go on."""
        self.cluster.wait_ready()
        if pair.victim == "launcher" and not self.launcher(self.nodes()[0]):
            self.run.shell("suspend", self.run.id, "--level", "checkpoint")
            self.run.shell("resume", self.run.id)
        if pair.place.deed == "restart":
            self._kill_in_a_restart(pair)
        else:
            nodes = self.nodes()
            holders = self.services(pair.place.holder, nodes)
            strike = self._strike(pair, nodes)
            for holder in holders:
                holder.arm(f"{pair.place.failpoint}=stop")
            self._ask(pair, nodes)
            held = self.until_held(holders, pair)
            strike(held)
            release(holders)
        start_the_dead(self.cluster)
        self._settle(pair)

    def until_held(self, holders: list[Service], pair: Pair) -> Service:
        eventually(
            lambda: any(holder.is_stopped for holder in holders),
            what=f"{pair.place.holder} comes to {pair.place}",
            within_seconds=60,
            story=self.run.story,
        )
        return next(holder for holder in holders if holder.is_stopped)

    def _strike(self, pair: Pair, nodes: list[str]) -> Callable[[Service], None]:
        """Return the kill. Its victim is found before, while all programs still answer."""
        if pair.victim in ("launcher", "rank"):
            pid = (self.launcher if pair.victim == "launcher" else self.rank)(nodes[0])
            return lambda held: os.kill(pid, signal.SIGKILL)
        if pair.victim == "destination":
            others = self.services("destination", nodes)
            return lambda held: (held if held in others else others[0]).kill()
        (service,) = self.services(pair.victim, nodes)
        return lambda held: service.kill()

    def _ask(self, pair: Pair, nodes: list[str]) -> None:
        """In a thread: while the master is held it does not answer, and one that is killed never will."""
        others = [name for name in self.cluster.daemons if name not in nodes]

        def ask() -> None:
            with Client(str(self.cluster.master_directory)) as client:
                try:
                    if pair.place.deed == "move":
                        client.move_job(self.run.name, others)
                    else:
                        client.suspend_job(self.run.name, pair.place.deed)
                except ApiError as error:
                    if pair.victim != "master":
                        raise AssertionError(f"{pair}: {error}") from error

        threading.Thread(target=ask, daemon=True).start()

    def _suspension(self, pair: Pair) -> tuple[str, ...]:
        return ("suspend", self.run.id, "--level", pair.place.deed)

    def _kill_in_a_restart(self, pair: Pair) -> None:
        strike = self._strike(pair, self.nodes())
        self.cluster.master.kill()
        self.cluster.master.arm(f"{pair.place.failpoint}=stop")
        self.cluster.master.start()
        strike(self.until_held([self.cluster.master], pair))
        release([self.cluster.master])

    def _settle(self, pair: Pair) -> None:
        """The order may not have been durable when the master died: a user asks again. Then the job goes on."""
        done = [len(self.run.lines(rank)) for rank in range(self.run.world)]
        if pair.place.deed in ("offload", "checkpoint"):
            for order in (self._suspension(pair), ("resume", self.run.id)):
                self._until(
                    lambda order=order: self.run.shell.try_(*order, "--timeout", "10s").code == 0,  # type: ignore[misc]
                    f"{order[0]} is carried out after {pair}",
                )
        self._until(
            lambda: (
                all(len(self.run.lines(rank)) >= done[rank] + 2 for rank in range(self.run.world)) and self._is_quiet()
            ),
            f"the job goes on after {pair}, and nothing is left of what was",
        )

    def _until(self, probe: Callable[[], bool], what: str) -> None:
        def probed() -> bool:
            # a program that had read its failpoint before it was withdrawn may have stopped only now
            release([self.cluster.master, *self.cluster.daemons.values()])
            return probe()

        eventually(probed, what=what, within_seconds=60, story=self.run.story)

    def _is_quiet(self) -> bool:
        """The job runs, and holds two devices of the four: a move has ended, with its source."""
        shown = self.run.shell.try_("show", self.run.id, "--json")
        nodes = self.run.shell.try_("nodes", "--json")
        if shown.code or nodes.code:
            return False
        gang = json.loads(shown.out).get("gang") or {}
        free = sum(int(node["view_entry"].get("free_mask", 0)).bit_count() for node in json.loads(nodes.out)["nodes"])
        return gang.get("phase") == "RUNNING" and not gang.get("move_claims") and free == len(self.cluster.daemons) - 2


def start_the_dead(cluster: Cluster) -> None:
    if not cluster.master.alive:
        cluster.start_master()
    for daemon in cluster.daemons.values():
        if not daemon.alive:
            daemon.start()


def clear_up(cluster: Cluster) -> None:
    """An idle cluster for the next story, whatever became of this one."""
    release([cluster.master, *cluster.daemons.values()])
    start_the_dead(cluster)
    cluster.wait_ready()
    shell = Shell(cluster.master_directory)
    for job in shell.json("queue"):
        shell.try_("cancel", job["name"])
    eventually(lambda: not shell.json("queue"), what="every job has ended", story=cluster.story)


def release(holders: list[Service]) -> None:
    """Let held programs go on, and withdraw the failpoints of all."""
    for holder in holders:
        holder.armed.unlink(missing_ok=True)
    for holder in holders:
        while holder.is_stopped:
            holder.signal(signal.SIGCONT)
