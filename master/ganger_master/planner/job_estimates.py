"""Fits of what jobs report, kept and made anew only once there is more to fit: each takes some milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from ganger_master.estimators.convergence import LossPoint, StepsLeftEstimate, fit_convergence, steps_to_convergence
from ganger_master.estimators.speed import AllReduceModel, StepPoint, fit_allreduce

# Losses are fitted from so many passes over the data on, and anew once there are so many times as many.
_FIRST_PASSES: Final = 2
_REFIT: Final = 1.2
# Speeds that are off by no more say the same.
_ALIKE: Final = 0.05


class Fits:
    """By job number. One writer."""

    def __init__(self) -> None:
        self._ends: dict[int, tuple[int, StepsLeftEstimate | None]] = {}
        self._speeds: dict[int, tuple[Mapping[int, float], AllReduceModel | None]] = {}

    def forget(self, number: int) -> None:
        self._ends.pop(number, None)
        self._speeds.pop(number, None)

    def keep(self, is_live: Callable[[int], bool]) -> None:
        """Forgets all others."""
        for number in [number for number in {*self._ends, *self._speeds} if not is_live(number)]:
            self.forget(number)

    def end(
        self,
        number: int,
        passes: int,
        losses: Callable[[], Iterable[LossPoint]],
        least_decrease: float,
        pass_steps: float,
        in_a_row: int = 1,
    ) -> StepsLeftEstimate | None:
        """Steps from the start until its losses have converged, by those of so many `passes` over its data, each of
        `pass_steps`; None while they say too little. The rest as `steps_to_convergence` has it."""
        if passes < _FIRST_PASSES:
            return None
        known = self._ends.get(number)
        if known is None or passes >= _REFIT * known[0] or passes < known[0]:
            model = fit_convergence(losses())
            end = None if model is None else steps_to_convergence(model, least_decrease, pass_steps, in_a_row)
            known = self._ends[number] = passes, end
        return known[1]

    def speed(self, number: int, seconds: Mapping[int, float], gpus_per_node: int) -> AllReduceModel | None:
        """By the seconds of a step with each number of GPUs that was measured; None where none was. The same samples a
        step whatever the size, so a GPU has its part of them."""
        known = self._speeds.get(number)
        if known is None or not _is_alike(known[0], seconds):
            model = fit_allreduce(_points(seconds, gpus_per_node))
            known = self._speeds[number] = dict(seconds), model
        return known[1]


def _points(seconds: Mapping[int, float], gpus_per_node: int) -> Sequence[StepPoint]:
    return [StepPoint(gpus, -(-gpus // gpus_per_node), 1.0 / gpus, seconds[gpus]) for gpus in sorted(seconds)]


def _is_alike(known: Mapping[int, float], seconds: Mapping[int, float]) -> bool:
    if known.keys() != seconds.keys():
        return False
    return all(abs(seconds[gpus] - was) <= _ALIKE * was for gpus, was in known.items())
