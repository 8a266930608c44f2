"""B6. Which of Gandiva's eight models stay packed (OSDI 2018, table 1: several copies of a model on one P40; five gain,
three lose).

Set-up: utilisation alone and mini-batches a second alone and packed, as published. One copy more joins the others; how
many there were is not published, so it is the fewest that could give the gain. Each resident then runs at the published
rate, measured in windows that scatter by 3 %, and the production's trial decides: kept or undone. The same decision as
the table's sign is counted. Before each trial the interference model foretells the sign; it begins with its prior for a
GPU without co-locations and learns from each trial, in the table's order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from ganger_master.estimators.slowdown import UNKNOWN_DEVICE, Pressure, forecast, learn
from ganger_master.policies.colocation_choice import Berth, ColocationProposal, Resident, lesson, verdict
from ganger_master.policies.trials import MOST_WINDOWS, TrialRates, TrialVerdict
from ganger_master.simulator.report.figures import interval

from experiments.experiment import CoreUse, Experiment, MeasuredRows, Row, Setting

# Model, utilisation alone, mini-batches a second alone and packed.
_TABLE = (
    ("VAE", 0.087, 81.8, 419.3),
    ("SuperRes", 0.141, 40.3, 145.2),
    ("RHN", 0.616, 10.1, 14.8),
    ("SCRNN", 0.668, 16.7, 23.3),
    ("MI-LSTM", 0.762, 22.2, 25.9),
    ("LSTM", 0.872, 63.8, 53.0),
    ("ResNet-50", 0.940, 10.3, 9.0),
    ("ResNeXt-50", 0.989, 83.6, 74.4),
)
_DEVICE_BYTES = int(24e9)
_SCATTER = 0.03


def parts(setting: Setting) -> Sequence[Row]:
    return [{"seed": seed} for seed in setting.seeds(10)]


def measure(setting: Setting, part: Row) -> Sequence[Row]:
    random = np.random.default_rng(part["seed"])
    belief = UNKNOWN_DEVICE
    rows: list[Row] = []
    for model, utilisation, alone, packed in _TABLE:
        gain = packed / alone
        proposal = _one_more(model, utilisation, max(2, math.ceil(gain)))
        foretold = forecast([one.pressure for one in proposal.residents], _DEVICE_BYTES, belief)
        rates = {
            one.number: TrialRates(
                _windows(random, alone, 16), _windows(random, packed / len(proposal.residents), MOST_WINDOWS)
            )
            for one in proposal.residents
        }
        found = verdict(proposal, rates)
        belief = learn(belief, [lesson(proposal, rates)])
        rows.append(
            {
                "model": model,
                "published_gain": gain,
                "foretold_gain": foretold.gain,
                "measured_gain": found.gain.value,
                "kept": found.verdict is TrialVerdict.KEEP,
                "undone": found.verdict is TrialVerdict.UNDO,
                "foretold": foretold.is_promising,
            }
        )
    return rows


def conclude(rows: Sequence[Row]) -> MeasuredRows:
    seeds = sorted({row["seed"] for row in rows})

    def count(seed: int, what: str) -> int:
        """Decisions on which the table's sign agrees; one that is still open agrees with nothing."""
        of_seed = [row for row in rows if row["seed"] == seed]
        if what == "kept":
            return sum(row["kept"] if row["published_gain"] > 1.0 else row["undone"] for row in of_seed)
        return sum(row["foretold"] == (row["published_gain"] > 1.0) for row in of_seed)

    return MeasuredRows(
        {
            "same_decisions": interval([count(seed, "kept") for seed in seeds]),
            "foretold_signs": interval([count(seed, "foretold") for seed in seeds]),
        },
        len(seeds),
        load=None,
        why="" if all(count(seed, "kept") == len(_TABLE) for seed in seeds) else "scatter of the windows hides a gain",
    )


def _one_more(model: str, utilisation: float, copies: int) -> ColocationProposal:
    """The last of so many copies joins the others."""
    one = Resident(0, model, Pressure(utilisation, 1e9), least_speed=0.0)
    host, guest = (
        Berth(((node, 1),), "P40", _DEVICE_BYTES, tuple(replace(one, number=number) for number in numbers))
        for node, numbers in (("host", range(copies - 1)), ("guest", [copies - 1]))
    )
    return ColocationProposal(guest, host, forecast([*host.pressures, *guest.pressures], _DEVICE_BYTES))


def _windows(random: np.random.Generator, rate: float, count: int) -> tuple[float, ...]:
    return tuple((rate * (1.0 + _SCATTER * random.standard_normal(count)).clip(0.1)).tolist())


PACKED_COPIES = Experiment("B6", parts, measure, conclude, core=CoreUse.ARITHMETIC)
