"""Names of policies that cannot be used: what is wrong with each, and which names there are."""

from __future__ import annotations

import re

import pytest
from ganger_master.policies import NAMES, live_policy_named, policy_named
from ganger_master.policies.placements import PLACEMENTS
from ganger_master.policies.tunings.catalogue import TUNINGS

PARTS = f"placements {', '.join(PLACEMENTS)}; tunings {', '.join(TUNINGS)}; other parts defrag, elastic, packs, slices"
LONG = "x" * 5_000


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("fifo+las", f"policy 'fifo+las': only the first part can be the policy las; then there are {PARTS}"),
        ("ganger+", f"policy 'ganger+' has an empty part; after the policy's name there are {PARTS}"),
        ("fifo++best-fit", f"policy 'fifo++best-fit' has an empty part; after the policy's name there are {PARTS}"),
        ("+best-fit", f"policy '+best-fit' has an empty part; after the policy's name there are {PARTS}"),
        ("fifo+xyz", f"there is no placement or tuning 'xyz'; there are {PARTS}"),
        ("fifo+bestfit", "there is no placement or tuning 'bestfit'; did you mean best-fit?"),
        ("", f"there is no policy ''; there are {', '.join(NAMES)}"),
        ("nonsense", f"there is no policy 'nonsense'; there are {', '.join(NAMES)}"),
        ("SRFT", "there is no policy 'SRFT'; did you mean srtf?"),
        ("las+defrag+defrag", "policy 'las+defrag+defrag' names defrag twice"),
    ],
)
def test_an_error_states_what_is_wrong_and_which_names_there_are(name: str, problem: str) -> None:
    with pytest.raises(KeyError) as refused:
        policy_named(name)
    assert refused.value.args == (problem,)


@pytest.mark.parametrize(
    "name",
    [LONG, f"fifo+{LONG}", f"fifo+las+{LONG}", f"fifo+{LONG}+", f"fifo+{LONG}+{LONG}", f"{LONG}+las", "\0" * 5_000],
)
def test_an_error_repeats_no_more_than_60_characters_of_a_long_name(name: str) -> None:
    with pytest.raises(KeyError) as refused:
        policy_named(name)
    quoted = re.findall("'[^']*'", refused.value.args[0])[0]
    assert quoted.endswith("...'")
    assert len(quoted) <= 60


@pytest.mark.parametrize("name", ["nonsense", "srtf", "srtf+defrag"])
def test_a_live_cluster_lists_only_policies_that_need_no_oracle(name: str) -> None:
    live = [one for one in NAMES if one not in ("ftf-oracle", "lrtf", "srsf", "srtf", "tetris-oracle")]
    with pytest.raises((KeyError, ValueError)) as refused:
        live_policy_named(name)
    assert refused.value.args[0].endswith(f"there are {', '.join(live)}")


def test_a_live_cluster_suggests_no_policy_that_needs_an_oracle() -> None:
    with pytest.raises(KeyError, match=r"there is no policy 'ltrf'; there are backfill"):
        live_policy_named("ltrf")
