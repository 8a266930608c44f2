"""Flags win over the environment, the environment over the file, and all mistakes are told at once."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from ganger_master.config import PREFIX, Config, ConfigError, load, parse_duration
from ganger_master.core.settings import SlowNodes
from ganger_master.core.tenancy import Partition, Team
from ganger_master.policies import Colocate, Grow, Migrate, StartByRank, Tune, policy_named


def test_defaults_need_only_a_state_directory() -> None:
    config = load({"state_dir": "/s"}, {})
    assert config.state_dir == Path("/s")
    assert config.database == Path("/s/ganger.db")
    assert config.storage_path == Path("/s/storage")
    assert config.lost_after_s == 600.0


def test_flag_beats_environment_beats_file() -> None:
    text = 'state_dir = "/file"\npolicy = "las"\nlost_after = "1h"\n'
    environment = {"GANGER_MASTER_POLICY": "gandiva", "GANGER_MASTER_LOST_AFTER": "never"}
    config = load({"state_dir": "/flag", "policy": None}, environment, text)
    assert (config.state_dir, config.policy, config.lost_after_s) == (Path("/flag"), "gandiva", None)


def test_jobs_that_use_no_gpu_are_reported_after_half_an_hour_and_not_parked_unless_that_is_set() -> None:
    config = load({"state_dir": "/s"}, {})
    assert (config.idle_warning_s, config.idle_park_s) == (1800.0, None)
    text = """
