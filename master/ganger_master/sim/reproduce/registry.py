"""Every claim's experiment, or why it is not run here yet."""

from __future__ import annotations

from collections.abc import Mapping

from ganger_master.sim.reproduce.approvals import APPROVALS
from ganger_master.sim.reproduce.closest_tier import CLOSEST_TIER
from ganger_master.sim.reproduce.convergence import CONVERGENCE
from ganger_master.sim.reproduce.cpu_poster import CPU_POSTER
from ganger_master.sim.reproduce.early_feedback import EARLY_FEEDBACK
from ganger_master.sim.reproduce.elastic_job import ELASTIC_JOB
from ganger_master.sim.reproduce.experiment import Experiment
from ganger_master.sim.reproduce.fairness import FAIRNESS
from ganger_master.sim.reproduce.locality_inputs import LOCALITY_INPUTS
from ganger_master.sim.reproduce.migration import MIGRATION
from ganger_master.sim.reproduce.optimus_end_to_end import OPTIMUS_END_TO_END
from ganger_master.sim.reproduce.packed_cluster import PACKED_CLUSTER
from ganger_master.sim.reproduce.packed_copies import PACKED_COPIES
from ganger_master.sim.reproduce.scale import SCALE
from ganger_master.sim.reproduce.sliced_gpus import SLICED_GPUS
from ganger_master.sim.reproduce.speed_model import SPEED_MODEL
from ganger_master.sim.reproduce.synergy_load import SYNERGY_LARGE, SYNERGY_LOAD
from ganger_master.sim.reproduce.synergy_traces import SYNERGY_DYNAMIC, SYNERGY_STATIC
from ganger_master.sim.reproduce.t4_workloads import T4_WORKLOADS
from ganger_master.sim.reproduce.tetris_study import TETRIS_STUDY
from ganger_master.sim.reproduce.time_slicing import TIME_SLICING
from ganger_master.sim.reproduce.tune_bound import TUNE_BOUND

EXPERIMENTS: Mapping[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        SPEED_MODEL,
        CONVERGENCE,
        OPTIMUS_END_TO_END,
        SCALE,
        SLICED_GPUS,
        PACKED_COPIES,
        ELASTIC_JOB,
        MIGRATION,
        PACKED_CLUSTER,
        SYNERGY_STATIC,
        SYNERGY_DYNAMIC,
        SYNERGY_LOAD,
        TUNE_BOUND,
        TETRIS_STUDY,
        CPU_POSTER,
        CLOSEST_TIER,
        APPROVALS,
        TIME_SLICING,
        FAIRNESS,
        T4_WORKLOADS,
        SYNERGY_LARGE,
        EARLY_FEEDBACK,
        LOCALITY_INPUTS,
    )
}

# By name, why it is not run.
UNRUN: Mapping[str, str] = {}
