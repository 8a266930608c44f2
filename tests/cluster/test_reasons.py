"""What people read of a refusal."""

from __future__ import annotations

from ganger.cluster.refusals import Reason, Refusal


def test_figures_are_counted_as_people_count_them() -> None:
    memory = Refusal(Reason.MEMORY, {"needed_bytes": 1 << 40, "free_bytes": 18_956_156_928, "largest_bytes": 0})
    assert memory.message == "not enough free host memory (1T needed, 17.654G free, 0B at most)"
    cores = Refusal(Reason.CORES, {"needed_millicores": 96_000, "free_millicores": 500, "socket": 0}, node="n1")
    assert cores.message.endswith("devices (96 cores needed, 0.5 cores free, socket 0), on n1")


def test_amounts_that_differ_little_read_differently() -> None:
    nearly = Refusal(Reason.MEMORY, {"needed_bytes": 8 << 30, "free_bytes": (8 << 30) - (1 << 20)})
    assert "(8G needed, 7.999G free)" in nearly.message


def test_free_devices_that_are_all_together_are_counted_once_and_what_the_detail_has_is_not_repeated() -> None:
    together = Refusal(Reason.GPUS, {"needed": 4, "free": 3, "largest_free": 3})
    assert together.message == "not enough free devices (4 needed, 3 free)"
    apart = Refusal(Reason.GPUS, {"needed": 4, "free": 5, "largest_free": 3})
    assert apart.message == "not enough free devices (4 needed, 5 free, 3 free together)"
    held = Refusal(Reason.QUOTA, {"needed": 2, "held": 3, "limit": 4}, detail="user 'ann' holds 3 of 4 GPUs")
    assert held.message == "user 'ann' holds 3 of 4 GPUs (2 needed)"
