"""Metrics of the dashboard and the alert rules: a running system exports each of them, with its labels."""

from __future__ import annotations

import json
import re
import urllib.request
from collections import defaultdict
from collections.abc import Iterator

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from diptych.client import Client
from tests.deploy.manifests import DEPLOY
from tests.end_to_end.stack import Stack

FOLDER = DEPLOY / "observability"
METRIC = re.compile(r"\b((?:diptych|gen_ai|rpc|http)_[a-z0-9_]+)(?:\{([^}]*)\})?")
GROUPS = re.compile(r"\bby \(([^)]*)\)")
ADDED = {"job", "instance"}
"""Labels that Prometheus adds."""


def expressions() -> Iterator[tuple[str, str]]:
    """Yield (where, expression) of every panel and rule."""
    for panel in json.loads((FOLDER / "dashboard.json").read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for group in yaml.safe_load((FOLDER / "rules.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule.get("alert") or rule["record"], rule["expr"]


def exported(stack: Stack) -> dict[str, set[str]]:
    """Return the labels of every sample of every program, by the sample's name."""
    found = defaultdict[str, set[str]](set)
    account = stack.account
    for process in (account["gateway"], *account["prefill"], *account["decode"]):
        url = f"http://127.0.0.1:{process['http_port']}/metrics"
        with urllib.request.urlopen(url, timeout=60) as answer:
            text = answer.read().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name] |= set(sample.labels)
    return found


@pytest.fixture(scope="module")
def samples(bundled: Stack) -> dict[str, set[str]]:
    with Client(bundled.address) as client:
        client.generate("Once upon a time there was a river that ran uphill.", max_tokens=8)
    return exported(bundled)


def unknown(expression: str, samples: dict[str, set[str]]) -> list[str]:
    """Return the metrics that are not exported, and labels that none of an expression's metrics has."""
    faults, labels = [], set(ADDED)
    for name, matchers in METRIC.findall(expression):
        if name not in samples:
            faults.append(name)
            continue
        labels |= samples[name]
        wanted = set(re.findall(r"(\w+)\s*[=!]", matchers or ""))
        faults += [f"{name}{{{label}}}" for label in wanted - samples[name] - ADDED]
    for group in GROUPS.findall(expression):
        faults += [f"by {label}" for label in map(str.strip, group.split(",")) if label not in labels]
    return faults


def test_every_metric_is_exported(samples: dict[str, set[str]]) -> None:
    found = list(expressions())
    assert len(found) > 50
    faults = {f"{where}: {fault}" for where, one in found for fault in unknown(one, samples)}
    assert faults == set()


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("sum(rate(diptych_requests_lost_total[5m]))", "diptych_requests_lost_total"),
        ('diptych_workers_ready{rule="decode"}', "diptych_workers_ready{rule}"),
        ("sum by (colour) (diptych_workers_ready)", "by colour"),
    ],
)
def test_metric_or_label_that_does_not_exist_is_seen(
    samples: dict[str, set[str]], expression: str, fault: str
) -> None:
    """The control."""
    assert unknown(expression, samples) == [fault]
