"""The tunings, by name."""

from __future__ import annotations

from ganger_master.policies.tune.exact import EXACT
from ganger_master.policies.tune.predictor import PREDICTOR
from ganger_master.policies.tune.proportional import BIND, PROPORTIONAL
from ganger_master.policies.tune.role import ROLE
from ganger_master.policies.tune.shared import SHARED
from ganger_master.policies.tune.synergy_greedy import SYNERGY_GREEDY
from ganger_master.policies.tune.synergy_opt import SYNERGY_OPT
from ganger_master.policies.tune.synergy_tune import SYNERGY_TUNE

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
