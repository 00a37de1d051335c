"""Every arrangement of base, overlays and components that deploy/README.md offers, rendered and validated."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.manifests import DEPLOY, IMAGE, KUBERNETES, Document, cores, mebibytes
from tests.deploy.rendering import (
    ARRANGEMENTS,
    COMPONENTS,
    KUBERNETES_VERSIONS,
    WITHOUT_SCHEMA,
    containers,
    pod_templates,
    render,
    render_on_top,
    schema_faults,
)

NAME, COMPONENT = "app.kubernetes.io/name", "app.kubernetes.io/component"
VALKEY = "docker.io/valkey/valkey"
MIRRORS = {IMAGE: "mirror.example:5000/team/diptych", VALKEY: "mirror.example:5000/valkey"}
SMALL = KUBERNETES / "overlays" / "small"

every_arrangement = pytest.mark.parametrize(
    ("resource", "components"),
    ARRANGEMENTS,
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)


def registry_of(image: str) -> str | None:
    """Return the registry that `image` names, None for a name that a runtime completes by itself."""
    first, slash, _ = image.partition("/")
    return first if slash and (first == "localhost" or re.search(r"[.:]", first)) else None


def selectors(value: Any) -> list[Document]:
    """Return every label selector inside `value`."""
    if isinstance(value, list):
        return [found for one in value for found in selectors(one)]
    if not isinstance(value, dict):
        return []
    own = [value] if {"matchLabels", "matchExpressions"} & set(value) else []
    return own + [found for one in value.values() for found in selectors(one)]


def test_the_arrangements_are_all_overlays_and_components() -> None:
    overlays = {f"overlays/{folder.name}" for folder in (KUBERNETES / "overlays").iterdir()}
    assert set(COMPONENTS) == overlays | {"base"}
    assert set().union(*COMPONENTS.values()) == {
        folder.name for folder in (KUBERNETES / "components").iterdir()
    }


@pytest.mark.parametrize("resource", COMPONENTS)
def test_a_folder_that_is_applied_as_it_is_fits_the_schemas(resource: str) -> None:
    assert schema_faults(render(KUBERNETES / resource)) == []


@every_arrangement
def test_an_arrangement_fits_the_schemas(resource: str, components: tuple[str, ...]) -> None:
    assert schema_faults(render_on_top(resource, components)) == []


@every_arrangement
def test_images_namespace_and_labels_reach_every_object(resource: str, components: tuple[str, ...]) -> None:
    images = [{"name": name, "newName": new, "newTag": "9.9"} for name, new in MIRRORS.items()]
    before = render_on_top(resource, components)
    assert {one["metadata"].get("namespace") for one in before} == {"diptych"}
    after = render_on_top(resource, components, images=images, namespace="other")
    assert {one["metadata"].get("namespace") for one in after} == {"other"}
    assert {one["image"] for one in containers(after)} == {f"{new}:9.9" for new in MIRRORS.values()}
    for one in after:
        where = f"{one['kind']} {one['metadata']['name']}"
        assert one["metadata"]["labels"][NAME] == "diptych", where
        if one["kind"] == "Service":
            assert one["spec"]["selector"][NAME] == "diptych", where
        for selector in selectors(one.get("spec", {})):
            if "kubernetes.io/metadata.name" not in selector.get("matchLabels", {}):
                assert selector["matchLabels"][NAME] == "diptych", where


@every_arrangement
def test_what_objects_refer_to_is_rendered_with_them(resource: str, components: tuple[str, ...]) -> None:
    """Secrets and the volume of models are the user's."""
    rendered = render_on_top(resource, components)
    names = {(one["kind"], one["metadata"]["name"]) for one in rendered}
    services = {
        one["metadata"]["name"]: {port["port"] for port in one["spec"]["ports"]}
        for one in rendered
        if one["kind"] == "Service"
    }
    pods = [template["metadata"]["labels"] for template in pod_templates(rendered).values()]
    for container in containers(rendered):
        for source in container.get("envFrom", []):
            assert ("ConfigMap", source["configMapRef"]["name"]) in names
        for variable in container.get("env", []):
            for host, port in re.findall(r"@([\w-]+):(\d+)", variable.get("value", "")):
                assert int(port) in services[host], variable["name"]
    for one in rendered:
        if one["kind"] == "HorizontalPodAutoscaler":
            target = one["spec"]["scaleTargetRef"]
            assert (target["kind"], target["name"]) in names
        elif one["kind"] in ("NetworkPolicy", "PodDisruptionBudget", "PodMonitor"):
            selector = one["spec"].get("selector") or one["spec"]["podSelector"]
            assert any(_selects(selector, labels) for labels in pods), one["metadata"]["name"]


