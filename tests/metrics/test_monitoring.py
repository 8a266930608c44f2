"""The alert rules and the dashboard that are shipped: every metric, label and value in them is one that a master
exports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from ganger.cluster.resources import ConfigurationSet
from ganger_master import metrics
from ganger_master.core.node_model import Node
from ganger_master.core.tenancy import Team, TeamIndex
from ganger_master.runtime.telemetry import MasterCounters
from prometheus_client import CollectorRegistry, ProcessCollector

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "docs" / "monitoring"
RULES = yaml.safe_load((MONITORING / "ganger.rules.yml").read_text())
DASHBOARD = json.loads((MONITORING / "ganger.dashboard.json").read_text())
# Of PromQL: functions, aggregations and words that expressions here may use.
WORDS = frozenset(["sum", "rate", "increase", "histogram_quantile", "by", "on", "and", "or"])
# Given by Prometheus itself, with labels of the scrape.
OF_PROMETHEUS = {"up"}
OF_SCRAPE = {"job", "instance", "le"}
_GROUPING = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\s*\{([^}]*)\}")
_MATCHER = re.compile(r'\s*([a-zA-Z_]+)\s*(=~|!~|!=|=)\s*"([^"]*)"\s*,?')
_NAME = re.compile(r"(?<![\w$.])[a-zA-Z_:][a-zA-Z0-9_:]*")


class Matcher(NamedTuple):
    metric: str
    label: str
    values: tuple[str, ...]


class Parsed(NamedTuple):
    """Names of metrics, matchers of labels, and labels by which an expression groups."""

    names: frozenset[str]
    matchers: tuple[Matcher, ...]
    groups: frozenset[str]


def parse(expression: str) -> Parsed:
    """Read the names in an expression. Raises AssertionError for matchers that it cannot read."""
    matchers = []
    for metric, inside in _SELECTOR.findall(expression):
        assert _MATCHER.sub("", inside).strip() == "", inside
        matchers += [Matcher(metric, label, tuple(values.split("|"))) for label, _, values in _MATCHER.findall(inside)]
    groups = {label.strip() for inside in _GROUPING.findall(expression) for label in inside.split(",")} - {""}
    bare = _GROUPING.sub(" ", re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", expression))
    return Parsed(frozenset(_NAME.findall(bare)) - WORDS, tuple(matchers), frozenset(groups))


def exported() -> dict[str, list[dict[str, str]]]:
    """The labels of all samples that a master with one node exports, by name."""
    kind = ConfigurationSet("v", device_type="v", devices=1)
    snapshot = metrics.Snapshot(
        now=0.0,
        policy="ganger",
        is_ready=True,
        jobs=(),
        gangs=(),
        nodes=(Node("n1", "m1", "v"),),
        rows={},
        configuration_sets={"v": kind},
        node_sets=0,
        blockers=("GPUS",),
        answered={},
        daemons=0,
        approved=0,
        meter=MasterCounters(),
        teams=TeamIndex({"vision": Team(("ann",), gpus=4)}),
        usages=(),
        usage_half_life_s=1.0,
    )
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    found: dict[str, list[dict[str, str]]] = {}
    for family in (*metrics.families(snapshot, "1"), *registry.collect()):
        # A counter of which nothing was counted has no sample yet.
        found.setdefault(family.name + {"counter": "_total", "info": "_info"}.get(family.type, ""), [])
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


EXPORTED = exported()
# Labels whose values appear once they were counted, and the sources that have them.
COUNTED = {"kind": ROOT / "master" / "ganger_master" / "core", "reason": ROOT / "client" / "ganger" / "cluster"}


def expressions() -> Iterator[tuple[str, str]]:
    for group in RULES["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def faults(expression: str) -> list[str]:
    """What an expression names that no master exports."""
    names, matchers, groups = parse(expression)
    found = [f"no metric {name}" for name in sorted(names - EXPORTED.keys() - OF_PROMETHEUS)]
    labels = {label for name in names for sample in EXPORTED.get(name, ()) for label in sample}
    labels |= {label for matcher in matchers for label in (matcher.label,) if label in COUNTED}
    found += [f"no label {label}" for label in sorted(groups - labels - OF_SCRAPE)]
    for metric, label, values in matchers:
        if label in OF_SCRAPE:
            continue
        if label in COUNTED:
            text = "".join(path.read_text() for path in sorted(COUNTED[label].glob("*.py")))
            found += [f"no {label} {value}" for value in values if f'"{value}"' not in text]
            continue
        known = {sample.get(label) for sample in EXPORTED.get(metric, ())}
        found += [f"no {metric} with {label}={value}" for value in values if value not in known]
    return found


@pytest.mark.parametrize(("name", "expression"), list(expressions()))
def test_all_that_an_expression_names_is_exported(name: str, expression: str) -> None:
    assert faults(expression) == [], name


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("sum(ganger_gpu)", "no metric ganger_gpu"),
        ('ganger_nodes{state="gone"} > 0', "no ganger_nodes with state=gone"),
        ('ganger_nodes{status="lost"} > 0', "no ganger_nodes with status=lost"),
        ("sum by (model) (ganger_gpus)", "no label model"),
        ('increase(ganger_events_total{kind="node_gone"}[1d])', "no kind node_gone"),
        ("rate(ganger_commit_seconds_buckets[5m])", "no metric ganger_commit_seconds_buckets"),
    ],
)
def test_what_is_not_exported_is_found(expression: str, fault: str) -> None:
    assert faults(expression) == [fault]


def test_every_rule_has_a_severity_and_texts_and_a_name_of_its_own() -> None:
    rules: list[dict[str, Any]] = [rule for group in RULES["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), rule
        assert rule["annotations"].keys() == {"summary", "description"}, rule


def test_panels_have_numbers_of_their_own_and_do_not_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not own & cells, panel["title"]
        cells |= own
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_every_metric_of_the_reference_page_is_exported_and_every_exported_one_is_there() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    named = set(re.findall(r"`(ganger_[a-z_]+)", page))
    families = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in EXPORTED if name.startswith("ganger_")}
    assert named == families
