"""B6. Which of Gandiva's eight models stay co-located (OSDI 2018, table 1: several copies of a model on one P40; five
gain, three lose).

Set-up: two copies of a model on one GPU, through the production core and the planner's loop in virtual time, under
`gandiva`: they are time-sliced, and whether they are tried on the GPU together, and kept there, the planner decides
from measured windows. Of the table only the models' utilisations go in. How fast the copies are together is drawn: by a
law of their utilisations and an error, both from other pairs on other GPUs (Lucid's, `simulator.true_rates`). Memory is
drawn, too, and draws in which two copies do not fit are left out. A decision counts as the table's if the copies spend
most of their time together where the table has a gain, and apart where it has a loss. Foretold is the sign by the
interference model of a GPU on which nothing was co-located yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice

from ganger_master.estimators.speed import UNKNOWN_DEVICE, forecast
from ganger_master.simulator.inputs import ReplayOptions
from ganger_master.simulator.report.figures import interval
from ganger_master.simulator.run import simulate
from ganger_master.simulator.traces.servers import servers_from_flags
from ganger_master.simulator.traces.workload import workload
from ganger_master.simulator.true_rates import Footprints

from experiments.experiment import CoreUse, Experiment, MeasuredRows, Row, Setting

# Models in the table's order, with the sign of their gain there.
_GAINS = {
    "VAE": True,
    "SuperRes": True,
    "RHN": True,
    "SCRNN": True,
    "MI-LSTM": True,
    "LSTM": False,
    "ResNet-50": False,
    "ResNeXt-50": False,
}
_WORK_S = 2 * 3600.0
# Of the memory of a GPU; planners leave a part of it free.
_MOST_MEMORY = 0.45
# Both copies work at least at this speed, and together more than alone by this, where co-location is to stay.
_LEAST_SPEED, _LEAST_GAIN = 0.6, 1.05


def parts(setting: Setting) -> Sequence[Row]:
    return [{"draw": draw} for draw in setting.seeds(5)]


def measure(setting: Setting, part: Row) -> Sequence[Row]:
    return pairs("gandiva", part["draw"])


def pairs(policy: str, draw: int) -> list[Row]:
    """Return what becomes of two copies of each model under a policy."""
    return [_together(model, draw, policy) for model in _GAINS]


def _together(model: str, draw: int, policy: str) -> Row:
    """Two copies of a model. `draw`: position among the draws in which they fit."""
    jobs = workload("ab", [0.0, 0.0], [1, 1], [_WORK_S, _WORK_S], labels={"model": [model, model]})
    servers = servers_from_flags(nodes=1, gpus_per_node=1)
    device_bytes = servers.groups[0].configuration_set.device_memory_bytes

    def fitting() -> Iterator[tuple[int, Footprints]]:
        for seed in count():
            drawn = Footprints(jobs, servers, seed)
            if drawn.memory_bytes(0) <= _MOST_MEMORY * device_bytes:
                yield seed, drawn

    seed, drawn = next(islice(fitting(), draw, None))
    speed = drawn.speed(0, [1])
    foretold = forecast([drawn.pressure(0), drawn.pressure(1)], device_bytes, UNKNOWN_DEVICE)
    run = simulate(jobs, servers, policy, ReplayOptions(seed=seed))
    # Of the time in which the GPU is held, that in which both copies hold it.
    held = run.series["used_gpus"].mean() * (run.end_s - run.start_s)
    shared = float(run.outcomes.gpu_seconds.sum()) / held - 1.0
    return {
        "model": model,
        "gains": _GAINS[model],
        "true_speed": speed,
        "pays": speed >= _LEAST_SPEED and 2.0 * speed >= _LEAST_GAIN,
        "shared": shared,
        "kept": shared > 0.5,
        "foretold": foretold.fits and foretold.gain > 1.0,
        # Of two copies that are equally fast.
        "foretold_speed": foretold.gain / 2.0,
    }


def conclude(rows: Sequence[Row]) -> MeasuredRows:
    draws = sorted({row["draw"] for row in rows})

    def agreeing(draw: int, figure: str, sign: str) -> int:
        return sum(row[figure] == row[sign] for row in rows if row["draw"] == draw)

    missed = [row for row in rows if row["pays"] and not row["kept"]]
    slow = [row for row in missed if row["foretold_speed"] < _LEAST_SPEED]
    wrong = [row for row in rows if row["kept"] and not row["pays"]]
    return MeasuredRows(
        {
            "same_decisions": interval([agreeing(draw, "kept", "gains") for draw in draws]),
            "foretold_signs": interval([agreeing(draw, "foretold", "gains") for draw in draws]),
            "right_by_the_draw": interval([agreeing(draw, "kept", "pays") for draw in draws]),
            "missed_gains": len(missed) / len(rows),
            "kept_losses": len(wrong) / len(rows),
        },
        len(draws),
        load=2.0,
        why=f"of {len(rows)} drawn pairs {len(missed)} that would pay are not kept, {len(slow)} of them as they are "
        f"forecast to run below {_LEAST_SPEED:g} of the speed alone and not tried; {len(wrong)} are kept that do not "
        "pay. Two copies that together need nine tenths of the GPU's memory are not tried, either. The forecast is "
        "that of Lucid's pairs, by which all but the last of the table's models gain",
    )


PACKED_COPIES = Experiment("B6", parts, measure, conclude, core=CoreUse.WHOLE)