@every_arrangement
def test_pods_fit_pod_security_restricted(resource: str, components: tuple[str, ...]) -> None:
    allowed_volumes = {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}
    rendered = render_on_top(resource, components)
    for template in pod_templates(rendered).values():
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert all(set(volume) - {"name"} <= allowed_volumes for volume in pod.get("volumes", []))
    for container in containers(rendered):
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert not any("hostPort" in port for port in container["ports"])


def _selects(selector: Document, labels: dict[str, str]) -> bool:
    expressions = selector.get("matchExpressions", [])
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(expression["key"]) in expression["values"] for expression in expressions
    )


def test_an_init_containers_image_is_seen() -> None:
    """The control of the images' test."""
    pod = {
        "initContainers": [{"image": "a"}],
        "containers": [{"image": "b"}],
        "ephemeralContainers": [{"image": "c"}],
    }
    deployment = {"kind": "Deployment", "metadata": {"name": "x"}, "spec": {"template": {"spec": pod}}}
    assert [one["image"] for one in containers([deployment])] == ["a", "b", "c"]


PLAIN = [file for file in DEPLOY.rglob("*.yaml") if "chart" not in file.parts]


@pytest.mark.parametrize("file", [*PLAIN, DEPLOY / "Dockerfile"], ids=lambda file: file.name)
def test_every_image_names_its_registry(file: Path) -> None:
    text = file.read_text()
    stages = re.findall(r"^FROM .+ AS (\S+)$", text, re.MULTILINE)
    for image in re.findall(r"^\s*(?:- )?image: *(\S+)|^FROM +(\S+)", text, re.MULTILINE):
        if "".join(image) in stages:
            continue
        assert registry_of("".join(image)) is not None, image


@pytest.mark.parametrize(
    ("image", "registry"),
    [
        ("diptych", None),
        ("diptych:0.1.0", None),
        ("valkey/valkey:9", None),
        ("docker.io/valkey/valkey:9", "docker.io"),
        ("localhost/diptych", "localhost"),
        ("mirror:5000/x", "mirror:5000"),
    ],
)
def test_a_bare_image_name_is_seen(image: str, registry: str | None) -> None:
    """The control."""
    assert registry_of(image) == registry


@pytest.mark.parametrize("resource", COMPONENTS)
def test_images_that_a_node_has_are_not_pulled_again(resource: str) -> None:
    """Kubernetes pulls `latest` each time, which fails for an image that was only loaded into a node."""
    for container in containers(render(KUBERNETES / resource)):
        tag = container["image"].rpartition("/")[2].partition(":")[2]
        assert container.get("imagePullPolicy", "IfNotPresent") == "IfNotPresent"
        assert tag not in ("", "latest"), container["image"]


def test_prometheus_scrapes_the_gateway_over_tls_where_it_has_a_certificate() -> None:
    for components, scheme in ((("metrics",), None), (("metrics", "tls"), "https")):
        rendered = render_on_top("base", components)
        endpoints = {
            one["metadata"]["name"]: one["spec"]["podMetricsEndpoints"]
            for one in rendered
            if one["kind"] == "PodMonitor"
        }
        assert [endpoint.get("scheme") for endpoint in endpoints["diptych-gateway"]] == [scheme]
        assert {endpoint.get("scheme") for endpoint in endpoints["diptych-workers"]} == {None}


