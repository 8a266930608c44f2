"""B23. Locality and interference as what decides where jobs are put (Xiao, SOSP 2017 student research, figures 1 and 2:
four GPUs in two servers cost ResNet50 28 % and in four 59 %, InceptionV3 hardly anything; two jobs of one GPU under the
same PCIe switch cost each other up to 12 %, with CNTK up to 40 %; so a job says what it tolerates, and a cluster
spreads jobs while it is lightly loaded and packs them when it is not).

Set-up, locality: 16 servers of figure 2 (2 CPUs, 2 switches each, 2 GPUs each), four a rack, of whose GPUs eight in ten
are held, at random, forty times a seed. A gang of four comes, of each of six models: ResNet50 as in figure 1a, and
Chronus's measurements of the five it published, InceptionV3 and VGG16 among them. The production's `fit_locality` says
how far apart each may be put if it is to lose no more than a tenth, and `locality` places it, or leaves it waiting.
Beside it the same for gangs that tolerate everything, and for those that tolerate no other server. Speeds are the
measured ones of as many servers as the gang lies on.

Set-up, interference: on the same servers, jobs of one GPU come until the load is 0.25, and then to 0.75, from where on
they come and end at random, three hundred times. The production's candidates place them, in the mode that its
`choose_mode` finds for the load, and beside it always spreading and always packing; all of these without Gandiva's
affinity (OSDI 2018, algorithm 1), by which servers that have jobs of one GPU are filled with such before others are
begun, in either mode: that stands beside as `gandiva`. Counted are jobs that share a switch with another at 0.25, and
servers with eight free GPUs at 0.75.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.feasibility import Family, FeasibilityQuery
from ganger.cluster.placement import choose_mode
from ganger.cluster.preferences import GANDIVA, apart, line_then_least, line_then_most, packed
from ganger.cluster.resources import Claim, GangShape, Locality, LocalityLevel, NodeRow, Role, TaskShape
from ganger.cluster.search import Claims, PlacementPreference, PlacementRequest, Single, on_one_node
from ganger.cluster.topology import parse_topology
from ganger.cluster.view import LoadMode, View
from ganger_master.estimators.speed import LocalityPoint, fit_locality
from ganger_master.policies.placements import PLACEMENTS
from ganger_master.simulator.report.figures import Interval, interval

from experiments.experiment import CoreUse, Experiment, MeasuredRows, Row, Setting

_CHRONUS = "chronus_locality_relspeed.json"
_SERVERS, _DEVICES, _GANG, _PER_RACK = 16, 8, 4, 4
_SET = parse_topology("2x2x2", name="server", device_type="gpu", millicores=24_000, memory_bytes=500 * 10**9)
# Models of figure 1a, and what they show there.
_SENSITIVE, _TOLERANT = ("resnet50", "vgg16"), "inception3"
# Relative speed of four GPUs by servers.
_RESNET50 = {1: 1.0, 2: 0.72, 4: 0.41}
_LOSS, _STATES, _HELD = 0.1, 40, 0.8
_LIGHT, _HEAVY, _CHANGES = 0.25, 0.75, 300
# The most that the paper saw two jobs under one switch cost each other.
_SLOWDOWNS = {"tensorflow": 0.12, "cntk": 0.40}


def _by_load(index: CapacityIndex, query: FeasibilityQuery, widest: LocalityLevel) -> Iterator[Claims]:
    """Algorithm 1 without its classes of servers, as if all servers had jobs of one size."""
    mode = index.view.mode
    if mode is LoadMode.SPREAD:
        return on_one_node(index, query, widest, Single(_level_then_most, apart, mode))
    return on_one_node(index, query, widest, Single(_level_then_least, packed, mode))


def _level_then_most(family: Family, query: FeasibilityQuery) -> tuple[int, ...]:
    return line_then_most(family, query)[1:]


def _level_then_least(family: Family, query: FeasibilityQuery) -> tuple[int, ...]:
    return line_then_least(family, query)[1:]


_BY_LOAD = PlacementPreference("by-load", "the closest devices, then the load", _by_load)
# Of placing: the mode, by the one before and what is held; and whether servers are Gandiva's, of one size of jobs each.
_Choice: TypeAlias = Callable[[LoadMode, int], LoadMode]
_MODES: Mapping[str, tuple[_Choice, PlacementPreference]] = {
    "adaptive": (lambda before, held: choose_mode(before, held, _SERVERS * _DEVICES), _BY_LOAD),
    "spread": (lambda before, held: LoadMode.SPREAD, _BY_LOAD),
    "pack": (lambda before, held: LoadMode.PACK, _BY_LOAD),
    "gandiva": (lambda before, held: choose_mode(before, held, _SERVERS * _DEVICES), GANDIVA),
}


def parts(setting: Setting) -> Sequence[Row]:
    return [{"kind": kind, "seed": seed} for kind in ("locality", "interference") for seed in setting.seeds(5)]


def measure(setting: Setting, part: Row) -> Sequence[Row]:
    random = np.random.default_rng(part["seed"])
    if part["kind"] == "locality":
        return _apart(speeds(json.loads((setting.papers / _CHRONUS).read_text(encoding="utf-8"))), random)
    return [row for name in _MODES for row in _beside(name, np.random.default_rng(part["seed"]))]


def speeds(chronus: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, dict[int, float]]:
    """Relative speed of four GPUs by servers, of each model."""
    published = {model: {int(n): speed for n, speed in by_gpus["4"].items()} for model, by_gpus in chronus.items()}
    return {"resnet50": _RESNET50, **published}


def tolerance(by_servers: Mapping[int, float]) -> LocalityLevel:
    """How far apart four GPUs of such a model may be put: in one server, or beyond."""
    points = [LocalityPoint(_GANG, servers, speed) for servers, speed in by_servers.items() if servers > 1]
    model = fit_locality(points)
    best = model.relative_speed(_GANG, 1, min(LocalityLevel))
    apart = [level for level in LocalityLevel if level > LocalityLevel.NODE]
    tolerated = [level for level in apart if model.relative_speed(_GANG, 2, level) >= (1.0 - _LOSS) * best]
    return max([LocalityLevel.NODE, *tolerated])


def _apart(known: Mapping[str, Mapping[int, float]], random: np.random.Generator) -> list[Row]:
    ways: Mapping[str, Callable[[Mapping[int, float]], LocalityLevel]] = {
        "own": tolerance,
        "anywhere": lambda speed: LocalityLevel.CLUSTER,
        "one_server": lambda speed: LocalityLevel.NODE,
    }
    rows: list[Row] = []
    for state in range(_STATES):
        free = [
            sum(1 << device for device, is_free in enumerate(of_server) if is_free)
            for of_server in (random.random((_SERVERS, _DEVICES)) > _HELD).tolist()
        ]
        for model, by_servers in known.items():
            for name, way in ways.items():
                claims = _placed(free, way(by_servers))
                servers = 0 if claims is None else len(claims)
                speed = float(np.interp(servers, list(by_servers), list(by_servers.values()))) if servers else 0.0
                rows.append({"state": state, "model": model, "way": name, "servers": servers, "speed": speed})
    return rows


def _placed(free: Sequence[int], widest: LocalityLevel) -> Sequence[Claim] | None:
    shape = GangShape((Role("worker", _GANG, TaskShape(1)),), locality=Locality(widest))
    return PLACEMENTS["locality"].place(CapacityIndex(_view(free, LoadMode.PACK)), PlacementRequest(shape))


def _view(free: Sequence[int], mode: LoadMode) -> View:
    view = View((_SET,), mode=mode)
    cores = tuple(socket.millicores for socket in _SET.sockets)
    for number, mask in enumerate(free):
        view.put(NodeRow(f"n{number:02}", _SET.name, mask, cores, _SET.memory_bytes, rack=f"r{number // _PER_RACK}"))
    return view


def _beside(name: str, random: np.random.Generator) -> list[Row]:
    view = _view([(1 << _DEVICES) - 1] * _SERVERS, LoadMode.SPREAD)
    shape = GangShape((Role("worker", 1, TaskShape(1)),))
    choice, placement = _MODES[name]
    held: list[Claim] = []

    def come() -> None:
        view.mode = choice(view.mode, len(held))
        (claim,) = placement.place(CapacityIndex.of(view), PlacementRequest(shape)) or ()
        view.take(claim, 1)
        held.append(claim)

    while len(held) < _LIGHT * _SERVERS * _DEVICES:
        come()
    beside = _share_of_a_switch(held)
    while len(held) < _HEAVY * _SERVERS * _DEVICES:
        come()
    for _ in range(_CHANGES):
        view.give(held.pop(int(random.integers(len(held)))))
        come()
    whole = sum(mask == (1 << _DEVICES) - 1 for mask in view.free)
    return [{"mode": name, "beside": beside, "whole_servers": whole}]


def _share_of_a_switch(held: Sequence[Claim]) -> float:
    """Of jobs that have another one under their switch."""
    switches = [(claim.node, (claim.device_mask.bit_length() - 1) // 2) for claim in held]
    return float(np.mean([switches.count(switch) > 1 for switch in switches]))


def conclude(rows: Sequence[Row]) -> MeasuredRows:
    apart = [row for row in rows if row["kind"] == "locality"]
    beside = {(row["mode"], row["seed"]): row for row in rows if row["kind"] == "interference"}
    seeds = sorted({row["seed"] for row in rows})
    models = list(dict.fromkeys(row["model"] for row in apart))

    def of(figure: Callable[[Row], float], way: str, model: str | None = None) -> Interval:
        """Mean over the gangs of a seed."""
        wanted = [row for row in apart if row["way"] == way and model in (None, row["model"])]
        return interval([float(np.mean([figure(row) for row in wanted if row["seed"] == seed])) for seed in seeds])

    def mode(figure: str, name: str) -> Interval:
        return interval([beside[name, seed][figure] for seed in seeds])

    ours: dict[str, float | Interval] = {
        "placed_and_too_slow": of(lambda row: 0.0 < row["speed"] < 1.0 - _LOSS, "own"),
        "placed_and_too_slow_anywhere": of(lambda row: 0.0 < row["speed"] < 1.0 - _LOSS, "anywhere"),
        "placed": of(lambda row: row["servers"] > 0, "own"),
        "placed_one_server": of(lambda row: row["servers"] > 0, "one_server"),
        "placed_anywhere": of(lambda row: row["servers"] > 0, "anywhere"),
    }
    apart_by_model = {model: of(lambda row: row["servers"] > 1, "own", model) for model in models}
    ours |= {f"apart_{model}": found for model, found in apart_by_model.items()}
    ours["sensitive_apart"] = max(apart_by_model[model].mean for model in _SENSITIVE)
    ours["tolerant_apart"] = apart_by_model[_TOLERANT].mean
    for name in _MODES:
        ours[f"beside_another_{name}"] = mode("beside", name)
        ours[f"whole_servers_{name}"] = mode("whole_servers", name)
    for framework, slowdown in _SLOWDOWNS.items():
        ours[f"slowdown_{framework}_pack"] = slowdown * mode("beside", "pack").mean
    more = [beside["adaptive", seed]["whole_servers"] - beside["spread", seed]["whole_servers"] for seed in seeds]
    ours["more_whole_servers"] = interval(more)
    return MeasuredRows(
        ours,
        len(seeds),
        load={"locality": _HELD, "light": _LIGHT, "heavy": _HEAVY},
        why="directional, as the paper publishes no placements: sensitive gangs wait for one server, tolerant ones "
        "start at once; jobs of one GPU share no switch while there are free ones, and a loaded cluster keeps servers "
        "whole. Gandiva's affinity, which is our default, fills servers with jobs of one size first, at light load too",
    )


LOCALITY_INPUTS = Experiment("B23", parts, measure, conclude, core=CoreUse.ARITHMETIC, needs=(("papers", _CHRONUS),))
