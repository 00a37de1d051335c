"""The example for KubeRay: its command is one that `diptych up` takes."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from diptych.cli.app import app
from diptych.cli.ray_cluster import foreground
from diptych.cli.ray_cluster.placement import Node, place
from diptych.cli.stack_options import StackOptions
from diptych.runtime.env import unknown_variables
from tests.deploy.manifests import DEPLOY


def test_the_job_of_the_example_starts_on_its_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, job = yaml.safe_load_all((DEPLOY / "ray" / "raycluster.yaml").read_text())
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": cluster["metadata"]["name"]}
    variables = yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]
    assert unknown_variables(variables) is None
    taken: list[tuple[StackOptions, str]] = []

    def serve(options: StackOptions, address: str, **others: Any) -> int:
        taken.append((options, address))
        return 0

    monkeypatch.setattr(foreground, "serve_on_ray", serve)
    program, *arguments = shlex.split(job["spec"]["entrypoint"])
    assert program == "diptych"
    assert CliRunner().invoke(app, arguments, env=variables).exit_code == 0
    [(options, address)] = taken
    workers = cluster["spec"]["workerGroupSpecs"][0]
    [container] = workers["template"]["spec"]["containers"]
    cpus = float(container["resources"]["limits"]["cpu"])
    nodes = [Node("10.0.0.1", 0.0), *(Node(f"10.0.1.{n}", cpus) for n in range(workers["replicas"]))]
    placement = place(options, address, nodes, "10.0.0.1")
    assert [one.strategy for one in placement.groups] == ["STRICT_PACK"] * workers["replicas"]
    assert all(sum(part["CPU"] for part in one.bundles.values()) <= cpus for one in placement.groups)
