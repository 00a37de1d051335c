"""The alert rules, run by the real promtool, and the dashboard's form. tests/end_to_end has their metrics."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.manifests import DEPLOY
from tests.deploy.promtool import promtool_path

FOLDER = DEPLOY / "observability"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
RULES = yaml.safe_load((FOLDER / "rules.yaml").read_text())
CASES = yaml.safe_load((FOLDER / "rules_test.yaml").read_text())


def alerts() -> dict[str, dict[str, str]]:
    return {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule}


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    tool = promtool_path()
    if tool is None:
        pytest.skip("no promtool is to be had here")
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=False, timeout=120)


def test_rules_are_valid_and_every_alert_fires() -> None:
    for arguments in (
        ("check", "rules", FOLDER / "rules.yaml"),
        ("test", "rules", FOLDER / "rules_test.yaml"),
    ):
        done = promtool(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr


def test_threshold_that_never_holds_is_seen(tmp_path: Path) -> None:
    """The control."""
    for file in ("rules.yaml", "rules_test.yaml"):
        shutil.copy(FOLDER / file, tmp_path)
    rules = (tmp_path / "rules.yaml").read_text()
    (tmp_path / "rules.yaml").write_text(rules.replace("utilization > 0.95", "utilization > 1.95"))
    done = promtool("test", "rules", tmp_path / "rules_test.yaml")
    assert done.returncode != 0
    assert "DiptychKvCacheFull" in done.stdout + done.stderr


def test_every_alert_has_a_case_and_says_what_to_do() -> None:
    fired = {
        case["alertname"] for test in CASES["tests"] for case in test["alert_rule_test"] if case["exp_alerts"]
    }
    silent = {case["alertname"] for case in CASES["tests"][0]["alert_rule_test"] if not case["exp_alerts"]}
    assert fired == silent == alerts().keys()
    for alert in alerts().values():
        assert set(alert["annotations"]) == {"summary", "action"}
        assert alert["labels"]["severity"] in ("critical", "warning", "info")


def test_dashboard_has_a_place_and_a_description_for_each_panel() -> None:
    ids, taken = set(), set()
    for panel in DASHBOARD["panels"]:
        ids.add(panel["id"])
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or (panel["description"] and panel["targets"])
    assert len(ids) == len(DASHBOARD["panels"])
