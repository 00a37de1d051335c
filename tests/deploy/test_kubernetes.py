"""The manifests beside the code: what they name exists, what they assume holds. No cluster is asked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import trustme
from prometheus_client import CollectorRegistry

from diptych import __version__
from diptych.cli.restart_policy import LivenessProbe
from diptych.runtime.env import KNOWN, unknown_variables
from diptych.runtime.http_edge import _OPERATOR
from diptych.runtime.worker_metrics import DecodeMetrics, PrefillMetrics
from gateway.config import GatewaySettings
from tests.deploy.manifests import (
    DEPLOY,
    IMAGE,
    KUBERNETES,
    Document,
    Started,
    documents,
    kustomizations,
    leaves_within_s,
    mebibytes,
    settings_of,
    started,
)
from tests.deploy.rendering import COMPONENTS, render_on_top
from tests.diptych.runtime.authority import Authority

PROGRAMS = list(started())
every_program = pytest.mark.parametrize("one", PROGRAMS, ids=lambda one: one.where)
LABEL = "app.kubernetes.io/component"


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys.jsonl"
    path.write_text('{"name": "k", "tenant": "t", "sha256": "%s"}\n' % ("0" * 64))
    path.chmod(0o440)
    return str(path)


@every_program
def test_a_program_takes_its_flags_and_variables_and_listens_where_the_manifest_says(
    one: Started, keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = one.environment()
    assert unknown_variables(variables) is None
    if "DIPTYCH_API_KEYS_FILE" in variables:
        [mount] = [m["mountPath"] for m in one.container["volumeMounts"] if m["name"] == "keys"]
        assert variables["DIPTYCH_API_KEYS_FILE"] == f"{mount}/keys.jsonl"
        variables["DIPTYCH_API_KEYS_FILE"] = keys
    settings = settings_of(one.program, one.container["args"][1:], variables, monkeypatch)
    ports = {settings.grpc_port, settings.http_port}
    if isinstance(settings, GatewaySettings):
        ports.add(settings.resolved_admin_port)
    assert set(one.ports.values()) == ports
    assert one.pod["terminationGracePeriodSeconds"] > leaves_within_s(settings)


@every_program
def test_probes_ask_what_is_served_and_are_as_patient_as_the_supervisor(one: Started) -> None:
    probes = {kind: one.container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")}
    for probe in probes.values():
        assert probe["httpGet"]["path"] in _OPERATOR
        assert one.ports[probe["httpGet"]["port"]] == int(one.container["args"][-1]), "the HTTP port"
    assert probes["readiness"]["httpGet"]["path"] == "/ready"
    liveness = probes["liveness"]
    assert liveness["httpGet"]["path"] == "/health", "a worker that drains is not to be killed"
    own = LivenessProbe()
    assert liveness["failureThreshold"] * liveness["periodSeconds"] >= own.max_failures * own.every_s
    assert liveness["timeoutSeconds"] >= own.every_s


@every_program
def test_programs_run_as_the_images_user_without_rights(one: Started) -> None:
    [uid] = set(re.findall(r"^USER (\d+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE))
    pod, own = one.pod["securityContext"], one.container["securityContext"]
    assert (pod["runAsUser"], pod["runAsNonRoot"], own["readOnlyRootFilesystem"]) == (int(uid), True, True)
    assert one.pod["enableServiceLinks"] is False, "DIPTYCH_GRPC_PORT could be the address of a Service"


@every_program
def test_memory_holds_the_pool_and_what_it_asks_for_before_it_takes_its_pages(one: Started) -> None:
    resources = one.container["resources"]
    pool = int(one.environment().get("DIPTYCH_KV_MEMORY_MIB", 0))
    assert mebibytes(resources["limits"]["memory"]) >= pool * 1.25 + 1024
    if one.program != "gateway":
        assert resources["limits"]["cpu"] == resources["requests"]["cpu"]
        assert resources["limits"]["cpu"].isdigit(), "whole cores, else nobody gets cores of its own"


def test_a_pair_shares_what_its_memory_needs() -> None:
    [pod] = [one.pod for one in PROGRAMS if one.where == "diptych-pair-decode"]
    assert pod["shareProcessNamespace"] is True
    users = {container["securityContext"].get("runAsUser") for container in pod["containers"]}
    assert users == {None}, "all run as the pod's user"


def test_every_variable_named_in_deploy_is_known() -> None:
    for file in [*KUBERNETES.rglob("*.yaml"), *DEPLOY.glob("*.*")]:
        assert set(re.findall(r"DIPTYCH_[A-Z_]+[A-Z]", file.read_text())) <= KNOWN, file


def _pods() -> dict[str, set[str]]:
    """By component, the names of all ports."""
    return {
        one["spec"]["template"]["metadata"]["labels"][LABEL]: {
            port["name"] for c in one["spec"]["template"]["spec"]["containers"] for port in c["ports"]
        }
        for one in documents()
        if one["kind"] == "Deployment"
    }


def _selected(selector: Document) -> set[str]:
    expressions = selector.get("matchExpressions", [])
    chosen = {value for key, value in selector.get("matchLabels", {}).items() if key == LABEL}
    return chosen.union(*(expression["values"] for expression in expressions))


def test_selectors_and_named_ports_lead_to_pods() -> None:
    pods = _pods()
    for one in documents():
        spec, name = one["spec"], f"{one['kind']} {one['metadata']['name']}"
        if one["kind"] == "Service":
            [component] = spec["selector"].values()
            assert {port["targetPort"] for port in spec["ports"]} <= pods[component], name
        elif one["kind"] == "NetworkPolicy":
            mine = _selected(spec["podSelector"])
            open_ports = {port["port"] for rule in spec["ingress"] for port in rule.get("ports", [])}
            assert mine <= set(pods), name
            assert open_ports <= set().union(*(pods[component] for component in mine)), name
            for rule in spec["ingress"]:
                sources = [
                    _selected(peer["podSelector"]) for peer in rule.get("from", ()) if "podSelector" in peer
                ]
                assert set().union(*sources) <= set(pods), name
        elif one["kind"] in ("PodDisruptionBudget", "PodMonitor", "Deployment"):
            assert _selected(spec["selector"]) <= set(pods), name


def test_no_policy_opens_the_admin_port_and_every_pod_has_one() -> None:
    policies = [one["spec"] for one in documents() if one["kind"] == "NetworkPolicy"]
    assert not [p for p in policies for rule in p["ingress"] if {"port": "admin"} in rule.get("ports", [])]
    assert set().union(*(_selected(policy["podSelector"]) for policy in policies)) == set(_pods())


def test_autoscalers_ask_for_metrics_that_the_workers_export() -> None:
    deployments = {one["metadata"]["name"] for one in documents() if one["kind"] == "Deployment"}
    for scaler in (one["spec"] for one in documents() if one["kind"] == "HorizontalPodAutoscaler"):
        name = scaler["scaleTargetRef"]["name"]
        assert name in deployments
        registry = CollectorRegistry()
        (PrefillMetrics if name == "diptych-prefill" else DecodeMetrics)(registry)
        exported = {family.name for family in registry.collect()}
        assert {metric["pods"]["metric"]["name"] for metric in scaler["metrics"]} <= exported


def test_kustomizations_name_files_and_objects_that_exist() -> None:
    objects = [(one["kind"], one["metadata"]["name"]) for one in documents()]
    for folder, one in kustomizations().items():
        for resource in one.get("resources", []):
            assert (folder / resource).exists(), f"{folder}: {resource}"
        for patch in one.get("patches", []):
            kind, name = patch["target"]["kind"], patch["target"]["name"]
            assert [o for o in objects if o[0] == kind and re.fullmatch(name, o[1])], f"{folder}: {name}"


def _pod(rendered: list[Document], name: str) -> Any:
    [one] = [o for o in rendered if o["kind"] == "Deployment" and o["metadata"]["name"] == f"diptych-{name}"]
    return one["spec"]["template"]["spec"]


def test_all_components_together_still_make_a_gateway_that_starts(
    tmp_path: Path, keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered = render_on_top("base", COMPONENTS["base"])
    [gateway] = _pod(rendered, "gateway")["containers"]
    [shared] = [one["data"] for one in rendered if one["kind"] == "ConfigMap"]
    variables = shared | {v["name"]: v["value"] for v in gateway["env"] if "value" in v}
    authority = trustme.CA().issue_cert("gateway")
    authority.cert_chain_pems[0].write_to_path(tmp_path / "tls.crt")
    authority.private_key_pem.write_to_path(tmp_path / "tls.key")
    (tmp_path / "tls.key").chmod(0o440)
    mounts = {mount["name"]: mount["mountPath"] for mount in gateway["volumeMounts"]}
    assert variables["DIPTYCH_TLS_CERT"] == f"{mounts['tls']}/tls.crt"
    assert variables["DIPTYCH_MODEL"].startswith(mounts["models"])
    variables |= {
        "DIPTYCH_TLS_CERT": str(tmp_path / "tls.crt"),
        "DIPTYCH_TLS_KEY": str(tmp_path / "tls.key"),
        "DIPTYCH_API_KEYS_FILE": keys,
        "DIPTYCH_INTERNAL_TLS": str(Authority().issue(tmp_path / "links", "gateway")),
    }
    settings = settings_of("gateway", gateway["args"][1:], variables, monkeypatch)
    assert isinstance(settings, GatewaySettings)
    assert settings.tls is not None
    assert settings.link_tls is not None
    assert gateway["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http", "scheme": "HTTPS"}
    for name in ("prefill", "decode"):
        [worker] = _pod(rendered, name)["containers"]
        assert worker["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert "DIPTYCH_KV_MEMORY_MIB" not in {variable["name"] for variable in worker["env"]}


def test_pairs_take_the_place_of_lone_workers() -> None:
    rendered = render_on_top("overlays/shared-pod", ("model",))
    names = {one["metadata"]["name"] for one in rendered if one["kind"] != "ConfigMap"}
    assert names == {"diptych", "diptych-gateway", "diptych-pair", "diptych-valkey"}
    for container in _pod(rendered, "pair")["containers"]:
        assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/models"]


def test_the_image_of_the_manifests_is_this_version() -> None:
    assert {one.container["image"] for one in PROGRAMS} == {f"{IMAGE}:{__version__}"}
