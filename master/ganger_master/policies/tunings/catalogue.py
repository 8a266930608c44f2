"""The tunings, by name."""

from __future__ import annotations

from ganger_master.policies.tunings.exact import EXACT
from ganger_master.policies.tunings.fixed_shares import BIND, PROPORTIONAL, ROLE, SHARED
from ganger_master.policies.tunings.predictor import PREDICTOR
from ganger_master.policies.tunings.synergy_opt import SYNERGY_OPT
from ganger_master.policies.tunings.synergy_tune import SYNERGY_GREEDY, SYNERGY_TUNE

TUNINGS = {
    tuning.name: tuning
    for tuning in (
        BIND,
        EXACT,
        PREDICTOR,
        PROPORTIONAL,
        ROLE,
        SHARED,
        SYNERGY_GREEDY,
        SYNERGY_OPT,
        SYNERGY_TUNE,
    )
}