def requests(rendered: list[Document]) -> tuple[float, float]:
    """Return the cores and the GiB of memory that all replicas request."""
    pods = [
        (one["spec"]["replicas"], container["resources"]["requests"])
        for one in rendered
        if one["kind"] == "Deployment"
        for container in one["spec"]["template"]["spec"]["containers"]
    ]
    return (
        sum(replicas * cores(one["cpu"]) for replicas, one in pods),
        sum(replicas * mebibytes(one["memory"]) for replicas, one in pods) / 1024,
    )


@pytest.mark.parametrize("resource", ["base", "overlays/shared-pod"])
def test_the_readme_says_how_many_cores_are_requested(resource: str) -> None:
    [row] = re.findall(rf"^\| `{resource}` \|.*$", (DEPLOY / "README.md").read_text(), re.MULTILINE)
    requested_cores, _ = requests(render(KUBERNETES / resource))
    assert f" {requested_cores:.1f} cores" in row


def test_the_small_overlay_asks_for_what_it_says() -> None:
    rendered = render(SMALL)
    assert [one["spec"]["replicas"] for one in rendered if one["kind"] == "Deployment"] == [1, 1, 1, 1]
    requested_cores, requested_gib = requests(rendered)
    assert requested_cores <= 1, "half of two cores: a cluster's own pods take the other"
    said = f"{requested_cores:.2f} cores and {requested_gib:.1f} GiB"
    assert said in (SMALL / "kustomization.yaml").read_text()
    assert said in (DEPLOY / "README.md").read_text()


def test_workers_of_the_small_overlay_have_whole_cores_and_room_for_their_pool() -> None:
    for name, template in pod_templates(render(SMALL)).items():
        [container] = template["spec"]["containers"]
        if name in ("diptych-prefill", "diptych-decode"):
            variables = {variable["name"]: variable.get("value") for variable in container["env"]}
            limits = container["resources"]["limits"]
            assert limits["cpu"].isdigit()
            assert mebibytes(limits["memory"]) >= int(variables.get("DIPTYCH_KV_MEMORY_MIB", 0)) * 1.25 + 1024


def _broken(change: Any) -> list[str]:
    objects = copy.deepcopy(render(KUBERNETES / "base"))
    change(next(one for one in objects if one["kind"] == "Deployment"))
    return schema_faults(objects)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda one: one["spec"].update(replicas="two"), "'two' is not of type 'integer'"),
        (lambda one: one["spec"].update(replica=2), "'replica' was unexpected"),
        (lambda one: one["spec"].pop("selector"), "'selector' is a required property"),
        (lambda one: one.update(apiVersion="apps/v1beta1"), "no such kind in apps/v1beta1"),
        (
            lambda one: one["spec"]["template"]["spec"]["containers"][0].pop("name"),
            "'name' is a required property",
        ),
    ],
    ids=["type", "unknown field", "missing field", "version of the API", "nested"],
)
def test_a_broken_manifest_is_seen(change: Any, fault: str) -> None:
    """The control: each version of the schemas rejects it."""
    faults = _broken(change)
    assert len(faults) == len(KUBERNETES_VERSIONS)
    assert all(fault in one for one in faults), faults


def test_a_patch_that_kubectl_cannot_parse_is_seen() -> None:
    """The control: flow-style YAML in quotes is neither JSON nor a list of operations to kustomize."""
    target = {"kind": "Deployment", "name": "diptych-decode"}
    patches = [{"target": target, "patch": "[{op: replace, path: /spec/replicas, value: 4}]"}]
    with pytest.raises(RuntimeError, match="unable to parse SM or JSON patch"):
        render_on_top("base", patches=patches)


def test_only_kinds_of_the_prometheus_operator_have_no_schema() -> None:
    kinds = {
        one["kind"]
        for file in (KUBERNETES / "components").rglob("*.yaml")
        for one in yaml.safe_load_all(file.read_text())
        if one["apiVersion"].startswith("monitoring.coreos.com/")
    }
    assert kinds == WITHOUT_SCHEMA
