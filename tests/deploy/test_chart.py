"""The Helm chart, rendered by the real helm: valid, the same as the manifests, and read by the programs."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from diptych.cli.app import app
from tests.deploy.helm import CHART, SMALL, render_chart, run_helm
from tests.deploy.manifests import (
    IMAGE,
    KUBERNETES,
    SETTINGS,
    Document,
    cores,
    leaves_within_s,
    mebibytes,
    settings_of,
)
from tests.deploy.rendering import containers, pod_templates, render, schema_faults
from tests.diptych.runtime.authority import Authority

OPERATORS = {"PodMonitor", "ServiceMonitor", "ScaledObject", "InferencePool", "LeaderWorkerSet"}
"""Kinds that Kubernetes itself does not define."""
EVERYTHING: dict[str, Any] = {
    "image": {"repository": "mirror.example:5000/diptych", "tag": "9.9", "pullSecrets": ["registry"]},
    "model": {"claim": "models", "path": "Qwen3-0.6B"},
    "gateway": {"tls": {"secret": "diptych-tls"}, "batches": {"claim": "batches"}},
    "prefill": {"gpus": 1},
    "decode": {"gpus": 1, "kvMemoryMib": 0, "environment": {"DIPTYCH_MAX_BATCH": 32}},
    "encode": {"replicas": 1, "gpus": 1},
    "internalTls": {
        "gateway": "gateway-tls",
        "prefill": "prefill-tls",
        "decode": "decode-tls",
        "encode": "encode-tls",
    },
    "metrics": {"enabled": True, "labels": {"release": "prometheus"}},
    "autoscaling": {"kind": "hpa"},
    "inferencePool": {"enabled": True},
}
LEAST: dict[str, Any] = {
    "directory": {"url": "redis://:$(DIRECTORY_PASSWORD)@redis.example:6379/0"},
    "disruptionBudgets": False,
    "networkPolicies": False,
    "autoscaling": {"kind": "keda"},
}
MODELS: dict[str, Any] = {
    "model": {"claim": "models"},
    "models": [
        {"name": "chat", "path": "a", "decode": {"replicas": 4, "environment": {"DIPTYCH_MAX_BATCH": 32}}},
        {
            "name": "chat-v2",
            "path": "b/model.gguf",
            "prefill": {"gpus": 1},
            "encode": {"replicas": 1},
            "autoscaling": {"decode": {"min": 1, "max": 3}},
        },
    ],
    "aliases": {"best": {"chat": 90, "chat-v2": 10}, "old": {"chat": 1}},
    "decode": {"kvMemoryMib": 2048},
    "metrics": {"enabled": True},
}
GROUPS: dict[str, Any] = {
    "model": {"claim": "models", "path": "Qwen3-4B"},
    "prefill": {"tensorParallel": 2},
    "decode": {"hosts": 3, "tensorParallel": 3, "replicas": 4, "surge": False},
    "metrics": {"enabled": True},
}
VARIANTS = {
    "default": render_chart,
    "small": lambda: render_chart(None, SMALL),
    "everything": lambda: render_chart(EVERYTHING),
    "least": lambda: render_chart(LEAST),
    "models": lambda: render_chart(MODELS),
    "models-keda": lambda: render_chart(MODELS | {"autoscaling": {"kind": "keda"}}),
    "models-hpa": lambda: render_chart(MODELS | {"autoscaling": {"kind": "hpa"}}),
    "groups": lambda: render_chart(GROUPS),
    "groups-keda": lambda: render_chart(GROUPS | {"autoscaling": {"kind": "keda"}}),
    "groups-hpa": lambda: render_chart(GROUPS | {"autoscaling": {"kind": "hpa"}}),
    "other-release": lambda: render_chart(release="canary"),
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def deployments(objects: list[Document]) -> dict[str, Document]:
    """Return the specs of Deployments by name."""
    return {one["metadata"]["name"]: one["spec"] for one in objects if one["kind"] == "Deployment"}


def pods_of_groups(objects: list[Document]) -> list[Document]:
    """Return the pod templates of LeaderWorkerSets."""
    return list(pod_templates([one for one in objects if one["kind"] == "LeaderWorkerSet"]).values())


def as_deployment(template: Document) -> Document:
    """Return a Deployment of these pods, which has a schema."""
    spec = {"selector": {"matchLabels": template["metadata"]["labels"]}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "group"}, "spec": spec}


@every_variant
def test_variant_fits_the_schemas(variant: str) -> None:
    objects = VARIANTS[variant]()
    assert len(objects) > 5
    assert {one["metadata"]["namespace"] for one in objects} == {"diptych"}
    plain = [one for one in objects if one["kind"] not in OPERATORS]
    assert schema_faults([*plain, *(as_deployment(one) for one in pods_of_groups(objects))]) == []


def test_broken_variant_is_seen() -> None:
    """The control."""
    objects = copy.deepcopy(render_chart())
    next(one for one in objects if one["kind"] == "Deployment")["spec"]["replica"] = 2
    assert any("'replica' was unexpected" in fault for fault in schema_faults(objects))


@every_variant
def test_selectors_find_the_pods_that_are_meant(variant: str) -> None:
    objects = VARIANTS[variant]()
    pods = {name: template["metadata"]["labels"] for name, template in pod_templates(objects).items()}
    names = {(one["kind"], one["metadata"]["name"]) for one in objects}
    for one in objects:
        spec, name = one.get("spec", {}), one["metadata"]["name"]
        if one["kind"] == "Service":
            found = [pod for pod, labels in pods.items() if spec["selector"].items() <= labels.items()]
            assert found == [name if name in pods else f"{name}-gateway"]
        elif one["kind"] in ("NetworkPolicy", "PodDisruptionBudget"):
            selector = spec.get("selector") or spec["podSelector"]
            found = [pod for pod, labels in pods.items() if selector["matchLabels"].items() <= labels.items()]
            found = [pod for pod in found if not pod.endswith("/rank")]  # beside the first pod of their group
            assert found == [name] or (  # a policy is of a role, whatever the model
                one["kind"] == "NetworkPolicy" and found and all(pod.startswith(f"{name}-") for pod in found)
            )
        elif one["kind"] in ("HorizontalPodAutoscaler", "ScaledObject"):
            [target] = [
                other
                for other in objects
                if spec["scaleTargetRef"]
                == {**{key: other[key] for key in ("apiVersion", "kind")}, "name": other["metadata"]["name"]}
            ]
            assert "replicas" not in target["spec"]
    for container in containers(objects):
        for source in container.get("envFrom", []):
            assert ("ConfigMap", source["configMapRef"]["name"]) in names


def bare(spec: Document) -> Document:
    """Return a Deployment's spec without labels and annotations, its variables by name."""
    spec = copy.deepcopy(spec)
    del spec["selector"]
    template = spec["template"]
    del template["metadata"]
    for constraint in template["spec"].get("topologySpreadConstraints", []):
        del constraint["labelSelector"]
    for container in template["spec"]["containers"]:
        container["env"] = {variable["name"]: variable for variable in container["env"]}
        for source in container.get("envFrom", []):
            source["configMapRef"]["name"] = source["configMapRef"]["name"].partition("-")[0]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            container.get(probe, {}).get("httpGet", {}).pop("scheme", None)  # HTTP is the default
    return spec


