"""Every claim's experiment, or why it is not run here yet."""

from __future__ import annotations

from collections.abc import Mapping

from experiments.approvals import APPROVALS
from experiments.closest_tier import CLOSEST_TIER
from experiments.convergence import CONVERGENCE
from experiments.cpu_poster import CPU_POSTER
from experiments.early_feedback import EARLY_FEEDBACK
from experiments.elastic_job import ELASTIC_JOB
from experiments.epoch_intervals import EPOCH_INTERVALS
from experiments.experiment import Experiment
from experiments.fairness import FAIRNESS
from experiments.locality_inputs import LOCALITY_INPUTS
from experiments.migration import MIGRATION
from experiments.optimus_end_to_end import OPTIMUS_END_TO_END
from experiments.packed_cluster import PACKED_CLUSTER
from experiments.packed_copies import PACKED_COPIES
from experiments.scale import SCALE
from experiments.server_epochs import SERVER_EPOCHS
from experiments.sliced_gpus import SLICED_GPUS
from experiments.speed_model import SPEED_MODEL
from experiments.synergy_load import SYNERGY_LARGE, SYNERGY_LOAD
from experiments.synergy_traces import SYNERGY_DYNAMIC, SYNERGY_STATIC
from experiments.t4_workloads import T4_WORKLOADS
from experiments.tetris_study import TETRIS_STUDY
from experiments.time_slicing import TIME_SLICING
from experiments.tune_bound import TUNE_BOUND

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
        EPOCH_INTERVALS,
        SERVER_EPOCHS,
    )
}

# By name, why it is not run.
UNRUN: Mapping[str, str] = {}
