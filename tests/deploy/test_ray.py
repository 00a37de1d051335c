"""The examples for KubeRay: their flags are such as `diptych up` takes, and their nodes have room."""

from __future__ import annotations

import ast
import importlib.util
import shlex
from pathlib import Path
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
    program, *arguments = shlex.split(job["spec"]["entrypoint"])
    assert program == "diptych"
    options, address = taken_by_up(arguments, variables, monkeypatch)
    fits(cluster["spec"], options, address)


def test_the_service_of_the_example_starts_on_its_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    service = yaml.safe_load((DEPLOY / "ray" / "rayservice.yaml").read_text())
    [application] = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    module, _, name = application["import_path"].partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())  # not imported: it needs Ray
    [builder] = [one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == name]
    [arguments] = [one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == "Arguments"]
    assert ast.unparse(builder.args) == "args: Arguments"
    fields = {one.target.id for one in arguments.body if isinstance(one, ast.AnnAssign)}  # type: ignore[union-attr]
    assert application["args"].keys() == fields
    flags = ["up", *shlex.split(application["args"]["flags"]), "--ray", "10.0.0.1:6379"]
    variables = application["runtime_env"]["env_vars"]
    options, address = taken_by_up(flags, variables, monkeypatch)
    fits(service["spec"]["rayClusterConfig"], options, address)


def taken_by_up(
    arguments: list[str], variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> tuple[StackOptions, str]:
    """Return what `diptych up --ray` reads from its arguments and variables."""
    assert unknown_variables(variables) is None
    taken: list[tuple[StackOptions, str]] = []

    def serve(options: StackOptions, address: str, **others: Any) -> int:
        taken.append((options, address))
        return 0

    monkeypatch.setattr(foreground, "serve_on_ray", serve)
    assert CliRunner().invoke(app, arguments, env=variables).exit_code == 0
    [found] = taken
    return found


def fits(cluster: dict[str, Any], options: StackOptions, address: str) -> None:
    """Check that each worker node has room for a pair."""
    workers = cluster["workerGroupSpecs"][0]
    [container] = workers["template"]["spec"]["containers"]
    cpus = float(container["resources"]["limits"]["cpu"])
    nodes = [Node("10.0.0.1", 0.0), *(Node(f"10.0.1.{n}", cpus) for n in range(workers["replicas"]))]
    placement = place(options, address, nodes, "10.0.0.1")
    assert [one.strategy for one in placement.groups] == ["STRICT_PACK"] * workers["replicas"]
    assert all(sum(part["CPU"] for part in one.bundles.values()) <= cpus for one in placement.groups)
