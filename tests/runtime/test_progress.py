"""What daemons say of a job's progress becomes one figure."""

from __future__ import annotations

import dataclasses
import math

from ganger_master.runtime.publication import ProgressBoard, Sample


def sample(time: float, step: int = 1, concern: str = "", epoch: int = 1) -> Sample:
    return Sample(epoch, step, step * 8, 1.0, 0.5, 0.0, time, concern)


def concern_of(board: ProgressBoard) -> str:
    found = board.of(7)
    assert found is not None
    return found.concern


def test_a_concern_of_one_node_stands_while_the_others_have_none() -> None:
    board = ProgressBoard()
    board.report(7, sample(1.0, concern="rank 3 hangs"), "n2")
    board.report(7, sample(1.5, step=2), "n1")
    assert concern_of(board) == "rank 3 hangs"
    board.report(7, sample(2.0, step=2), "n2")
    assert concern_of(board) == ""


def test_a_concern_ends_with_the_daemon_that_had_it() -> None:
    board = ProgressBoard()
    board.report(7, sample(1.0, concern="rank 3 hangs"), "n2")
    board.report(7, sample(10.0, step=2), "n1")
    assert concern_of(board) == "rank 3 hangs"
    board.report(7, sample(12.0, step=3), "n1")
    assert concern_of(board) == ""


def test_a_node_that_is_behind_adds_its_concern_to_the_newest_figures() -> None:
    board = ProgressBoard()
    board.report(7, sample(1.0, step=9), "n1")
    board.report(7, sample(1.1, step=8, concern="rank 3 hangs"), "n2")
    found = board.of(7)
    assert found is not None
    assert (found.step, found.concern) == (9, "rank 3 hangs")


def test_a_node_of_parameter_servers_does_not_replace_the_loss_and_epochs_of_the_workers() -> None:
    worker = dataclasses.replace(sample(1.0, step=9), training_epoch=2, training_epochs=5)
    server = Sample(1, 10, 0, 1.0, math.nan, 0.0, 1.1)
    for first, second in ((worker, server), (server, worker)):
        board = ProgressBoard()
        board.report(7, first, "n1")
        board.report(7, second, "n2")
        found = board.of(7)
        assert found is not None
        assert (found.step, found.samples, found.loss) == (10, 72, 0.5)
        assert (found.training_epoch, found.training_epochs) == (2, 5)
    # The next attempt has not taken a sample.
    board.report(7, Sample(2, 9, 0, 1.0, math.nan, 0.0, 2.0), "n2")
    found = board.of(7)
    assert found is not None
    assert (found.samples, found.training_epochs) == (0, 0)