@pytest.mark.parametrize(
    ("objects", "folder"),
    [
        pytest.param(VARIANTS["default"], "base", id="base"),
        pytest.param(VARIANTS["small"], "overlays/small", id="small"),
    ],
)
def test_chart_is_the_manifests(objects: Any, folder: str) -> None:
    chart, plain = deployments(objects()), deployments(render(KUBERNETES / folder))
    assert chart.keys() == plain.keys()
    for name, spec in plain.items():
        expected, found = bare(spec), bare(chart[name])
        if name == "diptych-valkey":
            expected["template"]["spec"].pop("volumes", None)
        assert found == expected, name


def test_small_values_ask_for_what_they_say() -> None:
    total = [
        container["resources"]["requests"] | {"replicas": spec["replicas"]}
        for spec in deployments(render_chart(None, SMALL)).values()
        for container in spec["template"]["spec"]["containers"]
    ]
    requested = sum(one["replicas"] * cores(one["cpu"]) for one in total)
    memory = sum(one["replicas"] * mebibytes(one["memory"]) for one in total) / 1024
    assert f"{requested:.2f} cores and {memory:.1f} GiB" in SMALL.read_text()


@every_variant
def test_programs_read_their_flags_and_variables(
    variant: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    objects = VARIANTS[variant]()
    [shared] = [one["data"] for one in objects if one["kind"] == "ConfigMap"]
    seen = set()
    for template in pod_templates(objects).values():
        for container in template["spec"]["containers"]:
            program = container.get("args", [""])[0]
            if program not in SETTINGS:
                continue
            seen.add(program)
            own: dict[str, str] = {}
            for variable in container["env"]:
                value = variable.get("value")
                if value is None:
                    value = "ab" * 16 if "secretKeyRef" in variable["valueFrom"] else "filled"
                own[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda name, own=own: own[name[1]], value)  # type: ignore[misc]
            variables = shared | own
            for name in ("DIPTYCH_API_KEYS_FILE", "DIPTYCH_TLS_CERT", "DIPTYCH_TLS_KEY"):
                variables.pop(name, None)  # files of Secrets
            if (at := variables.pop("DIPTYCH_INTERNAL_TLS", None)) is not None:
                assert at in {mount["mountPath"] for mount in container["volumeMounts"]}
                variables["DIPTYCH_INTERNAL_TLS"] = str(Authority().issue(tmp_path / program, program))
            settings = settings_of(program, container["args"][1:], variables, monkeypatch)
            assert leaves_within_s(settings) < template["spec"]["terminationGracePeriodSeconds"]
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            assert (settings.grpc_port, settings.http_port) == (ports["grpc"], ports["http"])
    with_encode = variant == "everything" or variant.startswith("models")
    assert seen == set(SETTINGS) - (set() if with_encode else {"encode"})


@every_variant
def test_pods_fit_pod_security_restricted(variant: str) -> None:
    for template in pod_templates(VARIANTS[variant]()).values():
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        for container in template["spec"]["containers"]:
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["securityContext"]["allowPrivilegeEscalation"] is False


def test_values_reach_their_objects() -> None:
    objects = render_chart(EVERYTHING)
    ours = {one["image"] for one in containers(objects)}
    assert ours == {"mirror.example:5000/diptych:9.9", "docker.io/valkey/valkey:9"}
    assert {one["image"].rpartition(":")[0] for one in containers(render_chart())} == {
        IMAGE,
        "docker.io/valkey/valkey",
    }
    pods = {name: template["spec"] for name, template in pod_templates(objects).items()}
    assert all(pod["imagePullSecrets"] == [{"name": "registry"}] for pod in pods.values())
    [decode] = pods["diptych-decode"]["containers"]
    assert decode["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert {"name": "DIPTYCH_MAX_BATCH", "value": "32"} in decode["env"]
    [gateway] = pods["diptych-gateway"]["containers"]
    assert {mount["mountPath"] for mount in gateway["volumeMounts"]} == {
        *("/access/keys", "/access/tls", "/access/internal-tls", "/models", "/batches")
    }
    assert gateway["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    assert decode["livenessProbe"]["httpGet"]["scheme"] == "HTTPS"  # beside internalTls
    kinds = {one["kind"] for one in objects}
    assert OPERATORS - kinds == {"ScaledObject", "LeaderWorkerSet"}
    least = render_chart(LEAST)
    assert {one["kind"] for one in least} == {"ConfigMap", "Service", "Deployment", "ScaledObject"}
    assert "diptych-valkey" not in deployments(least)
    assert deployments(render_chart(release="canary")).keys() == {
        f"canary-diptych-{part}" for part in ("gateway", "prefill", "decode", "valkey")
    }


def test_each_model_has_workers_of_its_own_behind_one_fleet_of_gateways() -> None:
    objects = render_chart(MODELS | {"autoscaling": {"kind": "hpa"}})
    [shared] = [one["data"] for one in objects if one["kind"] == "ConfigMap"]
    assert "DIPTYCH_MODEL" not in shared
    found = deployments(objects)
    assert found.keys() == {
        *("diptych-gateway", "diptych-valkey", "diptych-encode-chat-v2"),
        *(f"diptych-{role}-{model}" for role in ("prefill", "decode") for model in ("chat", "chat-v2")),
    }

    def variables(name: str) -> dict[str, str]:
        [container] = found[name]["template"]["spec"]["containers"]
        return {one["name"]: one["value"] for one in container["env"] if "value" in one}

    gateway = variables("diptych-gateway")
    assert gateway["DIPTYCH_MODEL"] == "chat=/models/a,chat-v2=/models/b/model.gguf"
    assert gateway["DIPTYCH_MODEL_SPLIT"] == "best=chat:90,chat-v2:10,old=chat:1"
    chat, other = variables("diptych-decode-chat"), variables("diptych-decode-chat-v2")
    assert (chat["DIPTYCH_MODEL"], other["DIPTYCH_MODEL"]) == ("/models/a", "/models/b/model.gguf")
    assert (chat["DIPTYCH_MAX_BATCH"], other.get("DIPTYCH_MAX_BATCH")) == ("32", None)
    assert chat["DIPTYCH_KV_MEMORY_MIB"] == other["DIPTYCH_KV_MEMORY_MIB"] == "2048"
    [prefill] = found["diptych-prefill-chat-v2"]["template"]["spec"]["containers"]
    assert prefill["resources"]["limits"]["nvidia.com/gpu"] == "1"
    bounds = {
        one["metadata"]["name"]: (one["spec"]["minReplicas"], one["spec"]["maxReplicas"])
        for one in objects
        if one["kind"] == "HorizontalPodAutoscaler"
    }
    assert bounds == {
        "diptych-prefill-chat": (2, 8),
        "diptych-decode-chat": (2, 8),
        "diptych-prefill-chat-v2": (2, 8),
        "diptych-decode-chat-v2": (1, 3),
    }
    without = deployments(render_chart({key: one for key, one in MODELS.items() if key != "autoscaling"}))
    assert without["diptych-decode-chat"]["replicas"] == 4
    assert without["diptych-prefill-chat"]["replicas"] == 2


def test_workers_of_a_model_are_counted_apart_from_one_with_a_longer_name() -> None:
    """The queries of KEDA go by names of pods; a shorter pattern would take both."""
    objects = render_chart(MODELS | {"autoscaling": {"kind": "keda"}})
    scaled = {one["metadata"]["name"]: one for one in objects if one["kind"] == "ScaledObject"}
    for name, pod in (
        ("decode-chat", "decode-chat-6d4b75cb6d-x2x7q"),
        ("decode-chat-v2", "decode-chat-v2-84-z"),
    ):
        queries = [one["metadata"]["query"] for one in scaled[f"diptych-{name}"]["spec"]["triggers"]]
        for query in queries:
            [pattern] = re.findall(r'pod=~"([^"]+)"', query)
            assert re.fullmatch(pattern, f"diptych-{pod}")
            assert not re.fullmatch(pattern, "diptych-decode-chat-v3-6d4b75cb6d-x2x7q")


def test_a_worker_of_several_hosts_is_a_leader_with_ranks_that_join_it() -> None:
    objects = render_chart(GROUPS)
    [group] = [one for one in objects if one["kind"] == "LeaderWorkerSet"]
    assert group["metadata"]["name"] == "diptych-decode"
    spec = group["spec"]
    assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (4, 3)
    assert spec["rolloutStrategy"]["rollingUpdateConfiguration"] == {"maxSurge": 0, "maxUnavailable": 1}
    pods = pod_templates(objects)
    [leader], [rank] = (
        pods[name]["spec"]["containers"] for name in ("diptych-decode", "diptych-decode/rank")
    )
    own = {one["name"]: one.get("value") for one in leader["env"]}
    assert own["DIPTYCH_REMOTE_RANKS"] == "2"
    assert own["DIPTYCH_SUM_PARTS"] == "6"
    at = own["DIPTYCH_RENDEZVOUS"].removeprefix("$(DIPTYCH_ADVERTISE_HOST)")
    assert rank["args"][:2] == ["rank", f"$(LWS_LEADER_ADDRESS){at}"]
    assert f"--rank-key-file={own['DIPTYCH_RANK_KEY_FILE']}" in rank["args"]
    [shared] = [one["data"] for one in objects if one["kind"] == "ConfigMap"]
    assert f"--model={shared['DIPTYCH_MODEL']}" in rank["args"]
    assert not {"livenessProbe", "readinessProbe", "startupProbe"} & rank.keys()
    assert rank["resources"] == leader["resources"]
    for one in (leader, rank):
        assert "/access/ranks" in {mount["mountPath"] for mount in one["volumeMounts"]}
    [prefill] = pods["diptych-prefill"]["spec"]["containers"]  # one pod of two processes
    assert {"name": "DIPTYCH_TENSOR_PARALLEL", "value": "2"} in prefill["env"]
    assert {"name": "DIPTYCH_SUM_PARTS", "value": "6"} in prefill["env"]
    assert not any("RENDEZVOUS" in one["name"] for one in prefill["env"])


def test_pods_of_a_group_reach_each_other_and_no_other_group_needs_to() -> None:
    def sources(values: dict[str, Any]) -> list[str]:
        [policy] = [
            one
            for one in render_chart(values)
            if one["kind"] == "NetworkPolicy" and one["metadata"]["name"] == "diptych-decode"
        ]
        return [
            source["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
            for rule in policy["spec"]["ingress"]
            if "ports" not in rule
            for source in rule["from"]
        ]

    assert sources(GROUPS) == ["prefill", "decode"]
    assert sources({}) == ["prefill"]


def test_scaling_of_a_group_counts_its_first_pods() -> None:
    objects = render_chart(GROUPS | {"autoscaling": {"kind": "keda"}})
    [scaled] = [
        one
        for one in objects
        if one["kind"] == "ScaledObject" and one["metadata"]["name"] == "diptych-decode"
    ]
    for trigger in scaled["spec"]["triggers"]:
        [pattern] = re.findall(r'pod=~"([^"]+)"', trigger["metadata"]["query"])
        assert re.fullmatch(pattern, "diptych-decode-11")
        assert not re.fullmatch(pattern, "diptych-decode-11-2")  # a rank


def test_rank_takes_the_arguments_of_its_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    [rank] = pod_templates(render_chart(GROUPS))["diptych-decode/rank"]["spec"]["containers"]
    seen: list[Any] = []
    monkeypatch.setattr("diptych.cli.rank_command.run_ranks", lambda *values: seen.extend(values) or 0)
    done = CliRunner().invoke(app, [one.replace("$(LWS_LEADER_ADDRESS)", "leader") for one in rank["args"]])
    assert done.exit_code == 0, done.output
    assert seen[:3] == ["leader:7001", Path("/access/ranks/rank-key"), "/models/Qwen3-4B"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"decode": {"hosts": 4, "tensorParallel": 3}}, r"decode\.hosts: 4 pods have 3 processes"),
        ({"prefill": {"gpus": 1, "tensorParallel": 2}}, r"prefill\.gpus: a worker of several processes"),
        (
            {"internalTls": {role: role for role in ("gateway", "prefill", "decode", "encode")}},
            "DIPTYCH_INSECURE_KV_NETWORK allows it",
        ),
        ({"encode": {"replicas": 1, "hosts": 2}}, "additional properties 'hosts'"),
    ],
)
def test_wrong_groups_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        render_chart(GROUPS | values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": {"claim": ""}}, "model.claim has all of them"),
        ({"model": {"claim": "models", "path": "a"}}, "model.path is of a single one"),
        (
            {"models": [{"name": "a", "path": "a"}, {"name": "a", "path": "b"}]},
            "each needs a name of its own",
        ),
        ({"models": [{"name": "A", "path": "a"}]}, "does not match pattern"),
        ({"models": [{"name": "chat"}]}, "missing propert"),
        ({"aliases": {"best": {"nothing": 1}}}, "aliases: nothing is none of models"),
    ],
)
def test_wrong_models_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        render_chart(MODELS | values)


def test_encode_workers_need_a_certificate_where_the_others_have_one() -> None:
    secrets = {role: f"{role}-tls" for role in ("gateway", "prefill", "decode")}
    assert "diptych-encode" not in deployments(render_chart({"internalTls": secrets}))
    with pytest.raises(RuntimeError, match=r"internalTls\.encode"):
        render_chart({"internalTls": secrets, "encode": {"replicas": 1}})


@pytest.mark.parametrize(
    "values",
    [
        {"decode": {"replicaz": 2}},
        {"autoscaling": {"kind": "magic"}},
        {"gateway": {"lameDuckSeconds": 600}},
        {"more": 1},
        {"internalTls": {"gateway": "gateway-tls"}},
    ],
)
def test_unknown_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="values don't meet the specifications"):
        render_chart(values)


def test_every_value_is_described() -> None:
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())["properties"]
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert schema.keys() - {"global"} == values.keys()
    for name, value in values.items():
        if isinstance(value, dict) and "properties" in schema[name]:
            assert schema[name]["properties"].keys() == value.keys(), name


def test_helm_lint_has_no_fault() -> None:
    assert "0 chart(s) failed" in run_helm("lint", "--strict", CHART)