idle_warning = "never"
idle_park = "2h"
[partitions.notebooks]
idle_warning = "10m"
idle_park = "never"
"""
    config = load({"state_dir": "/s"}, {}, text)
    assert (config.idle_warning_s, config.idle_park_s) == (None, 7200.0)
    own = config.partitions["notebooks"]
    assert (own.idle_warning_s, own.idle_park_s) == (600.0, 0.0)
    with pytest.raises(ConfigError, match="'notebooks' has idle_park = '1s': write at least 2s, or never"):
        load({"state_dir": "/s"}, {}, text.replace('"never"\n', '"1s"\n').replace('warning = "1s"', 'warning = "9s"'))


def test_nodes_are_tested_and_slow_ones_drained_where_that_is_set() -> None:
    config = load({"state_dir": "/s"}, {})
    assert (config.test_nodes, config.test_command) == (False, "python3 -m ganger.node_test")
    assert load({"state_dir": "/s"}, {"GANGER_MASTER_TEST_NODES": "true"}).test_nodes
    assert load({"state_dir": "/s"}, {}, 'slow_nodes = "drain"').slow_nodes is SlowNodes.DRAIN
    with pytest.raises(ConfigError, match="slow_nodes 'never': one of ignore, warn, drain"):
        load({"state_dir": "/s"}, {}, 'slow_nodes = "never"')
    for wrong, why in (("'  '", "name a program"), ("'\"x'", "No closing quotation")):
        with pytest.raises(ConfigError, match=f"test_command: .*{why}"):
            load({"state_dir": "/s"}, {}, f"test_command = {wrong}")


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90.0), ("0", 0.0), ("250ms", 0.25), ("10m", 600.0), ("1.5h", 5400.0), ("1d", 86400.0)]
)
def test_durations_are_read_with_their_units(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


def test_without_a_policy_the_whole_system_schedules() -> None:
    policy = policy_named(load({"state_dir": "/s"}, {}).policy)
    assert policy.name == "ganger"
    assert policy.has(StartByRank)
    assert policy.has(Colocate)
    assert policy.has(Migrate)
    assert policy.has(Grow)
    assert policy.has(Tune)


def test_a_policy_that_there_is_not_is_told_with_the_other_mistakes() -> None:
    with pytest.raises(ConfigError) as wrong:
        load({}, {}, 'policy = "x"\nlost_after = "soon"\nno_such = 1\nquotas = {ann = "many"}')
    for told in ("there is no policy 'x'", "'soon' is not a duration", "no_such", "quotas"):
        assert told in str(wrong.value)


def test_all_mistakes_are_reported_together() -> None:
    with pytest.raises(ConfigError) as refused:
        load(
            {"listen": "10.0.0.1:80", "lost_after": "soon", "log_level": "loud"},
            {"GANGER_MASTER_FINISHED_JOBS_LIMIT": "0"},
            'nonsense_key = 1\nnonsense_seconds = 1\nresidue_bytes = "much"\n',
        )
    text = str(refused.value)
    for word in (
        "certificates",
        "lost_after: 'soon' is not a duration",
        "log_level 'loud'",
        "'0' is not a number of jobs",
        "nonsense_key",
        "nonsense_seconds",
        "'much'",
        "--state-dir",
    ):
        assert word in text
    assert "there are authority, changes_per_user, checkpoint_interval, checkpoints_kept, database_url, " in text, (
        "as the documentation calls them"
    )
    assert load({"state_dir": "/s"}, {}, "finished_jobs_limit = 7\n").finished_jobs_limit == 7
    assert load({"state_dir": "/s"}, {}, 'residue_bytes = "1.5G"\n').residue_bytes == 3 << 29
    assert load({"state_dir": "/s"}, {}, "residue_bytes = 4096\n").residue_bytes == 4096, "its name has the unit"
    assert load({"state_dir": "/s", "plan_every": "2m", "planner": False}, {}).plan_every_s == 120.0
    with pytest.raises(ConfigError, match=r"plan_every: '500ms' is too short"):
        load({"state_dir": "/s", "plan_every": "500ms"}, {})


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("lost_after = 600", "lost_after: '600' has no unit: write 600s, 600m or 600h"),
        ('lost_aftr = "5m"', "lost_aftr: there is no such setting; is it lost_after?"),
        ('quantum_seconds = "5m"', "quantum_seconds: there is no such setting; is it quantum?"),
        ('idle_park = "1s"', "idle_park: '1s' is too short, at least 2 s, or never"),
        ('quantum = "60"', "quantum: '60' has no unit: write 60s, 60m or 60h"),
        ('residue_bytes = "much"', "residue_bytes: 'much' is not an amount of memory: write for example 512M or 16G"),
    ],
)
def test_a_mistake_is_named_with_its_setting_and_what_to_write(text: str, wrong: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load({"state_dir": "/s"}, {}, text)
    assert refused.value.problems == (wrong,)


def test_a_variable_that_is_almost_that_of_a_setting_is_refused() -> None:
    mistyped = {"GANGER_MASTER_LOST_AFTR": "5m", "GANGER_MASTER_SERVICE_HOST": "10.0.0.1", "GANGER_MASTER": "h:1"}
    with pytest.raises(ConfigError) as refused:
        load({"state_dir": "/s"}, mistyped)
    told = "GANGER_MASTER_LOST_AFTR: there is no such variable; is it GANGER_MASTER_LOST_AFTER?"
    assert refused.value.problems == (told,)


@pytest.mark.parametrize(
    ("address", "tls", "wrong"),
    [
        ("127.0.0.1:9464", "", ""),
        ("[::1]:9464", "", ""),
        ("m.lab:9464", "/tls", ""),
        ("m.lab:9464", "", "only with certificates"),
        ("unix:/run/metrics", "", "write HOST:PORT"),
        ("9464", "", "is not an address"),
    ],
)
def test_metrics_are_served_beyond_loopback_only_with_certificates(address: str, tls: str, wrong: str) -> None:
    flags = {"state_dir": "/s", "metrics": address, "tls": tls or None}
    if not wrong:
        assert load(flags, {}).metrics == address
        return
    with pytest.raises(ConfigError, match=wrong):
        load(flags, {})


def test_room_is_kept_for_a_gang_after_the_time_that_is_set() -> None:
    assert load({"state_dir": "/s"}, {}).keep_place_after_s == 120.0
    assert load({"state_dir": "/s", "keep_place_after": "2s"}, {}).keep_place_after_s == 2.0


@pytest.mark.parametrize(("told", "moves"), [("auto", None), ("0", 0.0), ("2.5", 2.5), (3, 3.0)])
def test_moves_of_an_hour_are_a_number_or_left_to_the_planner(told: str | int, moves: float | None) -> None:
    text = f"moves_per_hour = {told!r}\n"
    assert load({"state_dir": "/s"}, {}, text).moves_per_hour == moves
    assert load({"state_dir": "/s", "moves_per_hour": str(told)}, {}).moves_per_hour == moves


@pytest.mark.parametrize("told", ["-1", "many", "1e9", "nan", "inf", "true"])
def test_what_is_no_number_of_moves_is_refused(told: str) -> None:
    with pytest.raises(ConfigError, match=r"moves_per_hour: '.*' is no number of moves from 0 to 3600, nor auto"):
        load({"state_dir": "/s", "moves_per_hour": told}, {})


def test_quotas_are_a_table_or_pairs() -> None:
    told = {"alice": 8, "*": 4}
    assert load({"state_dir": "/s"}, {}, '[quotas]\nalice = 8\n"*" = 4\n').quotas == told
    assert load({"state_dir": "/s", "quotas": "alice=8, *=4"}, {}).quotas == told
    assert load({"state_dir": "/s"}, {"GANGER_MASTER_QUOTAS": "alice=8,*=4"}).quotas == told
    for wrong in ("alice", "alice=", "=4", "alice=-1", "alice=many", "alice=1.5"):
        with pytest.raises(ConfigError, match="write USER=GPUS"):
            load({"state_dir": "/s", "quotas": wrong}, {})
    with pytest.raises(ConfigError, match="no table"):
        load({"state_dir": "/s"}, {}, "quotas = 7\n")
    with pytest.raises(ConfigError, match=r"'alice' twice: give each user one number; 'bob', 'alice': write USER="):
        load({"state_dir": "/s", "quotas": "alice=8,bob=few,alice=x"}, {})
    most = load({"state_dir": "/s", "quotas": "alice=1000000000"}, {}).quotas
    for beyond in ("1000000001", "9" * 30, "9" * 9_999):
        with pytest.raises(ConfigError, match="quotas: 'bob': at most 1000000000 GPUs"):
            load({"state_dir": "/s", "quotas": f"alice={most['alice']},bob={beyond}"}, {})
    with pytest.raises(ConfigError, match="quotas: 'alice' twice: give each user one number"):
        load({"state_dir": "/s", "quotas": "alice=8,bob=1,alice =8"}, {})


def test_partitions_are_tables_of_the_file_or_toml_of_the_variable() -> None:
    told = {"gpu": Partition(("n01", "n02"), teams=("vision",), time_s=7200.0, priority=3)}
    file = '[teams.vision]\nusers = ["ann"]\n[partitions.gpu]\nnodes = "n[01-02]"\nteams = ["vision"]\n'
    assert load({"state_dir": "/s"}, {}, file + 'time = "2h"\npriority = 3\n').partitions == told
    found = load({"state_dir": "/s"}, {"GANGER_MASTER_PARTITIONS": 'gpu = {nodes = ["n1"]}'})
    assert found.partitions == {"gpu": Partition(("n1",))}
    with pytest.raises(ConfigError, match="partitions: 'gpu' has 'node'"):
        load({"state_dir": "/s"}, {}, "[partitions.gpu]\nnode = 1\n")
    with pytest.raises(ConfigError, match="partitions: 'gpu' is for team 'text', which \\[teams\\] does not have"):
        load({"state_dir": "/s"}, {}, '[partitions.gpu]\nteams = ["text"]\n')


def test_teams_are_tables_of_the_file_or_toml_of_the_variable() -> None:
    told = {"vision": Team(("ann", "bob"), 2.0, 16)}
    file = '[teams.vision]\nusers = ["ann", "bob"]\nweight = 2\ngpus = 16\n'
    assert load({"state_dir": "/s"}, {}, file).teams == told
    variable = 'vision = {users = ["ann", "bob"], weight = 2, gpus = 16}'
    assert load({"state_dir": "/s"}, {"GANGER_MASTER_TEAMS": variable}).teams == told
    with pytest.raises(ConfigError, match="teams: 'vision' needs users"):
        load({"state_dir": "/s"}, {}, "[teams.vision]\ngpus = 16\n")
    assert load({"state_dir": "/s"}, {}, 'usage_half_life = "14d"\n').usage_half_life_s == 14 * 86_400.0
    for wrong in ("never", "1s"):
        with pytest.raises(ConfigError, match="usage_half_life"):
            load({"state_dir": "/s"}, {}, f'usage_half_life = "{wrong}"\n')


@pytest.mark.parametrize("listen", ["nowhere", "127.0.0.1:99999", "0.0.0.0:0", "unix:relative", "unix:/" + "x" * 200])
def test_address_that_cannot_or_must_not_be_served_is_refused(listen: str) -> None:
    with pytest.raises(ConfigError):
        load({"state_dir": "/s", "listen": listen}, {})


def test_with_a_certificate_any_address_can_be_served_but_a_socket() -> None:
    for flags, environment, text in (
        ({"tls": "/c"}, {}, ""),
        ({}, {"GANGER_MASTER_TLS": "/c"}, ""),
        ({}, {}, 'tls = "/c"'),
    ):
        found = load({"state_dir": "/s", "listen": "m.lab:7070", **flags}, environment, text)
        assert (found.listen, found.tls) == ("m.lab:7070", Path("/c"))
        with pytest.raises(ConfigError, match="certificates are for HOST:PORT"):
            load({"state_dir": "/s", "listen": "unix:/run/m", **flags}, environment, text)


def test_file_that_is_no_toml_is_named() -> None:
    with pytest.raises(ConfigError, match=r"master\.toml"):
        load({"state_dir": "/s"}, {}, "= broken", "master.toml")


def test_the_leaders_lease_is_long_enough_for_a_busy_machine() -> None:
    assert load({"state_dir": "/s"}, {}).leader_lease_s == 2.0
    assert load({"state_dir": "/s"}, {"GANGER_MASTER_LEADER_LEASE": "500ms"}).leader_lease_s == 0.5
    for wrong in ("0", "0.1", "never", "soon"):
        with pytest.raises(ConfigError, match="leader_lease"):
            load({"state_dir": "/s"}, {"GANGER_MASTER_LEADER_LEASE": wrong})


def test_every_setting_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/settings.md").read_text()
    for name in (field.name.removesuffix("_s") for field in fields(Config)):
        assert f"| `{name}` | `{PREFIX}{name.upper()}` |" in page
