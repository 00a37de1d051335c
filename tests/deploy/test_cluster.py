"""deploy/cluster.sh: what it asks of a cluster, and that it removes what it made.

Recording programs stand for those that need one; the chart with its values is rendered by the real helm.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.deploy.helm import CHART, run_helm
from tests.deploy.manifests import DEPLOY
from tests.deploy.rendering import parse, pod_templates, schema_faults
from tests.deploy.scripts import Run, dry_run, recorded_run

SCRIPT = DEPLOY / "cluster.sh"
RECORDER = """#!/bin/bash
printf '%q ' {name} "$@" >> {record}.$$; echo >> {record}.$$; cat {record}.$$ >> {record}; rm {record}.$$
[[ "$*" != *{fails}* ]] || exit 9
"""
DIPTYCH = """
echo '{"name": "key-1"}'
echo 'The key, which is stored nowhere: dk-a_b-c' >&2
"""
KUBECTL = """
[ "$1" != get ] || echo pod/diptych-decode-7d9f
"""
CURL = """
while (($#)); do
    [ "$1" != --output ] || echo "{{\\"choices\\": [{{\\"text\\": \\"{text}\\"}}]}}" > "$2"
    shift
done
"""


def dry(*options: str) -> Run:
    """Run the script without kubectl and helm on the path."""
    return dry_run(SCRIPT, *options)


def recorded(folder: Path, *options: str, fails: str = "nothing-like-it", changes: str = "never") -> Run:
    """Run the script with programs that do nothing, fail at `fails` and say something else at `changes`."""
    record = folder / "recorded"
    tails = {"kubectl": KUBECTL, "helm": "", "kind": "", "diptych": DIPTYCH, "curl": CURL}
    for name, tail in tails.items():
        program = folder / name
        text = f'$([[ "$2" != */{changes}.json ]] && echo once || echo other)'
        start = RECORDER.format(name=name, record=shlex.quote(str(record)), fails=shlex.quote(fails))
        program.write_text(start + (tail.format(text=text) if name == "curl" else tail))
        program.chmod(0o755)
    return recorded_run(SCRIPT, folder, record, *options)


def verbs(run: Run) -> list[str]:
    """Return the commands that change the cluster, in short."""
    words = {"install", "uninstall", "create", "delete", "restart", "label", "load"}
    return [" ".join([one[0], *(word for word in one[1:4] if word in words)]) for one in run.commands]


def left(run: Run) -> set[str]:
    """Return what the commands made and did not remove."""
    there: set[str] = set()
    for one in run.commands:
        match one[:3]:
            case ["kubectl", "create", "namespace"]:
                there.add("namespace")
            case ["kubectl", "delete", "namespace"]:
                there.discard("namespace")
            case ["helm", "install", _]:
                there.add("release")
            case ["helm", "uninstall", _]:
                there.discard("release")
    return there


def test_it_installs_asks_through_restarts_and_removes_everything(tmp_path: Path) -> None:
    done = recorded(tmp_path, "--kind", "try")
    assert done.status == 0, done.text
    assert "The same text" in done.text
    assert left(done) == set()
    order = verbs(done)
    for earlier, later in (
        ("kind load", "helm install"),
        ("kubectl label", "helm install"),
        ("helm install", "kubectl restart"),
        ("kubectl restart", "helm uninstall"),
    ):
        assert order.index(earlier) < order.index(later)
    asked = [one for one in done.commands if one[0] == "curl"]
    assert len(asked) == 3
    assert all("authorization: Bearer dk-a_b-c" in one for one in asked)


def test_a_dry_run_needs_no_program_and_says_what_a_run_does(tmp_path: Path) -> None:
    said = [one[0] for one in dry().commands]
    did = [one[0] for one in recorded(tmp_path).commands]
    for name in ("helm", "curl", "diptych"):
        assert said.count(name) == did.count(name), name


@pytest.mark.parametrize(
    "fails", ["rollout status", "install diptych", "delete pod/diptych-decode-7d9f", "secret generic"]
)
def test_it_removes_what_it_made_when_a_step_fails(tmp_path: Path, fails: str) -> None:
    done = recorded(tmp_path, fails=fails)
    assert done.status != 0
    assert left(done) == set()


def test_another_text_is_a_failure(tmp_path: Path) -> None:
    """The control of its promise."""
    done = recorded(tmp_path, changes="killed")
    assert done.status == 1
    assert "another text once workers were killed" in done.text


@pytest.mark.parametrize("options", [(), ("--groups",)], ids=["plain", "groups"])
def test_the_chart_takes_what_it_sets(options: tuple[str, ...]) -> None:
    [install] = [one for one in dry(*options).commands if one[:2] == ["helm", "install"]]
    chosen = [one.replace("deploy/chart", str(CHART)) for one in install[4:]]
    objects = parse(run_helm("template", "diptych", CHART, *chosen))
    names = set(pod_templates(objects))
    assert ("diptych-decode/rank" in names) == bool(options)
    known = [one for one in objects if one["kind"] != "LeaderWorkerSet"]
    assert schema_faults(known) == []
    [decode] = [
        one for one in objects if one["metadata"]["name"] == "diptych-decode" and "replicas" in one["spec"]
    ]
    assert decode["spec"]["replicas"] == 2


@pytest.mark.parametrize(
    "wrong", [["--sizes"], ["--namespace", ""], ["--image", "registry.example:5000/diptych"]]
)
def test_wrong_options_are_refused(wrong: list[str]) -> None:
    done = dry(*wrong)
    assert done.status != 0
    assert wrong[0] in done.text
