"""Control inside the jobs of whole gangs: real processes agree on the steps at which they stop."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from ganger.injob.page import GangPages, Page, page_path
from ganger.injob.page_layout import EXIT_FENCED, EXIT_YIELDED, PageOrderKind, PageParkLevel, PagePhase, PageState
from ganger.protocol.stop_rules import decide
from kit.waiting import eventually

WORKER = str(Path(__file__).with_name("worker.py"))
CLIENT = str(Path(__file__).parents[2] / "client")


class _Gang:
    """Worker processes on real pages. ``nodes``: ranks of other nodes see each other through relayed mirrors only."""

    def __init__(self, directory: Path, world: int, split: bool, depth: int, sync_every: int, steps: int) -> None:
        self.world = world
        shared = directory / "collective"
        shared.write_bytes(bytes(4096))
        self.homes = [directory / f"node-{rank * 2 // world if split else 0}" for rank in range(world)]
        self.own: list[Page] = []
        self.mirrors: list[tuple[Page, Page]] = []
        for home in sorted(set(self.homes)):
            home.mkdir()
        for rank in range(world):
            self.own.append(Page.create(page_path(str(self.homes[rank]), rank), epoch=1, rank=rank, world=world))
        for home in sorted(set(self.homes)):
            for rank in range(world):
                if self.homes[rank] != home:
                    mirror = Page.create(page_path(str(home), rank), epoch=1, rank=rank, world=world)
                    self.mirrors.append((self.own[rank], mirror))
        self.order(1, PageOrderKind.RUN)
        self.stopping = threading.Event()
        self.relay = threading.Thread(target=self._relay)
        self.relay.start()
        self.processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    WORKER,
                    str(directory),
                    str(shared),
                    *map(str, (rank, world, depth, sync_every)),
                    str(steps),
                    "1",
                ],
                env={**os.environ, "GANGER_PAGE": self.own[rank].path, "PYTHONPATH": CLIENT},
            )
            for rank in range(world)
        ]

    def _relay(self) -> None:
        while not self.stopping.wait(0.003):
            for source, mirror in self.mirrors:
                mirror.mirror(source.raw_point())

    def order(self, seq: int, order: int, **details: int) -> None:
        for page in self.own:
            page.write_order(seq, order, **details)

    def all(self, condition: Callable[[Page], bool], what: str) -> None:
        eventually(
            lambda: all(condition(page) for page in self.own),
            within_seconds=60,
            what=what,
            story=lambda: "\n".join(str(page.progress()) for page in self.own),
            every_seconds=0.002,
        )

    def publish(self, seq: int) -> None:
        self.all(lambda page: page.progress().reached_seq == seq, "every shard")
        assert all(process.poll() is None for process in self.processes), "none may leave before the others saved"
        for page in self.own:
            page.let_leave(seq)

    def end(self) -> list[int]:
        codes = [process.wait(timeout=60) for process in self.processes]
        self.close()
        return codes

    def close(self) -> None:
        self.stopping.set()
        self.relay.join()
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.mark.parametrize(
    ("world", "split", "depth", "sync_every"), [(2, False, 1, 0), (4, True, 8, 10), (4, False, 64, 3)]
)
def test_gang_stops_at_the_same_step_every_time(
    tmp_path: Path, world: int, split: bool, depth: int, sync_every: int
) -> None:
    gang = _Gang(tmp_path, world, split, depth, sync_every, 100_000)
    draw = random.Random(world * depth)
    try:
        seq = 1
        for _ in range(15):
            target = min(page.progress().step for page in gang.own) + draw.randrange(1, 20)
            gang.all(lambda page, target=target: page.progress().step >= target, "steps")
            seq += 1
            stop = seq
            level = draw.choice([PageParkLevel.PAUSE, PageParkLevel.OFFLOAD])
            gang.order(stop, PageOrderKind.STOP, stop_seq=stop, level=level)
            if draw.random() < 0.3:
                # RUN cancels a stop at any time, agreed or not.
                seq += 1
                gang.order(seq, PageOrderKind.RUN)
                continue
            gang.all(lambda page, stop=stop: page.progress().reached_seq == stop, f"stop {stop}")
            assert len({(page.progress().reached_step, page.progress().step) for page in gang.own}) == 1
            seq += 1
            gang.order(seq, PageOrderKind.RUN)
        stop = seq + 1
        gang.order(stop, PageOrderKind.STOP, stop_seq=stop, level=PageParkLevel.CHECKPOINT)
        gang.publish(stop)
        assert gang.end() == [EXIT_YIELDED] * world
        assert len({page.progress().checkpoint_step for page in gang.own}) == 1
        assert {page.progress().exit_code for page in gang.own} == {EXIT_YIELDED}
    finally:
        gang.close()


def test_checkpoints_and_stops_that_cross_leave_no_rank_behind(tmp_path: Path) -> None:
    gang = _Gang(tmp_path, 4, True, 8, 7, 1_000_000)
    draw = random.Random(5)
    try:
        seq = 1
        for number in range(1, 16):
            for page in gang.own:
                request = page.request_checkpoint(number)
                if draw.random() < 0.2:
                    gang.stopping.wait(0.002)
            if draw.random() < 0.5:
                gang.all(lambda page, request=request: page.progress().checkpoint_done == request, "the checkpoint")
                assert len({page.progress().checkpoint_step for page in gang.own}) == 1
            seq += 1
            stop = seq
            gang.order(stop, PageOrderKind.STOP, stop_seq=stop, level=PageParkLevel.PAUSE)
            gang.all(lambda page, stop=stop: page.progress().reached_seq == stop, f"stop {stop}")
            assert len({page.progress().reached_step for page in gang.own}) == 1
            seq += 1
            gang.order(seq, PageOrderKind.RUN)
        gang.order(seq + 1, PageOrderKind.STOP, stop_seq=seq + 1, level=PageParkLevel.CHECKPOINT)
        gang.publish(seq + 1)
        assert gang.end() == [EXIT_YIELDED] * 4
    finally:
        gang.close()


def test_stop_that_comes_at_the_end_of_training_ends_as_finished(tmp_path: Path) -> None:
    gang = _Gang(tmp_path, 2, False, 4, 0, 30)
    try:
        gang.all(lambda page: page.progress().step >= 30 or page.progress().phase == PagePhase.DONE, "the last steps")
        gang.order(2, PageOrderKind.STOP, stop_seq=2, level=PageParkLevel.PAUSE)
        assert gang.end() == [0, 0]
        points = GangPages(str(gang.homes[0]), 2).points(2)
        assert points is not None
        assert decide(points, 0).finished
    finally:
        gang.close()


def test_fenced_rank_leaves_with_its_own_code_even_while_it_waits(tmp_path: Path) -> None:
    gang = _Gang(tmp_path, 2, False, 4, 0, 100_000)
    try:
        gang.all(lambda page: page.progress().step > 3, "steps")
        gang.order(2, PageOrderKind.STOP, stop_seq=2, level=PageParkLevel.PAUSE)
        gang.all(lambda page: page.progress().state == PageState.PAUSED, "the pause")
        for page in gang.own:
            page.fence()
        assert gang.end() == [EXIT_FENCED] * 2
    finally:
        gang.close()


def test_rank_killed_in_mid_agreement_leaves_the_others_waiting_not_past_the_limit(tmp_path: Path) -> None:
    gang = _Gang(tmp_path, 2, False, 64, 0, 10**9)
    survivor = gang.own[0]
    try:
        gang.all(lambda page: page.progress().step > 3, "steps")
        gang.processes[1].kill()
        gang.processes[1].wait()
        ended = gang.own[1].progress().step
        gang.order(2, PageOrderKind.STOP, stop_seq=2, level=PageParkLevel.PAUSE)
        eventually(
            lambda: survivor.progress().state == PageState.WAITING,
            within_seconds=20,
            what="the survivor's wait",
            every_seconds=0.001,
        )
        assert survivor.progress().step <= max(survivor.progress().ack_step, ended) + 1
        assert survivor.progress().reached_seq == 1
    finally:
        gang.close()
