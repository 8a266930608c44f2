"""What people read of a refusal."""

from __future__ import annotations

from ganger.cluster.refusals import Reason, Refusal


def test_figures_are_counted_as_people_count_them() -> None:
    memory = Refusal(Reason.MEMORY, {"needed_bytes": 1 << 40, "free_bytes": 18_956_156_928, "largest_bytes": 0})
    assert memory.message == "not enough free host memory, free=17.654G largest=0B needed=1T"
    cores = Refusal(Reason.CORES, {"needed_millicores": 96_000, "free_millicores": 500, "socket": 0}, node="n1")
    assert cores.message.endswith("devices, free_cores=0.5 needed_cores=96 socket=0, on n1")


def test_amounts_that_differ_little_read_differently() -> None:
    nearly = Refusal(Reason.MEMORY, {"needed_bytes": 8 << 30, "free_bytes": (8 << 30) - (1 << 20)})
    assert "free=7.999G needed=8G" in nearly.message
